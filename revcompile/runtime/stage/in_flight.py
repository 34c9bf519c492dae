"""What a stage stores of a micro-batch between its forward and its backward pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from torch import Tensor

from revcompile.runtime.reversible.hooks import HookRecord
from revcompile.runtime.reversible.replay import BufferSnapshot
from revcompile.runtime.stage.pass_weights import Used
from revcompile.runtime.stage.stream_samples import StartedCheck

_UNKNOWN: Final = Used()


@dataclass
class InFlight:
    """What a stage stores of one micro-batch between its forward and its backward pass."""

    kept: tuple[Any, ...]
    """Values that the backward program takes, as `ActivationStore` stores them."""
    used: Used = _UNKNOWN
    """The weights of its forward pass."""
    buffers: list[BufferSnapshot] = field(default_factory=list)
    versions: tuple[int, ...] = ()
    """Autograd versions of `kept`, to notice in-place writes."""
    original: Mapping[str, Tensor] = field(default_factory=dict)
    """The stage's inputs, if the error of rebuilding them is to be measured."""
    parameter_versions: tuple[int, ...] = ()
    """Autograd versions of the parameters that its graph has saved by reference."""
    samples: StartedCheck | None = None
    """Of the streams that entered its couplings, where their reconstruction can be checked."""
    hooks: HookRecord | None = field(default_factory=dict)
    """Hooks that backward runs again; None, from a checkpoint: those that the layers have then."""
