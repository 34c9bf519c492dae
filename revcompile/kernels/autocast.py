"""Precisions: dtypes that are low and wide, whether autocast is on, conversion of many tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

LOW_PRECISION: Final = (torch.float16, torch.bfloat16)
"""Dtypes in which sums of many blocks lose too many digits for a residual stream."""


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Float32 in place of a dtype of low precision: for streams and sums."""
    return torch.float32 if dtype in LOW_PRECISION else dtype


def widest_dtype(device: torch.device) -> torch.dtype:
    """Of floating-point numbers on a device: float64, where it has that.

    >>> widest_dtype(torch.device("cpu")), widest_dtype(torch.device("mps"))
    (torch.float64, torch.float32)
    """
    return torch.float32 if device.type == "mps" else torch.float64


def is_autocasting(device: torch.device) -> bool:
    """Is autocast enabled for a device? Never for one that has no autocast, like meta."""
    kind = device.type
    return kind in _WITH_AUTOCAST and torch.is_autocast_enabled(kind)


def converted(tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """Copies of tensors in other dtypes, made together: few kernels on a GPU, however many.

    For values without a graph, or under `no_grad`.

    >>> [t.dtype for t in converted([torch.ones(2), torch.ones(3)], [torch.half, torch.double])]
    [torch.float16, torch.float64]
    """
    pairs = zip(tensors, dtypes, strict=True)
    copies = [torch.empty_like(t, dtype=dtype, requires_grad=False) for t, dtype in pairs]
    if copies:
        torch._foreach_copy_(copies, list(tensors))
    return copies


# Asked once: torch.compile before 2.15 cannot trace the question.
_WITH_AUTOCAST: Final = frozenset(
    kind
    for kind in ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "xla")
    if torch.amp.is_autocast_available(kind)
)
