"""Mixed precision: which types are low, and is autocast on."""

from __future__ import annotations

from typing import Final

import torch

__all__ = ["LOW_PRECISION", "is_autocasting"]

LOW_PRECISION: Final = (torch.float16, torch.bfloat16)
"""Types in which residual streams would drift."""


def is_autocasting(device: torch.device) -> bool:
    """Is autocast on for a device (never for one that has no autocast, like meta)?"""
    kind = device.type
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
