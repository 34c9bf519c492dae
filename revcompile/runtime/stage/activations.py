"""What a stage stores of a micro-batch until backward, and checks of what backward computes again.

Inputs that backward recomputes from are stored unchanged, or rounded to fewer bits; backward then
computes with the rounded values. The last stage, and methods with one micro-batch in the pipeline
at a time, store inputs unchanged: no other micro-batch passes while one is in flight.

Pieces seed the default generators, which other threads use, too: `StageDraws` compares the states
after each piece. `StreamSamples` is the reconstruction check of chains, for stages. A stage that
rebuilds with other weights than the forward pass had (in PETRA, weights a few updates newer) must
rebuild other values. So a micro-batch is compared only if this stage and all later ones rebuild it
with the weights of its forward pass: always with stashed weights; with the latest weights before
the first update, in the last stage, and where gradients are not late.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from revcompile.errors import InputError
from revcompile.ir.coupling_ops import current_seeder, seed_of, seeding
from revcompile.ir.precision_rewrites import declared_wide
from revcompile.ir.program import StageProgram
from revcompile.kernels.autocast import in_dtype
from revcompile.runtime.reversible.bindings import HookTables
from revcompile.runtime.reversible.reconstruction import (
    ReconstructionCheck,
    StartedCheck,
    Tolerance,
    samples_of,
)
from revcompile.runtime.reversible.replay import (
    BufferSnapshot,
    DrawCheck,
    RandomStates,
    default_generators,
    is_capturing,
    random_states,
)
from revcompile.runtime.stage.saved_tensors import Graph
from revcompile.runtime.stage.slots import Ring
from revcompile.runtime.stage.weights import Used
from revcompile.schedule import Keep, Order

# -- random numbers -------------------------------------------------------------------------------

_StatesLeft = dict[int, RandomStates]
"""The states of the generators after each piece, by the piece's place in the stage."""


class StageDraws:
    """Compares the generator states after each piece in forward with those in backward.

    Captured steps have their own generators, which no other thread uses, and need no check.
    """

    def __init__(self, program: StageProgram) -> None:
        pieces = [piece for unit in program.units for piece in unit.pieces]
        self._checks = [DrawCheck(f"stage {program.index}, {piece.name}") for piece in pieces]
        self.is_random = any(unit.random for unit in program.units)
        self._in_flight: dict[int, _StatesLeft] = {}
        """The states of forward passes, by micro-batch."""

    def forward(self, microbatch: int, device: torch.device) -> AbstractContextManager[Any]:
        """Around the forward pass of a micro-batch."""
        if not self.is_random or is_capturing(device):
            return nullcontext()
        left = self._in_flight[microbatch] = {}
        return _recorded(device, left)

    @contextmanager
    def backward(self, microbatch: int, key: int, device: torch.device) -> Iterator[None]:
        """Around its backward pass; raises `ModifiedError` at the end if it drew other numbers."""
        first, second = self._in_flight.get(microbatch), _StatesLeft()
        # Backward takes the oldest first; older entries were differentiated by replayed steps.
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
    """Record the generator states at the end of each piece: before the next one seeds them."""
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


class StreamSamples(ReconstructionCheck):
    """Samples the streams that enter a stage's couplings, in forward and as backward rebuilds them.

    Args:
        stage: Its number.
        tolerance: The largest relative error allowed.
    """

    def __init__(self, stage: int, tolerance: Tolerance) -> None:
        # Backward waits for the device at every micro-batch in any case.
        super().__init__(f"stage {stage}", tolerance, wait_every=1)
        self._sampled: dict[str, Tensor] | None = None

    def take(self, name: str, stream: Tensor) -> None:
        """Called by a program for each such stream."""
        if self._sampled is not None:
            self._sampled[name] = samples_of(stream)

    @contextmanager
    def collecting(self, is_compared: bool = True) -> Iterator[dict[str, Tensor]]:
        """Collect, if `is_compared`, what the program inside samples, by the stream's name."""
        sampled: dict[str, Tensor] = {}
        self._sampled = sampled if is_compared else None
        try:
            yield sampled
        finally:
            self._sampled = None


# -- what is stored -------------------------------------------------------------------------------


_UNKNOWN: Final = Used()
BUFFER_DTYPES: Final = (torch.bfloat16, torch.float16)


def buffer_bytes(dtype: torch.dtype | None) -> int | None:
    """Bytes per element of a float32 input that is stored in `dtype`; None: unchanged.

    >>> buffer_bytes(torch.bfloat16)
    2
    """
    if dtype not in (None, *BUFFER_DTYPES):
        raise InputError(
            f"kept_input_dtype={dtype!r}; use torch.bfloat16, torch.float16 or None (as they are)"
        )
    return None if dtype is None else dtype.itemsize


@dataclass
class InFlight:
    """What a stage stores of one micro-batch between its forward and its backward pass."""

    kept: tuple[Any, ...]
    """Values that the backward program takes, as `ActivationStore` stores them.

    With `SavedTensors`: None in place of values with a graph, then the tensors the graph saved."""
    graph: Graph | None = None
    """With `SavedTensors`: all kept values, with their own graph or that of a captured step."""
    used: Used = _UNKNOWN
    """The weights of its forward pass."""
    buffers: list[BufferSnapshot] = field(default_factory=list)
    parameter_versions: tuple[int, ...] = ()
    """Autograd versions of the parameters that its graph has saved by reference."""
    samples: StartedCheck | None = None
    """Samples of the streams that entered its couplings, to check their reconstruction."""
    hooks: HookTables = ()
    """Hooks that backward runs again."""
    ring: Ring | None = None
    """The ring whose slot holds the kept values, if they are in a slot."""


class ActivationStore:
    """Stores and loads what one stage keeps of the micro-batches in flight.

    Args:
        dtype: The dtype in which float32 inputs are stored; None: unchanged.
    """

    def __init__(self, program: StageProgram, dtype: torch.dtype | None) -> None:
        self.dtype, self._kept = dtype, program.kept
        self.low = _inputs_kept(program) if dtype is not None else frozenset()
        """Inputs that are rounded; a fused program takes them as they are stored."""
        self.sent = self.low & frozenset(program.sends_back)
        """Rounded inputs that are sent to the stage before; every program takes these as stored."""

    def store(self, kept: tuple[Any, ...]) -> tuple[Any, ...]:
        """The values that a forward pass keeps, rounded as configured."""
        return self._converted(kept, self.low, torch.float32, self.dtype)

    def load(self, kept: tuple[Any, ...], as_stored: bool = False) -> tuple[Any, ...]:
        """Stored values as the generated backward program takes them; `as_stored`: a fused one."""
        widened = frozenset() if as_stored else self.low - self.sent
        return self._converted(kept, widened, self.dtype, torch.float32)

    def state(self, kept: tuple[Any, ...]) -> list[Any]:
        """Stored values, rounded ones in float32: a trainer with another dtype can `store` them."""
        return list(self._converted(kept, self.low, self.dtype, torch.float32))

    def _converted(
        self,
        kept: tuple[Any, ...],
        names: frozenset[str],
        source: torch.dtype | None,
        target: torch.dtype | None,
    ) -> tuple[Any, ...]:
        """Kept values, with tensors in `names` converted from `source` to `target`."""
        if not names or target is None:
            return kept
        # Tensors of one element stay unchanged: a grid must be exact.
        return tuple(
            in_dtype(v, target)
            if name in names and isinstance(v, Tensor) and v.dtype == source and v.numel() > 1
            else v
            for name, v in zip(self._kept, kept, strict=True)
        )


def _inputs_kept(program: StageProgram) -> frozenset[str]:
    """Float32 inputs that backward recomputes from, in flight while other micro-batches pass."""
    if program.is_last or program.method.order is Order.LOCKED:
        return frozenset()
    read = (name for unit in program.units if unit.keep is Keep.INPUT for name in unit.inputs)
    return frozenset(read) & frozenset(program.kept) & declared_wide(program)
