"""Which slots a captured step writes to and reads from: numbers on the device.

The addresses in a CUDA graph are fixed, the slots of its micro-batches are not. So kernels read the
numbers of slots in rings, which the host writes before each step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor

from revcompile.runtime.executor.executor import StageExecutor
from revcompile.runtime.executor.messages import Route, Transport
from revcompile.runtime.stage.slots import Ring
from revcompile.schedule import Schedule


class SlotNumbers:
    """Those of the rings of stages, and of messages on some routes."""

    def __init__(
        self, executors: Sequence[StageExecutor], transport: Transport, device: torch.device
    ) -> None:
        self._executors, self._transport, self._device = executors, transport, device
        self.clear()

    def clear(self) -> None:
        """Let go of all slots."""
        self._slots: list[Any] = []
        self._rings: list[tuple[Ring, Route | None, int]] = []
        """Each with its route, if it has one, and its stage."""
        self._numbers = torch.empty(0, 2, device=self._device)
        """For each ring where a step writes, and where it reads; the last is for `row`."""

    def _present(self) -> list[Any]:
        rings = (executor.stage.ring for executor in self._executors)
        return [*rings, *(each.slots for each in self._transport.slots.values())]

    def have_changed(self) -> bool:
        """Whether other slots were made since `follow_slots`."""
        slots = self._present()
        return len(slots) != len(self._slots) or not all(map(is_, slots, self._slots))

    def follow_slots(self) -> None:
        """Take over the slots there are."""
        found = [
            *((executor.stage.ring, None, executor.index) for executor in self._executors),
            *((each.ring, route, route[1]) for route, each in self._transport.slots.items()),
        ]
        self._slots = self._present()
        self._rings = [(ring, route, stage) for ring, route, stage in found if ring is not None]
        numbers = torch.zeros(len(self._rings) + 1, 2, dtype=torch.int64)
        self._numbers = numbers.to(self._device)

    def set(self, schedule: Schedule, due: Mapping[int, int], row: int) -> None:
        """Before a step.

        Args:
            due: By stage, the micro-batch of its backward pass.
            row: See there.
        """
        updates, places = schedule.updates, []
        for ring, route, stage in self._rings:
            new, old = schedule.injected, due[stage]
            if route is not None:
                new, old = updates[route[0]], updates[route[1]]
            places.append((new % ring.count, old % ring.count))
        places.append((row, 0))
        self._numbers.copy_(torch.tensor(places), non_blocking=True)

    @property
    def row(self) -> Tensor:
        """In which row a step writes its flags."""
        return self._numbers[-1, :1]

    def begin_step(self) -> None:
        """Have rings read their numbers on the device."""
        for (ring, *_), (new, old) in zip(self._rings, self._numbers, strict=False):
            ring.ends = new.reshape(1), old.reshape(1)

    def end_step(self) -> None:
        for ring, *_ in self._rings:
            ring.ends = None
