"""What a graph finds in the module tree when it runs, and keeps to when it runs again.

Graphs name modules and parameters; which objects those names mean is looked up at every call.
Parameters may be replaced, sharded or swapped (`functional_call`) between calls, layers wrapped or
reparametrized: `Bindings.change` says cheaply whether what was derived from the modules still
holds. A branch that runs a second time has to run on what it found the first time (`Bound`):

    tensors in the modules' slots    put back if others are there now; written to: an error
    training modes, plain settings   put back (a dropout rate, a counter)
    forward hooks                    only those that took part in the computation run again
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from operator import is_
from typing import Any, Final

from torch import Tensor, fx, nn

from revcompile.errors import InputError, ModifiedError
from revcompile.ir.module_tree import child_path
from revcompile.runtime.reversible.hooks import FORWARD_HOOKS, HookRecord, recorded, replayed

__all__ = ["Bindings", "Bound", "form_of"]

_OWN: Final = frozenset(nn.Module().__dict__) - {"training"}
"""What torch keeps in every module: looked at in other ways."""
_PLAIN: Final = (bool, int, float, str, tuple)
"""Settings of layers that are put back. Tensors are not: they would be held until backward."""
_Slot = tuple[dict[str, Any], str]


class Bindings:
    """The modules, parameter slots, buffers and settings that a graph reads from `root`."""

    def __init__(self, graph: fx.Graph | None = None, root: nn.Module | None = None) -> None:
        self.modules: dict[nn.Module, str] = {}
        """Every module that runs, those inside others included, and its path."""
        self.around: dict[nn.Module, str] = {}
        """Modules on the way to those, whose own forward does not run."""
        self.labels: list[str] = []
        """Paths of the parameters, in the order of the slots."""
        self._root = root
        self._edges: dict[tuple[int, str], tuple[dict[str, Any], str, nn.Module]] = {}
        self._slots: dict[tuple[int, str], _Slot] = {}
        self._buffers: dict[tuple[int, str], _Slot] = {}
        self._settings: dict[tuple[int, str], _Slot] = {}
        for node in graph.nodes if graph is not None else ():
            path = str(node.target)
            if node.op == "call_module":
                self._add_module(self._walk(path), path)
            elif node.op == "get_attr":
                self._add_attribute(path)
        self.around = {m: path for m, path in self.around.items() if m not in self.modules}
        watched = {**self.around, **self.modules}
        self._forms = [(m, m.__class__, form_of(m), path) for m, path in watched.items()]
        self.hooked = tuple(m for m in self.modules if has_forward_hooks(m))
        self.edges = tuple(self._edges.values())
        # The same in columns: this is looked at in every call, for every block.
        self._watched = list(watched)
        self._kinds = list(map(type, self._watched))
        own = list(map(vars, self._watched))
        members = ("_modules", "_parameters", "_buffers")
        self._members = [d[name] for d in own for name in members]
        self._hooks = [d[name] for d in own for name in FORWARD_HOOKS]
        self._sizes = list(map(len, self._members)), list(map(len, self._hooks))
        self._own = own
        self._has_forward = ["forward" in d for d in own]
        self._children = [children for children, _, _ in self.edges]
        self._names = [name for _, name, _ in self.edges]
        self._targets = [module for _, _, module in self.edges]
        self.slots = tuple(self._slots.values())
        self.buffers = tuple(self._buffers.values())
        self.settings = tuple(self._settings.values())
        self._latest: list[Any] = []

    # -- what the names mean now --------------------------------------------------------------

    def _walk(self, path: str) -> nn.Module:
        module, around = self._root, ""
        assert module is not None
        for name in filter(None, path.split(".")):
            child = module._modules.get(name)
            if child is None:
                raise InputError(
                    f"{path}: the captured graph reads this module, but {type(module).__name__} "
                    f"has no {name!r} any more; put it back, or capture the changed model"
                )
            self._edges[id(module), name] = module._modules, name, child
            module = child
            around = child_path(around, name)
            self.around[module] = around
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
        for name, child in module._modules.items():
            if child is not None:
                self._edges[id(module), name] = module._modules, name, child
                self._add_module(child, child_path(path, name))

    def _add_slot(self, module: nn.Module, name: str, path: str) -> None:
        if (id(module), name) not in self._slots:
            self._slots[id(module), name] = module._parameters, name
            self.labels.append(child_path(path, name))

    def _add_attribute(self, path: str) -> None:
        outer, _, name = path.rpartition(".")
        owner = self._walk(outer)
        self.around.setdefault(owner, outer)
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
        """What the parameter slots hold now."""
        return [place.get(name) for place, name in self.slots]

    def change(self, with_hooks: bool = True) -> str | None:
        """The path of a module that was replaced or has another form now; None if there is none.

        Parameters are not looked at: those are found anew in every run. Without hooks, it is
        another form only if the module has other members or another class.
        """
        if self._is_as_it_was(with_hooks):
            return None
        for children, name, module in self.edges:
            if children.get(name) is not module:
                return self._path_of(children, name)
        for module, kind, form, path in self._forms:
            now = form_of(module)
            is_same = now == form if with_hooks else now[:3] == form[:3]
            if module.__class__ is not kind or not is_same:
                return path or "the model"
        return None

    def _is_as_it_was(self, with_hooks: bool) -> bool:
        """Whether `change` has anything to look for, without a loop in Python."""
        return (
            all(map(is_, map(dict.get, self._children, self._names), self._targets))
            and list(map(len, self._members)) == self._sizes[0]
            and list(map(type, self._watched)) == self._kinds
            and (
                not with_hooks
                or (
                    list(map(len, self._hooks)) == self._sizes[1]
                    and ["forward" in own for own in self._own] == self._has_forward
                )
            )
        )

    def _path_of(self, children: dict[str, Any], name: str) -> str:
        assert self._root is not None
        for path, module in self._root.named_modules(remove_duplicate=False):
            if module._modules is children:
                return child_path(path, name)
        return name

    def settings_now(self) -> list[Any]:
        """The settings; one list for all runs in which they are the same."""
        found = [place.get(name) for place, name in self.settings]
        if len(found) != len(self._latest) or not all(map(is_, found, self._latest)):
            self._latest = found
        return self._latest


def form_of(module: nn.Module) -> tuple[Any, ...]:
    """What decides how a module is run, besides its settings: members, hooks, its own forward."""
    own = vars(module)
    return (
        len(own["_modules"]),
        len(own["_parameters"]),
        len(own["_buffers"]),
        len(own["_forward_pre_hooks"]),
        len(own["_forward_hooks"]),
        "forward" in own,
    )


def has_forward_hooks(module: nn.Module) -> bool:
    """Does a module have forward hooks or pre-hooks of its own?"""
    own = vars(module)
    return bool(own["_forward_pre_hooks"] or own["_forward_hooks"])


class Bound:
    """What one run of a branch finds, for its second run."""

    def __init__(self, bindings: Bindings) -> None:
        self._bindings = bindings
        self._parameters = bindings.parameters()
        self._versions = _versions(self._parameters)
        self._buffers = [place.get(name) for place, name in bindings.buffers]
        self._settings = bindings.settings_now()
        self._hooks: HookRecord = {}

    def differentiable(self) -> list[Tensor]:
        """The parameters that want a gradient, each once."""
        found = {id(p): p for p in self._parameters if p is not None and p.requires_grad}
        return list(found.values())

    def running(self) -> AbstractContextManager[None]:
        """Around the first run."""
        hooked = self._bindings.hooked
        return recorded(hooked, self._hooks) if hooked else nullcontext()

    def check(self, block: str) -> None:
        """Stop if the run cannot be repeated: something was written to or replaced since."""
        changed = self._bindings.change(with_hooks=False)
        if changed is not None:
            raise ModifiedError(
                f"{changed} was replaced, or wrapped, between a forward pass and its backward "
                f"pass, but the reversible block {block} runs its layers again in backward; "
                "change modules before the forward pass or after backward()"
            )
        now = _versions(self._parameters)
        if now != self._versions:
            self._refuse_written(now, block)

    def _refuse_written(self, now: list[int], block: str) -> None:
        pairs = zip(now, self._versions, strict=True)
        place = next(i for i, (new, old) in enumerate(pairs) if new != old)
        parameter, label = self._parameters[place], self._bindings.labels[place]
        assert parameter is not None
        raise ModifiedError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: parameter {label} {list(parameter.shape)} is at version {now[place]}; "
            f"expected version {self._versions[place]} instead. The reversible block {block} runs "
            "again in backward; call backward() before weights are updated or loaded"
        )

    def stand_ins(self) -> dict[int, Tensor]:
        """Leaves in the places of computed parameters, by their ids.

        Given to `functional_call`, for one: the second run is not to end in the graph, or in the
        retained gradient, of what they are computed from.
        """
        computed = (p for p in self._parameters if p is not None and not p.is_leaf)
        return {id(p): p.detach().requires_grad_(p.requires_grad) for p in computed}

    def repeated(self, stand_ins: Mapping[int, Tensor]) -> AbstractContextManager[Any]:
        """Around the second run: put back what is not as it was, for the time being."""
        bindings, parameters = self._bindings, self._parameters
        if stand_ins:
            parameters = [stand_ins.get(id(p), p) for p in parameters]
        places = (
            *_different(bindings.slots, parameters),
            *_different(bindings.buffers, self._buffers),
            *_different(bindings.settings, self._settings),
        )
        hooked = [m for m in bindings.modules if m in self._hooks or has_forward_hooks(m)]
        if not places and not hooked:
            return nullcontext()
        stack = ExitStack()
        stack.enter_context(_filled(places))
        stack.enter_context(replayed(hooked, self._hooks))
        return stack


def _versions(tensors: Sequence[Tensor | None]) -> list[int]:
    try:
        return [0 if tensor is None else tensor._version for tensor in tensors]
    except RuntimeError:  # tensors made in inference mode have none
        return [0 if t is None or t.is_inference() else t._version for t in tensors]


def _different(places: tuple[_Slot, ...], values: list[Any]) -> Sequence[tuple[_Slot, Any]]:
    """The places where something else is now, and what is to be there."""
    now = [place.get(name) for place, name in places]
    if all(map(is_, now, values)):
        return ()
    pairs = zip(places, now, values, strict=True)
    return [(place, value) for place, there, value in pairs if there is not value]


@contextmanager
def _filled(places: Sequence[tuple[_Slot, Any]]) -> Iterator[None]:
    before = [(slot, slot[0].get(slot[1])) for slot, _ in places]
    for (place, name), value in places:
        place[name] = value
    try:
        yield
    finally:
        for (place, name), value in before:
            place[name] = value
