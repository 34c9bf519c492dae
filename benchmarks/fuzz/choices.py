"""Where a generator's choices come from: a seed here, Hypothesis in the tests."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol, TypeVar

__all__ = ["Choices", "Seeded"]

T = TypeVar("T")


class Choices(Protocol):
    """All that the generator asks for. Earlier options and smaller numbers are simpler."""

    def integer(self, low: int, high: int) -> int:
        """A number from `low` to `high`, both included."""
        ...

    def pick(self, options: Sequence[T]) -> T:
        """One of the options."""
        ...


class Seeded:
    """Choices of a pseudo-random generator; the same seed gives the same net everywhere."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)

    def integer(self, low: int, high: int) -> int:
        """A number from `low` to `high`, both included."""
        return self._random.randint(low, high)

    def pick(self, options: Sequence[T]) -> T:
        """One of the options."""
        return options[self._random.randrange(len(options))]
