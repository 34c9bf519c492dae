"""Who is to blame when tracing stops: the module, the line of the user's code, and why."""

from __future__ import annotations

import inspect
import sys
import traceback
from pathlib import Path
from types import FrameType
from typing import Final

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx.proxy import TraceError

__all__ = ["Refused", "Unrecorded", "Untraceable", "blame", "user_line"]

_NOT_THE_USERS: Final = (torch.__path__[0], str(Path(__file__).parent), "<")
"""How the paths of files begin that no user wrote."""


class Untraceable(Exception):
    """Tracing stopped; `path` is the innermost module whose forward was running."""

    def __init__(self, path: str, cause: str, source: str) -> None:
        super().__init__(f"{path or '(top level)'}: {cause} [{source}]")
        self.path = path
        self.cause = cause
        self.source = source


class Unrecorded(TraceError):
    """A forward pass did something that leaves no trace in the graph."""

    def __init__(self, text: str, module: nn.Module) -> None:
        super().__init__(text)
        self.module = module


class Refused(Unrecorded):
    """Not even keeping the module as one piece would help."""


def blame(path: str, error: Exception) -> Untraceable:
    """Put what went wrong in the module at `path` into words."""
    return Untraceable(path, _reason(error), _source(error))


def user_line() -> str:
    """`file:line` of the innermost frame in a file that a user wrote."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_NOT_THE_USERS):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


def _source(error: Exception) -> str:
    """`file:line: code` of the user's code that failed."""
    if isinstance(error, Unrecorded):
        code = inspect.unwrap(type(error.module).forward).__code__
        return f"{code.co_filename}:{code.co_firstlineno}: {type(error.module).__name__}.forward"
    frames = [*traceback.extract_stack(), *traceback.extract_tb(error.__traceback__)]
    mine = [f for f in frames if not f.filename.startswith(_NOT_THE_USERS)]
    return f"{mine[-1].filename}:{mine[-1].lineno}: {mine[-1].line}" if mine else "?"


def _reason(error: Exception) -> str:
    """One line of plain words."""
    if isinstance(error, DataDependentOutputException):
        return "control flow depends on the contents of a tensor"
    if isinstance(error, DynamicOutputShapeException):
        return f"a shape depends on the contents of a tensor ({error.func})"
    text = next(iter(str(error).strip().splitlines()), "")
    return text if isinstance(error, TraceError) else f"{type(error).__name__}: {text}"
