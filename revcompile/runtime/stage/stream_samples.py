"""Does a stage rebuild the streams that entered its couplings? The chains' check, for stages.

A stage that rebuilds with other weights than those of the forward pass (PETRA's own, a few updates
later) rebuilds something else, as it must. So a micro-batch is compared where all stages behind it,
and this one, have rebuilt it with the weights that forward had: with stashed weights always, with
the latest ones before the first update, in the last stage, and where nothing is late.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, fx

from revcompile.ir.program import StageProgram
from revcompile.ir.python_code import copied
from revcompile.ir.types import LIVE_VALUES, Coupling
from revcompile.runtime.reversible.reconstruction import ReconstructionCheck, Tolerance, samples_of
from revcompile.schedule import Keep

StartedCheck = tuple[bool, dict[str, Tensor]]
"""Is backward to wait for the device? And what was sampled in forward, by the stream's name."""


class StreamSamples:
    """Samples the streams that enter a stage's couplings, in forward and as backward rebuilds them.

    Args:
        program: The stage's.
        tolerance: The largest relative error allowed; None: nothing is compared.
        waits: Does backward wait for the device at every micro-batch in any case?
    """

    def __init__(self, program: StageProgram, tolerance: Tolerance, waits: bool) -> None:
        self._names = frozenset(_entering(program)) if tolerance is not None else frozenset()
        self._check = ReconstructionCheck(
            f"stage {program.index}", tolerance, wait_every=1 if waits else 50
        )
        self._sampled: dict[str, Tensor] | None = None

    @property
    def is_on(self) -> bool:
        return bool(self._names)

    def watched(self, graph: fx.Graph) -> fx.Graph:
        """A copy of the forward or backward program that hands such streams to this object."""
        if not self.is_on:
            return graph
        copy = copied(graph)
        for node in tuple(copy.nodes):
            for name in node.meta.get(LIVE_VALUES, ()):
                if name in self._names:
                    following = node.next
                    while following.op == "placeholder":
                        following = following.next
                    with copy.inserting_before(following):
                        copy.call_function(self._sample, (name, node))
        return copy

    def _sample(self, name: str, stream: Tensor) -> None:
        if self._sampled is not None:
            self._sampled[name] = samples_of(stream)

    @contextmanager
    def collecting(self, is_compared: bool = True) -> Iterator[dict[str, Tensor]]:
        """What the program that runs inside samples, by the stream's name; or nothing."""
        sampled: dict[str, Tensor] = {}
        self._sampled = sampled if self.is_on and is_compared else None
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


def _entering(program: StageProgram) -> Iterator[str]:
    """The streams that enter the first coupling of each row of couplings that are rebuilt."""
    before = False
    for unit in program.units:
        first, is_rebuilt = unit.pieces[0], unit.keep is Keep.NOTHING and not unit.is_frozen
        if is_rebuilt and not before and isinstance(first, Coupling):
            yield from first.streams_in
        before = is_rebuilt
