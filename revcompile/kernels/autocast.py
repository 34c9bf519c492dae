"""Mixed precision: dtypes that are low and wide, whether autocast is on, conversions of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

MIN_ELEMENTS: Final = 2**20
"""Our kernels are not used on fewer: launching one would take longer than running it."""
LOW_PRECISION: Final = (torch.float16, torch.bfloat16)
"""Dtypes in which sums of many blocks lose too many digits for a residual stream."""
# Evaluated once: torch.compile before 2.15 cannot trace `is_autocast_available`.
WITH_AUTOCAST: Final = frozenset(
    kind
    for kind in ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "xla")
    if torch.amp.is_autocast_available(kind)
)
"""Types of devices that have autocast."""


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Float32 in place of a dtype of low precision: for streams and sums."""
    return torch.float32 if dtype in LOW_PRECISION else dtype


def widest_dtype(device: torch.device) -> torch.dtype:
    """The widest floating-point dtype of a device: float64, if it has that.

    >>> widest_dtype(torch.device("cpu")), widest_dtype(torch.device("mps"))
    (torch.float64, torch.float32)
    """
    return torch.float32 if device.type == "mps" else torch.float64


def is_autocasting(device: torch.device) -> bool:
    """Whether autocast is on for a device; False for devices without autocast, like meta."""
    kind = device.type
    return kind in WITH_AUTOCAST and torch.is_autocast_enabled(kind)


def converted(tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """Copies of tensors in other dtypes, made together: a few kernels on a GPU for any number.

    For tensors without a graph, or under `no_grad`.

    >>> [t.dtype for t in converted([torch.ones(2), torch.ones(3)], [torch.half, torch.double])]
    [torch.float16, torch.float64]
    """
    pairs = zip(tensors, dtypes, strict=True)
    copies = [torch.empty_like(t, dtype=dtype, requires_grad=False) for t, dtype in pairs]
    if copies:
        torch._foreach_copy_(copies, list(tensors))
    return copies


def with_copy(value: Tensor, copy: Tensor) -> Tensor:
    """Attach to a value its copy in another dtype, for `in_dtype`; returns the value.

    The copy lives as long as the value, and is valid until the value is written to.
    """
    setattr(value, _COPY, (copy, value._version))
    return value


def in_dtype(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The value in another dtype: its attached copy, or a new one.

    >>> x = with_copy(torch.ones(2), torch.ones(2, dtype=torch.half))
    >>> in_dtype(x, torch.half) is in_dtype(x, torch.half)
    True
    >>> in_dtype(x.zero_(), torch.half)
    tensor([0., 0.], dtype=torch.float16)
    """
    copy, version = getattr(value, _COPY, (value, 0))
    is_valid = copy.dtype == dtype and version == value._version and not value.requires_grad
    return copy if is_valid else value.to(dtype)


_COPY: Final = "_revcompile_copy"
