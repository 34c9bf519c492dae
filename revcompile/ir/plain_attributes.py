"""The plain attributes of modules, and whether they are still what they were.

    blocks.0.alpha             an attribute of a module, or that there is none
    blocks.0.config.bias       all fields of an object that such an attribute holds
    blocks.0.scales[1].bias    likewise of objects in a list, a tuple or a dict
    blocks.0.table             the elements of a small tensor that is no buffer, and of an array

They are compared at each call. As long as all are the very objects that were found before, that
takes no loop in Python over them.
"""

from __future__ import annotations

import enum
import types
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from operator import attrgetter, call
from typing import Any, Final

import torch
from torch import Tensor, nn

from revcompile.ir.module_tree import child_path
from revcompile.ir.snapshot import INTERNAL, Kind, Presence, Reading, TreeSnapshot, frozen

Names = Mapping[str, frozenset[str]]
"""Of attributes, by the path of the module."""

_MEMBERS: Final = ("_parameters", "_buffers", "_modules")
_WITHOUT_FIELDS: Final = frozenset(("torch", "builtins", "numpy", "revcompile"))
"""Packages whose objects have no fields that steer a model."""
_MOST_ELEMENTS: Final = 1024
"""Of larger arrays and containers only the identity counts, of larger tensors the version too."""
PLAIN: Final = (bool, int, float, complex, str, bytes, type(None), enum.Enum, range, slice)
_OF_TORCH: Final = INTERNAL | {"training", "_compiled_call_impl"}
_version: Final = attrgetter("_version")


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """The plain attributes of a module, but for its mode."""
    return {name: value for name, value in vars(module).items() if name not in _OF_TORCH}


class PlainAttributes(TreeSnapshot):
    """Attributes of some modules as they are now, and their first change.

    Args:
        root: The model.
        plain: Names of the attributes.
        asked: Names of members, and of attributes that are absent: only whether they are there.
        kind: The class of the model.
    """

    def __init__(self, root: nn.Module, plain: Names, asked: Names, kind: type | None) -> None:
        modules = dict(root.named_modules(remove_duplicate=False))
        self._modules = {path: modules[path] for path in (*plain, *asked) if path in modules}
        self._plain, self._asked, self._class = plain, asked, kind
        super().__init__((), (Kind.SETTING,))

    def _read(self, kind: Kind) -> Reading:
        reading = _Reading()
        for path, module in self._modules.items():
            plain = self._plain.get(path, frozenset())
            for name in sorted(plain):
                reading.add_attribute(module, name, child_path(path, name))
            for name in sorted(self._asked.get(path, frozenset()) - plain):
                reading.add_presence(module, name, child_path(path, name))
            for base in ((not path and self._class) or type(module)).__mro__:
                reading.add_class(base, path)
        return reading.finish()


class _Reading(Reading):
    """A reading of attributes, with all that they hold."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[int] = set()

    def add_attribute(self, module: nn.Module, name: str, label: str) -> None:
        """Note an attribute; a tensor may have become a buffer since it was captured."""
        own, buffers = vars(module), vars(module)["_buffers"]
        table = buffers if name in buffers else own
        value = table.get(name, Presence.ABSENT)
        if table is buffers and _size(value) > _MOST_ELEMENTS:
            return  # it may be moved to another device
        self.entries.append((table, name, value))
        if value is not Presence.ABSENT:
            self._add(label, value)

    def add_presence(self, module: nn.Module, name: str, label: str) -> None:
        """Note whether there is a member of a name, and which if it is an attribute by now."""
        own = vars(module)
        parametrized = own["_modules"].get("parametrizations")
        tables = [own[kind] for kind in _MEMBERS]
        tables += [parametrized._modules] if parametrized is not None else []
        for table in tables:
            if table.get(name) is not None:
                self.members.append((table, name))
                self.found["", label] = Presence.SET
                return
        self.entries += [(t, name, t.get(name, Presence.ABSENT)) for t in (own, *tables)]
        if any(name in table for table in (own, *tables)):
            self.found["", label] = own.get(name)

    def add_class(self, kind: type, path: str) -> None:
        """Note plain attributes of a module's class."""
        if id(kind) in self._seen or kind.__module__.partition(".")[0] in _WITHOUT_FIELDS:
            return
        self._seen.add(id(kind))
        items = [(n, v) for n, v in vars(kind).items() if not n.startswith("__")]
        plain = {n: frozen(v) for n, v in items if isinstance(v, (*PLAIN, dict, list, tuple))}
        if plain:
            read = partial(attrgetter(*plain), kind)
            self.expect(call, read, frozen(read()))
            self.found |= {("", child_path(path, n)): value for n, value in plain.items()}

    def _add(self, label: str, value: Any, depth: int = 0) -> None:
        """Note a value that is held under a name, and what it holds itself."""
        self.found["", label] = value
        if isinstance(value, PLAIN) or id(value) in self._seen or depth > 2:
            return
        self._seen.add(id(value))
        if isinstance(value, Tensor):
            self.found["", label] = _Elements(value)
            self.look(_version, [] if value.is_inference() else [value])
        elif _is_array(value):
            self.found["", label] = _Elements(value)
            self.look(_Elements, [value])
        elif isinstance(value, (dict, set, list, tuple, deque)):
            self._add_container(label, value, depth)
        elif isinstance(value, types.MethodType):
            self._add(f"{label}.__self__", value.__self__, depth)
        else:
            self._add_fields(label, value, depth)

    def _add_container(self, label: str, value: Collection[Any], depth: int) -> None:
        if len(value) > _MOST_ELEMENTS:
            return
        is_list = isinstance(value, (list, deque))
        self.found["", label] = frozen(list(value) if is_list else value)
        kinds: tuple[type[Any], ...] = (dict, set, list, deque)  # of a subclass a plain copy
        for kind in (kind for kind in kinds if isinstance(value, kind)):
            self.expect(None, value, kind(value))
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in () if isinstance(value, set) else items:
            if not isinstance(item, PLAIN):
                self._add(f"{label}[{key!r}]", item, depth + 1)

    def _add_fields(self, label: str, value: Any, depth: int) -> None:
        """Of an object of the user's, a class that serves as one, or a module in a list."""
        kind = value if isinstance(value, type) else type(value)
        is_module = isinstance(value, nn.Module)
        is_foreign = kind.__module__.partition(".")[0] in _WITHOUT_FIELDS
        if isinstance(value, types.FunctionType) or (
            is_foreign and not is_module and kind is not types.SimpleNamespace
        ):
            return
        fields: dict[str, Any] = {}
        if isinstance(value, type):
            if not issubclass(value, (nn.Module, enum.Enum)):
                fields = _without_dunders(value)
                self.look(_without_dunders, [value])
        elif isinstance(own := getattr(value, "__dict__", None), dict):
            self.look(len, [own])  # another field: another size
            fields = {n: v for n, v in own.items() if not is_module or n not in INTERNAL}
            self.entries += [(own, name, held) for name, held in fields.items()]
        for name in () if isinstance(value, type) else _slots(kind):
            read = partial(getattr, value, name, Presence.ABSENT)
            fields[name] = read()
            self.look(call, [read])
        for name, held in fields.items():
            self._add(f"{label}.{name}", held, depth + 1)


class _Elements:
    """The elements of a tensor or an array.

    They are compared where the tensor, or its version, is another; of large ones, only those.
    """

    def __init__(self, value: Any) -> None:
        is_tensor = isinstance(value, Tensor)
        is_counted = is_tensor and not value.is_inference()
        self._value, self._version = value, value._version if is_counted else None
        self._copy = None
        if _size(value) <= _MOST_ELEMENTS:
            self._copy = value.detach().clone() if is_tensor else value.copy()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_version": None}  # that of a copy starts again

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, _Elements)
        is_same = self._value is other._value
        if is_same and self._version is not None and self._version == other._version:
            return True
        a, b = self._copy, other._copy
        if a is None or b is None:
            return is_same and self._version is None
        if type(a) is not type(b) or (a.shape, a.dtype) != (b.shape, b.dtype):
            return False
        if not isinstance(a, Tensor):
            return bool(a.tobytes() == b.tobytes())
        return a.is_meta or b.is_meta or torch.equal(a, b.to(a.device))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        is_short = self._copy is not None and len(text := repr(self._copy)) < 80
        shape = f"({', '.join(map(str, self._value.shape))})"
        return text if is_short else f"{shape} elements of {self._value.dtype}"


def _is_array(value: Any) -> bool:
    return hasattr(value, "tobytes") and hasattr(value, "dtype")


def _size(value: Any) -> int:
    """The number of elements of a tensor or an array."""
    if isinstance(value, Tensor):
        return value.numel()
    return int(value.size) if _is_array(value) else 0


def _without_dunders(kind: type) -> dict[str, Any]:
    return {n: v for n, v in vars(kind).items() if not n.startswith("__")}


def _slots(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        names = vars(base).get("__slots__", ())
        yield from (n for n in ([names] if isinstance(names, str) else names) if n[:2] != "__")
