"""Who else holds a tensor's memory: what nobody holds can be used again."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

__all__ = ["is_unshared"]


def is_unshared(tensor: Tensor) -> bool:
    """Does this tensor alone hold its memory?

    >>> room = torch.empty(4)
    >>> view = room[:2]
    >>> is_unshared(room)
    False
    >>> del view
    >>> is_unshared(room)
    True
    """
    return _holders(tensor) <= _alone()


def _holders(tensor: Tensor) -> int:
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count


@functools.cache
def _alone() -> int:
    """What the count is if nobody else holds a tensor's memory: asking may count too."""
    return _holders(torch.empty(1))
