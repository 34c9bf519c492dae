"""What to train, and how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from revcompile.arguments import number, whole_number
from revcompile.errors import InputError
from revcompile.ir.program import Partition, StageProgram
from revcompile.runtime.executor.captured import Backend
from revcompile.runtime.reversible.module import Reversible
from revcompile.runtime.stage.activations import Buffers
from revcompile.runtime.stage.loss_head import Loss
from revcompile.runtime.stage.loss_scale import LossScale
from revcompile.runtime.stage.module_guards import TreeGuard
from revcompile.runtime.stage.update import OptimizerFactory, ParamGroups, ScheduleFactory
from revcompile.units import is_int


@dataclass(frozen=True)
class Settings:
    """How to train: what `net.trainer(...)` takes besides optimizer and loss."""

    accumulate: int = 1
    synchronous: int = 0
    lr_schedule: ScheduleFactory | None = None
    param_groups: ParamGroups | None = None
    autocast: torch.dtype | None = None
    clip_grad_norm: float | None = None
    seed: int = 0
    check_finite: bool = True
    measure_every: int | None = None
    backend: Backend = Backend.AUTO
    buffers: Buffers = field(default_factory=Buffers)
    messages: torch.dtype | None = None
    loss_scale: LossScale | None = None

    def __post_init__(self) -> None:
        for name, least in (("accumulate", 1), ("synchronous", 0), ("measure_every", 1)):
            if (given := getattr(self, name)) is not None:
                object.__setattr__(self, name, whole_number("net.trainer", name, given, least))
        if self.clip_grad_norm is not None:
            hint = "use a positive norm or None"
            number("net.trainer", "clip_grad_norm", self.clip_grad_norm, hint)
        if not is_int(self.seed):
            raise InputError(f"seed={self.seed!r}; use a whole number")
        for name in ("lr_schedule", "param_groups"):
            if (given := getattr(self, name)) is not None and not callable(given):
                raise InputError(
                    f"{name}: expected a function, called once a stage, got "
                    f"{type(given).__name__}; see help(net.trainer)"
                )
        if self.autocast not in (None, torch.bfloat16, torch.float16):
            raise InputError(
                f"autocast={self.autocast}; use torch.bfloat16, torch.float16 (with a scaled "
                "loss) or None"
            )
        if self.messages not in (None, torch.bfloat16):
            raise InputError(
                f"messages={self.messages!r}; use torch.bfloat16, or None (gradients as they are)"
            )
        if self.loss_scale is not None and self.loss_scale.dynamic and not self.check_finite:
            raise InputError(
                "check_finite=False: a scale that follows overflows has to look for them; leave "
                "it out, or give loss_scale= a number"
            )


@dataclass(frozen=True)
class Task:
    """What every trainer is given."""

    model: Reversible
    """Holds the parameters; ranks free the parts they do not use."""
    partition: Partition
    programs: Sequence[StageProgram]
    """What each stage runs."""
    optimizer: OptimizerFactory
    """Builds the optimizer of a stage from its parameters."""
    loss: Loss | None
    """Of the model's output and a target."""
    settings: Settings
    tree: TreeGuard
    """The modules that the stages were compiled for."""
