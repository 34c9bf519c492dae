"""What a command answers, as text or as JSON."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Answer:
    """The result of a command: text to read, the same as plain values, and the exit code."""

    text: object
    facts: dict[str, Any]
    code: int = 0

    @property
    def json(self) -> str:
        """Infinities and NaN, which JSON has not, are null."""
        return json.dumps(_finite(self.facts), indent=2)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
