"""Calls that a trace does not see: reads of torch's flags, random numbers of Python and NumPy.

The profile function of a thread sees every call of a C function, and replaces nothing. It takes as
long as tracing itself. Flags are therefore collected while the check runs the model. Draws are
looked for only if the state of a generator has changed, which may be due to another thread.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

import torch
from torch import nn

from revcompile.compiler.capture.isolation import foreign_rng_state
from revcompile.compiler.capture.leaf_modules import is_leaf
from revcompile.compiler.capture.trace_errors import is_users_file
from revcompile.ir.guards import FLAGS

_FLAGS: Final = {id(getattr(torch, name)): name for name in FLAGS}
_CALL: Final = nn.Module._call_impl.__code__


@contextmanager
def flag_reads(model: nn.Module) -> Iterator[dict[str, set[str]]]:
    """Collect the names of flags by the path of the module whose forward pass reads them.

    Layers are left out: graphs call them as they are, and they read flags at each call.
    """
    paths = {id(module): path for path, module in model.named_modules()}
    found: dict[str, set[str]] = {}

    def note(frame: FrameType, called: Any) -> None:
        if id(called) in _FLAGS and is_users_file(frame):
            module = _running(frame)
            if module is not None and not is_leaf(module):
                found.setdefault(paths.get(id(module), ""), set()).add(_FLAGS[id(called)])

    with _watch_calls(note):
        yield found


@contextmanager
def foreign_draws() -> Iterator[Callable[[], bool]]:
    """Yields a function: whether this thread has since drawn from Python's or NumPy's generators.

    Calls of NumPy's functions are not seen: code that names them counts as drawing.
    """
    numpy, own, start = sys.modules.get("numpy"), random.random.__self__, foreign_rng_state()  # type: ignore[attr-defined]
    found: list[Any] = []

    def names_numpy(frame: FrameType) -> bool:
        values = [frame.f_globals.get(name) for name in frame.f_code.co_names]
        owners = [getattr(value, "__self__", None) for value in values]
        is_named = numpy in values and "random" in frame.f_code.co_names
        return is_named or numpy.random in values or numpy.random.rand.__self__ in owners  # type: ignore[union-attr]

    def note(frame: FrameType, called: Any) -> None:
        if called is None:
            if numpy and is_users_file(frame) and names_numpy(frame):
                found.append(frame.f_code)
        elif getattr(called, "__self__", None) is own and "state" not in called.__name__:
            found.append(called)

    def has_drawn() -> bool:
        is_alone = threading.active_count() == 1
        return bool(found) or (is_alone and foreign_rng_state() != start)

    with _watch_calls(note):
        yield has_drawn


@contextmanager
def _watch_calls(note: Callable[[FrameType, Any], None]) -> Iterator[None]:
    """Pass each call of this thread to `note`: the frame of a Python function, and None; or the
    frame that calls a C function, and the function.

    Does nothing if a profiler is active that could not be restored.
    """
    before: Any = sys.getprofile()
    if before is not None and not callable(before):
        yield
        return

    def profile(frame: FrameType, event: str, called: Any) -> None:
        if before is not None:
            before(frame, event, called)
        if event in ("call", "c_call"):
            note(frame, called)

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(before)


def _running(frame: FrameType | None) -> nn.Module | None:
    """The innermost module whose forward pass is running."""
    while frame is not None and frame.f_code is not _CALL:
        frame = frame.f_back
    return None if frame is None else frame.f_locals["self"]
