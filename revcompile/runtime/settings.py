"""How to train, apart from what to minimise and by which optimizer."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from revcompile.errors import InputError
from revcompile.runtime.backend import Backend
from revcompile.runtime.buffers import Buffers
from revcompile.runtime.scaling import LossScale
from revcompile.runtime.update import ParamGroups, ScheduleFactory

__all__ = ["Settings"]


@dataclass(frozen=True)
class Settings:
    """How to train: what `net.trainer(...)` takes besides optimizer and loss."""

    accumulate: int = 1
    lr_schedule: ScheduleFactory | None = None
    param_groups: ParamGroups | None = None
    autocast: torch.dtype | None = None
    clip_grad_norm: float | None = None
    seed: int = 0
    check_finite: bool = True
    measure_every: int | None = None
    backend: Backend = Backend.AUTO
    buffers: Buffers = field(default_factory=Buffers)
    loss_scale: LossScale | None = None

    def __post_init__(self) -> None:
        if self.accumulate < 1:
            raise InputError(f"accumulate={self.accumulate}; an update needs at least 1")
        if self.clip_grad_norm is not None and not self.clip_grad_norm > 0:
            raise InputError(f"clip_grad_norm={self.clip_grad_norm}; use a positive norm or None")
        if self.autocast not in (None, torch.bfloat16, torch.float16):
            raise InputError(
                f"autocast={self.autocast}; use torch.bfloat16, torch.float16 (with a scaled "
                "loss) or None"
            )
        if self.loss_scale is not None and self.loss_scale.dynamic and not self.check_finite:
            raise InputError(
                "check_finite=False: a scale that follows overflows has to look for them; leave "
                "it out, or give loss_scale= a number"
            )
