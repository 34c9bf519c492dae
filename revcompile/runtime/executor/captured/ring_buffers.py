"""Static buffers for what outlives a step by more than one: activations and stashed weights.

A stage that keeps the inputs of n micro-batches in flight has n slots. Each step reads the oldest
micro-batch and writes the newest over it, so the slot moves on from step to step. A captured step
cannot follow: its addresses are fixed. It reads a copy in a read slot, and leaves what is new at
one place; copies between steps connect both to the slots:

    slots       | m-3 | m-2 | m-1 |       m, which enters with the step, takes the slot of m-3
                   |  ^
         prefetch  |  |  store
                   v  |
                | m-3 | m |               read slot, and what the step leaves of m
                   |    ^
                   v    |
                captured step
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from revcompile.runtime.executor.captured.static_buffers import StaticBuffers
from revcompile.runtime.executor.captured.streams import CopyStream
from revcompile.runtime.stage.weights import detached_copies

__all__ = ["RingBuffer", "RingBuffers", "WeightStash", "updates_since_forward"]


class RingBuffer:
    """What one stage keeps of its micro-batches in flight.

    Args:
        like: What it keeps of one micro-batch.
        count: How many micro-batches are in flight.
        read_slots: With two, one can be filled while a step reads the other.
    """

    def __init__(self, like: Any, count: int, read_slots: int = 1) -> None:
        self.slots = [StaticBuffers(like) for _ in range(count)]
        self.read_slots = [StaticBuffers(like) for _ in range(read_slots)]

    def slot(self, microbatch: int) -> StaticBuffers:
        """Where a micro-batch is kept."""
        return self.slots[microbatch % len(self.slots)]

    def read_slot(self, parity: int) -> StaticBuffers:
        """Where a step of this parity reads."""
        return self.read_slots[parity % len(self.read_slots)]

    def oldest(self, entering: int) -> int:
        """The micro-batch read by the step in which micro-batch `entering` enters."""
        return entering - len(self.slots)

    def prefetch(self, entering: int, parity: int) -> None:
        """Copy to the read slot what the step of micro-batch `entering` reads."""
        self.read_slot(parity).copy_(self.slot(self.oldest(entering)))


class RingBuffers:
    """The ring buffers of all stages, and the copies between two steps.

    With a `copy_stream` the copies run beside the steps: during step e the read slots of step e + 1
    are filled, and what step e - 1 has left is stored. Consecutive steps then have to use different
    read slots and leave what is new at different places: their parity is 0 and 1 in turn.
    """

    def __init__(
        self, rings: Mapping[int, RingBuffer], copy_stream: CopyStream | None = None
    ) -> None:
        self._rings, self._stream = rings, copy_stream
        self._prefetched: Any = None
        """The event after which the next step's read slots are filled."""
        self._finished: Any = None
        """The event after which all copies so far are done."""

    def before_step(self, entering: int, parity: int, all_stored: bool = False) -> None:
        """Fill the read slots of a step, or have the step wait until they are filled.

        Args:
            all_stored: Have it wait also until what the last step has left is stored, because this
                step may write there.
        """
        if self._stream is not None and self._prefetched is not None:
            self._stream.wait_event(self._finished if all_stored else self._prefetched)
            self._prefetched = None
            return
        for ring in self._rings.values():
            ring.prefetch(entering, parity)
        if self._stream is not None:
            self._stream.follow(self._stream.record_event())

    def after_step(self, entering: int, parity: int, fresh: Mapping[int, Any]) -> None:
        """Store what a step has left of the newest micro-batch, and prefetch for the next step."""
        rings, stream = self._rings, self._stream
        if stream is None:
            self._store(entering, fresh)
            return
        step_done = stream.record_event()
        with stream.active():
            # These read slots belong to the other parity, whose last step is over: no need to wait
            # for this step. Only a ring of one slot needs what this step has just computed.
            for ring in rings.values():
                if ring.oldest(entering + 1) < entering:
                    ring.prefetch(entering + 1, 1 - parity)
            stream.follow(step_done)
            for stage, ring in rings.items():
                if ring.oldest(entering + 1) == entering:
                    ring.read_slot(1 - parity).copy_(fresh[stage])
            self._prefetched = stream.record_event()
            self._store(entering, fresh)
            self._finished = stream.record_event()

    def synchronize(self) -> None:
        """Have the current stream wait until everything is in the slots."""
        if self._stream is not None and self._finished is not None:
            self._stream.wait_event(self._finished)
        self._prefetched = self._finished = None

    def _store(self, entering: int, fresh: Mapping[int, Any]) -> None:
        for stage, activations in fresh.items():
            self._rings[stage].slot(entering).copy_(activations)


# -- stashed weights -------------------------------------------------------------------------------


class WeightStash:
    """A stage's weights of one update ago, of two, and so on, in static buffers.

    `stash[n]` are the weights of n updates ago; None for n = 0, where they are the parameters.
    Setting `stash[n]` copies weights in.
    """

    def __init__(self, parameters: Mapping[str, Tensor], count: int) -> None:
        self._parameters = parameters
        self._past = [detached_copies(parameters) for _ in range(count)]

    def __getitem__(self, updates: int) -> dict[str, Tensor] | None:
        return self._past[updates - 1] if updates else None

    def __setitem__(self, updates: int, weights: Mapping[str, Tensor]) -> None:
        if updates:
            _copy_weights(weights, self._past[updates - 1])

    def clone(self, updates: int) -> dict[str, Tensor]:
        """A copy of the weights of some updates ago, at least one."""
        return detached_copies(self._past[updates - 1])

    def shift(self) -> None:
        """Before an update: all weights, the parameters too, become one update older."""
        newer = [*reversed(self._past[:-1]), self._parameters]
        for old, new in zip(reversed(self._past), newer, strict=True):
            _copy_weights(new, old)


def _copy_weights(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    if target:
        names = list(target)
        targets = [target[name].detach() for name in names]
        torch._foreach_copy_(targets, [source[name].detach() for name in names])


def updates_since_forward(microbatch: int, entering: int, accumulated: int, accumulate: int) -> int:
    """A stage's updates since its forward pass of a micro-batch, once the pipeline is full.

    Args:
        entering: The micro-batch that enters with the step to come.
        accumulated: Micro-batches in the stage's gradient since its last update.
        accumulate: Micro-batches of one update.

    >>> [updates_since_forward(microbatch, 7, 0, accumulate=1) for microbatch in (4, 5, 6, 7)]
    [3, 2, 1, 0]
    >>> [updates_since_forward(microbatch, 7, 1, accumulate=2) for microbatch in (4, 5, 6, 7)]
    [1, 1, 0, 0]
    """
    return max(0, (entering - 1 - accumulated - microbatch) // accumulate + 1)
