"""Buffers that are used again once nothing refers to their memory any more."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Hashable
from typing import Final

import torch
from torch import Tensor

_MOST_LOOKED_AT: Final = 8
"""Whoever keeps thousands of buffers does not want to wait until all have been looked at."""


class BufferPool:
    """Gives out buffers, and gives one out again when the caller's tensors are all gone.

    Nobody hands a buffer back. The pool gives out views, and counts the references to the storage:

        pool -> buffer -> storage <- view <- caller        two references or more: in use
        pool -> buffer -> storage                          one reference: free

    >>> pool = BufferPool()
    >>> first = pool.take("row", lambda: torch.empty(4))
    >>> part = first[:2]
    >>> del first
    >>> second = pool.take("row", lambda: torch.empty(4))
    >>> second.data_ptr() == part.data_ptr()
    False
    >>> address = part.data_ptr()
    >>> del part
    >>> pool.take("row", lambda: torch.empty(4)).data_ptr() == address
    True

    Args:
        limit: How many buffers of a kind are remembered; None for all of them.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.allocations = 0
        """How often a buffer had to be allocated."""
        self._limit = limit
        self._buffers: dict[Hashable, deque[Tensor]] = {}
        """Those that were given out or looked at longest ago come first."""

    def __len__(self) -> int:
        return sum(map(len, self._buffers.values()))

    def take(self, kind: Hashable, allocate: Callable[[], Tensor]) -> Tensor:
        """A view of a free buffer of this kind; without one, of what `allocate` returns."""
        buffers = self._buffers.setdefault(kind, deque(maxlen=self._limit))
        for _ in range(min(len(buffers), _MOST_LOOKED_AT)):
            buffers.rotate(-1)
            if _is_free(buffer := buffers[-1]):
                break
        else:
            buffer = allocate()
            self.allocations += 1
            buffers.append(buffer)
        return buffer.view_as(buffer)

    def clear(self) -> None:
        """Forget all buffers; those in use live on with their users."""
        self._buffers.clear()


def _is_free(buffer: Tensor) -> bool:
    return _references(buffer) <= _references_of_unshared()


def _references(tensor: Tensor) -> int:
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count


@functools.cache
def _references_of_unshared() -> int:
    """The count for a tensor that alone holds its memory: reading it may add a reference."""
    return _references(torch.empty(1))
