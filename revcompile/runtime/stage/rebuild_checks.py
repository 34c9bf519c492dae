"""Checks that what a stage computes again is what the forward pass had.

A piece seeds the default generators, which other threads use, too: `StageDraws` compares the states
that pieces leave behind. `StreamSamples` is the chains' reconstruction check, for stages.

A stage that rebuilds with other weights than those of the forward pass (PETRA's own, a few updates
later) rebuilds something else, as it must. So a micro-batch is compared where all stages behind it,
and this one, have rebuilt it with the weights that forward had: with stashed weights always, with
the latest ones before the first update, in the last stage, and where nothing is late.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from revcompile.ir.coupling_ops import current_seeder, seed_of, seeding
from revcompile.ir.program import StageProgram
from revcompile.runtime.reversible.reconstruction import ReconstructionCheck, Tolerance, samples_of
from revcompile.runtime.reversible.replay import (
    DrawCheck,
    RandomStates,
    default_generators,
    is_capturing,
    random_states,
)

# -- random numbers -------------------------------------------------------------------------------

_StatesLeft = dict[int, RandomStates]
"""In which each piece has left the generators, by its place in the stage."""


class StageDraws:
    """Compares the random states that pieces leave behind in forward and in backward.

    The generators of captured steps are known to nobody else: passes that are replayed need no
    check.
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
            return nullcontext()
        left = self._in_flight[microbatch] = {}
        return _recorded(device, left)

    @contextmanager
    def backward(self, microbatch: int, key: int, device: torch.device) -> Iterator[None]:
        """Around its backward pass; at its end a `ModifiedError`, if that drew other numbers."""
        first, second = self._in_flight.get(microbatch), _StatesLeft()
        # The oldest comes first. Older ones were differentiated by steps that were replayed.
        self._in_flight = {m: states for m, states in self._in_flight.items() if m > microbatch}
        if first is None or is_capturing(device):
            yield
            return
        with _recorded(device, second):
            yield
        for place, states in second.items():

            def seeded(place: int = place) -> RandomStates:
                generators = (torch.Generator(g.device) for g in default_generators(device))
                return random_states(g.manual_seed(seed_of(key, place)) for g in generators)

            self._checks[place].compare(seeded, first[place], states)

    def clear(self) -> None:
        self._in_flight.clear()


@contextmanager
def _recorded(device: torch.device, left: _StatesLeft) -> Iterator[None]:
    """Record the states before each further piece seeds the generators, and at the end."""
    generators, seed = default_generators(device), current_seeder()
    latest: int | None = None

    def end_piece() -> None:
        if latest is not None:
            left[latest] = random_states(generators)

    def reseed(key: int, place: int) -> None:
        nonlocal latest
        end_piece()
        latest = place
        seed(key, place)

    with seeding(reseed):
        yield
    end_piece()


# -- streams --------------------------------------------------------------------------------------

StartedCheck = tuple[bool, dict[str, Tensor]]
"""Whether backward waits for the device; what was sampled in forward, by the stream's name."""


class StreamSamples:
    """Samples the streams that enter a stage's couplings, in forward and as backward rebuilds them.

    Args:
        stage: Its number.
        tolerance: The largest relative error allowed.
        waits: Whether backward waits for the device at every micro-batch in any case.
    """

    def __init__(self, stage: int, tolerance: Tolerance, waits: bool) -> None:
        self._check = ReconstructionCheck(
            f"stage {stage}", tolerance, wait_every=1 if waits else 50
        )
        self._sampled: dict[str, Tensor] | None = None

    def take(self, name: str, stream: Tensor) -> None:
        """Called by a program for each such stream."""
        if self._sampled is not None:
            self._sampled[name] = samples_of(stream)

    @contextmanager
    def collecting(self, is_compared: bool = True) -> Iterator[dict[str, Tensor]]:
        """What the program that runs inside samples, by the stream's name; or nothing."""
        sampled: dict[str, Tensor] = {}
        self._sampled = sampled if is_compared else None
        try:
            yield sampled
        finally:
            self._sampled = None

    def start(self, sampled: dict[str, Tensor]) -> StartedCheck | None:
        """In forward, with what was sampled there."""
        if not sampled:
            return None
        waits, copies = self._check.start(*sampled.values())
        return waits, dict(zip(sampled, copies, strict=True))

    def finish(self, started: StartedCheck | None, sampled: dict[str, Tensor]) -> None:
        """In backward, with what was sampled there.

        Raises:
            InversionError: A stream was rebuilt wrongly.
        """
        if started is None:
            return
        waits, expected = started
        names = [name for name in expected if name in sampled]
        if names:
            rebuilt = [sampled[name] for name in names]
            self._check.finish((waits, tuple(expected[name] for name in names)), *rebuilt)
