"""Looking at a model in the middle of training, which goes on as if nobody had."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from revcompile.tree import device_of_model

__all__ = ["evaluating"]


@contextmanager
def evaluating(model: nn.Module, autocast: torch.dtype | None) -> Iterator[None]:
    """Eval mode, no gradients; modes and random generators are put back afterwards."""
    modes = {module: module.training for module in model.modules()}
    device = device_of_model(model)
    model.eval()
    try:
        with (
            torch.random.fork_rng([device] if device.type == "cuda" else []),
            torch.no_grad(),
            torch.autocast(device.type, autocast, enabled=autocast is not None),
        ):
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
