"""Copies of the pipeline: a stage's gradients are averaged over its copies at every update.

Each stage has a communicator and a thread of its own: stages of one rank update in an order that
depends on who answers first, and must not wait for each other's copies.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
from torch import Tensor, distributed

from revcompile.runtime.distributed.alarm import told
from revcompile.runtime.distributed.start import Ranks, new_group
from revcompile.tree import LOW_PRECISION

__all__ = ["Copies", "open_copies"]

_CONTIGUOUS: Final = torch.contiguous_format


def open_copies(ranks: Ranks, backend: str, timeout: timedelta) -> dict[int, Any]:
    """A communicator for the copies of each stage; returns those of this rank's stages."""
    found = {}
    for stage in range(len(ranks.layout.places)):
        members = [ranks.layout.rank(stage, r) for r in range(ranks.layout.replicas)]
        group = new_group(members, backend, timeout)
        if ranks.rank in members:
            found[stage] = group
    return found


class Copies:
    """One stage's part in the averaging over its copies."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        statistics: Sequence[Tensor],
        group: Any,
        done: Callable[[], None],
        failed: Callable[[str], None],
    ) -> None:
        self._parameters = {n: p for n, p in parameters.items() if p.requires_grad}
        self._statistics = [s for s in statistics if s.is_floating_point()]
        self._group, self._done, self._failed = group, done, failed
        self._jobs: queue.SimpleQueue[tuple[list[Tensor], Any] | None] = queue.SimpleQueue()
        self._asked = False
        self._answer: list[Tensor] | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def mean(self, gradients: Mapping[str, Tensor], count: int) -> dict[str, Tensor] | None:
        """The mean over the micro-batches of all copies, once all of them have asked."""
        if not self._asked:
            self._asked, sums = True, self._sums(gradients, count)
            event = torch.cuda.current_stream().record_event() if sums[0].is_cuda else None
            self._jobs.put((sums, event))
        if self._answer is None:
            return None
        answer, self._answer, self._asked = self._answer, None, False
        return self._read(answer)

    def close(self, timeout: float) -> bool:
        """No more; False if the thread does not come back."""
        self._jobs.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _sums(self, gradients: Mapping[str, Tensor], count: int) -> list[Tensor]:
        """What is added up: who is there and how many, gradients, statistics."""
        there = [count, *(name in gradients for name in self._parameters)]
        device = next((p.device for p in self._parameters.values()), torch.device("cpu"))
        counts = torch.tensor(there, dtype=torch.float64, device=device)
        found = []
        for name, parameter in self._parameters.items():
            gradient = gradients.get(name, torch.zeros_like(parameter))
            low = gradient.dtype in LOW_PRECISION
            found.append(gradient.float() if low else gradient.clone(memory_format=_CONTIGUOUS))
        return [counts, *found, *(s.detach().clone() for s in self._statistics)]

    def _read(self, sums: list[Tensor]) -> dict[str, Tensor]:
        counts = sums[0].tolist()
        end = 1 + len(self._parameters)
        copies = distributed.get_world_size(self._group)
        for statistic, total in zip(self._statistics, sums[end:], strict=True):
            statistic.data.copy_(total / copies)
        return {
            name: (total / counts[0]).to(parameter.dtype)
            for (name, parameter), total, there in zip(
                self._parameters.items(), sums[1:end], counts[1:], strict=True
            )
            if there
        }

    def _run(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                sums, event = job
                if event is not None:
                    event.synchronize()
                for work in [
                    distributed.all_reduce(t, group=self._group, async_op=True) for t in sums
                ]:
                    work.wait()
                if event is not None:
                    torch.cuda.current_stream(sums[0].device).synchronize()
                self._answer = sums
                self._done()
        except Exception as error:
            self._failed(told(error))
