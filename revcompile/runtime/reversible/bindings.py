"""What a graph reads from the module tree, in its first run and again in its second.

Graphs name modules and parameters; which objects the names mean is looked up at every call.
Parameters may be replaced, sharded or swapped (`functional_call`) between calls. Layers may be
wrapped or reparametrized: then a chain is planned again (`TreeSnapshot`). The second run of a
branch must read what the first one read (`Bound`):

    parameters and buffers           restored if replaced; written to in place: an error
    training modes, plain settings   restored (a dropout rate, a counter)
    forward hooks                    those of the first run run again

Hooks run in both runs, as under `torch.utils.checkpoint`. The first run has no graph: gradients,
and what hooks set on tensors (`retain_grad`, `register_hook`), are those of the second. Gradient
hooks of parameters (`Tensor.register_hook`) run when the gradient is accumulated, as always, not
when a block computes its part of it.

FSDP2 gathers a module's parameters in a pre-hook and frees them in a hook. Where `fully_shard` was
applied to a module whose forward is inlined into the graph, each block (or segment) made of its
layers calls these hooks in its place:

    unshard(modules, (b,))      gather; after the block's backward: reduce gradients, free
    reshard(modules, (y,))      free; before the block's backward: gather

Only tensors of the outer graph are passed to them; inside a block, and in its rebuild, the FSDP
hooks of layers are skipped.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from revcompile.errors import InputError, ModifiedError
from revcompile.ir.coupling_ops import refuse_other_leaves
from revcompile.ir.module_tree import child_path
from revcompile.ir.snapshot import HOOKS, INTERNAL, is_sharding_hook, read_by

Slot = tuple[dict[str, Any], str]
"""A dict of a module (`_parameters`, `_buffers`, `__dict__`) and a key."""


@contextmanager
def filled(contents: Sequence[tuple[Slot, Any]]) -> Iterator[None]:
    """Inside, slots have these contents; afterwards they have the previous ones again."""
    before = [(slot, slot[0].get(slot[1])) for slot, _ in contents]
    try:
        for (owner, name), value in contents:
            owner[name] = value
        yield
    finally:
        for (owner, name), value in before:
            owner[name] = value


# -- FSDP2 modules --------------------------------------------------------------------------------


ShardedModule = tuple[str, nn.Module]
"""A module that `fully_shard` was applied to, and its path."""


def unshard(modules: Sequence[ShardedModule], tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    """Gather the modules' parameters, outermost first; returns the tensors to continue with."""
    for path, module in modules:
        for hook in filter(is_sharding_hook, module._forward_pre_hooks.values()):
            tensors = _not_cast(path, tensors, hook(module, tensors, {})[0])
    return tensors


def reshard(modules: Sequence[ShardedModule], tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    """Free the modules' parameters, innermost first."""
    for path, module in reversed(modules):
        for hook in filter(is_sharding_hook, module._forward_hooks.values()):
            with warnings.catch_warnings():
                # about in-place operations on views, which captured graphs do not have
                warnings.filterwarnings("ignore", ".*returned a view tensor")
                tensors = _not_cast(path, tensors, hook(module, (), tensors))
    return tensors


def _not_cast(path: str, before: tuple[Any, ...], after: tuple[Any, ...]) -> tuple[Any, ...]:
    for old, new in zip(before, after, strict=True):
        if isinstance(old, Tensor) and old.dtype != new.dtype:
            raise InputError(
                f"{path}: fully_shard would cast its inputs or outputs to {new.dtype}, but "
                "residual streams keep their type inside a reversible chain; give it "
                "MixedPrecisionPolicy(..., cast_forward_inputs=False) without output_dtype, or "
                "shard the whole model only"
            )
    return after


# -- forward hooks of both runs -------------------------------------------------------------------


FORWARD_HOOKS: Final = ("_forward_pre_hooks", "_forward_hooks")
"""Attributes in which torch keeps a module's forward hooks, each a dict by handle."""
_NOTHING: Final = nullcontext()

HookTables = Sequence[tuple[Slot, "OrderedDict[int, Callable[..., Any]]"]]
"""The forward hooks of layers, where the layers keep them; empty if no layer has any."""


_ANCHOR: Final = torch.empty(0, dtype=torch.float32, requires_grad=True)
"""Makes the outputs of `_Tap` require a gradient."""


class _Tap(torch.autograd.Function):
    """A tensor that leaves a forward pass without a graph: a gradient to it is an error."""

    @staticmethod
    def forward(ctx: Any, name: str, anchor: Tensor, tensor: Tensor) -> Tensor:
        ctx.name = name
        return tensor.data  # the same memory, and no view: the hook may write into it

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise InputError(
            f"a gradient flows into a tensor that a forward hook or an attribute took out of a "
            f"reversible chain (from a {ctx.name}), which keeps no graph of its forward pass, so "
            "the gradient would be lost. Let the model return the tensor, or store activations "
            "with net.reversible = False; detach what you only observe"
        )


def tap_stored(root: nn.Module, stored: Iterable[tuple[str, str]]) -> None:
    """Make gradients to tensors that modules have stored in attributes an error."""
    for path, name in stored:
        own = vars(module := root.get_submodule(path))
        tensors = pytree.tree_leaves(own.get(name))
        if not any(isinstance(each, Tensor) and each.requires_grad for each in tensors):
            own[name] = _tapped(type(module).__name__, own.get(name))


def _tapped(name: str, given: Any) -> Any:
    def tap(tensor: Tensor) -> Tensor:
        if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.is_inference():
            return tensor
        return _Tap.apply(name, _ANCHOR, tensor.detach())  # type: ignore[no-any-return]

    with torch.enable_grad():
        return pytree.tree_map_only(Tensor, tap, given)


class LayerHooks:
    """The hooks of layers that run in forward, and perhaps again in backward."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.layers = layers
        self._slots: list[Slot] = [(vars(m), kind) for m in layers for kind in FORWARD_HOOKS]
        self._forward = [owner[kind] for owner, kind in self._slots]
        self._all = [vars(layer)[kind] for layer in layers for kind in HOOKS]
        self._none_until = -1
        """The next id of torch's hooks when the layers were last seen without hooks."""

    def __bool__(self) -> bool:
        """Whether any layer has hooks now."""
        if self._none_until != RemovableHandle.next_id:
            if any(self._all):
                return True
            self._none_until = RemovableHandle.next_id
        return False

    @property
    def run_in_forward(self) -> bool:
        """Whether any layer has forward hooks now."""
        return any(self._forward)

    def now(self) -> HookTables:
        """The forward hooks, for both runs, without those of FSDP2."""
        if not self.run_in_forward:
            return ()
        return [
            (
                (owner, kind),
                OrderedDict((i, h) for i, h in owner[kind].items() if not is_sharding_hook(h)),
            )
            for owner, kind in self._slots
        ]

    def running(self, tables: HookTables) -> AbstractContextManager[Any]:
        """A context for either run, in which these hooks run.

        Where no graph is kept, hooks get tensors that a loss cannot use.
        """
        if not (tables or self.run_in_forward):
            return _NOTHING
        tables = tables or [(slot, OrderedDict()) for slot in self._slots]
        return filled(
            [
                (slot, OrderedDict((i, self._tapping(hook)) for i, hook in hooks.items()))
                for slot, hooks in tables
            ]
        )

    def _tapping(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """The hook, with gradients on for what it does where no graph is kept."""

        def run(module: nn.Module, *given: Any) -> Any:
            if torch.is_grad_enabled():
                return hook(module, *given)
            given, before = _tapped(type(module).__name__, given), dict(vars(module))
            with torch.enable_grad():
                result = hook(module, *given)
            # Frozen layers have no backward pass that would detect this.
            is_set = [v for name, v in vars(module).items() if before.get(name) is not v]
            known = [p for m in self.layers for p in m._parameters.values() if p is not None]
            refuse_other_leaves(
                f"what a forward hook of a {type(module).__name__} returns or sets",
                [t for t in pytree.tree_leaves([result, given, is_set]) if isinstance(t, Tensor)],
                [_ANCHOR, *known],
            )
            return pytree.tree_map_only(Tensor, Tensor.detach, result)

        return run


@contextmanager
def gradient_hooks_silenced(tensors: Sequence[Tensor]) -> Iterator[None]:
    """A context for `torch.autograd.grad`, in which gradient hooks of these tensors do not run."""
    # The dicts are emptied in place: torch holds on to them.
    dicts = [tensor._backward_hooks for tensor in tensors if tensor._backward_hooks]
    contents = [dict(hooks) for hooks in dicts]
    for hooks in dicts:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, content in zip(dicts, contents, strict=True):
            hooks.update(content)


# -- what graphs read -----------------------------------------------------------------------------


_PLAIN: Final = (bool, int, float, str, tuple)
"""Types of settings that are restored."""


class Bindings:
    """The modules, parameter slots, buffers and settings that a graph reads from `root`."""

    def __init__(self, graph: fx.Graph, root: nn.Module) -> None:
        self.watched = watched = read_by([graph], root)
        self.modules = {each.module: each.path for each in watched if each.names is None}
        """Every module that runs, including modules inside others, and its path."""
        # Modules that contain called ones, and whose own forward does not run. The root is left
        # out: its hooks run around its whole forward.
        enclosing = {each.module: each.path for each in watched if each.names and each.path}
        self.sharded: tuple[ShardedModule, ...] = tuple(
            (path, module)
            for module, path in (*enclosing.items(), *self.modules.items())
            if any(map(is_sharding_hook, module._forward_hooks.values()))
        )
        """FSDP2 modules, outermost first: those around called modules, called ones, inner ones."""
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
            # Of whole modules tensors would be held until backward.
            kinds = _PLAIN if names is None else (*_PLAIN, Tensor)
            others += [(own, name) for name in settings if type(own[name]) in kinds]
        self.slots = tuple(slots)
        """Where the parameters are, in the order of `labels`."""
        self.entries = (*slots, *others)
        """Parameters, then buffers and settings."""
        self.hooks = LayerHooks(list(self.modules))


class Bound:
    """What one run of a branch read from the module tree, for its second run."""

    __slots__ = ("_bindings", "_entries", "_versions", "hooks", "parameters")

    def __init__(self, bindings: Bindings) -> None:
        self._bindings = bindings
        self._entries = [owner.get(name) for owner, name in bindings.entries]
        self.parameters: Sequence[Any] = self._entries[: len(bindings.labels)]
        """The parameters, in the order of `Bindings.labels`."""
        self._versions = _versions(self.parameters)
        self.hooks: HookTables = bindings.hooks.now()

    def differentiable(self) -> list[Tensor]:
        """The parameters that require a gradient, each once."""
        unique = {id(p): p for p in self.parameters if p is not None and p.requires_grad}
        return list(unique.values())

    def check(self, block: str) -> None:
        """Raise if the run cannot be repeated because a parameter has been written to since."""
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
            "again in backward; call backward() before weights are updated or loaded, and do not "
            "write into weights in forward"
        )

    def stand_ins(self) -> dict[int, Tensor]:
        """Leaf tensors to use instead of computed parameters, by the ids of the parameters.

        Parameters may be computed (given to `functional_call`). Differentiating the second run must
        stop there: neither continue into the graph that computed them, nor set retained gradients.
        """
        computed = [p for p in self.parameters if p is not None and not p.is_leaf]
        return {id(p): p.detach().requires_grad_(p.requires_grad) for p in computed}

    def replaced_by(self, others: Mapping[int, Tensor]) -> AbstractContextManager[None]:
        """A context for the first run: `others` replace parameters, by the parameters' ids."""
        if not others:
            return _NOTHING
        pairs = zip(self._bindings.slots, self.parameters, strict=True)
        return filled([(slot, others[id(p)]) for slot, p in pairs if id(p) in others])

    def restored(self, others: Mapping[int, Tensor]) -> AbstractContextManager[Any]:
        """A context for the second run, with parameters, buffers and settings of the first.

        Args:
            others: As in `replaced_by`.
        """
        bindings, entries = self._bindings, self._entries
        if others:
            entries = [others.get(id(entry), entry) for entry in entries]
        pairs = zip(bindings.entries, entries, strict=True)
        replaced = [(slot, entry) for slot, entry in pairs if slot[0].get(slot[1]) is not entry]
        return filled(replaced) if replaced else _NOTHING


def _versions(tensors: Sequence[Tensor | None]) -> list[int]:
    try:
        return [0 if tensor is None else tensor._version for tensor in tensors]
    except RuntimeError:  # tensors made in inference mode have none
        return [0 if t is None or t.is_inference() else t._version for t in tensors]
