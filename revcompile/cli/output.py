"""Printing results: text, or JSON; on a terminal with a spinner until they are there."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.status import Status

_spinning: list[Status] = []


def say(text: object) -> None:
    """Write a result to stdout."""
    _stop_spinning()
    sys.stdout.write(f"{text}\n")


def say_json(value: Any) -> None:
    """Write a result as JSON; infinities and NaN, which JSON has not, become null."""
    _stop_spinning()
    sys.stdout.write(f"{json.dumps(_finite(value), indent=2)}\n")


@contextmanager
def spinner(text: str) -> Iterator[None]:
    """Show that something goes on until the first result, if stderr is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True, force_jupyter=False).status(text) as status:
        _spinning.append(status)
        try:
            yield
        finally:
            _spinning.remove(status)


def _stop_spinning() -> None:
    for status in _spinning:
        status.stop()


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
