"""Why tracing stopped: the module, the line of the user's code, and the reason in words."""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Final

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx.proxy import TraceError

_TORCH: Final = torch.__path__[0]
_TRACERS: Final = (str(Path(__file__).parent), str(Path(_TORCH, "fx")))
_LAYERS: Final = str(Path(_TORCH, "nn", "modules"))
_COMPILERS: Final = (_TORCH, str(Path(__file__).parents[2]), "<frozen")
_GENERATED: Final = ("<frozen", "<string>", "<eval_with_key>", "<attrs", "<__array_function__")
_NOT_THE_USERS: Final = (_TORCH, str(Path(__file__).parent), *_GENERATED)
"""How the paths of files begin that no user wrote; `<stdin>` and `<ipython-input-…>` are theirs."""


AUTOCAST: Final = "an autocast region, which no graph can hold"
_AUTOCAST: Final = str(Path(_TORCH, "amp", "autocast_mode.py"))


class Untraceable(Exception):
    """Tracing stopped.

    Attributes:
        path: the innermost module whose forward was running.
        cause: the reason, one line.
        source: `file:line` of the user's code.
        has_state: the module's next call computes something else, and no buffer holds that state.
        by_batch: control flow depends on the batch size.
    """

    def __init__(
        self,
        path: str,
        cause: str,
        source: str,
        has_state: bool = False,
        by_batch: bool = False,
    ) -> None:
        super().__init__(f"{path or '(top level)'}: {cause} [{source}]")
        self.path = path
        self.cause = cause
        self.source = source
        self.has_state = has_state
        self.by_batch = by_batch


class BatchDependent(TraceError):
    """Control flow reads a value that differs between the two batch sizes."""

    def __init__(self, first: Any, second: Any) -> None:
        text = f"control flow depends on the batch size ({first} or {second})"
        if type(first) is int:
            text += ", which len() and int() read as a number; x.shape[0] leaves it free"
        super().__init__(text)


class UntracedEffect(TraceError):
    """A forward pass did something that leaves no trace in the graph."""

    def __init__(self, text: str, module: nn.Module) -> None:
        super().__init__(text)
        self.module = module


class PythonState(UntracedEffect):
    """A forward pass changes what its next call computes, in an attribute that is no buffer."""


class Rejected(UntracedEffect):
    """An effect that is wrong even inside a leaf module."""


def describe_failure(path: str, error: Exception) -> Untraceable:
    """Put what went wrong in the module at `path` into words."""
    return Untraceable(
        path,
        _reason(error),
        _source(error),
        has_state=isinstance(error, PythonState),
        by_batch=isinstance(error, BatchDependent),
    )


def is_torch_code() -> bool:
    """Was the caller of the tracer's code a file of torch, not the user's?"""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_TRACERS):
        frame = frame.f_back
    return frame.f_code.co_filename.startswith(_TORCH)


def is_model_code() -> bool:
    """Is the code that reads an attribute the model's, or a layer of torch.nn that it calls?

    Not code of torch or of the compiler that looks through the modules, or through all parameters.
    """
    frame: FrameType | None = sys._getframe(3)
    while frame is not None and frame.f_code.co_filename.startswith(_LAYERS):
        if frame.f_code.co_name == "forward":
            return True
        if frame.f_code.co_name in ("_named_members", "__getattr__"):
            return False
        frame = frame.f_back
    return frame is not None and not frame.f_code.co_filename.startswith(_COMPILERS)


def is_users_file(frame: FrameType) -> bool:
    return not frame.f_code.co_filename.startswith(_COMPILERS)


def user_line() -> str:
    """`file:line` of the innermost frame in a file that a user wrote."""
    frame = _user_frame()
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "?"


def _user_frame() -> FrameType | None:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back
    return frame


def in_bare_call() -> bool:
    """Is the user's code in a statement without a result: a bare call, `raise` or `assert`?

    Text made there goes into a message and decides nothing.
    """
    frame = _user_frame()
    if frame is None:
        return True
    around = [s for s in _statements(frame.f_code.co_filename) if s[0] <= frame.f_lineno <= s[1]]
    return max(around, default=(0, 0, False))[2]


def compares_types_by_identity() -> bool:
    """Does the user's function compare a dtype or layout by `is`?

    A proxy is never the object that it represents.
    """
    frame = _user_frame()
    if frame is None:
        return False
    line = frame.f_lineno
    return any(a <= line <= b for a, b in _comparing_functions(frame.f_code.co_filename))


@functools.lru_cache(maxsize=64)
def _comparing_functions(file: str) -> list[tuple[int, int]]:
    """First and last line of every function of a file that compares types by identity."""
    return [
        (node.lineno, node.end_lineno or 0)
        for node in _syntax(file)
        if isinstance(node, ast.FunctionDef)
        and any(isinstance(n, ast.Compare) and _is_of_types(n) for n in ast.walk(node))
    ]


def _is_of_types(compare: ast.Compare) -> bool:
    if not any(isinstance(op, (ast.Is, ast.IsNot)) for op in compare.ops):
        return False
    names = [s.attr for s in (compare.left, *compare.comparators) if isinstance(s, ast.Attribute)]
    types = (torch.dtype, torch.layout)
    return any(
        n in ("dtype", "layout") or isinstance(getattr(torch, n, None), types) for n in names
    )


@functools.lru_cache(maxsize=64)
def _statements(file: str) -> list[tuple[int, int, bool]]:
    """First and last line of every statement of a file, and whether it has no result."""
    return [
        (node.lineno, node.end_lineno or 0, isinstance(node, (ast.Expr, ast.Raise, ast.Assert)))
        for node in _syntax(file)
        if isinstance(node, ast.stmt)
    ]


def _syntax(file: str) -> Iterator[ast.AST]:
    try:
        return ast.walk(ast.parse("".join(linecache.getlines(file))))
    except SyntaxError:
        return iter(())


def _source(error: Exception) -> str:
    """`file:line: code` of the user's code that failed."""
    if isinstance(error, UntracedEffect):
        code = inspect.unwrap(type(error.module).forward).__code__
        return f"{code.co_filename}:{code.co_firstlineno}: {type(error.module).__name__}.forward"
    frames = [*traceback.extract_stack(), *traceback.extract_tb(error.__traceback__)]
    users = [f for f in frames if not f.filename.startswith(_NOT_THE_USERS)]
    return f"{users[-1].filename}:{users[-1].lineno}: {users[-1].line}" if users else "?"


def _reason(error: Exception) -> str:
    """One line for the user."""
    if isinstance(error, DataDependentOutputException):
        return "control flow depends on the contents of a tensor"
    if isinstance(error, DynamicOutputShapeException):
        return f"a shape depends on the contents of a tensor ({error.func})"
    frames = traceback.extract_tb(error.__traceback__)
    if frames and frames[-1].filename == _AUTOCAST:  # for a device that is a value of the graph
        return AUTOCAST
    text = next(iter(str(error).strip().splitlines()), "")
    return text if isinstance(error, TraceError) else f"{type(error).__name__}: {text}"
