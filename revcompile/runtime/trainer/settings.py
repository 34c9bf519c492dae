"""What to train, and how; and the executor of a stage, with its optimizer and tied weights."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch.nn import functional as F

from revcompile.arguments import flag, number, whole_number
from revcompile.errors import InputError
from revcompile.ir.program import Partition, StageProgram
from revcompile.runtime.executor.executor import StageExecutor
from revcompile.runtime.executor.messages import Transport
from revcompile.runtime.executor.runner import Backend
from revcompile.runtime.executor.updates import StageUpdates
from revcompile.runtime.reversible.module import Reversible
from revcompile.runtime.stage.activations import buffer_bytes
from revcompile.runtime.stage.gradient_predictor import GradientPredictor
from revcompile.runtime.stage.loss import Loss, LossHead, LossScale, scaling_of
from revcompile.runtime.stage.module_guards import TreeGuard
from revcompile.runtime.stage.optimizers import (
    EXAMPLES,
    OptimizerFactory,
    ParamGroups,
    ScheduleFactory,
)
from revcompile.runtime.stage.stage import Fuse, Sample, Stage
from revcompile.runtime.stage.update import Updater
from revcompile.schedule import Order, mean_delay
from revcompile.units import is_int


@dataclass(frozen=True, kw_only=True)
class TrainerOptions:
    """Settings of `net.trainer(..., options=TrainerOptions(...))` that are seldom needed.

    >>> import revcompile
    >>> revcompile.TrainerOptions(synchronous_updates=100).check_finite
    True
    """

    in_flight_per_stage: float | None = None
    """Stage j of J has `1 + in_flight_per_stage * (J-1-j)` micro-batches in flight, for methods
    that never drain. 1: the least delay; 2: as in the PETRA paper, twice the delay. More hides slow
    links. Default: the method's."""
    synchronous_updates: int = 0
    """Updates without delay at the start: the pipeline is drained before each, as with "1f1b"."""
    loss_scale: LossScale | float | Literal["dynamic"] | None = None
    """"dynamic" (as torch.amp.GradScaler, the default with float16), a fixed number, or a
    `LossScale`. Micro-batches whose gradients overflow are left out."""
    microbatch_size: int | None = None
    """Samples in a micro-batch, for `memory_budget`. Default: the example's."""
    kept_input_dtype: torch.dtype | None = None
    """How stages that are not reversible keep their float32 inputs until backward: rounded to
    torch.bfloat16 or torch.float16 (half the memory), or None: unchanged."""
    gradient_message_dtype: torch.dtype | None = None
    """torch.bfloat16: float32 gradients are rounded to it where one stage sends them to the stage
    before. Values of streams, which are rebuilt, stay exact."""
    check_finite: bool = True
    """Look for losses and gradients that are not finite; their micro-batches are never applied."""
    measure_reconstruction_every: int | None = None
    """Measure the reconstruction error of every n-th micro-batch."""
    stage_to_rank: Sequence[int] | None = None
    """The rank of each stage. Default: contiguous, balanced by cost. With more ranks than stages
    the whole pipeline is replicated, and gradients are averaged at every update."""
    timeout: float = 600.0
    """Seconds without an answer after which a rank gives up."""
    loss_on_all_ranks: bool = False
    """Send the loss of each step to every rank, not only to that of the last stage."""
    average_statistics: bool = False
    """Average the running statistics of batch norms over replicas of the pipeline, too."""

    def __post_init__(self) -> None:
        who = "TrainerOptions"
        counts = {"synchronous_updates": 0, "microbatch_size": 1, "measure_reconstruction_every": 1}
        for name, least in counts.items():
            if (given := getattr(self, name)) is not None:
                object.__setattr__(self, name, whole_number(who, name, given, least))
        for name in ("check_finite", "loss_on_all_ranks", "average_statistics"):
            flag(who, name, getattr(self, name))
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
    loss_scale: LossScale | None = None
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
        if self.autocast not in (None, torch.bfloat16, torch.float16):
            raise InputError(
                f"autocast={self.autocast!r}; use torch.bfloat16, torch.float16 (with a scaled "
                "loss) or None"
            )
        if (
            self.loss_scale is not None
            and self.loss_scale.dynamic
            and not self.options.check_finite
        ):
            raise InputError(
                "check_finite=False: a scale that follows overflows has to look for them; leave "
                "it out, or give loss_scale= a number"
            )


@dataclass(frozen=True)
class Task:
    """What a trainer is given."""

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
    sample: Sample | None = None
    fuse: Fuse | None = None


def build_executor(
    task: Task,
    index: int,
    device: torch.device,
    transport: Transport,
    loss_head: LossHead,
    seed: int,
) -> StageExecutor:
    """The executor of a stage. That of the last one has the loss head."""
    program, stages, ties = task.programs[index], len(task.programs), task.partition.ties
    model, optimizer, settings = task.model, task.optimizer, task.settings
    options = settings.options
    delay = mean_delay(program.method, stages, index, settings.accumulation_steps)
    owners = {tie.owner: names for tie, names in ties.items() if tie.holder == index}
    holders = {tie.holder: names for tie, names in ties.items() if tie.owner == index}
    copied = [name for names in owners.values() for name in names]
    stage = Stage(
        program,
        model,
        device=device,
        seed=seed,
        autocast=settings.autocast,
        copied=copied,
        check_finite=options.check_finite,
        kept_input_dtype=options.kept_input_dtype,
        gradient_message_dtype=options.gradient_message_dtype,
        delay=delay,
        tolerance=model.tolerance,
        sample=task.sample,
    )
    own = {n: p for n, p in stage.parameters.items() if n not in copied}
    updater = Updater(
        f"stage {index}",
        own,
        optimizer,
        groups=settings.param_groups,
        lr_schedule=settings.lr_schedule,
        delay=0.0 if options.synchronous_updates else delay,
        is_predicted=stage.weights.predicted is not None,
    )
    gradient_predictor = None
    if program.method.order is Order.SYNTHETIC and not program.is_last:
        gradient_predictor = GradientPredictor(index, program.outputs, optimizer, device)
    scaling = scaling_of(settings.loss_scale, program.method, device)
    updates = StageUpdates(
        stage,
        updater,
        transport,
        clip_grad_norm=settings.clip_grad_norm,
        tied_owners=owners,
        tied_holders=holders,
        delay=delay,
        synchronous_updates=options.synchronous_updates,
        accumulation_steps=settings.accumulation_steps,
        scaling=scaling if program.is_last else None,
    )
    return StageExecutor(
        stage,
        updates,
        loss_head=loss_head if program.is_last else None,
        gradient_predictor=gradient_predictor,
        scaling=scaling,
    )


def choose_cpu_matmuls(task: Task) -> None:
    """Let torch choose its CPU matmul for low precision now, not in the middle of training.

    On a CPU without bf16 instructions the first bf16 matmul of some size makes torch switch
    oneDNN off for the whole process, and float32 convolutions and products round differently from
    then on. Ranks would meet that first product at different moments, or never, and no longer
    equal a run in one process.
    """
    dtypes = dict.fromkeys([task.settings.autocast, *(p.dtype for p in task.model.parameters())])
    for dtype in (torch.bfloat16, torch.float16):
        if dtype in dtypes:
            operand = torch.ones(64, 64, dtype=dtype)
            with torch.autocast("cpu", enabled=False), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns that it does what is wanted here
                F.linear(operand, operand)
