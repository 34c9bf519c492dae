"""Activations reach the step that reads them, in whatever order two streams run."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from revcompile.runtime.executor.captured.ring_buffers import RingBuffer, RingBuffers


@dataclass
class Device:
    """Two streams whose work is done later, each in its order, in any order between them."""

    queues: tuple[deque[Any], deque[Any]] = field(default_factory=lambda: (deque(), deque()))
    current: int = 0

    def ask(self, work: Callable[[], None]) -> None:
        self.queues[self.current].append(work)

    # -- as a copy stream ---------------------------------------------------------------------

    def record_event(self) -> list[bool]:
        event: list[bool] = []
        self.ask(lambda: event.append(True))
        return event

    def wait_event(self, event: list[bool]) -> None:
        self.queues[0].append(event)

    def follow(self, event: list[bool]) -> None:
        self.queues[1].append(event)

    @contextmanager
    def active(self) -> Iterator[None]:
        self.current = 1
        yield
        self.current = 0

    # -- running ------------------------------------------------------------------------------

    def run(self, chance: random.Random, favour: float) -> None:
        """Everything, one queue ahead of the other or in turn."""
        while any(self.queues):
            ready = [q for q in self.queues if q and (callable(q[0]) or q[0])]
            assert ready, "both queues wait for each other"
            found = ready[0] if chance.random() < favour else ready[-1]
            work = found.popleft()
            if callable(work):
                work()


@dataclass
class Cell:
    """A static buffer on such a device."""

    device: Device
    content: int | None = None

    @property
    def value(self) -> Cell:
        return self

    def copy_(self, other: Cell) -> None:
        def work() -> None:
            self.content = other.content

        self.device.ask(work)


def ring_of(device: Device, count: int) -> RingBuffer:
    ring = RingBuffer(None, 0)
    ring.slots = [Cell(device) for _ in range(count)]  # type: ignore[misc]
    ring.read_slots = [Cell(device), Cell(device)]  # type: ignore[misc]
    return ring


COUNTS = {0: 1, 1: 2, 2: 3, 3: 7}


@pytest.mark.parametrize("favour", [0.0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("seed", range(5))
def test_every_step_reads_the_oldest(favour: float, seed: int) -> None:
    device = Device()
    rings = {stage: ring_of(device, count) for stage, count in COUNTS.items()}
    buffers = RingBuffers(rings, device)
    fresh = [{stage: Cell(device) for stage in rings} for _ in range(2)]
    read: dict[int, list[int | None]] = {stage: [] for stage in rings}

    def compute(entering: int, parity: int) -> None:
        for stage, ring in rings.items():
            slot: Any = ring.read_slot(parity)
            read[stage].append(slot.content)
            fresh[parity][stage].content = entering

    start, steps = 7, 12
    for again in range(2):  # the second time after everything has been handed back
        first = start + again * steps
        for ring, count in zip(rings.values(), COUNTS.values(), strict=True):
            for microbatch in range(first - count, first):
                cell: Any = ring.slot(microbatch)
                device.ask(lambda cell=cell, m=microbatch: setattr(cell, "content", m))  # type: ignore[misc]
        for entering in range(first, first + steps):
            parity = (entering - first) % 2
            buffers.before_step(entering, parity)
            device.ask(lambda e=entering, p=parity: compute(e, p))  # type: ignore[misc]
            buffers.after_step(entering, parity, fresh[parity])
        buffers.synchronize()
        left: list[int] = []
        device.ask(lambda r=rings, found=left: found.extend(_contents(r)))  # type: ignore[misc]
        device.run(random.Random(seed), favour)
        last = first + steps
        assert left == [last - count + n for count in COUNTS.values() for n in range(count)]
    for stage, count in COUNTS.items():
        assert read[stage] == list(range(start - count, start + 2 * steps - count))


def _contents(rings: dict[int, RingBuffer]) -> list[int]:
    found: list[int] = []
    for ring in rings.values():
        cells: Any = ring.slots
        found += sorted(cell.content for cell in cells)
    return found
