"""Mixed precision: the low-precision dtypes, and whether autocast is on."""

from __future__ import annotations

from typing import Final

import torch

__all__ = ["LOW_PRECISION", "is_autocasting"]

LOW_PRECISION: Final = (torch.float16, torch.bfloat16)
"""Dtypes in which sums of many blocks lose too many digits for a residual stream."""


def is_autocasting(device: torch.device) -> bool:
    """Is autocast enabled for a device? Never for one that has no autocast, like meta."""
    kind = device.type
    return kind in _WITH_AUTOCAST and torch.is_autocast_enabled(kind)


# Asked once: torch.compile before 2.15 cannot trace the question.
_WITH_AUTOCAST: Final = frozenset(
    kind
    for kind in ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "xla")
    if torch.amp.is_autocast_available(kind)
)
