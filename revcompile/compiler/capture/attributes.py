"""Attributes of modules: which ones a forward pass reads and writes, and tensors it leaves there.

self.step += 1             a counter: read, then changed (`AttributeLog.overwritten`)
if self.alpha > 0:         read: becomes a guard (`AttributeLog.guards`)
if self.config.bias:       a field of an object that a module holds: likewise
self.aux = p.mean()        a tensor that only the traced forward computes (`UncomputedTensor`)
"""

from __future__ import annotations

import enum
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import torch
from torch import nn

from revcompile.compiler.capture.trace_errors import user_line
from revcompile.errors import InputError
from revcompile.ir.guards import AttributeGuard, frozen
from revcompile.ir.module_tree import child_path

__all__ = ["AttributeLog", "UncomputedTensor", "log_attributes", "mark_uncomputed", "state_of"]

_OF_NN: Final = frozenset(vars(nn.Module())) - {"training"}
"""Attributes every module has, for torch's own use."""

_SCALARS: Final = (
    *(bool, int, float, complex, str, bytes, types.NoneType, enum.Enum),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    *(type, types.FunctionType, types.BuiltinFunctionType),
)
_CONTAINERS: Final = (tuple, list, set, frozenset, dict)
_MAX_GUARDED: Final = 256
"""Larger containers are taken for data, which decides no control flow."""


@dataclass(frozen=True)
class _Event:
    module: nn.Module
    name: str
    is_read: bool
    value: Any
    content: Any
    """The value's contents at that time: a list may have grown since."""
    source: str
    fields: tuple[str, ...] = ()
    """Not the attribute itself was read, but this field (of a field) of the object in it."""


class AttributeLog:
    """Reads and writes in the order they happen; none are noted while `paused()` is true."""

    def __init__(self, paused: Callable[[], bool]) -> None:
        self.events: list[_Event] = []
        self._paused = paused
        self._busy = False

    def note(
        self,
        module: nn.Module,
        name: str,
        is_read: bool,
        value: Any,
        fields: tuple[str, ...] = (),
    ) -> None:
        """Note a read, or a write, of an attribute."""
        if self._busy or self._paused():
            return
        self._busy = True  # finding the user's line reads attributes too
        try:
            event = _Event(module, name, is_read, value, _content(value), user_line(), fields)
            self.events.append(event)
        finally:
            self._busy = False

    def guards(self, paths: Mapping[nn.Module, str]) -> tuple[AttributeGuard, ...]:
        """Guards on plain attributes that were read before the forward pass itself wrote them."""
        first: dict[Any, _Event] = {}
        for event in self.events:
            first.setdefault((event.module, event.name, event.fields), event)
        return tuple(
            AttributeGuard(paths[e.module], e.name, frozen(e.value), e.source, e.fields)
            for e in first.values()
            if e.is_read and e.module in paths and _is_plain(e.value)
        )

    def overwritten(self, since: int = 0) -> list[tuple[nn.Module, str]]:
        """Attributes that were read and then changed, by assignment or in place."""
        first: dict[tuple[nn.Module, str], _Event] = {}
        changed: dict[tuple[nn.Module, str], None] = {}
        for event in self.events[since:]:
            if event.fields:
                continue
            key = event.module, event.name
            start = first.setdefault(key, event)
            if start.is_read and _content(event.value) != start.content:
                changed[key] = None
        return list(changed)

    def read_first(self, module: nn.Module, name: str, since: int) -> bool:
        """Was the attribute read before it was written, since an event?"""
        own = (e for e in self.events[since:] if not e.fields)
        return next((e.is_read for e in own if e.module is module and e.name == name), False)


@contextmanager
def log_attributes(log: AttributeLog) -> Iterator[None]:
    """Log reads and writes of all modules' own attributes, and reads of the objects in them."""
    get, put = object.__getattribute__, nn.Module.__setattr__
    fields = _FieldReads(log)

    def getting(self: nn.Module, name: str) -> Any:
        value = get(self, name)
        if name not in _OF_NN and name in get(self, "__dict__"):
            log.note(self, name, True, value)
            fields.follow(value, self, name)
        return value

    def setting(self: nn.Module, name: str, value: Any) -> None:
        put(self, name, value)
        if name not in _OF_NN:
            log.note(self, name, False, value)

    nn.Module.__getattribute__ = getting  # type: ignore[method-assign, assignment]
    nn.Module.__setattr__ = setting  # type: ignore[method-assign]
    try:
        yield
    finally:
        del nn.Module.__getattribute__
        nn.Module.__setattr__ = put  # type: ignore[method-assign]
        fields.stop()


class _FieldReads:
    """Logs reads of the fields of objects that modules hold, such as a configuration.

    The classes of such objects get a `__getattribute__` that logs, until `stop`. Of a class that
    is written in C (`types.SimpleNamespace`) all fields count as read.
    """

    def __init__(self, log: AttributeLog) -> None:
        self._log = log
        self._held: dict[int, tuple[Any, nn.Module, str, tuple[str, ...]]] = {}
        """By id: the object (held, so that the id stays its own) and how it was reached first."""
        self._classes: dict[type, tuple[Any, bool]] = {}
        """What each class's `__getattribute__` was, and whether the class had its own."""

    def follow(self, value: Any, module: nn.Module, name: str, *fields: str) -> None:
        if id(value) not in self._held and _has_fields(value):
            self._held[id(value)] = value, module, name, fields
            if not self._patch(type(value)):
                for field, inner in vars(value).items():
                    self._note(value, field, inner)

    def _note(self, this: Any, field: str, value: Any) -> None:
        _, module, name, outer = self._held[id(this)]
        if _is_plain(value):
            self._log.note(module, name, True, value, (*outer, field))
        else:
            self.follow(value, module, name, *outer, field)

    def _patch(self, kind: type) -> bool:
        """Log reads of a class's objects; False if the class cannot be changed."""
        if kind in self._classes:
            return True
        before: Any = kind.__getattribute__

        def reading(this: Any, field: str) -> Any:
            value = before(this, field)
            if id(this) in self._held and not field.startswith("__"):
                self._note(this, field, value)
            return value

        is_own = "__getattribute__" in vars(kind)
        try:
            kind.__getattribute__ = reading  # type: ignore[method-assign, assignment]
        except TypeError:  # a class written in C
            return False
        self._classes[kind] = before, is_own
        return True

    def stop(self) -> None:
        for kind, (before, is_own) in self._classes.items():
            if is_own:
                kind.__getattribute__ = before  # type: ignore[method-assign]
            else:
                del kind.__getattribute__


def _has_fields(value: Any) -> bool:
    """Is it an object with plain attributes, like a configuration?"""
    kind = type(value)
    if issubclass(kind, (nn.Module, torch.Tensor, types.ModuleType)) or _is_scalar(value):
        return False
    if kind.__module__.partition(".")[0] in ("torch", "builtins") or callable(value):
        return False
    return type(getattr(value, "__dict__", None)) is dict


def state_of(module: nn.Module) -> dict[str, Any]:
    """A module's own attributes: plain values and containers by content, others by identity."""
    return {n: _content(v) for n, v in vars(module).items() if n not in _OF_NN}


@dataclass(frozen=True)
class _Same:
    """An object that equals only itself."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def _is_scalar(value: Any) -> bool:
    # by its type: while a model is traced, `isinstance` takes proxies for numbers
    return issubclass(type(value), _SCALARS)


def _content(value: Any) -> Any:
    if _is_scalar(value):
        return type(value), value
    if type(value) is dict:
        value = [(k if _is_scalar(k) else None, _item(v)) for k, v in value.items()]
        return dict, value
    if type(value) in _CONTAINERS:
        return type(value), [*map(_item, value)]
    return _Same(value)


def _item(value: Any) -> Any:
    return _content(value) if _is_scalar(value) else None


def _is_plain(value: Any, depth: int = 0) -> bool:
    if _is_scalar(value):
        return True
    if type(value) not in (*_CONTAINERS, torch.Size) or depth > 4 or len(value) > _MAX_GUARDED:
        return False
    items: Iterable[Any] = (*value, *value.values()) if type(value) is dict else value
    return all(_is_plain(item, depth + 1) for item in items)


class UncomputedTensor:
    """In the place of a tensor that a traced forward stored in an attribute; using it raises.

    The captured graph does not set the attribute: what was there before would be used silently.

    >>> UncomputedTensor("blocks.0.aux") + 1
    Traceback (most recent call last):
    revcompile.errors.InputError: blocks.0.aux is set by a forward pass that is part of ...
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def _refuse(self, *_: Any) -> NoReturn:
        raise InputError(
            f"{self._name} is set by a forward pass that is part of the captured graph now, which "
            "computes only what the model returns: the attribute would be out of date, and a loss "
            "that uses it would have no gradient. Let the model return the tensor"
        )

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        given = [*args, *(kwargs or {}).values()]
        flat = [a for arg in given for a in (arg if isinstance(arg, list | tuple) else [arg])]
        next(a for a in flat if isinstance(a, UncomputedTensor))._refuse()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy and pickle look for optional methods
            raise AttributeError(name)
        self._refuse()

    def __repr__(self) -> str:
        return f"<{self.__dict__.get('_name', '?')}, which the captured graph does not set>"

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _refuse
    __rtruediv__ = __pow__ = __neg__ = __matmul__ = __rmatmul__ = __abs__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __float__ = __int__ = __bool__ = __len__ = __iter__ = __getitem__ = _refuse


def mark_uncomputed(root: nn.Module, names: Iterable[tuple[str, str, Any]]) -> None:
    """Replace attributes (module's path, name, and None or the key of a dict's entry)."""
    for path, name, key in names:
        owner = vars(root.get_submodule(path))
        full = child_path(path, name)
        if key is None:
            owner[name] = UncomputedTensor(full)
        elif type(owner.get(name)) is dict:
            owner[name][key] = UncomputedTensor(f"{full}[{key!r}]")
