"""Functions and classes by name, and which of them a file may ask for.

A file names code as `module:qualname`, operators of `torch.ops` by their own name. Reading looks
names up in the packages the caller allows. Of a well-known package the bare name stands for its
numerical part only: "torch" allows `torch.add` and every layer, not `torch.hub.load`. Whoever
wants the rest names the very module ("torch.hub"). This keeps a file from calling what it likes;
it does not make the layers of a stranger's package safe to run.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import inspect
import re
from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch
from torch import nn

from revcompile.errors import InputError

__all__ = ["ALLOWED", "Names", "check_member", "located", "name_of"]

ALLOWED: Final = (
    "torch",
    "timm",
    "torchvision",
    "revcompile",
    "operator",
    "builtins",
    "math",
    "_operator",
)
"""What may be named unless the caller says otherwise."""

_OPS: Final = "torch.ops."

_HOMES: Final = {
    "torch": (
        "torch",
        "torch._tensor",
        "torch.functional",
        "torch.nn.functional",
        "torch.amp.autocast_mode",
        *(f"torch._C.{part}" for part in ("_nn", "_linalg", "_special", "_fft")),
    ),
    "revcompile": tuple(
        f"revcompile.{part}" for part in ("ops", "steps", "grid", "coupling", "replay")
    ),
}
"""Modules whose functions a graph may call, where the whole package would be too much."""

_TREES: Final = {
    "timm": ("timm.layers", "timm.models"),
    "torchvision": ("torchvision.ops", "torchvision.models"),
}
"""The same for packages with many such modules; private ones below them fetch and load files."""

# fmt: off
_BUILTINS: Final = frozenset({
    "abs", "all", "any", "bool", "complex", "dict", "divmod", "enumerate", "float", "getattr",
    "int", "len", "list", "max", "min", "pow", "range", "reversed", "round", "slice", "sorted",
    "str", "sum", "tuple", "zip",
})

_NEVER: Final = frozenset({
    "dump", "from_file", "load", "numpy", "save", "tofile",  # files
    "storage", "typed_storage", "untyped_storage",  # raw memory
    "attrgetter", "call", "format", "format_map", "methodcaller",  # names handed on
    "compile", "register_hook", "register_post_accumulate_grad_hook",  # code for later
})
# fmt: on
_ARITHMETIC: Final = re.compile(
    r"__[ri]?(add|sub|mul|truediv|floordiv|mod|pow|matmul|and|or|xor|lshift|rshift)__"
    r"|__(getitem|contains|len|neg|pos|invert|abs|eq|ne|lt|le|gt|ge|bool|int|float|index)__"
)

_NAME: Final = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)")


@contextlib.contextmanager
def located(where: str) -> Iterator[None]:
    """Say where in the stage an error belongs."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{where}: {error}") from error.__cause__


def check_member(name: str) -> None:
    """Whether a method or attribute of a value may be asked for by this name."""
    private = name.startswith("_") and not _ARITHMETIC.fullmatch(name)
    if private or name in _NEVER:
        raise InputError(
            f"a stage may not use the attribute {name!r}: private and special names, and those "
            "that reach files or raw memory, are refused; compute the value another way"
        )


def name_of(value: Any) -> str:
    """The name under which a function or class is found again.

    >>> name_of(torch.add), name_of(nn.Linear), name_of(torch.ops.aten.add.Tensor)
    ('torch:add', 'torch.nn.modules.linear:Linear', 'torch.ops.aten.add.Tensor')
    """
    if isinstance(value, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return f"{_OPS}{value}"
    for module, qualname in _candidates(value):
        with contextlib.suppress(ImportError, AttributeError, InputError):
            if module != "__main__" and _follow(module, qualname) == value:
                return f"{module}:{qualname}"
    label = getattr(value, "__qualname__", None) or repr(value)
    raise InputError(
        f"{label} (of {getattr(value, '__module__', None)}) cannot be found by its name; move it "
        "out of functions and scripts to the top level of a module that workers can import"
    )


def _candidates(value: Any) -> Iterator[tuple[str, str]]:
    """Where a function or class might be found, the most telling place first."""
    short = getattr(value, "__name__", "")
    qualname = getattr(value, "__qualname__", short)
    owner = getattr(value, "__objclass__", None) or getattr(value, "__self__", None)
    if isinstance(owner, type) and getattr(value, "__module__", None) is not None:
        yield owner.__module__, f"{owner.__qualname__}.{short}"
    for module in (getattr(value, "__module__", None), *_HOMES["torch"]):
        if module is not None:
            yield module, qualname
            yield module, short
    yield "torch", f"Tensor.{short}"


def _follow(module: str, qualname: str) -> Any:
    """The object of that name, reached through classes only, never through another module."""
    value: Any = importlib.import_module(module)
    for step in qualname.split("."):
        if value is not None and not isinstance(value, type) and not inspect.ismodule(value):
            raise InputError(f"{module}:{qualname} leads through something that is no class")
        value = getattr(value, step)
        if inspect.ismodule(value):
            raise InputError(f"{module}:{qualname} leads through another module")
    return value


class Names:
    """Looks up what a file names, within the packages that are allowed.

    >>> Names(ALLOWED).function("torch:add") is torch.add
    True
    >>> try:
    ...     Names(ALLOWED).function("os:system")
    ... except InputError as error:
    ...     print(error)
    os:system is outside the allowed packages (torch, timm, ...); if you trust this file
    add "os" to allow=
    """

    def __init__(self, allow: Iterable[str]) -> None:
        if isinstance(allow, str):
            raise InputError(f"allow={allow!r}: expected several names; write allow=({allow!r},)")
        self._allow = tuple(allow)

    def function(self, name: str) -> Any:
        """A function, or a class called like one."""
        if name.startswith(_OPS):
            return self._operator(name)
        module, qualname, value = self._find(name)
        if not callable(value):
            raise InputError(f"{name} is a {type(value).__name__}, expected a function")
        home = _home(value) or module
        self._check_package(home, name)
        if not self._by_itself(home) and not _is_numerical(home, qualname, value):
            raise InputError(
                f"{name} is not among the functions a stage may call; if you trust this file "
                f'add "{home}" to allow='
            )
        return value

    def layer(self, name: str) -> type[nn.Module]:
        """A class of modules."""
        found: type[nn.Module] = self._class(name, nn.Module)
        return found

    def choice(self, name: str) -> type[enum.Enum]:
        """A class of enum members."""
        found: type[enum.Enum] = self._class(name, enum.Enum)
        return found

    def _class(self, name: str, kind: type) -> Any:
        _, _, value = self._find(name)
        if not isinstance(value, type) or not issubclass(value, kind):
            raise InputError(f"{name} is no subclass of {kind.__name__}")
        self._check_package(value.__module__, name)
        return value

    def _find(self, name: str) -> tuple[str, str, Any]:
        """Check the name, then import: importing is already running."""
        found = _NAME.fullmatch(name)
        if found is None:
            raise InputError(f"{name!r} is not of the form module:qualname")
        module, qualname = found[1], found[2]
        self._check_package(module, name)
        for step in (*module.split("."), *qualname.split(".")):
            if step.startswith("__") and not _ARITHMETIC.fullmatch(step):
                raise InputError(f"{name}: special names ({step}) are refused")
        try:
            return module, qualname, _follow(module, qualname)
        except (ImportError, AttributeError) as error:
            raise InputError(
                f"{name} does not exist here ({error}); install the version of "
                f"{module.partition('.')[0]} that the stage was saved with"
            ) from error

    def _operator(self, name: str) -> Any:
        self._check_package("torch", name)
        value: Any = torch.ops
        steps = name.removeprefix(_OPS).split(".")
        if not 2 <= len(steps) <= 3 or any(s.startswith("__") or s in _NEVER for s in steps):
            raise InputError(f"{name} is not an operator a stage may call")
        try:
            for step in steps:
                value = getattr(value, step)
        except AttributeError as error:
            raise InputError(
                f"{name} does not exist here; import the library that registers it before loading"
            ) from error
        if not isinstance(value, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            raise InputError(f"{name} is not an operator")
        return value

    def _check_package(self, module: str, name: str) -> None:
        if not any(_inside(module, entry) for entry in self._allow):
            top = module.partition(".")[0]
            raise InputError(
                f"{name} is outside the allowed packages ({', '.join(self._allow)}); if you "
                f'trust this file add "{top}" to allow='
            )

    def _by_itself(self, home: str) -> bool:
        """Did the caller name this module, rather than a package whose bare name means less?"""
        return any(_inside(home, entry) and entry not in ALLOWED for entry in self._allow)


def _inside(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def _home(value: Any) -> str | None:
    """The module a function says it is from; None where only the stored name knows."""
    owner = getattr(value, "__objclass__", None)
    home = owner.__module__ if isinstance(owner, type) else getattr(value, "__module__", None)
    return "torch" if owner is torch._C.TensorBase else home


def _is_numerical(home: str, qualname: str, value: Any) -> bool:
    """Is it a function of the kind that models compute with?"""
    if any(step in _NEVER for step in qualname.split(".")):
        return False
    top = home.partition(".")[0]
    if top == "builtins":
        return qualname in _BUILTINS
    if top in _TREES:
        inner = [part for part in home.split(".") if part.startswith("_")]
        inside = any(_inside(home, tree) for tree in _TREES[top])
        return inside and not inner and not _fetches_weights(value)
    return home in _HOMES[top] if top in _HOMES else True


def _fetches_weights(value: Any) -> bool:
    """Does it build a whole model, and perhaps download one?"""
    try:
        parameters = inspect.signature(value).parameters
    except (TypeError, ValueError):
        return False
    return not {"pretrained", "weights"}.isdisjoint(parameters)
