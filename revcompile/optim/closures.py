"""The optional argument of every `Optimizer.step`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """What a closure that computes loss and gradients returns; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
