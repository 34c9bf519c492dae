"""Bad gradients without waiting for the device: flags that travel with what they speak of."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from revcompile.errors import NonFiniteError
from revcompile.runtime.executor.captured.static_buffers import StaticBuffers

__all__ = ["NonFiniteReports", "Statistics", "judge", "noted", "put_back", "unless"]


def judge(gradients: Sequence[Tensor], before: Tensor) -> Tensor:
    """A flag: 1 if it was so before, or if an element of the gradients is not finite.

    >>> float(judge([torch.tensor([1.0, float("inf")])], torch.zeros(1)))
    1.0
    """
    found = before.clone()
    there = [g for g in gradients if g.numel()]
    if not there:
        return found
    if there[0].is_cuda:
        one = torch.ones(1, device=found.device)
        torch._amp_foreach_non_finite_check_and_unscale_(there, found, one)
        return found
    fine = torch.stack([torch.isfinite(g).all() for g in there]).all()
    return torch.maximum(found, (~fine).to(found.dtype))


def unless(bad: Tensor, gradient: Tensor) -> Tensor:
    """The gradient, or zeros."""
    return torch.where(bad.bool(), torch.zeros_like(gradient), gradient)


def noted(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of tensors as they are."""
    box = StaticBuffers(list(tensors))
    box.fill(list(tensors))
    return box.tensors


def put_back(tensors: Sequence[Tensor], before: Sequence[Tensor], bad: Tensor) -> None:
    """Tensors as they were noted, bit for bit, if the flag says so.

    >>> weight = torch.tensor([1.0, 2.0])
    >>> before = noted([weight])
    >>> put_back([weight.fill_(torch.nan)], before, torch.ones(1))
    >>> weight
    tensor([1., 2.])
    """
    flag = bad.bool().reshape(())
    for tensor, old in zip(tensors, before, strict=True):
        now = tensor.detach()
        torch.where(flag, old, now, out=now)


class Statistics:
    """Running statistics that a bad micro-batch must not move."""

    def __init__(self, buffers: Sequence[Tensor]) -> None:
        self._kinds: dict[torch.dtype, list[Tensor]] = {}
        for buffer in buffers:
            self._kinds.setdefault(buffer.dtype, []).append(buffer)

    def noted(self) -> list[Tensor]:
        """As they are: one tensor for each type."""
        return [_flat(buffers) for buffers in self._kinds.values()]

    def settle(self, before: Sequence[Tensor], bad: Tensor) -> None:
        """Back to what was noted, if the flag says so."""
        for buffers, old in zip(self._kinds.values(), before, strict=True):
            merged = torch.where(bad.bool(), old, _flat(buffers))
            parts = merged.split([buffer.numel() for buffer in buffers])
            shaped = [part.view(buffer.shape) for part, buffer in zip(parts, buffers, strict=True)]
            # As quietly as batch norm writes them: graphs that hold them may be in flight.
            torch._foreach_copy_([buffer.data for buffer in buffers], shaped)


def _flat(buffers: Sequence[Tensor]) -> Tensor:
    return torch.cat([buffer.reshape(-1) for buffer in buffers])


class NonFiniteReports:
    """Flags on their way from the device, and what they say once they have arrived."""

    def __init__(self, rounds: int = 8) -> None:
        self._rounds = rounds
        self._waiting: deque[tuple[Tensor, torch.cuda.Event | None, Mapping[int, int]]] = deque()
        self._spare: list[tuple[Tensor, torch.cuda.Event | None]] = []
        self._told: set[int] = set()

    def note(self, flags: Tensor, microbatches: Mapping[int, int]) -> None:
        """One flag for each stage, in order of the mapping from stages to micro-batches."""
        host, event = self._spare.pop() if self._spare else self._made(flags)
        host.copy_(flags, non_blocking=True)
        if event is not None:
            event.record()
        self._waiting.append((host, event, microbatches))

    def arrived(self, everything: bool = False) -> list[NonFiniteError]:
        """What has become known since; nobody waits, unless for everything or for too much."""
        found = []
        while self._waiting:
            host, event, microbatches = self._waiting[0]
            if event is not None and not event.query():
                if not everything and len(self._waiting) < self._rounds:
                    break
                event.synchronize()
            self._waiting.popleft()
            found += self._read(host.tolist(), microbatches)
            self._spare.append((host, event))
        return found

    def _made(self, flags: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        if not flags.is_cuda:
            return torch.empty_like(flags), None
        return torch.empty(flags.shape, dtype=flags.dtype, pin_memory=True), torch.cuda.Event()

    def _read(self, flags: list[float], microbatches: Mapping[int, int]) -> list[NonFiniteError]:
        """One error for each bad micro-batch: from where it was seen first."""
        found = []
        judged = list(zip(microbatches.items(), flags, strict=True))
        for (stage, microbatch), bad in reversed(judged):
            if bad and microbatch not in self._told:
                self._told.add(microbatch)
                found.append(_error(stage, microbatch))
        oldest = min(microbatches.values(), default=0)
        self._told = {microbatch for microbatch in self._told if microbatch >= oldest}
        return found


def _error(stage: int, microbatch: int) -> NonFiniteError:
    return NonFiniteError(
        f"stage {stage}, micro-batch {microbatch}: the loss or the gradient of a parameter is not "
        "finite. The micro-batch was left out of the updates of this stage and of those before "
        "it, and moved no running statistics; lower the learning rate, clip gradients, or look at "
        "this batch (backend='eager' says at once, and which parameter)",
        stage=stage,
        microbatch=microbatch,
    )
