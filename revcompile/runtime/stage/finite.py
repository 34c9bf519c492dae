"""Are numbers finite? Asked of every gradient before it is used."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["all_finite"]


def all_finite(tensors: list[Tensor]) -> list[bool]:
    """For each tensor: are all its elements finite? Waits for the device once.

    A finite sum says so at the price of one fast pass; a sum may overflow, so others are looked
    at again. On a GPU the largest elements of all tensors are one kernel.
    """
    tensors = [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in tensors]
    if tensors[0].is_cuda:
        largest = torch._foreach_norm(tensors, float("inf"))
        return torch.isfinite(torch.stack([norm.double() for norm in largest])).tolist()
    sums = torch.isfinite(torch.stack([tensor.sum().double() for tensor in tensors])).tolist()
    return [
        fine or bool(torch.isfinite(tensor).all())
        for fine, tensor in zip(sums, tensors, strict=True)
    ]
