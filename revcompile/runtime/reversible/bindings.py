"""What a graph reads of the module tree when it runs, and again when it runs a second time.

Graphs name modules and parameters; which objects the names mean is looked up at every call.
Parameters may be replaced, sharded or swapped (`functional_call`) between calls, layers wrapped or
reparametrized: `Watch.change` tells cheaply whether what was derived from the modules is still
right. The second run of a branch must read what the first one read (`Bound`):

    parameters and buffers           restored if replaced; written to in place: an error
    training modes, plain settings   restored (a dropout rate, a counter)
    forward hooks                    only those that took part in the computation run again
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from itertools import repeat
from typing import Any, Final

from torch import Tensor, fx, nn

from revcompile.errors import InputError, ModifiedError
from revcompile.ir.module_tree import child_path
from revcompile.runtime.reversible.hooks import FORWARD_HOOKS, HookRecord, LayerHooks
from revcompile.runtime.reversible.slots import Column, Slot, filled

_OWN: Final = frozenset(nn.Module().__dict__) - {"training"}
"""Attributes of every module: compared in other ways."""
_PLAIN: Final = (bool, int, float, str, tuple)
"""Types of settings that are restored. Tensors are not: they would be held until backward."""
_MEMBERS: Final = ("_modules", "_parameters", "_buffers")
_NOTHING: Final = nullcontext()
_Edge = tuple[dict[str, Any], str, nn.Module]
"""A member access on the way to a module: where, name, and the module found there."""


class Bindings:
    """The modules, parameter slots, buffers and settings that a graph reads from `root`.

    Without a graph: all that is below `root`.
    """

    def __init__(self, graph: fx.Graph | None = None, root: nn.Module | None = None) -> None:
        self.modules: dict[nn.Module, str] = {}
        """Every module that runs, those inside others included, and its path."""
        self.enclosing: dict[nn.Module, str] = {}
        """Modules that contain those, and whose own forward does not run."""
        self.labels: list[str] = []
        """Paths of the parameters, in the order of the slots."""
        self.root = root
        self.edges: dict[tuple[int, str], _Edge] = {}
        self._slots: dict[tuple[int, str], Slot] = {}
        self._buffers: dict[tuple[int, str], Slot] = {}
        self._settings: dict[tuple[int, str], Slot] = {}
        for node in graph.nodes if graph is not None else ():
            path = str(node.target)
            if node.op == "call_module":
                self._add_module(self._walk(path), path)
            elif node.op == "get_attr":
                self._add_attribute(path)
        if graph is None and root is not None:
            self._add_children(root, "")
        self.enclosing = {m: path for m, path in self.enclosing.items() if m not in self.modules}
        self.slots = tuple(self._slots.values())
        """Where the parameters are, in the order of `labels`."""
        buffers, settings = self._buffers.values(), self._settings.values()
        self.entries = Column((*self.slots, *buffers, *settings))
        """Parameters, then buffers and settings."""
        self.hooks = LayerHooks(list(self.modules))
        self.hooked = self.hooks.run_in_forward
        """Had one of the modules forward hooks? `Watch` tells if that changes."""

    # -- what the names mean now --------------------------------------------------------------

    def _walk(self, path: str) -> nn.Module:
        module, around = self.root, ""
        assert module is not None
        for name in filter(None, path.split(".")):
            child = module._modules.get(name)
            if child is None:
                raise InputError(
                    f"{path}: the captured graph reads this module, but {type(module).__name__} "
                    f"has no {name!r} any more; put it back, or capture the changed model"
                )
            self.edges[id(module), name] = module._modules, name, child
            module = child
            around = child_path(around, name)
            self.enclosing[module] = around
        return module

    def _add_module(self, module: nn.Module, path: str) -> None:
        if module in self.modules:
            return
        self.modules[module] = path
        if vars(module).get("_fsdp_use_orig_params") is False:
            raise InputError(
                f"{path}: FullyShardedDataParallel has moved its parameters into a flat one, where "
                "a reversible chain cannot find them by name; use "
                "torch.distributed.fsdp.fully_shard(net) instead"
            )
        for name in module._parameters:
            self._add_slot(module, name, path)
        for name in module._buffers:
            self._buffers[id(module), name] = module._buffers, name
        for name, value in vars(module).items():
            if name not in _OWN and type(value) in _PLAIN:
                self._settings[id(module), name] = vars(module), name
        self._add_children(module, path)

    def _add_children(self, module: nn.Module, path: str) -> None:
        for name, child in module._modules.items():
            if child is not None:
                self.edges[id(module), name] = module._modules, name, child
                self._add_module(child, child_path(path, name))

    def _add_slot(self, module: nn.Module, name: str, path: str) -> None:
        if (id(module), name) not in self._slots:
            self._slots[id(module), name] = module._parameters, name
            self.labels.append(child_path(path, name))

    def _add_attribute(self, path: str) -> None:
        outer, _, name = path.rpartition(".")
        owner = self._walk(outer)
        self.enclosing.setdefault(owner, outer)
        parametrized = child_path(outer, "parametrizations")
        if name in owner._parameters:
            self._add_slot(owner, name, outer)
        elif name in owner._buffers:
            self._buffers[id(owner), name] = owner._buffers, name
        elif name in owner._modules:
            self._add_module(self._walk(path), path)
        elif type(vars(owner).get(name)) in _PLAIN:
            self._settings[id(owner), name] = vars(owner), name
        elif "parametrizations" in owner._modules and name in self._walk(parametrized)._modules:
            inner = child_path(parametrized, name)
            self._add_module(self._walk(inner), inner)

    def parameters(self) -> list[Any]:
        """The present parameters, in the order of `labels`."""
        return self.entries.read()[: len(self.labels)]


class Watch:
    """Notices modules, among those that some graphs read, that were replaced or run differently.

    Args:
        only: Of all these modules.
    """

    def __init__(
        self, bindings: Sequence[Bindings], only: Sequence[nn.Module] | None = None
    ) -> None:
        watched, edges = dict[nn.Module, str](), dict[tuple[int, str], _Edge]()
        for each in bindings:
            watched |= each.enclosing | each.modules
            edges |= each.edges
        if only is not None:
            owners = set(map(id, only))
            watched = {module: path for module, path in watched.items() if id(module) in owners}
            edges = {place: edge for place, edge in edges.items() if place[0] in owners}
        self._root, self._paths = next((each.root for each in bindings), None), watched
        # Whole columns are compared, without a loop in Python; what differs is found afterwards.
        self._modules = list(watched)
        self._classes = list(map(type, self._modules))
        dicts = list(map(vars, self._modules))
        members = [own[name] for own in dicts for name in _MEMBERS]
        self._empty, self._filled = [m for m in members if not m], [m for m in members if m]
        self._filled_counts = list(map(len, self._filled))
        self._hooks = Column((own, name) for own in dicts for name in FORWARD_HOOKS)
        self._hook_counts = list(map(len, self._hooks.read()))
        self._without_forward = [own for own in dicts if "forward" not in own]
        self._forwards = Column((own, "forward") for own in dicts if "forward" in own)
        self._own_forwards = self._forwards.read()
        self._children = Column((children, name) for children, name, _ in edges.values())
        self._targets = [module for _, _, module in edges.values()]
        self._before = list(map(_members_and_forward, self._modules))

    def change(self, with_hooks: bool = True) -> str | None:
        """The path of a module that was replaced, or is run differently now; None if there is none.

        Differently: another class, other members, a `forward` of its own, and, `with_hooks`, other
        hooks. Parameters are not compared: those are looked up anew in every run.
        """
        if not self._children.holds(self._targets):
            return self._replaced_path()
        if (
            any(self._empty)
            or list(map(len, self._filled)) != self._filled_counts
            or list(map(type, self._modules)) != self._classes
            or any(map(dict.__contains__, self._without_forward, repeat("forward")))
            or self._forwards.read() != self._own_forwards
        ):
            return self._first_path(list(map(_members_and_forward, self._modules)), self._before)
        if with_hooks and (counts := list(map(len, self._hooks.read()))) != self._hook_counts:
            return self._first_path(counts, self._hook_counts)
        return None

    def check_repeatable(self) -> None:
        """Raise if a run of the graphs cannot be repeated."""
        changed = self.change(with_hooks=False)
        if changed is not None:
            raise ModifiedError(
                f"{changed} was replaced, or wrapped, between a forward pass and its backward "
                "pass, but it is part of a reversible chain, which runs its layers again in "
                "backward; change modules before the forward pass or after backward()"
            )

    def _first_path(self, now: Sequence[Any], before: Sequence[Any]) -> str:
        """The path of the first module whose entries in a column differ."""
        entry = next(i for i, (new, old) in enumerate(zip(now, before, strict=True)) if new != old)
        return self._paths[self._modules[entry * len(self._modules) // len(now)]] or "the model"

    def _replaced_path(self) -> str:
        assert self._root is not None
        (children, name), _ = self._children.different(self._targets)[0]
        for path, module in self._root.named_modules(remove_duplicate=False):
            if module._modules is children:
                return child_path(path, name)
        return name


def _members_and_forward(module: nn.Module) -> tuple[Any, ...]:
    own = vars(module)
    return type(module), *(len(own[name]) for name in _MEMBERS), own.get("forward")


class Bound:
    """What one run of a branch read of the module tree, for its second run."""

    __slots__ = ("_bindings", "_entries", "_hooks", "_versions", "parameters")

    def __init__(self, bindings: Bindings) -> None:
        self._bindings = bindings
        self._entries = bindings.entries.read()
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
        replaced = bindings.entries.different(entries)
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
