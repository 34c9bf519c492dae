"""Copies of the pipeline: a stage's gradients are averaged over its copies at every update.

Each stage has a communicator and a thread of its own: stages of one rank update in an order that
depends on who answers first, and must not wait for each other's copies. A stage's all-reduce runs
beside the work of the rank's other stages and of its neighbours, who have their messages already.
Its own next micro-batch waits: it is to be computed with the updated weights, as in one process.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

from revcompile.kernels.autocast import LOW_PRECISION
from revcompile.runtime.distributed.liveness import told
from revcompile.runtime.distributed.process_groups import Ranks, new_group

__all__ = ["Copies", "open_copies"]


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
    """One stage's part in the averaging over its copies.

    Everything is added up in buffers that are made once, one for each type of number.
    """

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
        summed = [*self._parameters.values(), *self._statistics]
        device = summed[0].device if summed else torch.device("cpu")
        there = torch.zeros(1 + len(self._parameters), dtype=torch.float64, device=device)
        self._buffers, (self._there, *views) = _buffers([there, *summed])
        self._sums = dict(zip(self._parameters, views, strict=False))
        self._statistic_sums = views[len(self._sums) :]
        self._jobs: queue.SimpleQueue[tuple[Any] | None] = queue.SimpleQueue()
        self._asked = False
        self._answered = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def mean(self, gradients: dict[str, Tensor], count: int) -> dict[str, Tensor] | None:
        """The mean over the micro-batches of all copies, once all of them have asked.

        It is written over the sums that were given.
        """
        if not self._asked:
            self._asked = True
            self._fill(gradients, count)
            on_gpu = self._there.is_cuda
            self._jobs.put((torch.cuda.current_stream().record_event() if on_gpu else None,))
        if not self._answered.is_set():
            return None
        self._answered.clear()
        self._asked = False
        return self._read(gradients)

    def close(self, timeout: float) -> bool:
        """No more; False if the thread does not come back."""
        self._jobs.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _fill(self, gradients: Mapping[str, Tensor], count: int) -> None:
        """What is added up: how many and who is there, gradients, statistics."""
        there = [float(count), *(float(name in gradients) for name in self._sums)]
        self._there.copy_(torch.tensor(there, dtype=torch.float64))
        for name, total in self._sums.items():
            if name in gradients:
                total.copy_(gradients[name])
            else:
                total.zero_()
        for statistic, total in zip(self._statistics, self._statistic_sums, strict=True):
            total.copy_(statistic.detach())

    def _read(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        count, *there = self._there.tolist()
        copies = distributed.get_world_size(self._group)
        for statistic, total in zip(self._statistics, self._statistic_sums, strict=True):
            statistic.data.copy_(total.div_(copies))
        for (name, total), is_there in zip(self._sums.items(), there, strict=True):
            if is_there and name not in gradients:
                gradients[name] = torch.empty_like(self._parameters[name].detach())
            if is_there:
                gradients[name].copy_(total.div_(count))
        return gradients

    def _run(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                (event,) = job
                if event is not None:
                    event.synchronize()
                for buffer in self._buffers:
                    distributed.all_reduce(buffer, group=self._group)
                if event is not None:
                    torch.cuda.current_stream(self._there.device).synchronize()
                self._answered.set()
                self._done()
        except Exception as error:
            self._failed(told(error))


def _buffers(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """A buffer for each type of number, and in them a place for each tensor.

    Numbers of low precision are added up as float32.
    """
    wide = [torch.float32 if t.dtype in LOW_PRECISION else t.dtype for t in tensors]
    sizes = dict.fromkeys(wide, 0)
    starts = []
    for tensor, kind in zip(tensors, wide, strict=True):
        starts.append(sizes[kind])
        sizes[kind] += tensor.numel()
    buffers = {
        kind: torch.zeros(size, dtype=kind, device=tensors[0].device)
        for kind, size in sizes.items()
    }
    views = [
        buffers[kind][start : start + tensor.numel()].view(tensor.shape)
        for tensor, kind, start in zip(tensors, wide, starts, strict=True)
    ]
    return list(buffers.values()), views
