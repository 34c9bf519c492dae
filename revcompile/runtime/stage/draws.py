"""Random numbers of a stage: are those of a backward pass the ones of the forward pass?"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Final

import torch

from revcompile.ir.coupling_ops import current_seeder, seed_of, seeding
from revcompile.ir.program import StageProgram
from revcompile.runtime.reversible.replay import (
    DrawCheck,
    RandomStates,
    default_generators,
    is_capturing,
    random_states,
)

_NOTHING: Final = nullcontext()
_StatesLeft = dict[int, RandomStates]
"""In which each piece has left the generators, by its place in the stage."""


class StageDraws:
    """Compares the random states that pieces leave behind in forward and in backward.

    A piece seeds the default generators, which other threads use, too. The generators of captured
    steps are known to nobody else: passes that are replayed need no check.
    """

    def __init__(self, program: StageProgram) -> None:
        pieces = [piece for unit in program.units for piece in unit.pieces]
        self._checks = [DrawCheck(f"stage {program.index}, {piece.name}") for piece in pieces]
        self.is_random = any(unit.random for unit in program.units)
        self._in_flight: dict[int, _StatesLeft] = {}
        """Of forward passes, by micro-batch."""

    def forward(self, microbatch: int, device: torch.device) -> AbstractContextManager[Any]:
        """Around the forward pass of a micro-batch."""
        if not self.is_random or is_capturing(device):
            return _NOTHING
        left = self._in_flight[microbatch] = {}
        return _Recording(device, left)

    def backward(
        self, microbatch: int, key: int, device: torch.device
    ) -> AbstractContextManager[Any]:
        """Around its backward pass; at its end a `ModifiedError`, if that drew other numbers."""
        left = self._in_flight.get(microbatch)
        # The oldest comes first. Older ones were differentiated by steps that were replayed.
        self._in_flight = {m: states for m, states in self._in_flight.items() if m > microbatch}
        if left is None or is_capturing(device):
            return _NOTHING
        return _Recording(device, {}, partial(self._compare, key, device, left))

    def _compare(
        self, key: int, device: torch.device, first: _StatesLeft, second: _StatesLeft
    ) -> None:
        for place, states in second.items():

            def seeded(place: int = place) -> RandomStates:
                generators = (torch.Generator(g.device) for g in default_generators(device))
                return random_states(g.manual_seed(seed_of(key, place)) for g in generators)

            self._checks[place].compare(seeded, first[place], states)

    def clear(self) -> None:
        self._in_flight.clear()


class _Recording(AbstractContextManager[None]):
    """Records the states before each further piece seeds the generators, and at the end.

    Not a generator: every pass of a stage that may draw enters one.
    """

    def __init__(
        self,
        device: torch.device,
        left: _StatesLeft,
        then: Callable[[_StatesLeft], None] | None = None,
    ) -> None:
        self._generators, self._left, self._then = default_generators(device), left, then
        self._place: int | None = None
        self._seed, self._seeding = current_seeder(), seeding(self._reseed)

    def _reseed(self, key: int, place: int) -> None:
        self._end_piece()
        self._place = place
        self._seed(key, place)

    def _end_piece(self) -> None:
        if self._place is not None:
            self._left[self._place] = random_states(self._generators)

    def __enter__(self) -> None:
        self._seeding.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._seeding.__exit__(*error)
        if error[0] is None:
            self._end_piece()
            if self._then is not None:
                self._then(self._left)
