"""How tensors that rewiring enlarges start from the original's weights."""

from __future__ import annotations

import torch

from revcompile.ir.types import Growth

__all__ = ["grow"]


def grow(tensor: torch.Tensor, how: Growth) -> torch.Tensor:
    """The enlarged tensor that starts from an original one.

    >>> grow(torch.tensor([[2.0, 4.0]]), Growth.HALVE)
    tensor([[1., 2., 1., 2.]])
    >>> grow(torch.zeros(2), Growth.WAKE)
    tensor([1., 1.])
    """
    if how is Growth.COPY:
        return tensor.clone()
    if how is Growth.WAKE:
        return tensor.clone() if tensor.any() else torch.ones_like(tensor)
    if how is Growth.TILE:
        return torch.cat([tensor, tensor]) if tensor.dim() else tensor.clone()
    return torch.cat([tensor / 2, tensor / 2], dim=1)
