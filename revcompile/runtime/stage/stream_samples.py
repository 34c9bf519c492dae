"""Does a stage rebuild the streams that entered its couplings? The chains' check, for stages.

A stage that rebuilds with other weights than those of the forward pass (PETRA's own, a few updates
later) rebuilds something else, as it must. So a micro-batch is compared where all stages behind it,
and this one, have rebuilt it with the weights that forward had: with stashed weights always, with
the latest ones before the first update, in the last stage, and where nothing is late.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from revcompile.runtime.reversible.reconstruction import ReconstructionCheck, Tolerance, samples_of

StartedCheck = tuple[bool, dict[str, Tensor]]
"""Is backward to wait for the device? And what was sampled in forward, by the stream's name."""


class StreamSamples:
    """Samples the streams that enter a stage's couplings, in forward and as backward rebuilds them.

    Args:
        stage: Its number.
        tolerance: The largest relative error allowed.
        waits: Does backward wait for the device at every micro-batch in any case?
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
