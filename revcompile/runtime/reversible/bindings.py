"""What a graph reads of the module tree when it runs, and again when it runs a second time.

Graphs name modules and parameters; which objects the names mean is looked up at every call.
Parameters may be replaced, sharded or swapped (`functional_call`) between calls. Layers may be
wrapped or reparametrized: then a chain is planned again (`TreeSnapshot`). The second run of a
branch must read what the first one read (`Bound`):

    parameters and buffers           restored if replaced; written to in place: an error
    training modes, plain settings   restored (a dropout rate, a counter)
    forward hooks                    only those that took part in the computation run again
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Final

from torch import Tensor, fx, nn

from revcompile.errors import InputError, ModifiedError
from revcompile.ir.module_tree import child_path
from revcompile.ir.snapshot import INTERNAL, TreeSnapshot, Watched, read_by
from revcompile.runtime.reversible.hooks import HookRecord, LayerHooks
from revcompile.runtime.reversible.slots import Slot, filled

_PLAIN: Final = (bool, int, float, str, tuple)
"""Types of settings that are restored. Tensors are not: they would be held until backward."""
_NOTHING: Final = nullcontext()


class Bindings:
    """The modules, parameter slots, buffers and settings that a graph reads from `root`."""

    def __init__(self, graph: fx.Graph | None = None, root: nn.Module | None = None) -> None:
        watched = [] if graph is None or root is None else read_by([graph], root)
        self.watched: Sequence[Watched] = watched
        self.modules = {each.module: each.path for each in watched if each.names is None}
        """Every module that runs, those inside others included, and its path."""
        self.enclosing = {each.module: each.path for each in watched if each.names and each.path}
        """Modules that contain those, and whose own forward does not run. Not the root, whose hooks
        run around all of its forward."""
        self.labels: list[str] = []
        """Paths of the parameters, in the order of the slots."""
        slots: list[Slot] = []
        others: list[Slot] = []
        for module, path, names in watched:
            own = vars(module)
            if names is None and own.get("_fsdp_use_orig_params") is False:
                raise InputError(
                    f"{path}: FullyShardedDataParallel has moved its parameters into a flat one, "
                    "where a reversible chain cannot find them by name; use "
                    "torch.distributed.fsdp.fully_shard(net) instead"
                )
            tables = own["_parameters"], own["_buffers"], own
            parameters, buffers, attributes = (
                [name for name in table if names is None or name in names] for table in tables
            )
            self.labels += [child_path(path, name) for name in parameters]
            slots += [(own["_parameters"], name) for name in parameters]
            others += [(own["_buffers"], name) for name in buffers]
            settings = (name for name in attributes if name not in INTERNAL)
            others += [(own, name) for name in settings if type(own[name]) in _PLAIN]
        self.slots = tuple(slots)
        """Where the parameters are, in the order of `labels`."""
        self.entries = (*slots, *others)
        """Parameters, then buffers and settings."""
        self.hooks = LayerHooks(list(self.modules))
        self.hooked = self.hooks.run_in_forward
        """Had one of the modules forward hooks? If that changes, chains are planned again."""


def check_repeatable(structure: TreeSnapshot) -> None:
    """Raise if a run of the graphs that read these modules cannot be repeated."""
    change = structure.first_change()
    if change is not None:
        raise ModifiedError(
            f"{change.where} was replaced, or wrapped, between a forward pass and its backward "
            "pass, but it is part of a reversible chain, which runs its layers again in "
            "backward; change modules before the forward pass or after backward()"
        )


class Bound:
    """What one run of a branch read of the module tree, for its second run."""

    __slots__ = ("_bindings", "_entries", "_hooks", "_versions", "parameters")

    def __init__(self, bindings: Bindings) -> None:
        self._bindings = bindings
        self._entries = [owner.get(name) for owner, name in bindings.entries]
        self.parameters: Sequence[Any] = self._entries[: len(bindings.labels)]
        """In the order of `Bindings.labels`."""
        self._versions = _versions(self.parameters)
        self._hooks: HookRecord = {}

    def differentiable(self) -> list[Tensor]:
        """The parameters that require a gradient, each once."""
        unique = {id(p): p for p in self.parameters if p is not None and p.requires_grad}
        return list(unique.values())

    def recording_hooks(self) -> AbstractContextManager[None]:
        """Around the first run."""
        bindings = self._bindings
        return bindings.hooks.recorded(self._hooks) if bindings.hooked else _NOTHING

    def has_hooks(self) -> bool:
        """Has one of the modules forward hooks, now or in the first run?"""
        return bool(self._hooks) or self._bindings.hooks.run_in_forward

    def check(self, block: str) -> None:
        """Raise if the run cannot be repeated: a parameter was written to since."""
        now = _versions(self.parameters)
        if now == self._versions:
            return
        pairs = zip(now, self._versions, strict=True)
        index = next(i for i, (new, old) in enumerate(pairs) if new != old)
        parameter, label = self.parameters[index], self._bindings.labels[index]
        assert parameter is not None
        raise ModifiedError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: parameter {label} {list(parameter.shape)} is at version {now[index]}; "
            f"expected version {self._versions[index]} instead. The reversible block {block} runs "
            "again in backward; call backward() before weights are updated or loaded"
        )

    def stand_ins(self) -> dict[int, Tensor]:
        """Leaf tensors to use instead of computed parameters, by the ids of those.

        Parameters may be computed (given to `functional_call`): differentiating the second run must
        not go on into the graph, or the retained gradient, of what they are computed from.
        """
        computed = [p for p in self.parameters if p is not None and not p.is_leaf]
        return {id(p): p.detach().requires_grad_(p.requires_grad) for p in computed}

    def restored(
        self, stand_ins: Mapping[int, Tensor], has_hooks: bool
    ) -> AbstractContextManager[Any]:
        """Around the second run: parameters, buffers, settings and hooks of the first."""
        bindings, entries = self._bindings, self._entries
        if stand_ins:
            entries = [stand_ins.get(id(entry), entry) for entry in entries]
        pairs = zip(bindings.entries, entries, strict=True)
        replaced = [(slot, entry) for slot, entry in pairs if slot[0].get(slot[1]) is not entry]
        if not replaced and not has_hooks:
            return _NOTHING
        stack = ExitStack()
        stack.enter_context(filled(replaced))
        stack.enter_context(bindings.hooks.replayed(self._hooks))
        return stack


def _versions(tensors: Sequence[Tensor | None]) -> list[int]:
    try:
        return [0 if tensor is None else tensor._version for tensor in tensors]
    except RuntimeError:  # tensors made in inference mode have none
        return [0 if t is None or t.is_inference() else t._version for t in tensors]
