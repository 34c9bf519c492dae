"""Reads of the objects and containers that modules hold: configurations, lists of them, arrays.

self.config.bias           the class of the object logs which fields are read
self.configs[0].bias       a container's keys are noted, and its items followed
vars(self.config)          all fields count as read
"""

from __future__ import annotations

import enum
import functools
import types
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Final, Protocol

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from revcompile.compiler.capture.proxy import ShapedProxy
from revcompile.ir.conditions import ABSENT, HasContents, HasKeys, HasType, Item, SameObject

OF_NN: Final = frozenset({*vars(nn.Module()), "_compiled_call_impl"} - {"training"})
"""Attributes every module has, for torch's own use."""

_SCALARS: Final = (
    *(bool, int, float, complex, str, bytes, types.NoneType, enum.Enum, range, slice),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    *(type, types.FunctionType, types.BuiltinFunctionType),
)
CONTAINERS: Final = (tuple, list, set, frozenset, dict)
_MAX_GUARDED: Final = 1024
"""Of larger containers only the identity and the length are guarded."""

_NOT_FOLLOWED: Final = frozenset(("torch", "builtins", "revcompile", "numpy"))
"""Packages whose objects have no fields that steer a model."""


def is_scalar(value: Any) -> bool:
    # by its type: while a model is traced, `isinstance` takes proxies for numbers
    return issubclass(type(value), _SCALARS) or _is_numpy(value, "generic")


def _is_numpy(value: Any, name: str) -> bool:
    return any(k.__module__ == "numpy" and k.__name__ == name for k in type(value).__mro__)


def is_plain(value: Any, depth: int = 0) -> bool:
    """Is it a value, or a small container of values, that is compared by equality?"""
    if is_scalar(value):
        return True
    if type(value) not in (*CONTAINERS, torch.Size) or depth > 4 or len(value) > _MAX_GUARDED:
        return False
    items: Iterable[Any] = (*value, *value.values()) if type(value) is dict else value
    return all(is_plain(item, depth + 1) for item in items)


class _Log(Protocol):
    """What notes the reads: an `AttributeLog`."""

    routes: dict[Any, tuple[nn.Module, str, tuple[str | Item, ...]]]

    @property
    def is_paused(self) -> bool: ...

    def note(
        self,
        module: nn.Module,
        name: str,
        is_read: bool,
        value: Any,
        fields: tuple[str | Item, ...] = (),
        is_own: bool = True,
    ) -> None: ...


class ObjectReads:
    """Logs reads of the fields of objects that modules hold.

    The classes of such objects get a `__getattribute__` that logs, until `stop`. Of a class that
    is written in C (`types.SimpleNamespace`) all fields count as read.
    """

    def __init__(self, log: _Log) -> None:
        self._log = log
        self._held: dict[int, tuple[Any, nn.Module, str, tuple[str | Item, ...]]] = {}
        """By id: the object (held, so that the id stays its own) and how it was reached first."""
        self._classes: dict[type, tuple[Any, bool]] = {}
        """What each class's `__getattribute__` was, and whether the class had its own."""

    def visit(self, value: Any, module: nn.Module, name: str, *steps: str | Item) -> None:
        """Note a read of a plain value; follow any other."""
        if is_plain(value):
            self._log.note(module, name, True, value, steps, is_own=False)
        self.follow(value, module, name, *steps)

    def follow(self, value: Any, module: nn.Module, name: str, *steps: str | Item) -> None:
        """Log what is read of an object from now on."""
        kind = type(value)
        is_class = issubclass(kind, type)
        if id(value) in self._held or (is_plain(value) and not is_class):
            return
        self._held[id(value)] = value, module, name, steps
        if issubclass(kind, (nn.Module, torch.Tensor)):
            self._log.routes.setdefault(value, (module, name, steps))
        elif issubclass(kind, (*CONTAINERS, deque)):
            self._follow_items(value, module, name, *steps)
        elif issubclass(kind, types.MethodType):
            self.visit(value.__func__, module, name, *steps, "__func__")
            self.follow(value.__self__, module, name, *steps, "__self__")
        elif _is_numpy(value, "ndarray"):
            self._log.note(module, name, True, HasContents(value), steps, is_own=False)
        elif kind is functools.partial:
            self._log.note(module, name, True, SameObject(value), steps, is_own=False)
        elif (value if is_class else kind).__module__.partition(".")[0] in _NOT_FOLLOWED:
            if kind is types.SimpleNamespace:
                self._note_all(value, vars(value))
        elif is_class:
            if not issubclass(value, (nn.Module, enum.Enum)):
                self._note_all(value, vars(value))
        elif not self._patch(kind):
            self._note_all(value, getattr(value, "__dict__", {}))

    def _follow_items(self, value: Any, module: nn.Module, name: str, *steps: str | Item) -> None:
        self._log.note(module, name, True, HasKeys.of(value), steps, is_own=False)
        if len(value) > _MAX_GUARDED:
            self._log.note(module, name, True, SameObject(value), steps, is_own=False)
            return
        items: Iterator[tuple[Any, Any]] = iter(())
        if isinstance(value, dict):
            items = iter([(k, v) for k, v in value.items() if is_plain(k)])
        elif not isinstance(value, (set, frozenset)):
            items = enumerate(value)
        for key, item in items:
            self.visit(item, module, name, *steps, Item(key))

    def _note(self, this: Any, field: str, value: Any) -> None:
        _, module, name, outer = self._held[id(this)]
        if value is ABSENT:
            self._log.note(module, name, True, ABSENT, (*outer, field))
        elif type(value) is not types.MethodType or value.__self__ is not this:
            self.visit(value, module, name, *outer, field)

    def _note_all(self, this: Any, fields: Any) -> None:
        """All fields count as read, and which ones there are."""
        _, module, name, outer = self._held[id(this)]
        self._log.note(module, name, True, HasKeys.of(fields), (*outer, "__dict__"))
        for field in [f for f in fields if not f.startswith("__")]:
            self._note(this, field, getattr(this, field, ABSENT))

    def _patch(self, kind: type) -> bool:
        """Log reads of a class's objects; False if the class cannot be changed."""
        if kind in self._classes:
            return True
        before: Any = kind.__getattribute__

        def reading(this: Any, field: str) -> Any:
            is_held = id(this) in self._held
            try:
                value = before(this, field)
            except AttributeError:
                if not is_held or field.startswith("__"):
                    raise
                value = self._computed(this, field)
            if is_held and not field.startswith("__"):
                self._note(this, field, value)
            elif is_held and field == "__dict__":
                self._note_all(this, value)
            return value

        is_own = "__getattribute__" in vars(kind)
        try:
            kind.__getattribute__ = reading  # type: ignore[method-assign, assignment]
        except TypeError:  # a class written in C
            return False
        self._classes[kind] = before, is_own
        return True

    def _computed(self, this: Any, field: str) -> Any:
        """What `__getattr__` makes of a field that is not there."""
        compute = getattr(type(this), "__getattr__", None)
        try:
            if compute is None:
                raise AttributeError(f"{type(this).__name__!r} object has no attribute {field!r}")
            return compute(this, field)
        except AttributeError:
            self._note(this, field, ABSENT)
            raise

    def stop(self) -> None:
        for kind, (before, is_own) in self._classes.items():
            if is_own:
                kind.__getattribute__ = before  # type: ignore[method-assign]
            else:
                del kind.__getattribute__


# -- tensors that are neither parameters nor buffers ----------------------------------------------


_METADATA: Final = frozenset(
    (
        *("size", "dim", "ndimension", "numel", "nelement", "stride", "__len__", "element_size"),
        *("is_floating_point", "is_complex", "is_contiguous", "get_device", "__hash__"),
    )
)
"""Methods of tensors that do not look at the elements."""


class TensorReads(TorchFunctionMode):
    """Logs what Python computes with tensors that modules hold as plain values.

    `self.scale.item()` and `self.scale + 1` are computed while the model is traced, and the graph
    holds the result: it is right as long as the tensor is the same.
    """

    def __init__(self, log: _Log) -> None:
        super().__init__()
        self._log = log

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._log.is_paused and self._log.routes:
            leaves = pytree.tree_leaves((args, kwargs))
            if not any(issubclass(type(leaf), ShapedProxy) for leaf in leaves):
                name = getattr(func, "__name__", "")
                is_tensor = issubclass(type(result), torch.Tensor)
                is_metadata = name in _METADATA or (name == "__get__" and not is_tensor)
                for leaf in leaves:
                    if issubclass(type(leaf), torch.Tensor):
                        self.note(leaf, is_metadata)
        return result

    def note(self, tensor: torch.Tensor, is_metadata: bool = False) -> None:
        """Note that the elements, or the type alone, of a tensor are part of the graph now."""
        if tensor in self._log.routes:
            module, name, steps = self._log.routes[tensor]
            with torch._C.DisableTorchFunction():
                value = HasType.of(tensor) if is_metadata else HasContents(tensor)
            self._log.note(module, name, True, value, steps, is_own=False)


def holds_tensors(model: nn.Module) -> bool:
    """Does a module hold tensors that are neither parameters nor buffers, at any depth?"""
    seen: set[int] = set()
    pending = [v for m in model.modules() for name, v in vars(m).items() if name not in OF_NN]
    while pending:
        value = pending.pop()
        if id(value) in seen or is_scalar(value) or isinstance(value, nn.Module):
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            if not isinstance(value, nn.Parameter):
                return True
        elif isinstance(value, dict):
            pending += value.values()
        elif isinstance(value, (list, tuple, set, frozenset, deque)):
            pending += value
        elif type(value).__module__.partition(".")[0] not in _NOT_FOLLOWED - {"builtins"}:
            pending += getattr(value, "__dict__", {}).values()
    return False
