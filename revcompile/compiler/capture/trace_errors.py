"""Why tracing stopped: the module, the line of the user's code, and the reason in words."""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
import os
import sys
import traceback
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx.proxy import TraceError

_TORCH: Final = torch.__path__[0] + os.sep  # with a separator: not torchvision
_TRACERS: Final = (str(Path(__file__).parent), str(Path(_TORCH, "fx")))
_GENERATED: Final = ("<frozen", "<string>", "<eval_with_key>", "<attrs", "<__array_function__")
_NOT_THE_USERS: Final = (_TORCH, str(Path(__file__).parents[2]) + os.sep, *_GENERATED)
"""Path prefixes of files that no user wrote; users write `<stdin>` and `<ipython-input-…>`."""


_ENDS: Final = ("POP_TOP", "POP_JUMP", "JUMP", "RAISE", "RETURN", "STORE", "YIELD", "FOR_ITER")
"""Instructions that use a result, or drop it."""

AUTOCAST: Final = "an autocast region, which no graph can hold"
_AUTOCAST: Final = str(Path(_TORCH, "amp", "autocast_mode.py"))


class Untraceable(Exception):
    """Tracing stopped.

    Attributes:
        path: the innermost module whose forward was running.
        cause: the reason, one line.
        source: `file:line` of the user's code.
        error: what the forward raised, if it did.
    """

    def __init__(self, path: str, cause: str, source: str, error: Exception | None = None) -> None:
        super().__init__(f"{path or '(top level)'}: {cause} [{source}]")
        self.path, self.cause, self.source, self.error = path, cause, source, error


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
    """A forward pass changes an attribute that is no buffer, and so the result of its next call."""


class Rejected(UntracedEffect):
    """An effect that is wrong even inside a leaf module."""


class DrawsElsewhere(Rejected):
    """A generator of Python or NumPy has changed."""


def describe_failure(path: str, error: Exception) -> Untraceable:
    """Describe an error that was raised in the module at `path`."""
    return Untraceable(path, _reason(error), _source(error), error)


def is_torch_code() -> bool:
    """Whether torch's code called the tracer, not the user's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_TRACERS):
        frame = frame.f_back
    return frame.f_code.co_filename.startswith(_TORCH)


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
    """Whether the user's code is in a call whose result is dropped, or in a `raise` or `assert`.

    Text made there goes into a message and decides nothing.
    """
    frame = _user_frame()
    for code in () if frame is None else dis.get_instructions(frame.f_code):
        if code.offset > frame.f_lasti and code.opname.startswith(_ENDS):  # type: ignore[union-attr]
            return code.opname in ("POP_TOP", "RAISE_VARARGS")
    return True


def compares_types_by_identity() -> bool:
    """Whether the user's function has an `is` comparison with anything but a constant.

    A proxy of a dtype or layout is never the object that it represents.
    """
    frame = _user_frame()
    return frame is not None and _compares_by_identity(frame.f_code)


@functools.lru_cache(maxsize=1024)
def _compares_by_identity(code: CodeType) -> bool:
    steps = [*dis.get_instructions(code)]
    return any(
        step.opname == "IS_OP" and before.opname != "LOAD_CONST"
        for before, step in itertools.pairwise(steps)
    )


def _source(error: Exception) -> str:
    """`file:line: code` of the user's code that failed."""
    if isinstance(error, UntracedEffect):
        code = inspect.unwrap(type(error.module).forward).__code__
        return f"{code.co_filename}:{code.co_firstlineno}: {type(error.module).__name__}.forward"
    frames = [*traceback.extract_stack(), *traceback.extract_tb(error.__traceback__)]
    users = [f for f in frames if not f.filename.startswith(_NOT_THE_USERS)]
    return f"{users[-1].filename}:{users[-1].lineno}: {users[-1].line}" if users else "?"


def _reason(error: Exception) -> str:
    """The reason for an error, in one line for the user."""
    if isinstance(error, DataDependentOutputException):
        return "control flow depends on the contents of a tensor"
    if isinstance(error, DynamicOutputShapeException):
        return f"a shape depends on the contents of a tensor ({error.func})"
    frames = traceback.extract_tb(error.__traceback__)
    if frames and frames[-1].filename == _AUTOCAST:  # autocast(a value of the graph)
        return AUTOCAST
    text = next(iter(str(error).strip().splitlines()), "")
    return text if isinstance(error, TraceError) else f"{type(error).__name__}: {text}"
