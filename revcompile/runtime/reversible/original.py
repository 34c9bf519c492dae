"""The original model's attributes and methods, on the module that was made from it.

Plain attributes of the original (`config`, `pretrained_cfg`, `num_classes`) are attributes of the
module itself. A method of the original (`no_weight_decay`, `get_classifier`) runs on a view: an
instance of the original's class that shares the module's `__dict__`, so that it sees the module's
parameters and sets the module's attributes, and `super()` works in it. `watch.py` refuses methods
that would compute with rewired weights by another path than the module's `forward`, or change the
modules there are.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from torch import Tensor, nn

from revcompile.errors import InputError, OriginalMethodError
from revcompile.runtime.reversible.original_methods import structure_kept, suspended, watched

__all__ = ["Original", "OriginalSurface"]

_OWN: Final = frozenset(vars(nn.Module()))
"""What every module keeps in its `__dict__`."""


class Original:
    """The class of the model a module was made from, and what became of its plain attributes.

    `plain` are the names of those that are the module's now; `hidden` are attributes whose names
    the module needs for itself, and methods that were bound to the original: only methods of the
    original see them.
    """

    def __init__(
        self, kind: type[nn.Module] | None, plain: frozenset[str], hidden: Mapping[str, Any]
    ) -> None:
        self.kind = kind
        self.plain = plain
        self.hidden = dict(hidden)

    @classmethod
    def adopted_by(cls, module: nn.Module, root: nn.Module, reserved: frozenset[str]) -> Original:
        """Make the root's plain attributes the module's own."""
        plain: set[str] = set()
        hidden: dict[str, Any] = {}
        for name, value in vars(root).items():
            if name in _OWN or isinstance(value, Tensor) or name == "forward":
                continue
            if isinstance(value, types.MethodType) and value.__self__ is root:
                hidden[name] = value.__func__
            elif name in reserved or hasattr(type(module), name):
                hidden[name] = value
            else:
                module.__dict__[name] = value
                plain.add(name)
        return cls(type(root), frozenset(plain), hidden)

    def overrides(self, name: str) -> bool:
        """Does the original's class replace a method that every module has?"""
        return self.kind is not None and getattr(self.kind, name) is not getattr(nn.Module, name)

    def view(self, module: nn.Module) -> nn.Module:
        """The module as an instance of the original's class."""
        view: nn.Module = object.__new__(self._view_class)
        object.__setattr__(view, "_revcompile_module", module)
        object.__setattr__(view, "__dict__", module.__dict__)
        return view

    @functools.cached_property
    def _view_class(self) -> Any:
        kind = self.kind
        assert kind is not None
        members: dict[str, Any] = {
            "__module__": kind.__module__,
            "__qualname__": kind.__qualname__,
            "__slots__": ("_revcompile_module",),  # not in __dict__, which is the module's
            "forward": _forward,
            **{name: _hidden(name) for name in self.hidden},
        }
        return types.new_class(kind.__name__, (kind,), {}, lambda body: body.update(members))

    def __deepcopy__(self, memo: dict[int, Any]) -> Original:
        return Original(self.kind, self.plain, copy.deepcopy(self.hidden, memo))

    def __reduce__(self) -> Any:
        # A class that pickle cannot find by name stays behind: the module runs without it.
        return Original, (self.kind if self.is_importable else None, self.plain, self.hidden)

    @property
    def is_importable(self) -> bool:
        """Can the original's class be found by its name?"""
        return self.kind is not None and _is_importable(self.kind)


def _is_importable(kind: type) -> bool:
    found: Any = sys.modules.get(kind.__module__)
    for step in kind.__qualname__.split("."):
        found = getattr(found, step, None)
    return found is kind


def _forward(view: Any, *args: Any, **kwargs: Any) -> Any:
    """`self(...)` in a method of the original runs the module: the path that is trained."""
    try:
        module = view._revcompile_module
    except AttributeError:  # a fresh instance, from `type(self)(...)` in a method
        return super(type(view), view).forward(*args, **kwargs)
    with suspended():
        return module.forward(*args, **kwargs)


def _hidden(name: str) -> property:
    def read(view: Any) -> Any:
        value = view._revcompile_module._original.hidden[name]
        return types.MethodType(value, view) if isinstance(value, types.FunctionType) else value

    def write(view: Any, value: Any) -> None:
        view._revcompile_module._original.hidden[name] = value

    return property(read, write)


class OriginalSurface(nn.Module):
    """A module that shows the attributes and methods of the model it was made from."""

    _original: Original

    def rewired_tensors(self) -> dict[int, str]:
        """The parameters and buffers that run otherwise than in the original: id -> name."""
        raise NotImplementedError

    def is_of_original(self, name: str) -> bool:
        """Is it a plain attribute or a method of the original's own, not one of every module?"""
        original = self._original
        if name.startswith("_") or name in _OWN or hasattr(nn.Module, name):
            return False
        return name in original.plain or (
            original.kind is not None and hasattr(original.kind, name)
        )

    def __getattr__(self, name: str) -> Any:
        modules = self.__dict__.get("_modules")
        if modules is not None and name in modules:  # what generated code asks for, in every call
            return modules[name]
        try:
            return super().__getattr__(name)
        except AttributeError:
            original = self.__dict__.get("_original")
            if original is None or original.kind is None or name.startswith("__"):
                raise
        return _of_original(self, original, name)

    def __dir__(self) -> list[str]:
        original = self.__dict__.get("_original")
        names: set[str] = {*super().__dir__()}  # type: ignore[no-untyped-call]
        return sorted(names | {*(dir(original.kind) if original is not None else ())})

    def train(self, mode: bool = True) -> Any:
        """Set the mode as the original does: some models keep parts of themselves in eval mode."""
        original = self.__dict__.get("_original")
        if original is None or not original.overrides("train"):
            return super().train(mode)
        original.view(self).train(mode)
        return self


def _of_original(module: OriginalSurface, original: Original, name: str) -> Any:
    assert original.kind is not None
    view = original.view(module)
    call = f"{original.kind.__name__}.{name}"
    missing = object()
    found = inspect.getattr_static(type(view), name, missing)
    if found is missing:
        if not original.overrides("__getattr__"):
            raise AttributeError(f"{type(module).__name__!r} object has no attribute {name!r}")
        with watched(call, module.rewired_tensors, module):
            return _handed_out(module, view, call, type(view).__getattr__(view, name))
    if not hasattr(found, "__get__"):
        return found
    with watched(call, module.rewired_tensors, module):
        return _handed_out(module, view, call, found.__get__(view, type(view)))


def _handed_out(module: OriginalSurface, view: nn.Module, call: str, value: Any) -> Any:
    """What the user gets: never the view, nor a method of it that is not watched."""
    if value is view:
        return module
    if isinstance(value, types.MethodType) and value.__self__ is view:
        return _method(module, view, call, value)
    if isinstance(value, types.GeneratorType):
        return _items(module, view, call, value)
    return value


def _method(
    module: OriginalSurface, view: nn.Module, call: str, method: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        with structure_kept(call, module), watched(call, module.rewired_tensors, module):
            try:
                result = method(*args, **kwargs)
            except InputError as error:
                raise OriginalMethodError(_other_arguments(call, error)) from error
        return _handed_out(module, view, call, result)

    return run


def _other_arguments(call: str, error: InputError) -> str:
    return (
        f"{call} calls the model with arguments it was not captured for. {error}\n"
        f"Call net(...) with arguments like the example's instead of {call.rpartition('.')[2]}"
    )


def _items(
    module: OriginalSurface, view: nn.Module, call: str, generator: Iterator[Any]
) -> Iterator[Any]:
    """A generator whose body is watched, though it runs after the method has returned."""
    while True:
        with structure_kept(call, module), watched(call, module.rewired_tensors, module):
            try:
                item = next(generator)
            except StopIteration:
                return
        yield _handed_out(module, view, call, item)
