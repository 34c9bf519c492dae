"""How tensors lie in memory. Kernels round by it, so a copy that is to give the same lies alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["TreeCopy", "clone_preserving_strides", "clone_tree", "detach_tree", "overlaps"]

TreeCopy = Callable[[Any], Any]
"""How a `state_dict` copies nested values: `clone_tree`, or `detach_tree` to share memory."""


def clone_preserving_strides(tensor: Tensor) -> Tensor:
    """A copy with the same strides, gaps included.

    >>> half = torch.zeros(2, 6)[:, :3]
    >>> half.clone().stride(), clone_preserving_strides(half).stride()
    ((3, 1), (6, 1))
    """
    plain = tensor.detach()
    if plain.layout is not torch.strided or overlaps(plain):
        return plain.clone()
    room = torch.empty_strided(plain.shape, plain.stride(), dtype=plain.dtype, device=plain.device)
    return room.copy_(plain)


def overlaps(tensor: Tensor) -> bool:
    """Do elements share memory, as those of an expanded tensor do?

    >>> overlaps(torch.zeros(1, 3).expand(2, 3)), overlaps(torch.zeros(4, 6)[:, ::2])
    (True, False)
    """
    reach = 1  # strides, from the smallest on, leave room for what is within
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride < reach:
            return True
        reach += stride * (size - 1)
    return False


def clone_tree(tree: Any) -> Any:
    """Nested values with a clone of every tensor, strides included."""
    return pytree.tree_map_only(Tensor, clone_preserving_strides, tree)


def detach_tree(tree: Any) -> Any:
    """Nested values that share memory with the originals: to be read before training goes on."""
    return pytree.tree_map_only(Tensor, lambda t: t.detach(), tree)
