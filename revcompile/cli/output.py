"""Printing results: text, or JSON."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

__all__ = ["say", "say_json"]


def say(text: object) -> None:
    """Write a result to stdout."""
    sys.stdout.write(f"{text}\n")


def say_json(value: Any) -> None:
    """Write a result as JSON; infinities and NaN, which JSON has not, become null."""
    say(json.dumps(_finite(value), indent=2))


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
