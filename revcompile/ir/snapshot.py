"""Snapshots of a model's modules, which tell whether the model has changed.

    snapshot = TreeSnapshot(below(model), (Kind.MODULE, Kind.SETTING))
    snapshot.first_change()     None, or for example: blocks.1.drop.p was 0.1 and is 0.3 now

The caller decides what a change means: it refuses it, plans or captures again, or expects the new
contents from then on (`take`). A comparison runs before every step or call. It compares lists of
values without a loop in Python; the loop that names the change runs only if something differs.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import chain, repeat
from operator import attrgetter, call, is_, is_not, itemgetter
from typing import Any, Final, NamedTuple

from torch import Tensor, fx, nn
from torch.utils.hooks import RemovableHandle

from revcompile.errors import InputError
from revcompile.ir.module_tree import child_path


class Kind(enum.Enum):
    """Which aspect of a module is compared."""

    MODULE = "the modules in it, by name: which objects they are"
    PARAMETER = "its parameters, likewise"
    BUFFER = "its buffers, and tensors among its attributes, likewise"
    MEMBERS = "the names of its modules, parameters and buffers"
    CLASS = "its class"
    FORWARD = "a forward of its own, beside that of its class"
    MEMORY = "where its parameters and buffers lie"
    REQUIRES_GRAD = "whether its parameters, and other leaf tensors in it, require gradients"
    DIFFERENTIABLE = "the same, and whether computed tensors in it require gradients"
    SETTING = "its plain attributes, by value, and its mode (`training`)"
    HOOK = "its hooks, but for those of FSDP"
    GRADIENT_HOOK = "whether its parameters have hooks"


STRUCTURE: Final = (Kind.MODULE, Kind.CLASS, Kind.FORWARD, Kind.MEMBERS)
"""What decides how a module runs, besides its settings and hooks."""


class Presence(enum.Enum):
    """Stands for a value that is absent, or for a value that may be anything."""

    ABSENT = "absent"
    SET = "set"

    def __repr__(self) -> str:
        return self.value


class Watched(NamedTuple):
    """A module to compare."""

    module: nn.Module
    path: str
    names: frozenset[str] | None = None
    """The members and settings to compare, besides the class; None: everything."""


class Change(NamedTuple):
    """A difference between a snapshot and the model."""

    path: str
    """The path of the module."""
    name: str
    """The name of the member or attribute; empty if the module itself is different."""
    kind: Kind
    before: Any
    now: Any

    @property
    def where(self) -> str:
        is_member = self.name and self.kind is not Kind.FORWARD
        return child_path(self.path, self.name) if is_member else self.path or "the model"

    def __str__(self) -> str:
        match self.kind:
            case Kind.MODULE if type(self.before) is type(self.now):
                kind = type(self.now).__name__
                return f"{self.where} was replaced by another {kind}, which has its own weights"
            case Kind.PARAMETER | Kind.BUFFER:
                return f"{self.where} was replaced"
            case Kind.MEMBERS:
                return f"{self.where} was given other members"
            case Kind.CLASS:
                return f"{self.where} was {_named(self.before)} and is {_named(self.now)} now"
            case Kind.FORWARD:
                what = "compiled" if self.name else "given another forward"
                return f"{self.where} was {what}"
            case Kind.HOOK | Kind.GRADIENT_HOOK:
                return f"a hook of {self.where} was registered or removed"
            case Kind.REQUIRES_GRAD | Kind.DIFFERENTIABLE:
                return f"requires_grad of {self.where} was changed"
            case Kind.MEMORY:
                return f"{self.where} lies in other memory"
        before, now = (Presence.ABSENT if v is None else v for v in (self.before, self.now))
        return f"{self.where} was {shown(before)} and is {shown(now)} now"


def shown(value: Any) -> str:
    """A value in a message."""
    if isinstance(value, nn.Module | Tensor | type):
        return _named(value if isinstance(value, type) else type(value))
    text = repr(value)
    return text if len(text) < 80 else f"{text[:76]} ..."


def _named(kind: type) -> str:
    return f"{'an' if kind.__name__[0] in 'AEIOU' else 'a'} {kind.__name__}"


HOOKS: Final = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""Attributes in which torch keeps a module's hooks, each a dict by handle."""
INTERNAL: Final = frozenset(vars(nn.Module())) - {"training"} | {"forward"}
"""Attributes that every module has. They are not settings."""
_TABLES: Final[Mapping[Kind, str]] = {
    Kind.MODULE: "_modules",
    Kind.PARAMETER: "_parameters",
    Kind.BUFFER: "_buffers",
}
_OF_LAYERS: Final = (bool, int, float, str, tuple)
"""Types of the settings of torch's own layers."""
_requires_grad: Final = attrgetter("requires_grad")
_version: Final = attrgetter("_version")
MOST_ELEMENTS: Final = 1024
"""Larger arrays and containers are compared by identity."""
_next_id: Final = attrgetter("next_id")


def is_sharding_hook(hook: Callable[..., Any]) -> bool:
    """Whether FSDP2 gathers or frees parameters with this hook."""
    kind = type(getattr(hook, "__self__", None))
    return kind.__name__ == "FSDPState" and kind.__module__.startswith("torch.distributed.")


def below(root: nn.Module) -> list[Watched]:
    """A module and all modules inside it."""
    return [Watched(module, path) for path, module in root.named_modules()]


def read_by(graphs: Iterable[fx.Graph], root: nn.Module) -> list[Watched]:
    """The modules that graphs call, with all inside them; of others, the members that paths name.

    Raises:
        InputError: A module that a graph reads is missing.
    """
    whole: dict[nn.Module, str] = {}
    parts: dict[nn.Module, Watched] = {}
    nodes = (node for graph in graphs for node in graph.nodes)
    for node in (node for node in nodes if node.op in ("call_module", "get_attr")):
        module, path, names = root, "", str(node.target).split(".")
        while names:
            before = parts.get(module, Watched(module, path, frozenset()))
            parts[module] = before._replace(names=(before.names or frozenset()) | {names[0]})
            parametrized = module._modules.get("parametrizations")
            if (child := module._modules.get(names[0])) is not None:
                module, path = child, child_path(path, names.pop(0))
            elif parametrized is not None and names[0] in parametrized._modules:
                names.insert(0, "parametrizations")
            elif node.op == "call_module" or len(names) > 1:
                raise InputError(
                    f"{node.target}: the captured graph reads this, but {type(module).__name__} "
                    f"has no {names[0]!r} any more; put it back, or capture the changed model"
                )
            else:
                break
        else:
            for inner_path, inner in module.named_modules(prefix=path):
                whole.setdefault(inner, inner_path)
    others = [watched for module, watched in parts.items() if module not in whole]
    return [*others, *(Watched(module, path) for module, path in whole.items())]


class Reading:
    """Values at one moment, and a check without a loop in Python that none has changed."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, str], Any] = {}
        """Values by the path of a module and the name of a member or attribute."""
        self.entries: list[tuple[dict[str, Any], str, Any]] = []
        """Dicts, keys, and the objects expected there, compared by identity."""
        self.members: list[tuple[dict[str, Any], str]] = []
        """Dicts, and keys at which any value except None is expected."""
        self._looks: dict[Any, tuple[list[Any], list[Any]]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"found": self.found}  # copied modules have other dicts

    def without(self, left_out: tuple[str, ...]) -> Reading:
        """The values alone, to be stored, except those of these attributes and what is in them."""
        inside, stored = tuple(f"{place}{dot}" for place in left_out for dot in ".["), Reading()
        for (path, name), value in self.found.items():
            label = child_path(path, name)
            if label not in left_out and not label.startswith(inside):
                stored.found[path, name] = value
        return stored

    def look(self, look: Callable[[Any], Any], objects: Iterable[Any]) -> None:
        """Expect that `look` keeps returning what it returns now for each object."""
        for each in objects:
            self.expect(look, each, look(each))

    def expect(self, look: Callable[[Any], Any], each: Any, value: Any) -> None:
        """Expect that `look(each)` equals a value."""
        objects, values = self._looks.setdefault(look, ([], []))
        objects.append(each)
        values.append(value)

    def expect_items(self, container: Collection[Any]) -> None:
        """Expect that a container keeps its items, and a dict its keys, compared by identity."""
        views: tuple[Collection[Any], ...] = (container,)
        if isinstance(container, dict):
            views = container.keys(), container.values()
        for items in () if isinstance(container, tuple) else views:
            self.expect(call, partial(_holds, items, tuple(items)), True)

    def finish(self) -> Reading:
        """Transpose what was noted into the columns that `is_same` compares."""
        self._columns: list[Any] = [[entry[i] for entry in self.entries] for i in range(3)]
        self._members: list[Any] = [[entry[i] for entry in self.members] for i in range(2)]
        return self

    def is_same(self) -> bool:
        """Whether nothing has changed; False if something may have."""
        if "_columns" not in vars(self):
            return False
        try:
            for look, (objects, expected) in self._looks.items():
                if list(map(look, objects)) != expected:
                    return False
        except Exception:  # a value is gone, or cannot be compared
            return False
        if self.entries:
            tables, names, values = self._columns
            if not all(map(is_, map(dict.get, tables, names, repeat(Presence.ABSENT)), values)):
                return False
        return all(map(is_not, map(dict.get, *self._members), repeat(None)))

    def changes(self, now: Reading, kind: Kind) -> Iterator[Change]:
        """What differs in a later reading of the same modules."""
        for key in {**self.found, **now.found}:
            pair = self.found.get(key, Presence.ABSENT), now.found.get(key, Presence.ABSENT)
            if not is_equal(*pair, by_value=kind not in _TABLES):
                yield Change(*key, kind, *pair)


def versions(tensors: Collection[Tensor]) -> list[int]:
    """What changes if tensors are written to, or if their `.data` is replaced."""
    return [*map(_version, tensors), *map(Tensor.data_ptr, tensors)]


class TreeSnapshot:
    """Some aspects of some modules at one moment, and whether they have changed since.

    Args:
        watched: The modules.
        kinds: The aspects, in the order in which changes are looked for.
    """

    def __init__(self, watched: Iterable[Watched], kinds: Collection[Kind]) -> None:
        self._watched, self._kinds = list(watched), tuple(kinds)
        self.take()

    def __getstate__(self) -> dict[str, Any]:
        """Without attributes that modules leave out of their own state, as recurrent layers do."""
        left_out = tuple(
            child_path(path, name) for path, module in self._owners() for name in _unsaved(module)
        )
        before = {kind: reading.without(left_out) for kind, reading in self._before.items()}
        return {**self.__dict__, "_before": before}

    def _owners(self) -> Iterable[tuple[str, nn.Module]]:
        """The paths and modules whose attributes are compared."""
        return ((watched.path, watched.module) for watched in self._watched)

    def take(self) -> None:
        """Take the snapshot again: expect the current values from now on."""
        self._before = {kind: self._read(kind) for kind in self._kinds}

    def _read(self, kind: Kind) -> Reading:
        reading = Reading()
        for watched in self._watched:
            values = _noted(watched, kind, reading)
            reading.found |= {(watched.path, name): value for name, value in values.items()}
        return reading.finish()

    def changes(self, now: TreeSnapshot | None = None) -> Iterator[Change]:
        """All differences from the modules as they are now, or from another snapshot."""
        for kind, before in self._before.items():
            yield from before.changes(now._before[kind] if now else self._read(kind), kind)

    def values(self, kind: Kind) -> dict[str, Any]:
        """What the snapshot has of one aspect, by path."""
        return {child_path(*place): value for place, value in self._before[kind].found.items()}

    def first_change(self) -> Change | None:
        """The first difference, or None."""
        for kind, before in self._before.items():
            if not before.is_same():
                now = self._read(kind)
                for change in before.changes(now, kind):
                    return change
                self._before[kind] = now  # equal values in other objects, or irrelevant changes
        return None


def _unsaved(module: nn.Module) -> Collection[str]:
    """Attributes that a module does not save with itself."""
    if type(module).__getstate__ is nn.Module.__getstate__:
        return ()
    saved: Any = None
    with suppress(Exception):  # a script module has no state
        saved = module.__getstate__()
    return vars(module).keys() - saved.keys() if isinstance(saved, dict) else ()


def _noted(watched: Watched, kind: Kind, reading: Reading) -> Mapping[str, Any]:
    """Note one aspect of a module in `reading`; returns it by names of members or attributes."""
    module, own, names = watched.module, vars(watched.module), watched.names
    parameters = {n: p for n, p in own["_parameters"].items() if p is not None}
    tensors = {n: v for n, v in own.items() if isinstance(v, Tensor)}

    def read(table: Mapping[str, Any]) -> dict[str, Any]:
        return {n: v for n, v in table.items() if names is None or n in names}

    match kind:
        case Kind.MODULE | Kind.PARAMETER | Kind.BUFFER:
            members, plain = own[_TABLES[kind]], tensors if kind is Kind.BUFFER else {}
            if members:  # `del` of a `ModuleList` makes another dict
                reading.entries.append((own, _TABLES[kind], members))
            reading.entries += [(members, name, value) for name, value in read(members).items()]
            reading.entries += [(own, name, value) for name, value in read(plain).items()]
            return read(members) | read(plain)
        case Kind.SETTING:
            settings = [n for n in read(own) if n not in INTERNAL and n not in tensors]
            if settings:
                get = partial(itemgetter(*settings), own)
                reading.expect(call, get, frozen(get()))
            if names is None:
                reading.look(len, [own])  # detects new settings
            return {name: frozen(own[name]) for name in settings}
        case Kind.MEMORY:
            found = read({**parameters, **own["_buffers"], **tensors})
            found = {n: t for n, t in found.items() if t is not None}
            reading.look(Tensor.data_ptr, found.values())
            return {n: tensor.data_ptr() for n, tensor in found.items()}
        case Kind.REQUIRES_GRAD | Kind.DIFFERENTIABLE:
            others: dict[str, Tensor] = {}
            for table in (own["_buffers"], own):
                held = {n: v for n, v in read(table).items() if n not in INTERNAL}
                if type(module).__module__.startswith("torch.nn."):  # their settings stay settings
                    held = {n: v for n, v in held.items() if not isinstance(v, _OF_LAYERS)}
                reading.entries += [(table, name, value) for name, value in held.items()]
                others |= {n: t for name in held for n, t in _tensors(name, held[name], reading)}
            if names is None:
                reading.look(len, [own])  # detects new attributes
            given = read(parameters)
            reading.look(_requires_grad, given.values())
            look = _requires_grad if kind is Kind.DIFFERENTIABLE else _is_trained
            reading.look(look, others.values())
            needed = {n: True for n, tensor in others.items() if look(tensor)}
            return needed | {n: parameter.requires_grad for n, parameter in given.items()}
        case Kind.GRADIENT_HOOK:  # the same as long as nobody registers a hook
            reading.look(_next_id, [] if reading.found else [RemovableHandle])
            return {n: has_hooks(p) for n, p in read(parameters).items()}
        case Kind.CLASS:
            reading.look(type, [module])
            return {"": type(module)}
        case _ if names is not None:
            return {}
        case Kind.FORWARD:
            for name in ("forward", "_compiled_call_impl"):
                reading.entries.append((own, name, own.get(name, Presence.ABSENT)))
            return {"": own.get("forward"), "compiled": own.get("_compiled_call_impl")}
        case Kind.MEMBERS:
            tables = {name: own[name] for name in _TABLES.values()}
            reading.entries += [(own, name, table) for name, table in tables.items()]
            reading.look(len, tables.values())
            return {"": list(map(tuple, tables.values()))}
        case _:
            reading.look(_next_id, [] if reading.found else [RemovableHandle])
            reading.look(len, [own[table] for table in HOOKS if own[table]])
            return {"": hooks_of(module)}


def _tensors(label: str, value: Any, reading: Reading, depth: int = 0) -> Iterator[Any]:
    """An attribute's value if it is a tensor, or the tensors in a container, with their labels.

    `reading` expects that containers keep their items.
    """
    if isinstance(value, Tensor):
        yield label, value
    is_container = isinstance(value, (dict, list, tuple, deque))
    if not is_container or depth > 2 or len(value) > MOST_ELEMENTS:
        return
    reading.expect_items(value)
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _tensors(f"{label}[{key!r}]", item, reading, depth + 1)


def _is_trained(tensor: Tensor) -> bool:
    return tensor.requires_grad and tensor.is_leaf


def _holds(items: Collection[Any], expected: tuple[Any, ...]) -> bool:
    return len(items) == len(expected) and all(map(is_, items, expected))


def hooks_of(module: nn.Module) -> list[int]:
    """The handles of a module's hooks, except those of FSDP."""
    hooks = chain.from_iterable(vars(module)[kind].items() for kind in HOOKS)
    return [handle for handle, hook in hooks if not is_sharding_hook(hook)]


def has_hooks(parameter: Tensor) -> bool:
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def frozen(value: Any) -> Any:
    """A copy of a container, because it may be changed in place; any other value itself."""
    if isinstance(value, dict):
        return {key: frozen(inner) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(frozen, value))
    return set(value) if type(value) is set else value


def is_equal(before: Any, now: Any, by_value: bool) -> bool:
    if before is now:
        return True
    if not by_value or type(before) is not type(now) or isinstance(now, Tensor):
        return False
    if isinstance(now, dict):
        before, now = list(before.items()), list(now.items())
    if isinstance(now, list | tuple):
        pairs = zip(before, now, strict=False)
        return len(before) == len(now) and all(is_equal(*pair, True) for pair in pairs)
    try:
        return bool(before == now)
    except Exception:  # of arrays, for example: another object is another value
        return False
