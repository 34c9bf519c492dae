"""Several streams: forward passes on one, backward passes and updates beside them on others.

In a full pipeline the forward and the backward pass of a stage belong to different micro-batches,
and so do the backward passes of different stages. A stage's backward pass waits for its own
forward pass only, whose weights it is going to change. The last stage, where both belong to the
same micro-batch, stays on the first stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["Lanes"]


class Lanes:
    """The streams of a round and what waits for what."""

    def __init__(self, device: torch.device, last: int, width: int = 2) -> None:
        self._last = last
        self._beside = [torch.cuda.Stream(device) for _ in range(width)]
        self._updates = torch.cuda.Stream(device)
        self._forward: dict[int, torch.cuda.Event] = {}
        self._backward: dict[int, torch.cuda.Event] = {}
        self._used: set[torch.cuda.Stream] = set()
        self._held: list[Tensor] = []

    def forwarded(self, stage: int) -> None:
        """A stage's forward pass has been asked for."""
        self._forward[stage] = torch.cuda.current_stream().record_event()

    @contextmanager
    def backward(self, stage: int) -> Iterator[None]:
        """Where a stage's backward pass runs."""
        if stage == self._last:
            yield
            return
        stream = self._beside[stage % len(self._beside)]
        stream.wait_event(self._forward[stage])
        self._used.add(stream)
        with torch.cuda.stream(stream):
            yield
        self._backward[stage] = stream.record_event()

    @contextmanager
    def sending(self, stage: int) -> Iterator[None]:
        """Where a stage sends: once those who may still read what it overwrites are done.

        What it sends may lie where it came from (a coupling hands one stream on as it is), so it
        reads its own mail until it has sent.
        """
        stream = torch.cuda.current_stream()
        if stage != self._last:
            stream = self._beside[stage % len(self._beside)]
        for reader in (stage - 2, stage - 1):
            if reader in self._backward:
                stream.wait_event(self._backward[reader])
        with torch.cuda.stream(stream):
            yield
        if stage != self._last:
            self._backward[stage] = stream.record_event()

    @contextmanager
    def updating(self, stage: int, used: Iterable[Tensor]) -> Iterator[None]:
        """Where a stage's update runs; `used` are tensors of its backward pass that it reads."""
        if stage == self._last:
            yield
            return
        # Memory that is given back is used again by whoever had it, which here is another stream.
        self._held += used
        self._updates.wait_event(self._backward[stage])
        self._used.add(self._updates)
        with torch.cuda.stream(self._updates):
            yield

    def join(self) -> None:
        """All that comes after waits for everything.

        A stream that had nothing to do (in a round without updates) is none of the recording's.
        """
        for stream in self._used:
            torch.cuda.current_stream().wait_stream(stream)
        self.forget()

    def forget(self) -> None:
        """The round is over, or was broken off."""
        self._used.clear()
        self._forward.clear()
        self._backward.clear()
        self._held.clear()
