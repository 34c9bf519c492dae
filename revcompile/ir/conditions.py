"""What a guard demands of a value that Python read, where that is more or less than equality.

    ABSENT        there was no such attribute
    Present       a parameter, buffer or module was there, whichever
    IsInstance    an object's class, as `isinstance` sees it
    HasKeys       a container's class and its keys, or its length; a module's children
    SameObject    the object itself
    HasType       the shape and type of a tensor
    HasContents   the elements of a tensor or an array

Any other value is compared by type and equality.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch
from torch import nn


class _Absence(enum.Enum):
    """In the place of a value; an enum stays itself when copied or pickled."""

    ABSENT = "absent"
    UNKNOWN = "unknown"

    def __repr__(self) -> str:
        return self.value


ABSENT: Final = _Absence.ABSENT
"""There is no such attribute, field or item."""
UNKNOWN: Final = _Absence.UNKNOWN
"""It cannot be told: a class that was not pickled with its module."""


_MAX_SHOWN: Final = 8
_MAX_TEXT: Final = 200
"""Elements of a tensor, and characters of any other value, in an error message."""


def frozen(value: Any) -> Any:
    """A copy of nested containers that does not change with the original."""
    if type(value) is dict:
        return {k: frozen(v) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(frozen, value))
    return set(value) if type(value) is set else value


class Condition:
    """What must hold of a value, now as when the model was captured."""

    is_structural: ClassVar[bool] = False
    """Is it about modules or parameters, which capturing the model again does not follow?"""

    def holds(self, value: Any) -> bool:
        raise NotImplementedError

    def rebased(self, value: Any) -> Condition:
        """The same condition for what rewiring, or a copy, has put in the place of the value."""
        return self


@dataclass(frozen=True)
class Present(Condition):
    is_structural = True

    def holds(self, value: Any) -> bool:
        return value is not None and value is not ABSENT

    def __repr__(self) -> str:
        return "set"


@dataclass(frozen=True)
class IsInstance(Condition):
    classes: tuple[type, ...]
    result: bool = True
    is_structural = True

    def holds(self, value: Any) -> bool:
        return isinstance(value, self.classes) is self.result

    def rebased(self, value: Any) -> Condition:
        return self if self.holds(value) else IsInstance((type(value),))

    def __repr__(self) -> str:
        names = " or ".join(with_article(kind.__name__) for kind in self.classes)
        return names if self.result else f"not {names}"


@dataclass(frozen=True)
class HasKeys(Condition):
    kind: type
    keys: Any

    @classmethod
    def of(cls, value: Any) -> HasKeys:
        if isinstance(value, nn.Module):
            # `torch.nn.utils.parametrize` adds a child that no forward pass asks for.
            names = value._modules
            return cls(nn.Module, tuple(name for name in names if name != "parametrizations"))
        if isinstance(value, Mapping):
            return cls(type(value), tuple(value))
        return cls(type(value), len(value) if hasattr(value, "__len__") else None)

    @property
    def is_structural(self) -> bool:  # type: ignore[override]
        return self.kind is nn.Module

    def holds(self, value: Any) -> bool:
        return HasKeys.of(value) == self

    def rebased(self, value: Any) -> Condition:
        return HasKeys.of(value)

    def __repr__(self) -> str:
        what = "children" if self.kind is nn.Module else f"{with_article(self.kind.__name__)} of"
        return f"{what} {self.keys!r}"


@dataclass(frozen=True)
class SameObject(Condition):
    value: Any

    def holds(self, value: Any) -> bool:
        return value is self.value

    def rebased(self, value: Any) -> Condition:
        return SameObject(value)

    def __repr__(self) -> str:
        return described(self.value)


@dataclass(frozen=True)
class HasType(Condition):
    shape: tuple[int, ...]
    dtype: Any

    @classmethod
    def of(cls, value: Any) -> HasType:
        return cls(tuple(value.shape), value.dtype)

    def holds(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and HasType.of(value) == self

    def rebased(self, value: Any) -> Condition:
        return HasType.of(value) if isinstance(value, torch.Tensor) else self

    def __repr__(self) -> str:
        return f"a tensor {self.shape} of {self.dtype}"


class HasContents(Condition):
    """The elements are compared only where the object or its version differs."""

    def __init__(self, value: Any) -> None:
        is_tensor = isinstance(value, torch.Tensor)
        self._copy = value.detach().clone() if is_tensor else value.copy()
        self._seen: tuple[Any, int | None] = value, _version(value)

    def __getstate__(self) -> dict[str, Any]:
        return {"_copy": self._copy, "_seen": (None, None)}  # versions of copies start anew

    def holds(self, value: Any) -> bool:
        seen, version = self._seen
        if value is seen and version is not None and _version(value) == version:
            return True
        copy = self._copy
        if type(value) is not type(copy) or value.shape != copy.shape or value.dtype != copy.dtype:
            return False
        if isinstance(value, torch.Tensor):
            same = torch.equal(value, copy.to(value.device))
        else:
            same = value.tobytes() == copy.tobytes()
        if same:
            self._seen = value, _version(value)
        return same

    def rebased(self, value: Any) -> Condition:
        return HasContents(value) if hasattr(value, "dtype") else self

    def __repr__(self) -> str:
        return described(self._copy)


def _version(value: Any) -> int | None:
    is_counted = isinstance(value, torch.Tensor) and not value.is_inference()
    return value._version if is_counted else None


def holds(expected: Any, value: Any) -> bool:
    """Is a value what a guard expects?"""
    if value is expected or value is UNKNOWN:
        return True
    if isinstance(expected, Condition):
        return expected.holds(value)
    return type(value) is type(expected) and bool(value == expected)


def described(value: Any) -> str:
    """A value in an error message."""
    if isinstance(value, nn.Module):
        return with_article(type(value).__name__)
    if isinstance(value, torch.Tensor) and value.numel() > _MAX_SHOWN:
        return repr(HasType.of(value))
    text = repr(value)
    return text if len(text) < _MAX_TEXT else f"{text[:_MAX_TEXT]}..."


# -- how a value is found again -------------------------------------------------------------------


@dataclass(frozen=True)
class Item:
    """A step into a container, as an attribute's name is a step into an object."""

    key: Any


def look_up(owner: Any, step: str | Item) -> Any:
    """An attribute or item; for a module without running code of the user's. ABSENT if missing."""
    try:
        if isinstance(step, Item):
            return owner[step.key]
        if not isinstance(owner, nn.Module):
            return getattr(owner, step, ABSENT)
    except Exception:  # a property, or an index that is out of range
        return ABSENT
    own = vars(owner)
    for members in (own, own["_parameters"], own["_buffers"], own["_modules"]):
        if step in members:
            return members[step]
    parametrized = own["_modules"].get("parametrizations")
    if parametrized is not None and step in parametrized._modules:
        return parametrized._modules[step]  # in the place of the parameter
    of_original = getattr(type(owner), "attribute_of_original", None)
    return getattr(type(owner), step, ABSENT) if of_original is None else of_original(owner, step)


def with_article(name: str) -> str:
    """
    >>> with_article("Identity"), with_article("Dropout")
    ('an Identity', 'a Dropout')
    """
    return f"an {name}" if name[:1] in "AEIOaeio" else f"a {name}"
