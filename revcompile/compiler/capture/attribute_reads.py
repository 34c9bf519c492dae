"""Which attributes a forward pass reads: guards are on those, and on no others.

While a fake copy of the model is traced, its modules and the objects that their attributes hold
(configurations) are instances of subclasses of their own classes, which note every read. Objects
whose reads cannot be seen that way (torch's layers, extension types) have all attributes guarded,
as have models whose code asks for the type of something.
"""

from __future__ import annotations

import enum
import sys
import types
from abc import ABCMeta
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from torch import nn
from torch.utils import _pytree as pytree

from revcompile.compiler.capture.bytecode import asks_types
from revcompile.compiler.capture.leaf_modules import is_leaf
from revcompile.ir.module_tree import child_path
from revcompile.ir.plain_attributes import attributes_of, objects_in
from revcompile.ir.snapshot import INTERNAL

_OF_OBJECT: Any = vars(object)["__class__"]


class AttributeReads:
    """Notes the attributes that are read of the modules of a model, and of objects in them."""

    def __init__(self, is_paused: Callable[[], bool]) -> None:
        self._is_paused = is_paused
        self._names: dict[int, set[str]] = {}
        self._kinds: dict[type, type | None] = {}
        self._labels: dict[str, Any] = {}

    @contextmanager
    def of(self, root: nn.Module) -> Iterator[None]:
        """Inside, note reads of attributes of the model's modules."""
        kinds: list[tuple[Any, type]] = []
        traced = {type(module) for module in root.modules() if not is_leaf(module)}
        modules = root.named_modules(remove_duplicate=False)
        for path, module in () if any(asks_types(kind) for kind in traced) else modules:  # type: ignore[arg-type]
            self._labels |= {} if is_leaf(module) else {path: module}
            for name, value in attributes_of(module).items():
                self._labels |= objects_in(child_path(path, name), value)
        try:
            for each in {id(each): each for each in self._labels.values()}.values():
                kind = type(each)
                if (noting := self._noting(kind)) is not None:
                    with suppress(TypeError):  # another layout in memory
                        _OF_OBJECT.__set__(each, noting)
                        kinds.append((each, kind))
                        self._names[id(each)] = set()
            yield
        finally:
            for each, kind in kinds:
                _OF_OBJECT.__set__(each, kind)

    def by_label(self) -> dict[str, frozenset[str]]:
        """Names of the attributes that were read, by the label of what has them."""
        found = {label: self._names.get(id(each)) for label, each in self._labels.items()}
        return {
            label: frozenset(names)
            for label, names in found.items()
            if names is not None and "__dict__" not in names
        }

    def _noting(self, kind: type) -> type | None:
        """A subclass that notes reads; None for classes whose reads it would not see."""
        if kind not in self._kinds:
            self._kinds[kind] = self._subclass(kind) if _is_transparent(kind) else None
        return self._kinds[kind]

    def _subclass(self, kind: type) -> type | None:
        names, is_paused = self._names, self._is_paused

        class Noting:  # next to `object`: a `__getattribute__` of `kind` may ask for other names
            __slots__ = ()

            def __getattribute__(self, name: str) -> Any:
                is_internal = name in INTERNAL or (name[:2] == "__" and name != "__dict__")
                if not is_internal and not is_paused():
                    names.setdefault(id(self), set()).update(_read(name, sys._getframe(1)))
                return object.__getattribute__(self, name)

        members = {
            "__slots__": (),
            "__module__": kind.__module__,
            "__qualname__": kind.__qualname__,
            "__doc__": kind.__doc__,
            "__class__": property(lambda _: kind),
            "__hash__": kind.__hash__,
        }
        bases, meta = (kind, Noting), {"metaclass": _WithoutNews}
        try:
            return types.new_class(kind.__name__, bases, meta, lambda own: own.update(members))
        except TypeError:
            return None


class _Quiet:
    __slots__ = ()

    def __init_subclass__(cls) -> None:
        pass


class _WithoutNews(ABCMeta):
    """Makes classes of which their base is not told: it might register or change them."""

    def mro(cls) -> list[type]:
        own, *bases = super().mro()
        return [own, _Quiet, *bases]


def _is_transparent(kind: type) -> bool:
    """Whether all reads of attributes pass through `object.__getattribute__` of the last base."""
    if type(kind) not in (type, ABCMeta) or issubclass(kind, (enum.Enum, type)):
        return False
    if kind in pytree.SUPPORTED_NODES:
        return False
    for base in kind.__mro__[:-1]:
        read = vars(base).get("__getattribute__")
        if read is None:
            continue
        code = getattr(read, "__code__", None)
        if code is None or "object" in code.co_names:
            return False
    return True


_ACCESS: Final = ("__getattribute__", "__getattr__", "__setattr__")


def _read(name: str, frame: types.FrameType) -> Iterable[str]:
    """Which attributes a read of one, or of `__dict__`, by the code of a frame is a read of.

    Methods of attribute access that look into `__dict__` read what they name. The tracer's reads
    do not count, nor do torch's of all attributes.
    """
    named: set[str] = set()
    while frame.f_code.co_name in _ACCESS and frame.f_back is not None:
        named |= {each for each in frame.f_code.co_consts if isinstance(each, str)}
        asked = frame.f_locals.get(frame.f_code.co_varnames[1])
        if name == "__dict__" != asked:
            return {each for each in named if each.isidentifier() and each[:2] != "__"}
        frame = frame.f_back
    package = str(frame.f_globals.get("__name__")).partition(".")[0]
    is_ours = package == "revcompile" or (package == "torch" and name == "__dict__")
    return () if is_ours else (name,)
