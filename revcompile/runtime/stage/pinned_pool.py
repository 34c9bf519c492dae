"""Tensors that wait in the host's memory, copied while the device computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from revcompile.runtime.stage.buffer_pool import BufferPool


@dataclass(eq=False)
class OffloadedTensor:
    """Nested values whose tensors are in the host's memory, or on their way back from it."""

    host: Any
    back: Any = None
    event: torch.cuda.Event | None = None
    """When what is on its way has arrived."""


class PinnedPool:
    """Pinned memory that is allocated once and used again, and a stream to copy on.

    All copies are on one stream, so that memory can be given out again as soon as its tensor has
    been asked back. `waits`: the device computes on only when what was put away is here. On the
    CPU a copy is just made.

    >>> pool = PinnedPool(torch.device("cpu"))
    >>> offloaded = pool.put(torch.ones(2))
    >>> pool.take(offloaded)
    tensor([1., 1.])
    """

    def __init__(self, device: torch.device, waits: bool = False) -> None:
        self._device, self._waits = device, waits
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pool = BufferPool()

    @property
    def buffers(self) -> int:
        """How many pinned buffers have been allocated."""
        return len(self._pool)

    def put(self, values: Any) -> OffloadedTensor:
        """Have them copied; nobody waits for it."""
        with self._beside(follows=True):
            away = OffloadedTensor(pytree.tree_map_only(Tensor, self._copied, values))
        if self._waits and self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return away

    def bring(self, away: OffloadedTensor) -> None:
        """Have them copied back; nobody waits for it."""
        if away.back is not None:
            return
        with self._beside():
            away.back = pytree.tree_map_only(
                Tensor, lambda t: t.to(self._device, non_blocking=True, copy=True), away.host
            )
            away.event = self._stream.record_event() if self._stream is not None else None

    def take(self, away: OffloadedTensor) -> Any:
        """The values on the device; what the device computes next waits for them."""
        self.bring(away)
        if away.event is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(away.event)
            pytree.tree_map_only(Tensor, lambda t: t.record_stream(stream), away.back)
        return away.back

    def look(self, away: OffloadedTensor) -> Any:
        """The values in the host's memory, once they are there."""
        if self._stream is not None:
            self._stream.synchronize()
        return away.host

    def _copied(self, tensor: Tensor) -> Tensor:
        buffer = self._pool.take(
            (tensor.shape, tensor.stride(), tensor.dtype),
            lambda: torch.empty_like(
                tensor, device="cpu", pin_memory=self._stream is not None, requires_grad=False
            ),
        )
        buffer.copy_(tensor, non_blocking=True)
        if self._stream is not None and tensor.is_cuda:
            tensor.record_stream(self._stream)
        return buffer

    @contextmanager
    def _beside(self, follows: bool = False) -> Iterator[None]:
        """On the stream for copies; `follows`: after what the device has been given so far."""
        if self._stream is None:
            yield
            return
        if follows:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield
