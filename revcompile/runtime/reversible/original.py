"""The original model's attributes and methods, on the module that was made from it.

Plain attributes of the original (`config`, `pretrained_cfg`, `num_classes`) are attributes of the
module itself. A method of the original runs on a view, which is an instance of the original's class
that shares the module's `__dict__`: it sees the module's parameters and sets the module's
attributes, and `super()` works in it.

A method may apply weights to data by another path than the module's `forward`, and blocks were
rewired: that would be another function than the trained one. So only those methods run that are
known not to (`get_classifier`, and methods of transformers itself), or all if the module computes
the original's function (policy="pretrained" in eval mode). Others raise an error that says what to
call instead. Properties, class methods and special methods always work.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import types
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from revcompile.errors import InputError, OriginalMethodError, warn

# -- attributes and methods -----------------------------------------------------------------------


_OWN: Final = frozenset(vars(nn.Module()))
"""What every module keeps in its `__dict__`."""
_READING: Final = frozenset(
    (
        *("get_classifier", "get_input_embeddings", "get_output_embeddings"),
        *("group_matcher", "no_weight_decay", "no_weight_decay_keywords"),
        *("__getitem__", "__iter__", "__len__"),
    )
)
"""Methods that find parts of a model, by which optimizers are made."""
_GENERAL: Final = tuple(
    f"transformers.{part}" for part in ("modeling", "generation", "integrations", "utils")
)
"""Where transformers has methods of all models, which call a model as a whole (`generate`)."""
_CHECKPOINTING: Final = ("checkpointing_enable", "set_grad_checkpointing")
"""Ends of the names of methods by which transformers and timm switch checkpointing on."""

_in_method: ContextVar[bool] = ContextVar("in_method", default=False)


def in_method_of_original() -> bool:
    """Whether the module runs because a method of the original has called it."""
    return _in_method.get()


@dataclass(eq=False)
class Original:
    """The class of the model a module was made from, and attributes that only its methods see."""

    kind: type[nn.Module] | None
    hidden: dict[str, Any]
    """Attributes whose names the module needs for itself, and methods bound to the original: only
    methods of the original see them."""
    signature: inspect.Signature
    """That of the original's `forward`."""
    signed_forward: Callable[..., Any] | None = None
    """The module's `forward` with that signature, made when it is first read."""

    @classmethod
    def adopted_by(cls, module: nn.Module, root: nn.Module, reserved: frozenset[str]) -> Original:
        """Make the root's plain attributes the module's own."""
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
        return cls(type(root), hidden, inspect.signature(root.forward))

    def overrides(self, name: str) -> bool:
        """Whether the original's class overrides a method of `nn.Module`."""
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
        return Original(self.kind, copy.deepcopy(self.hidden, memo), self.signature)

    def __reduce__(self) -> Any:
        # A class that pickle cannot find by name is left out: the module runs without it.
        return Original, (self.importable_kind, self.hidden, self.signature)

    @property
    def importable_kind(self) -> type[nn.Module] | None:
        """The class, if pickle can find it by its name."""
        if self.kind is None:
            return None
        imported: Any = sys.modules.get(self.kind.__module__)
        for step in self.kind.__qualname__.split("."):
            imported = getattr(imported, step, None)
        return self.kind if imported is self.kind else None


class SignedForward:
    """A `forward` that shows the arguments of the original's, of an instance and of its class.

    `inspect.signature(net.forward)` tells `torch.export` the names of inputs, and trainers which
    columns of a dataset the model takes. Only the signature is set, and not `__wrapped__`: who
    unwraps `forward`, as accelerate does, has to end at the module's own.
    """

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run

    def __get__(self, module: OriginalSurface | None, owner: Any = None) -> Callable[..., Any]:
        if module is None:
            others = (kind for kind in owner.__mro__ if not issubclass(kind, OriginalSurface))
            kind = next(kind for kind in others if issubclass(kind, nn.Module))
            is_plain = kind.forward is nn.Module.forward
            return self._run if is_plain else self._with(inspect.signature(kind.forward))
        if torch.compiler.is_dynamo_compiling():  # it does not trace the making of methods
            return functools.partial(self._run, module)
        original = module._original
        run = original.signed_forward
        if run is None:
            this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
            parameters = (this, *original.signature.parameters.values())
            run = self._with(original.signature.replace(parameters=parameters))
            original.signed_forward = run
        return types.MethodType(run, module)

    def _with(self, signature: inspect.Signature) -> Callable[..., Any]:
        run = self._run

        @functools.wraps(run)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            return run(self, *args, **kwargs)

        del forward.__wrapped__
        forward.__signature__ = signature  # type: ignore[attr-defined]
        return forward


def _forward(view: Any, *args: Any, **kwargs: Any) -> Any:
    """`self(...)` in a method of the original runs the module: the path that is trained."""
    try:
        module = view._revcompile_module
    except AttributeError:  # a fresh instance, from `type(self)(...)` in a method
        return super(type(view), view).forward(*args, **kwargs)
    token = _in_method.set(True)
    try:
        if module._computes_original:  # accepts arguments that were not captured, too: caches
            return super(type(view), view).forward(*args, **kwargs)
        return module.forward(*args, **kwargs)
    finally:
        _in_method.reset(token)


def _hidden(name: str) -> property:
    def read(view: Any) -> Any:
        value = view._revcompile_module._original.hidden[name]
        return types.MethodType(value, view) if isinstance(value, types.FunctionType) else value

    def write(view: Any, value: Any) -> None:
        view._revcompile_module._original.hidden[name] = value

    return property(read, write)


class _NoSpecialMethodError(AttributeError, TypeError):
    """As torch and Python raise both: `hasattr(net, "__len__")` is False, `len(net)` fails."""


def _special(name: str) -> Any:
    """A special method of the original, which Python looks up in the class."""

    def read(module: OriginalSurface) -> Any:
        original = module.__dict__.get("_original")
        if original is None or not hasattr(original.kind, name):
            raise _NoSpecialMethodError(f"{type(module).__name__!r} object has no {name}")
        return module._of_original(name)

    return property(read)


class OriginalSurface(nn.Module):
    """A module with the attributes and methods of the model it was made from."""

    _original: Original
    _keeps_function: bool
    """Whether it computes the original's function in eval mode."""

    @property
    def _computes_original(self) -> bool:
        """Whether it computes the original's function now: then all the original's methods work."""
        return self._keeps_function and not self.training

    def _is_of_original(self, name: str) -> bool:
        """Whether a name is an attribute or method of the original that not every module has."""
        if name.startswith("_") or name in _OWN or hasattr(nn.Module, name):
            return False
        is_plain = name in self.__dict__ and name not in self._reserved_names()
        return is_plain or hasattr(self._original.kind, name)

    @classmethod
    def _reserved_names(cls) -> frozenset[str]:
        """Names that the module needs for itself."""
        own = cls.__mro__[: cls.__mro__.index(nn.Module)]
        names = (name for kind in own for name in (*vars(kind), *inspect.get_annotations(kind)))
        return frozenset(names)

    @property
    def _own_names(self) -> frozenset[str]:
        """Names of attributes that are not the original's."""
        return self._reserved_names() | {*self._original.hidden}

    def __getattr__(self, name: str) -> Any:
        modules = self.__dict__.get("_modules")
        # The fast path: generated code reads these in every call.
        if modules is not None and name in modules:
            return modules[name]
        try:
            return super().__getattr__(name)
        except AttributeError:
            original = self.__dict__.get("_original")
            if original is None or original.kind is None or name.startswith("__"):
                raise
        return self._of_original(name)

    def _of_original(self, name: str) -> Any:
        """An attribute of the original's class."""
        original, missing = self._original, object()
        assert original.kind is not None
        view = original.view(self)
        member = inspect.getattr_static(type(view), name, missing)
        if member is missing and not original.overrides("__getattr__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if member is missing:
            value = type(view).__getattr__(view, name)
        else:
            value = member.__get__(view, type(view)) if hasattr(member, "__get__") else member
        if isinstance(value, types.MethodType) and value.__self__ is view:
            return self._method(view, name, value)
        return self if value is view else value

    def _method(self, view: nn.Module, name: str, method: Any) -> Any:
        """A method of the view for the user."""
        is_general = str(method.__module__).startswith(_GENERAL) and not name.startswith("resize_")
        is_safe = is_general or name in _READING
        call = f"{type(view).__name__}.{name}"

        @functools.wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            if name.endswith(_CHECKPOINTING):
                warn(
                    f"{call} has no effect: reversible blocks keep no activations that "
                    "checkpointing could save, and everything else runs as captured. Leave the "
                    "call out; summary() says which blocks are reversible"
                )
                return None
            hint = ", or call net.eval() first" if self._keeps_function else ""
            if not (is_safe or self._computes_original):
                raise OriginalMethodError(
                    f"{call} may compute with weights of rewired blocks as the original does, "
                    "which would be another function than the one that is trained. Call the "
                    f"model as a whole, net(...){hint}. With policy='pretrained', the model that "
                    f"net.to_original() returns has {name}, too. If {name} only reads the model, "
                    f"write {call}(net, ...)"
                )
            try:
                result = method(*args, **kwargs)
            except InputError as error:
                raise OriginalMethodError(
                    f"{call} calls the model with arguments it was not captured for. {error}\n"
                    f"Call net(...) with arguments like the example's instead of {name}{hint}"
                ) from error
            return self if result is view else result

        return run

    __getitem__: Any = _special("__getitem__")
    __len__: Any = _special("__len__")
    __iter__: Any = _special("__iter__")

    def __bool__(self) -> bool:
        original = self.__dict__.get("_original")
        return original is None or not hasattr(original.kind, "__len__") or len(self) > 0

    def __dir__(self) -> list[str]:
        original = self.__dict__.get("_original")
        names: set[str] = {*super().__dir__()}  # type: ignore[no-untyped-call]
        return sorted(names | {*(dir(original.kind) if original is not None else ())})

    def train(self, mode: bool = True) -> Any:
        """Set the mode as the original does: some models keep parts in eval mode."""
        original = self.__dict__.get("_original")
        if original is None or not original.overrides("train"):
            return super().train(mode)
        original.view(self).train(mode)
        return self
