"""Which plain attributes of modules a forward pass reads and writes."""

from __future__ import annotations

import enum
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from revcompile.compiler.capture.trace_errors import user_line
from revcompile.ir.guards import AttributeGuard, frozen

__all__ = ["AttributeLog", "attributes_logged", "state_of"]

_OF_NN: Final = frozenset(vars(nn.Module())) - {"training"}
"""Attributes every module has, for torch's own use."""

_SCALARS: Final = (
    *(bool, int, float, complex, str, bytes, types.NoneType, enum.Enum),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    *(type, types.FunctionType, types.BuiltinFunctionType),
)
_CONTAINERS: Final = (tuple, list, set, frozenset, dict)
_MOST: Final = 256
"""Larger containers are taken for tables, which nobody steers by."""


@dataclass(frozen=True)
class _Event:
    module: nn.Module
    name: str
    is_read: bool
    value: Any
    content: Any
    """What the value was then: a list may have grown since."""
    source: str


class AttributeLog:
    """Reads and writes in the order they happen; `paused` says when nothing counts."""

    def __init__(self, paused: Callable[[], bool]) -> None:
        self.events: list[_Event] = []
        self._paused = paused
        self._busy = False

    def note(self, module: nn.Module, name: str, is_read: bool, value: Any) -> None:
        """Remember a read, or a write, of an attribute."""
        if self._busy or self._paused():
            return
        self._busy = True  # finding the line must not count as reading
        try:
            event = _Event(module, name, is_read, value, _content(value), user_line())
            self.events.append(event)
        finally:
            self._busy = False

    def guards(self, paths: Mapping[nn.Module, str]) -> tuple[AttributeGuard, ...]:
        """What was read before the forward pass itself wrote it, as far as it is plain."""
        first: dict[tuple[nn.Module, str], _Event] = {}
        for event in self.events:
            first.setdefault((event.module, event.name), event)
        return tuple(
            AttributeGuard(paths[e.module], e.name, frozen(e.value), e.source)
            for e in first.values()
            if e.is_read and e.module in paths and _is_plain(e.value)
        )

    def overwritten(self, since: int = 0) -> list[tuple[nn.Module, str]]:
        """Attributes that were read and then changed, by assignment or in place."""
        first: dict[tuple[nn.Module, str], _Event] = {}
        found: dict[tuple[nn.Module, str], None] = {}
        for event in self.events[since:]:
            key = event.module, event.name
            start = first.setdefault(key, event)
            if start.is_read and _content(event.value) != start.content:
                found[key] = None
        return list(found)

    def read_first(self, module: nn.Module, name: str, since: int) -> bool:
        """Was the attribute read before it was written, since an event?"""
        mine = (e for e in self.events[since:] if e.module is module and e.name == name)
        return next((e.is_read for e in mine), False)


@contextmanager
def attributes_logged(log: AttributeLog) -> Iterator[None]:
    """Have every module report which of its own attributes are read and written."""
    get, put = object.__getattribute__, nn.Module.__setattr__

    def getting(self: nn.Module, name: str) -> Any:
        value = get(self, name)
        if name not in _OF_NN and name in get(self, "__dict__"):
            log.note(self, name, True, value)
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
    if type(value) not in (*_CONTAINERS, torch.Size) or depth > 4 or len(value) > _MOST:
        return False
    items: Iterable[Any] = (*value, *value.values()) if type(value) is dict else value
    return all(_is_plain(item, depth + 1) for item in items)
