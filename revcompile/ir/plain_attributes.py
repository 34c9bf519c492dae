"""The plain attributes of modules, and whether they have changed.

    blocks.0.alpha             an attribute of a module, or that there is none
    blocks.0.config.bias       all fields of an object that such an attribute holds
    blocks.0.scales[1].bias    likewise of objects in a list, a tuple or a dict
    blocks.0.table             the elements of a small tensor that is no buffer, and of an array

Of objects whose reads were noted while tracing (`Guards.fields`), only fields that were read count.
They are compared at each call. The comparison needs no loop in Python as long as all of them are
the same objects as before.
"""

from __future__ import annotations

import enum
import hashlib
import types
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from operator import attrgetter, call
from typing import Any, Final

import torch
from torch import Tensor, nn

from revcompile.ir.module_tree import child_path
from revcompile.ir.snapshot import (
    INTERNAL,
    MOST_ELEMENTS,
    Change,
    Kind,
    Presence,
    Reading,
    TreeSnapshot,
    frozen,
    is_equal,
)

Names = Mapping[str, frozenset[str]]
"""Names of attributes, by the path of the module."""

_MEMBERS: Final = ("_parameters", "_buffers", "_modules")
_WITHOUT_FIELDS: Final = frozenset(("torch", "builtins", "numpy", "revcompile"))
"""Packages whose objects have no fields that steer a model."""
PLAIN: Final = (bool, int, float, complex, str, bytes, type(None), enum.Enum, range, slice)
_OF_TORCH: Final = INTERNAL | {"training", "_compiled_call_impl"}
_version: Final = attrgetter("_version")
_requires_grad: Final = attrgetter("requires_grad")


CONSTANT_PREFIX: Final = "revcompile_constant_"
"""Begins the names of tensors that `forward` makes and graphs read; see `digest`."""
_FOREIGN: Final = (CONSTANT_PREFIX, "__composable_api_state_key_")


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """The plain attributes of a module, except its mode, constants, and what FSDP2 adds."""
    return {
        name: value
        for name, value in vars(module).items()
        if name not in _OF_TORCH and not name.startswith(_FOREIGN)
    }


def digest(tensor: Tensor) -> str:
    """A digest of a tensor's type, shape and elements: constants that differ have other names.

    >>> digest(torch.tensor(0.0)) == digest(torch.zeros(())) != digest(torch.tensor(-0.0))
    True
    """
    elements = tensor.detach().cpu().to_dense().resolve_conj().resolve_neg().reshape(-1)
    found = hashlib.blake2b(elements.contiguous().view(torch.uint8).numpy().data, digest_size=8)
    found.update(repr((type(tensor), tensor.dtype, tensor.shape, tensor.layout)).encode())
    return found.hexdigest()


class PlainAttributes(TreeSnapshot):
    """A snapshot of attributes of some modules, which finds their first change.

    Args:
        root: The model.
        plain: Names of the attributes.
        asked: Names of members and of absent attributes; only their presence is compared.
        kind: The class of the model.
        fields: Names that were read, by the label of a module or an object; of others, all count.
    """

    def __init__(
        self, root: nn.Module, plain: Names, asked: Names, kind: type | None, fields: Names
    ) -> None:
        modules = dict(root.named_modules(remove_duplicate=False))
        self._fields = fields
        self._modules = {path: modules[path] for path in (*plain, *asked) if path in modules}
        self._plain, self._asked, self._class = plain, asked, kind
        super().__init__((), (Kind.SETTING,))

    def _owners(self) -> Iterable[tuple[str, nn.Module]]:
        return self._modules.items()

    def _read(self, kind: Kind) -> Reading:
        reading = _Reading(self._fields)
        of_class: dict[type, tuple[str, set[str] | None]] = {}
        for path, module in self._modules.items():
            plain = self._plain.get(path, frozenset())
            for name in sorted(plain):
                reading.add_attribute(module, name, child_path(path, name))
            for name in sorted(self._asked.get(path, frozenset()) - plain):
                reading.add_presence(module, name, child_path(path, name))
            for base in ((not path and self._class) or type(module)).__mro__:
                first, names = of_class.setdefault(base, (path, set()))
                read = self._fields.get(path)
                both = None if names is None or read is None else names | read
                of_class[base] = first, both
        for base, (path, names) in of_class.items():
            reading.add_class(base, path, names)
        return reading.finish()


class _Reading(Reading):
    """A reading of attributes and of everything they contain."""

    def __init__(self, fields: Names) -> None:
        super().__init__()
        self._seen: set[int] = set()
        self._fields_read = fields

    def changes(self, now: Reading, kind: Kind) -> Iterator[Change]:
        """What differs, except whether attributes share a container, whose items are noted once.

        `torch.export` leaves copies of a model's containers in it.
        """
        for change in super().changes(now, kind):
            around = "", change.name.rpartition("[")[0]
            is_once = change.before is Presence.ABSENT or change.now is Presence.ABSENT
            is_item = is_once and change.name.endswith("]") and around in self.found
            if is_item and is_equal(self.found[around], now.found.get(around), by_value=True):
                continue
            yield change

    def add_attribute(self, module: nn.Module, name: str, label: str) -> None:
        """Note an attribute, or its absence."""
        own = vars(module)
        value = own.get(name, Presence.ABSENT)
        self.entries.append((own, name, value))
        if value is not Presence.ABSENT:
            self._add(label, value)

    def add_presence(self, module: nn.Module, name: str, label: str) -> None:
        """Note that a member has this name; if none has, note any attribute, or its absence."""
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

    def add_class(self, kind: type, path: str, names: Collection[str] | None) -> None:
        """Note plain attributes of a module's class, of these names or of all."""
        if id(kind) in self._seen or kind.__module__.partition(".")[0] in _WITHOUT_FIELDS:
            return
        self._seen.add(id(kind))
        items = [(n, v) for n, v in vars(kind).items() if not n.startswith("__")]
        items = [item for item in items if names is None or item[0] in names]
        plain = {n: frozen(v) for n, v in items if isinstance(v, (*PLAIN, dict, list, tuple))}
        if plain:
            read = partial(attrgetter(*plain), kind)
            self.expect(call, read, frozen(read()))
            for name, held in plain.items():
                label = child_path(path, name)
                is_hidden = ("", label) in self.found  # by the instance or by a subclass
                self.found["", f"{kind.__name__}.{name}" if is_hidden else label] = held

    def _add(self, label: str, value: Any, depth: int = 0) -> None:
        """Note the value at a label, and the values inside it."""
        self.found["", label] = value
        if isinstance(value, PLAIN) or id(value) in self._seen or depth > 2:
            return
        self._seen.add(id(value))
        if isinstance(value, Tensor):
            # Graphs read attributes by name, and of containers' tensors they have a copy.
            self.found["", label] = _Elements(value, is_copied=depth > 0)
            self.look(_requires_grad, [value] if depth else [])
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
        if len(value) > MOST_ELEMENTS:
            return
        is_list = isinstance(value, (list, deque))
        self.found["", label] = frozen(list(value) if is_list else value)
        self.expect_items(value)
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in () if isinstance(value, set) else items:
            if not isinstance(item, PLAIN):
                self._add(f"{label}[{key!r}]", item, depth + 1)

    def _add_fields(self, label: str, value: Any, depth: int) -> None:
        """Note the fields of a user's object, of a class used as one, or of a module in a list."""
        if not has_fields(value):
            return
        kind = value if isinstance(value, type) else type(value)
        is_module, read = isinstance(value, nn.Module), self._fields_read.get(label)
        fields: dict[str, Any] = {}
        if isinstance(value, type):
            if not issubclass(value, (nn.Module, enum.Enum)):
                fields = _without_dunders(value)
                self.look(_without_dunders, [value])
        elif isinstance(own := getattr(value, "__dict__", None), dict):
            if read is None:
                self.look(len, [own])  # detects new fields
            names = own if read is None else sorted(read)
            held = {n: own.get(n, Presence.ABSENT) for n in names}
            held = {n: v for n, v in held.items() if not is_module or n not in INTERNAL}
            self.entries += [(own, name, value) for name, value in held.items()]
            fields = {n: v for n, v in held.items() if v is not Presence.ABSENT}
        for name in () if isinstance(value, type) else _slots(kind):
            if read is None or name in read:
                get = partial(getattr, value, name, Presence.ABSENT)
                fields[name] = get()
                self.look(call, [get])
        for name, held in fields.items():
            self._add(f"{label}.{name}", held, depth + 1)


def has_fields(value: Any) -> bool:
    """Whether it is a user's object, a class, or a module: not a function or an object of torch."""
    kind = value if isinstance(value, type) else type(value)
    is_foreign = kind.__module__.partition(".")[0] in _WITHOUT_FIELDS
    is_own = isinstance(value, nn.Module) or kind is types.SimpleNamespace or not is_foreign
    return is_own and not isinstance(value, types.FunctionType)


def objects_in(label: str, value: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Objects with fields in an attribute's value, with the labels that `_Reading` gives them."""
    if isinstance(value, (*PLAIN, Tensor, type)) or depth > 2 or _is_array(value):
        return
    if isinstance(value, (dict, list, tuple, deque, set)):
        is_read = len(value) <= MOST_ELEMENTS and not isinstance(value, set)
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items if is_read else ():
            yield from objects_in(f"{label}[{key!r}]", item, depth + 1)
    elif isinstance(value, types.MethodType):
        yield from objects_in(f"{label}.__self__", value.__self__, depth)
    elif has_fields(value):
        yield label, value
        own = getattr(value, "__dict__", {})
        is_module = isinstance(value, nn.Module)
        names = [name for name in own if not is_module or name not in INTERNAL]
        for name in (*names, *_slots(type(value))):
            yield from objects_in(f"{label}.{name}", getattr(value, name, None), depth + 1)


class _Elements:
    """The elements of a tensor or an array; of a tensor that graphs copy, also `requires_grad`.

    They are compared if the tensor or its version differs. There is no copy of large ones: another
    one counts as another value, unless it is on another device, where the model may have moved.
    """

    def __init__(self, value: Any, is_copied: bool = False) -> None:
        is_tensor = isinstance(value, Tensor)
        is_counted = is_tensor and not value.is_inference()
        self._value, self._version = value, value._version if is_counted else None
        self._requires_grad = is_copied and value.requires_grad
        self._copy = None
        if (value.numel() if is_tensor else value.size) <= MOST_ELEMENTS:
            self._copy = value.detach().clone() if is_tensor else value.copy()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_version": None}  # a copy's version starts again

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, _Elements)
        is_same = self._value is other._value
        if self._requires_grad != other._requires_grad:
            return False
        if is_same and self._version is not None and self._version == other._version:
            return True
        a, b = self._copy, other._copy
        if a is None or b is None:
            places = {getattr(each._value, "device", None) for each in (self, other)}
            return len(places) > 1 or (is_same and self._version is None)
        if type(a) is not type(b) or (a.shape, a.dtype) != (b.shape, b.dtype):
            return False
        if not isinstance(a, Tensor):
            return bool(a.tobytes() == b.tobytes())
        return a.is_meta or b.is_meta or torch.equal(a, b.to(a.device))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        is_short = self._copy is not None and len(text := repr(self._copy)) < 80
        shape = f"({', '.join(map(str, self._value.shape))})"
        text = text if is_short else f"{shape} elements of {self._value.dtype}"
        return f"{text}, which requires a gradient," if self._requires_grad else text


def _is_array(value: Any) -> bool:
    return hasattr(value, "tobytes") and hasattr(value, "dtype")


def _without_dunders(kind: type) -> dict[str, Any]:
    return {n: v for n, v in vars(kind).items() if not n.startswith("__")}


def _slots(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        names = vars(base).get("__slots__", ())
        yield from (n for n in ([names] if isinstance(names, str) else names) if n[:2] != "__")
