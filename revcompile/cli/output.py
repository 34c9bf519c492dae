"""What a command answers, as text or as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Answer:
    """The result of a command: text to read, the same as plain values, and the exit code."""

    text: object
    facts: dict[str, Any]
    code: int = 0
