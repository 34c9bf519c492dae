"""Whether a model has changed: one snapshot of its modules for everyone who asks.

    snapshot = TreeSnapshot(below(model), (Kind.MODULE, Kind.SETTING))
    snapshot.first_change()     None, or for example: blocks.1.drop.p was 0.1 and is 0.3 now

The caller decides what a change means: it refuses it, plans or captures again, or expects the new
contents from then on (`take`). A comparison runs before every step or call. It reads whole columns
without a loop in Python; the loop that names the change runs only if something differs.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import attrgetter, call, is_, itemgetter, methodcaller
from typing import Any, Final, NamedTuple

from torch import Tensor, fx, nn
from torch.utils.hooks import RemovableHandle

from revcompile.errors import InputError
from revcompile.ir.module_tree import child_path


class Kind(enum.Enum):
    """What of a module is compared."""

    MODULE = "the modules in it, by name: which objects they are"
    PARAMETER = "its parameters, likewise"
    BUFFER = "its buffers, and tensors among its attributes, likewise"
    MEMBERS = "the names of its modules, parameters and buffers"
    CLASS = "its class"
    FORWARD = "a forward of its own, beside that of its class"
    MEMORY = "where its parameters and buffers lie"
    REQUIRES_GRAD = "whether its parameters require gradients"
    SETTING = "its plain attributes, by value, and its mode (`training`)"
    HOOK = "its hooks, but for those of FSDP"
    GRADIENT_HOOK = "whether its parameters have hooks"


STRUCTURE: Final = (Kind.MODULE, Kind.CLASS, Kind.FORWARD, Kind.MEMBERS)
"""What decides how a module runs, besides its settings and hooks."""


class Absent(enum.Enum):
    """What stands for a member or an attribute that a module does not have."""

    ABSENT = "absent"


class Watched(NamedTuple):
    """A module to look at."""

    module: nn.Module
    path: str
    names: frozenset[str] | None = None
    """Only its class, and the members and settings of these names; None: everything."""


class Change(NamedTuple):
    """A difference between a snapshot and the model."""

    path: str
    """Of the module."""
    name: str
    """Of the member or the attribute; empty if the module itself is different."""
    kind: Kind
    before: Any
    now: Any

    @property
    def where(self) -> str:
        return child_path(self.path, self.name) if self.name else self.path or "the model"

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
                return f"{self.where} was given another forward"
            case Kind.HOOK | Kind.GRADIENT_HOOK:
                return f"a hook of {self.where} was registered or removed"
            case Kind.REQUIRES_GRAD:
                return f"requires_grad of {self.where} was changed"
            case Kind.MEMORY:
                return f"{self.where} lies in other memory"
        before, now = (Absent.ABSENT if v is None else v for v in (self.before, self.now))
        return f"{self.where} was {shown(before)} and is {shown(now)} now"


def shown(value: Any) -> str:
    """A value in a message."""
    if isinstance(value, Absent):
        return "absent"
    if isinstance(value, nn.Module | Tensor | type):
        return _named(value if isinstance(value, type) else type(value))
    text = repr(value)
    return text if len(text) < 80 else f"{text[:76]} ..."


def _named(kind: type) -> str:
    return f"{'an' if kind.__name__[0] in 'AEIOU' else 'a'} {kind.__name__}"


HOOKS: Final = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""Where torch keeps a module's hooks: a dict by handle each."""
INTERNAL: Final = frozenset(vars(nn.Module())) - {"training"} | {"forward"}
"""Attributes of every module, which are no settings."""
_TABLES: Final[Mapping[Kind, str]] = {
    Kind.MODULE: "_modules",
    Kind.PARAMETER: "_parameters",
    Kind.BUFFER: "_buffers",
}


def is_sharding_hook(hook: Callable[..., Any]) -> bool:
    """Is it a hook by which FSDP2 gathers or frees parameters?"""
    kind = type(getattr(hook, "__self__", None))
    return kind.__name__ == "FSDPState" and kind.__module__.startswith("torch.distributed.")


def below(root: nn.Module) -> list[Watched]:
    """A module and all those in it."""
    return [Watched(module, path) for path, module in root.named_modules()]


def read_by(graphs: Iterable[fx.Graph], root: nn.Module) -> list[Watched]:
    """All modules that graphs call, with those in them; of others what is read or on the way.

    Raises:
        InputError: A module that a graph reads is not there.
    """
    called: dict[nn.Module, str] = {}
    parts: dict[nn.Module, Watched] = {}

    def add_part(module: nn.Module, path: str, name: str) -> None:
        before = parts.get(module, Watched(module, path, frozenset()))
        parts[module] = before._replace(names=(before.names or frozenset()) | {name})

    def walk(path: str) -> nn.Module:
        module, around = root, ""
        for name in filter(None, path.split(".")):
            child = module._modules.get(name)
            if child is None:
                raise InputError(
                    f"{path}: the captured graph reads this module, but {type(module).__name__} "
                    f"has no {name!r} any more; put it back, or capture the changed model"
                )
            add_part(module, around, name)
            module, around = child, child_path(around, name)
        return module

    def add(path: str) -> None:
        for inner, module in walk(path).named_modules(prefix=path):
            called.setdefault(module, inner)

    for node in (node for graph in graphs for node in graph.nodes):
        path, (outer, _, name) = str(node.target), str(node.target).rpartition(".")
        if node.op == "call_module":
            add(path)
        elif node.op == "get_attr":
            owner = walk(outer)
            parametrized = owner._modules.get("parametrizations")
            if name in owner._modules:
                add(path)
            elif parametrized is not None and name in parametrized._modules:
                add(child_path(outer, f"parametrizations.{name}"))
            else:
                add_part(owner, outer, name)
    others = [watched for module, watched in parts.items() if module not in called]
    return [*others, *(Watched(module, path) for module, path in called.items())]


class TreeSnapshot:
    """What some modules were like, in some respects, and whether they still are.

    Args:
        watched: The modules.
        kinds: The respects, in the order in which changes are looked for.
    """

    def __init__(self, watched: Iterable[Watched], kinds: Collection[Kind]) -> None:
        self._watched, self._kinds = list(watched), tuple(kinds)
        self._before: dict[Kind, list[dict[str, Any]]] = {}
        self._comparisons: dict[Kind, Callable[[], bool]] = {}
        self.take()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_comparisons": {}}  # they are made again for a copy

    def take(self) -> None:
        """Expect from now on what there is now."""
        for kind in self._kinds:
            self._take(kind)

    def _take(self, kind: Kind) -> None:
        self._before[kind] = before = [dict(_contents(each, kind)) for each in self._watched]
        self._comparisons[kind] = _comparison(self._watched, kind, before)

    def first_change(self) -> Change | None:
        """The first difference, or None."""
        for kind in self._kinds:
            is_same = self._comparisons.get(kind)
            if is_same is None or not is_same():
                for _, change in self._found(kind):
                    return change
                self._take(kind)  # equal values in other objects, or what does not count
        return None

    def _found(self, kind: Kind) -> Iterator[tuple[Watched, Change]]:
        for watched, before in zip(self._watched, self._before[kind], strict=True):
            now = _contents(watched, kind)
            for name in {**before, **now}:
                pair = before.get(name, Absent.ABSENT), now.get(name, Absent.ABSENT)
                if not is_equal(*pair, by_value=kind not in _TABLES):
                    yield watched, Change(watched.path, name, kind, *pair)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """What was expected, for a while: parameters, buffers and settings."""
        found = [(watched, change) for kind in self._kinds for watched, change in self._found(kind)]
        places = [(_owner(watched, c.kind, c.name), c.name, c.before) for watched, c in found]
        now = [(owner, name, owner.get(name, Absent.ABSENT)) for owner, name, _ in places]
        try:
            _put(places)
            yield
        finally:
            _put(now)


def _put(places: Iterable[tuple[dict[str, Any], str, Any]]) -> None:
    for owner, name, value in places:
        if value is Absent.ABSENT:
            owner.pop(name, None)
        else:
            owner[name] = value


def _owner(watched: Watched, kind: Kind, name: str) -> dict[str, Any]:
    """The dict in which a module has a member or an attribute."""
    own = vars(watched.module)
    table: dict[str, Any] = own[_TABLES[kind]] if kind in _TABLES else own
    return table if name in table or kind is not Kind.BUFFER else own


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters, buffers, and tensors among the attributes."""
    own = vars(module)
    found = {**own["_parameters"], **own["_buffers"], **own}
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}


def _contents(watched: Watched, kind: Kind) -> Mapping[str, Any]:
    """What a snapshot holds of a module, by the names of members or attributes."""
    own, names = vars(watched.module), watched.names
    found: Mapping[str, Any]
    if kind is Kind.BUFFER:
        found = {**own["_buffers"], **{n: v for n, v in own.items() if isinstance(v, Tensor)}}
    elif kind in _TABLES:
        found = own[_TABLES[kind]]
    elif kind is Kind.SETTING:
        items = own.items()
        found = {n: frozen(v) for n, v in items if n not in INTERNAL and not isinstance(v, Tensor)}
    elif kind is Kind.MEMORY:
        found = {n: tensor.data_ptr() for n, tensor in _tensors(watched.module).items()}
    elif kind is Kind.REQUIRES_GRAD:
        found = {n: p.requires_grad for n, p in own["_parameters"].items() if p is not None}
    elif kind is Kind.GRADIENT_HOOK:
        found = {n: has_hooks(p) for n, p in own["_parameters"].items() if p is not None}
    elif kind is Kind.CLASS:
        return {"": type(watched.module)}
    elif names is not None:
        return {}
    elif kind is Kind.FORWARD:
        return {"": own.get("forward")}
    elif kind is Kind.MEMBERS:
        return {"": [tuple(own[table]) for table in _TABLES.values()]}
    else:
        return {"": hooks_of(watched.module)}
    return found if names is None else {n: v for n, v in found.items() if n in names}


def hooks_of(module: nn.Module) -> list[int]:
    """The handles of a module's hooks, but for those of FSDP."""
    hooks = chain.from_iterable(vars(module)[kind].items() for kind in HOOKS)
    return [handle for handle, hook in hooks if not is_sharding_hook(hook)]


def has_hooks(parameter: Tensor) -> bool:
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def frozen(value: Any) -> Any:
    """A copy of a container, which may be changed in place."""
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


def _comparison(
    watched: Sequence[Watched], kind: Kind, before: Sequence[Mapping[str, Any]]
) -> Callable[[], bool]:
    """Whether nothing has changed in one respect; False if something may have."""
    pairs = [(each, held) for each, held in zip(watched, before, strict=True) if held]
    modules = [each.module for each, _ in pairs]
    owners = list(map(vars, modules))
    if kind in _TABLES:
        entries = [(_owner(each, kind, n), n, v) for each, held in pairs for n, v in held.items()]
        tables, names = [table for table, _, _ in entries], [name for _, name, _ in entries]
        objects = [value for _, _, value in entries]
        return lambda: all(map(is_, map(dict.get, tables, names), objects))
    if kind is Kind.SETTING:
        sized = [vars(each.module) for each in watched if each.names is None]
        return _same_settings(owners, [held for _, held in pairs], sized)
    if kind in (Kind.HOOK, Kind.MEMBERS):
        kinds = HOOKS if kind is Kind.HOOK else _TABLES.values()
        return _unchanged(len, [own[name] for own in owners for name in kinds])
    if kind is Kind.CLASS:
        return _unchanged(type, modules)
    if kind is Kind.FORWARD:
        return _unchanged(methodcaller("get", "forward"), owners)
    if kind is Kind.GRADIENT_HOOK:  # the same as long as nobody registers a hook
        return _unchanged(attrgetter("next_id"), [RemovableHandle])
    look = attrgetter("requires_grad") if kind is Kind.REQUIRES_GRAD else Tensor.data_ptr
    found = [(_tensors(each.module), held) for each, held in pairs]
    return _unchanged(look, [table[name] for table, held in found for name in held])


def _unchanged(look: Callable[[Any], Any], objects: Sequence[Any]) -> Callable[[], bool]:
    seen = list(map(look, objects))
    return lambda: list(map(look, objects)) == seen


def _same_settings(
    owners: Sequence[dict[str, Any]],
    before: Sequence[Mapping[str, Any]],
    sized: Sequence[Mapping[str, Any]],
) -> Callable[[], bool]:
    getters = [itemgetter(*held) for held in before]
    expected = list(map(call, getters, before))
    are_as_large = _unchanged(len, sized)

    def are_same() -> bool:
        try:
            return are_as_large() and list(map(call, getters, owners)) == expected
        except Exception:  # one is gone, or cannot be compared
            return False

    return are_same
