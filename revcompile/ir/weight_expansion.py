"""How tensors that rewiring adds or enlarges start from the original's weights."""

from __future__ import annotations

import enum

import torch


class WeightExpansion(enum.Enum):
    """How a tensor added or enlarged by rewiring starts from the original's weights."""

    TILE = "tile"
    """`[W, W]` along dim 0: both streams start equal."""
    HALVE = "halve"
    """`[W/2, W/2]` along dim 1: for two equal streams the head computes the same as for one."""
    COPY = "copy"
    """A second tensor equal to the first."""
    REVIVE_ZERO_INIT = "revive_zero_init"
    """Ones if the original is all zeros: before a ReLU, zeros would get no gradient."""


def grow(tensor: torch.Tensor, how: WeightExpansion) -> torch.Tensor:
    """The enlarged tensor that starts from an original one.

    >>> grow(torch.tensor([[2.0, 4.0]]), WeightExpansion.HALVE)
    tensor([[1., 2., 1., 2.]])
    >>> grow(torch.zeros(2), WeightExpansion.REVIVE_ZERO_INIT)
    tensor([1., 1.])
    """
    if how is WeightExpansion.COPY:
        return tensor.clone()
    if how is WeightExpansion.REVIVE_ZERO_INIT:
        return tensor.clone() if tensor.any() else torch.ones_like(tensor)
    if how is WeightExpansion.TILE:
        return torch.cat([tensor, tensor]) if tensor.dim() else tensor.clone()
    return torch.cat([tensor / 2, tensor / 2], dim=1)
