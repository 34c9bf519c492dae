"""What subcommands print."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

__all__ = ["say", "say_json"]


def say(text: object) -> None:
    """A result, to stdout."""
    sys.stdout.write(f"{text}\n")


def say_json(value: Any) -> None:
    """A result for programs. JSON has no infinity: null stands for it."""
    say(json.dumps(_finite(value), indent=2))


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list | tuple) else value
