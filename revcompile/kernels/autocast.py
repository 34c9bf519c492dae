"""Mixed precision: the low-precision dtypes, and whether autocast is on."""

from __future__ import annotations

import functools
from typing import Final

import torch

__all__ = ["LOW_PRECISION", "is_autocasting"]

LOW_PRECISION: Final = (torch.float16, torch.bfloat16)
"""Dtypes in which sums of many blocks lose too many digits for a residual stream."""


def is_autocasting(device: torch.device) -> bool:
    """Is autocast enabled for a device? Never for one that has no autocast, like meta."""
    kind = device.type
    return _has_autocast(kind) and torch.is_autocast_enabled(kind)


_has_autocast = functools.cache(torch.amp.is_autocast_available)
