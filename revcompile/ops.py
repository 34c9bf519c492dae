"""The few functions generated graphs call besides torch's own, and what reads such graphs."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "as_read",
    "attribute",
    "batch_norm",
    "device_of",
    "fuse_mean",
    "is_autocasting",
    "matching",
    "select",
    "shape",
    "statistics_frozen",
    "with_item",
]


def select(training: bool, train: Any, evaluation: Any) -> Any:
    """The value of a constant that depends on the mode.

    >>> select(True, 0.1, 0.0)
    0.1
    """
    return train if training else evaluation


def shape(*dims: int) -> torch.Size:
    """A shape from its numbers."""
    return torch.Size(dims)


def with_item(tensor: Tensor, index: Any, value: Any) -> Tensor:
    """`tensor[index] = value`, out of place."""
    result = tensor.clone()
    result[index] = value
    return result


def fuse_mean(a: Tensor, b: Tensor) -> Tensor:
    """One value from two streams: their mean, so that two equal streams give what one gave."""
    return torch.lerp(a, b, 0.5) if a.is_floating_point() else (a + b) // 2


def attribute(root: Any, path: str) -> Any:
    """The value at a dotted path: what a `get_attr` node reads.

    >>> attribute(torch.nn.Sequential(torch.nn.Linear(2, 3)), "0.bias").shape
    torch.Size([3])
    """
    return functools.reduce(getattr, path.split("."), root)


def is_autocasting(device: torch.device) -> bool:
    """Is autocast on for a device (never for one that has no autocast, like meta)?"""
    kind = device.type
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def as_read(x: Tensor) -> Tensor:
    """A value as autocast would give it to the layers that read it."""
    if x.dtype != torch.float32 or not is_autocasting(x.device):
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


def matching(source: Any, like: Any) -> Any:
    """A tensor in the floating-point type of another, under autocast; else as it is."""
    if not isinstance(source, Tensor) or not isinstance(like, Tensor) or source.dtype == like.dtype:
        return source
    both = source.is_floating_point() and like.is_floating_point()
    return source.to(like.dtype) if both and is_autocasting(like.device) else source


def device_of(tensor: Tensor) -> torch.device:
    """Where a tensor lives: exported graphs ask at run time instead of remembering."""
    return tensor.device


statistics_frozen = False
"""True while a branch is recomputed: functional batch norms then leave their statistics alone."""


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    count: Tensor | None = None,
) -> Tensor:
    """Batch normalisation whose running statistics stand still during a recomputation."""
    if training and statistics_frozen:
        mean = var = None
    elif training and count is not None:
        count.add_(1)
    return torch.nn.functional.batch_norm(x, mean, var, weight, bias, training, momentum, eps)
