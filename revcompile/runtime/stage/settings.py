"""The arguments of a trainer: the task, its settings and options."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor, fx, nn

from revcompile.arguments import number, whole_number
from revcompile.errors import InputError
from revcompile.ir.program import Partition, StageProgram
from revcompile.runtime.reversible.module import Reversible
from revcompile.runtime.stage.activations import buffer_bytes
from revcompile.runtime.stage.loss import Loss
from revcompile.runtime.stage.optimizers import (
    EXAMPLES,
    OptimizerFactory,
    ParamGroups,
    ScheduleFactory,
)
from revcompile.schedule import mean_delay
from revcompile.units import is_int

Sample = Callable[[StageProgram, fx.Graph, Callable[[str, Tensor], None]], fx.Graph]
"""Returns a copy of a stage's graph that passes the streams to be checked to a callback."""

Fuse = Callable[[fx.Graph, fx.Graph, nn.Module, bool], Sequence[fx.Graph]]
"""Returns faster versions of a stage's forward and backward graph.

The other arguments: the root module, and whether kept values have the dtype that layers read."""


NO_FLOAT16: Final = (
    "gradients need a scaled loss, and stages do not scale it; use torch.bfloat16, or "
    "reversify(...), whose result trains in float16 with torch.amp.GradScaler"
)
"""Why stages do not train in float16, and what does."""


class Backend(enum.Enum):
    """How the steps of a full pipeline are run. All give the same training."""

    AUTO = "auto"
    """`CUDAGRAPHS` if the model is on a CUDA device, else `EAGER`."""
    EAGER = "eager"
    """Action by action."""
    CUDAGRAPHS = "cudagraphs"
    """A whole step as one CUDA graph."""
    INDUCTOR = "inductor"
    """As `CUDAGRAPHS`, with the operations around convolutions and matrix products compiled, which
    takes a minute at the start."""
    STATIC = "static"
    """With the same static buffers as CUDA graphs, but every step runs in Python: for tests and
    debugging, on any device."""


@dataclass(frozen=True, kw_only=True)
class TrainerOptions:
    """Settings of `net.trainer(..., options=TrainerOptions(...))` that few runs need.

    >>> import revcompile
    >>> revcompile.TrainerOptions(in_flight_per_stage=2).timeout
    600.0
    """

    in_flight_per_stage: float | None = None
    """For methods that never drain: stage j of J has `1 + in_flight_per_stage * (J-1-j)`
    micro-batches in flight. 1: the least delay; 2: as in the PETRA paper, twice the delay. Larger
    values hide the latency of links. Default: the method's."""
    kept_input_dtype: torch.dtype | None = None
    """The dtype in which blocks that are not reversible keep their float32 inputs until backward:
    torch.bfloat16 or torch.float16 (half the memory). Default: unchanged."""
    gradient_message_dtype: torch.dtype | None = None
    """torch.bfloat16: stages send float32 gradients to the stage before in this dtype. Streams are
    sent unchanged, because inputs are rebuilt from them. Default: unchanged."""
    stage_to_rank: Sequence[int] | None = None
    """The rank of each stage. Default: consecutive stages, balanced by work. If the job has a
    multiple of these ranks, the pipeline is replicated, and every update averages gradients."""
    timeout: float = 600.0
    """A rank gives up after this many seconds without an answer."""

    def __post_init__(self) -> None:
        who = "TrainerOptions"
        number(who, "timeout", self.timeout, "use a number of seconds above 0")
        buffer_bytes(self.kept_input_dtype)
        if self.gradient_message_dtype not in (None, torch.bfloat16):
            raise InputError(
                f"{who}: gradient_message_dtype={self.gradient_message_dtype!r}; use "
                "torch.bfloat16, or None (gradients as they are)"
            )


@dataclass(frozen=True)
class Settings:
    """How to train: what `net.trainer(...)` takes besides optimizer and loss."""

    accumulation_steps: int = 1
    lr_schedule: ScheduleFactory | None = None
    param_groups: ParamGroups | None = None
    autocast: torch.dtype | None = None
    clip_grad_norm: float | None = None
    seed: int = 0
    backend: Backend = Backend.AUTO
    options: TrainerOptions = field(default_factory=TrainerOptions)

    def __post_init__(self) -> None:
        steps = whole_number("net.trainer", "accumulation_steps", self.accumulation_steps, 1)
        object.__setattr__(self, "accumulation_steps", steps)
        if self.clip_grad_norm is not None:
            hint = "use a positive norm or None"
            number("net.trainer", "clip_grad_norm", self.clip_grad_norm, hint)
        if not is_int(self.seed):
            raise InputError(f"seed={self.seed!r}; use a whole number")
        for name, example in EXAMPLES.items():
            if (given := getattr(self, name)) is not None and not callable(given):
                raise InputError(
                    f"{name}: expected a function, called once a stage, got "
                    f"{type(given).__name__}; write e.g. {name}={example}"
                )
        if self.autocast is torch.float16:
            raise InputError(f"autocast={self.autocast}: {NO_FLOAT16}")
        if self.autocast not in (None, torch.bfloat16):
            raise InputError(f"autocast={self.autocast!r}; use torch.bfloat16 or None")


@dataclass(frozen=True)
class Task:
    """What a trainer trains: the model, its stages, optimizer, loss and settings."""

    model: Reversible
    """Holds the parameters; ranks free the parts they do not use."""
    partition: Partition
    programs: Sequence[StageProgram]
    """The program of each stage."""
    optimizer: OptimizerFactory
    """Builds the optimizer of a stage from its parameters."""
    loss: Loss | None
    """A function of the model's output and a target; None: the model returns its own loss."""
    settings: Settings
    sample: Sample | None = None
    fuse: Fuse | None = None

    def delay(self, stage: int) -> float:
        """How many updates late the gradients of a stage are, on average."""
        method, stages = self.programs[stage].method, len(self.programs)
        return mean_delay(method, stages, stage, self.settings.accumulation_steps)

    def copied(self, stage: int) -> list[str]:
        """Tied parameters that another stage owns; the given stage has copies of them."""
        ties = self.partition.ties.items()
        return [name for tie, names in ties if tie.holder == stage for name in names]
