"""Capture a model that is on the meta device for the arguments of a real call."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from revcompile.compiler.capture.capture import capture_for
from revcompile.compiler.capture.example import make_example
from revcompile.compiler.capture.rng import rng_kept
from revcompile.ir.types import Captured, Frontend

__all__ = ["capture_again"]


def capture_again(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    frontend: Frontend,
    leaves: Iterable[str],
    device: torch.device,
    constants: dict[str, torch.Tensor],
) -> Captured:
    """The graph of `model`, as if its parameters were on `device`.

    `leaves` are kept as single calls; tensors found on the way that are among `constants` keep
    their names.
    """
    with rng_kept(), warnings.catch_warnings(), torch.enable_grad():
        warnings.simplefilter("ignore")
        paths = frozenset(leaves)
        if frontend is Frontend.EXPORT:  # which knows no fake devices: inputs go to the model's
            args, kwargs = pytree.tree_map_only(
                torch.Tensor, lambda t: t.detach().to("meta"), (args, dict(kwargs))
            )
        example = make_example(model, args, kwargs)
        captured, _ = capture_for(frontend, model, example, paths, device, constants)
        return captured
