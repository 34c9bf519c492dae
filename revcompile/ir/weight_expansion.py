"""How tensors that rewiring enlarges start from the original's weights."""

from __future__ import annotations

import torch

from revcompile.ir.types import WeightExpansion

__all__ = ["grow"]


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
