"""Attributes of modules: which ones a forward pass reads and writes, and tensors it leaves there.

self.step += 1             a counter: read, then changed (`AttributeLog.overwritten`)
if self.alpha > 0:         read: becomes a guard (`AttributeLog.guards`)
if hasattr(self, "late"):  so does an attribute that is not there, or is None
if self.config.bias:       a field of an object that a module holds: likewise (`object_reads.py`)
for b in self.blocks:      the names of a module's children, unless the graph calls them
self.aux = p.mean()        a tensor that only the traced forward computes (`UncomputedTensor`)
"""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from revcompile.compiler.capture.object_reads import (
    CONTAINERS,
    OF_NN,
    ObjectReads,
    is_plain,
    is_scalar,
)
from revcompile.compiler.capture.trace_errors import is_model_code, user_line
from revcompile.ir.conditions import ABSENT, Condition, HasKeys, IsInstance, Item, Present, frozen
from revcompile.ir.guards import AttributeGuard
from revcompile.ir.module_tree import child_path
from revcompile.ir.uncomputed import UncomputedTensor

_LISTS: Final = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
"""Containers; whoever runs a graph through one checks its members."""


@dataclass(frozen=True)
class _Event:
    module: nn.Module
    name: str
    is_read: bool
    value: Any
    content: Any
    """The value's contents at that time: a list may have grown since."""
    source: str
    fields: tuple[str | Item, ...] = ()
    """Not the attribute itself was read, but this field (of a field) of the object in it."""
    is_own: bool = True
    """Is it in the module's `__dict__`, where assignments can be followed?"""

    @property
    def key(self) -> Any:
        """What was read; a condition on a value is noted beside the value."""
        kind = self.value if isinstance(self.value, IsInstance) else type(self.value)
        condition = kind if isinstance(self.value, Condition) else None
        return self.module, self.name, self.fields, condition


class AttributeLog:
    """Reads and writes in the order they happen; none are noted while `paused()` is true."""

    def __init__(self, paused: Callable[[], bool]) -> None:
        self.events: list[_Event] = []
        self.routes: dict[Any, tuple[nn.Module, str, tuple[str | Item, ...]]] = {}
        """Of tensors and modules in plain attributes: the module, its attribute, the steps."""
        self._paused = paused
        self._busy = False

    @property
    def is_paused(self) -> bool:
        return self._busy or self._paused()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Note nothing, while code of the compiler's own walks the modules."""
        outer, self._busy = self._busy, True
        try:
            yield
        finally:
            self._busy = outer

    def note(
        self,
        module: nn.Module,
        name: str,
        is_read: bool,
        value: Any,
        fields: tuple[str | Item, ...] = (),
        is_own: bool = True,
    ) -> None:
        """Note a read, or a write, of an attribute."""
        if self.is_paused:
            return
        with self.pause():  # finding the user's line reads attributes too
            source = user_line()
            event = _Event(module, name, is_read, value, _content(value), source, fields, is_own)
            self.events.append(event)

    def guards(
        self, paths: Mapping[nn.Module, str], used: Collection[str] = ()
    ) -> tuple[AttributeGuard, ...]:
        """Guards on attributes that were read before the forward pass itself wrote them.

        `used` are paths of modules that the graph calls or runs through: those may be replaced, and
        what they have become is checked by whoever runs the graph.
        """
        first: dict[Any, _Event] = {}
        written: set[tuple[nn.Module, str]] = set()
        for event in self.events:
            if not event.is_read:
                written.add((event.module, event.name))
            elif (event.module, event.name) not in written:
                first.setdefault(event.key, event)
        guards = (self._guard(event, paths, used) for event in first.values())
        return tuple(guard for guard in guards if guard is not None)

    def _guard(
        self, event: _Event, paths: Mapping[nn.Module, str], used: Collection[str]
    ) -> AttributeGuard | None:
        module, name, fields, value = event.module, event.name, event.fields, event.value
        if module not in paths and module in self.routes:  # held in a list, or in a configuration
            module, outer, steps = self.routes[module]
            name, fields = outer, (*steps, *filter(None, (name,)), *fields)
        if module not in paths:
            return None
        path = paths[module]
        if issubclass(type(value), nn.Module):
            if paths.get(value, path) in used:
                return None
            value = IsInstance((type(value),))
        elif (isinstance(value, HasKeys) and type(module) in _LISTS and path in used) or (
            not isinstance(value, Condition) and not is_plain(value)
        ):
            return None
        return AttributeGuard(path, name, frozen(value), event.source, fields)

    def overwritten(self, since: int = 0) -> list[tuple[nn.Module, str]]:
        """Attributes that were read and then changed, by assignment or in place."""
        first: dict[tuple[nn.Module, str], _Event] = {}
        changed: dict[tuple[nn.Module, str], None] = {}
        for event in self.events[since:]:
            if event.fields or not event.is_own:
                continue
            key = event.module, event.name
            start = first.setdefault(key, event)
            if start.is_read and _content(event.value) != start.content:
                changed[key] = None
        return list(changed)

    def read_first(self, module: nn.Module, name: str, since: int) -> bool:
        """Was the attribute read before it was written, since an event?"""
        own = (e for e in self.events[since:] if e.is_own and not e.fields)
        return next((e.is_read for e in own if e.module is module and e.name == name), False)


@contextmanager
def log_attributes(log: AttributeLog) -> Iterator[None]:
    """Log reads and writes of all modules' attributes, and reads of the objects in them."""
    get, put = object.__getattribute__, nn.Module.__setattr__
    objects = ObjectReads(log)
    reads = _Reads(log, objects)

    def getting(self: nn.Module, name: str) -> Any:
        try:
            value = get(self, name)
        except AttributeError:  # `nn.Module.__getattr__` is called next
            reads.note_member(self, name)
            raise
        if name not in OF_NN:
            if name in get(self, "__dict__"):
                log.note(self, name, True, value)
                objects.follow(value, self, name)
            elif not name.startswith("__"):
                reads.note_class_attribute(self, name, value)
            elif name == "__dict__":
                reads.note_all(self, value)
        elif name == "_modules":
            reads.note_children(self, value)
        return value

    def setting(self: nn.Module, name: str, value: Any) -> None:
        is_same = get(self, "__dict__").get(name, log) is value  # nothing is written
        put(self, name, value)
        if name not in OF_NN and not is_same:
            log.note(self, name, False, value)

    nn.Module.__getattribute__ = getting  # type: ignore[method-assign, assignment]
    nn.Module.__setattr__ = setting  # type: ignore[method-assign]
    try:
        yield
    finally:
        del nn.Module.__getattribute__
        nn.Module.__setattr__ = put  # type: ignore[method-assign]
        objects.stop()


class _Reads:
    """Logs reads that the model's own code makes of what is not in a module's `__dict__`."""

    def __init__(self, log: AttributeLog, objects: ObjectReads) -> None:
        self._log, self._objects = log, objects

    def note_member(self, module: nn.Module, name: str) -> None:
        """Note a read of a parameter, buffer or child, which may be None, or absent."""
        if self._log.is_paused or name.startswith("__") or not is_model_code():
            return
        own = object.__getattribute__(module, "__dict__")
        members = (own.get(kind, {}) for kind in ("_parameters", "_buffers", "_modules"))
        value = next((found[name] for found in members if name in found), ABSENT)
        if value is ABSENT and _class_attribute(module, name) is not ABSENT:
            return  # a property that fails
        if issubclass(type(value), torch.Tensor):
            value = Present()
        self._log.note(module, name, True, value, is_own=False)

    def note_class_attribute(self, module: nn.Module, name: str, value: Any) -> None:
        """Note a read of a plain class attribute; methods and properties are code."""
        if self._log.is_paused or _class_attribute(module, name) is not value:
            return
        if not issubclass(type(value), (types.FunctionType, type)):
            self._objects.visit(value, module, name)

    def note_children(self, module: nn.Module, children: Mapping[str, nn.Module | None]) -> None:
        """Note that the names of children were read: `len`, `in`, `for ... in`, `children()`."""
        if self._log.is_paused or not is_model_code():
            return
        self._log.note(module, "", True, HasKeys.of(module), is_own=False)
        for name, child in children.items():
            self._log.note(module, name, True, child, is_own=False)

    def note_all(self, module: nn.Module, own: Mapping[str, Any]) -> None:
        """Note that all attributes were read: `vars(self)`."""
        if not self._log.is_paused and is_model_code():
            for name in [name for name in own if name not in OF_NN]:
                self._log.note(module, name, True, own[name])
                self._objects.follow(own[name], module, name)


def _class_attribute(module: nn.Module, name: str) -> Any:
    """What the user's class has under a name; ABSENT for what every module has."""
    kinds = (kind for kind in type(module).__mro__ if name in vars(kind))
    kind = next(kinds, nn.Module)
    return (
        ABSENT if kind.__module__.partition(".")[0] in ("torch", "builtins") else vars(kind)[name]
    )


def state_of(module: nn.Module) -> dict[str, Any]:
    """A module's own attributes: plain values and containers by content, others by identity."""
    return {n: _content(v) for n, v in vars(module).items() if n not in OF_NN}


@dataclass(frozen=True)
class _Same:
    """An object that equals only itself."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def _content(value: Any) -> Any:
    if is_scalar(value):
        return type(value), value
    if type(value) is dict:
        value = [(k if is_scalar(k) else None, _item(v)) for k, v in value.items()]
        return dict, value
    if type(value) in CONTAINERS:
        return type(value), [*map(_item, value)]
    return _Same(value)


def _item(value: Any) -> Any:
    return _content(value) if is_scalar(value) else None


def mark_uncomputed(root: nn.Module, names: Iterable[tuple[str, str, Any]]) -> None:
    """Replace attributes (module's path, name, and None or the key of a dict's entry)."""
    for path, name, key in names:
        owner = vars(root.get_submodule(path))
        full = child_path(path, name)
        if key is None:
            owner[name] = UncomputedTensor(full)
        elif type(owner.get(name)) is dict:
            owner[name][key] = UncomputedTensor(f"{full}[{key!r}]")
