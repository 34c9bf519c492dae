"""Replicas of the pipeline: a stage's gradients are averaged over its replicas at every update.

Each stage has a communicator and a thread of its own: the stages of one rank update in an order
that depends on timing, and must not wait for each other's replicas. A stage's all-reduce overlaps
with the work of the rank's other stages and of neighbouring ranks, which have their messages
already. Its own next micro-batch waits, because it needs the updated weights, as in one process.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

from revcompile.kernels.autocast import wide_dtype
from revcompile.runtime.distributed.failures import Worker
from revcompile.runtime.distributed.layout import Ranks, new_group


def open_replica_groups(ranks: Ranks, backend: str, timeout: timedelta) -> dict[int, Any]:
    """A process group for the replicas of each stage; returns those of this rank's stages."""
    groups = {}
    for stage in range(len(ranks.layout.stage_to_rank)):
        members = [ranks.layout.rank(stage, r) for r in range(ranks.layout.replicas)]
        group = new_group(members, backend, timeout)
        if ranks.rank in members:
            groups[stage] = group
    return groups


class ReplicaAverage:
    """Averages one stage's gradients (and running statistics) over its replicas.

    Everything is summed in static buffers, one for each dtype. `presence` comes first: the number
    of micro-batches, and for each parameter whether this replica has a gradient of it.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        statistics: Sequence[Tensor],
        group: Any,
        on_done: Callable[[], None],
        on_failure: Callable[[str], object],
        collective: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._parameters = {n: p for n, p in parameters.items() if p.requires_grad}
        self._statistics = [s for s in statistics if s.is_floating_point()]
        self._group, self._on_done = group, on_done
        self._collective = collective
        summed = [*self._parameters.values(), *self._statistics]
        device = summed[0].device if summed else torch.device("cpu")
        presence = torch.zeros(1 + len(self._parameters), dtype=torch.float64, device=device)
        self._buffers, (self._presence, *views) = _buffers([presence, *summed])
        self._sums = dict(zip(self._parameters, views, strict=False))
        self._statistic_sums = views[len(self._sums) :]
        self._jobs: queue.SimpleQueue[tuple[Any] | None] = queue.SimpleQueue()
        self.is_reduced = False
        """Whether the sums of all replicas are known."""
        self._thread = Worker(self._run, on_failure)

    def fill(self, gradients: Mapping[str, Tensor], count: Tensor) -> None:
        """Take over sums over `count` micro-batches here."""
        self._presence.copy_((count > 0).expand_as(self._presence))
        self._presence[0].copy_(count)
        for row, (name, total) in enumerate(self._sums.items(), 1):
            if name in gradients:
                total.copy_(gradients[name])
            else:  # nothing differentiates it
                self._presence[row].zero_()
                total.zero_()
        for statistic, total in zip(self._statistics, self._statistic_sums, strict=True):
            total.copy_(statistic.detach())

    def start(self) -> None:
        """Have the thread add up what all replicas have."""
        on_gpu = self._presence.is_cuda
        self._jobs.put((torch.cuda.current_stream().record_event() if on_gpu else None,))

    def reduce(self) -> None:
        """Add up what all replicas have."""
        with self._collective():
            self._all_reduce()

    def read(self, gradients: dict[str, Tensor], adds: bool) -> Tensor:
        """Write the means to `gradients`; how many micro-batches all replicas have had.

        Args:
            adds: Also those that only other replicas have; waits for the device.
        """
        self.is_reduced = False
        replicas = distributed.get_world_size(self._group)
        for statistic, total in zip(self._statistics, self._statistic_sums, strict=True):
            statistic.data.copy_(total.div_(replicas))
        presence = self._presence[1:].tolist() if adds else ()
        for name, is_present in zip(self._sums, presence, strict=False):
            if is_present and name not in gradients:
                gradients[name] = torch.empty_like(self._parameters[name].detach())
        count = self._presence[0]
        for name, gradient in gradients.items():
            gradient.copy_(self._sums[name].div_(count.clamp(min=1)))
        return count

    def close(self, timeout: float) -> bool:
        """End the thread; False if it does not end in time."""
        self._jobs.put(None)
        return self._thread.join(timeout)

    def _all_reduce(self) -> None:
        for buffer in self._buffers:
            distributed.all_reduce(buffer, group=self._group)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            (event,) = job
            if event is not None:
                event.synchronize()
            self._all_reduce()
            if event is not None:
                torch.cuda.current_stream(self._presence.device).synchronize()
            self.is_reduced = True
            self._on_done()


def _buffers(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """A buffer for each dtype, and a view into them for each tensor.

    Low precision is summed as float32.
    """
    dtypes = [wide_dtype(t.dtype) for t in tensors]
    sizes = dict.fromkeys(dtypes, 0)
    starts = []
    for tensor, dtype in zip(tensors, dtypes, strict=True):
        starts.append(sizes[dtype])
        sizes[dtype] += tensor.numel()
    buffers = {
        dtype: torch.zeros(size, dtype=dtype, device=tensors[0].device)
        for dtype, size in sizes.items()
    }
    views = [
        buffers[dtype][start : start + tensor.numel()].view(tensor.shape)
        for tensor, dtype, start in zip(tensors, dtypes, starts, strict=True)
    ]
    return list(buffers.values()), views
