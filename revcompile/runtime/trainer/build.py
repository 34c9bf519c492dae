"""Builds the executor of a stage: its numerics, its optimizer, its tied weights."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch.nn import functional as F

from revcompile.errors import InputError
from revcompile.runtime.executor.stage_executor import StageExecutor
from revcompile.runtime.executor.transport import Transport
from revcompile.runtime.stage.gradient_predictor import GradientPredictor
from revcompile.runtime.stage.loss_head import LossHead
from revcompile.runtime.stage.loss_scale import scaling_of
from revcompile.runtime.stage.stage import Stage
from revcompile.runtime.stage.update import Updater
from revcompile.runtime.trainer.settings import Task
from revcompile.schedule import Order, mean_delay


def build_executor(
    task: Task,
    index: int,
    transport: Transport,
    loss_head: LossHead,
    *,
    seed: int,
    skip_on_error: bool,
) -> StageExecutor:
    """The executor of one stage; see there for `skip_on_error`. The last has the loss head."""
    program, stages, ties = task.programs[index], len(task.programs), task.partition.ties
    model, optimizer, settings = task.model, task.optimizer, task.settings
    delay = mean_delay(program.method, stages, index, settings.accumulate)
    is_last = index == stages - 1
    owners = {tie.owner: names for tie, names in ties.items() if tie.holder == index}
    holders = {tie.holder: names for tie, names in ties.items() if tie.owner == index}
    replicas = [name for names in owners.values() for name in names]
    stage = Stage(
        program,
        model,
        seed=seed,
        autocast=settings.autocast,
        replicas=replicas,
        check_finite=settings.check_finite,
        buffers=settings.buffers,
        messages=settings.messages,
        delay=delay,
        tolerance=model.tolerance,
    )
    if stage.weights.rewound is not None:
        _check_rewound(stage, [*replicas, *(name for names in holders.values() for name in names)])
    stage.accumulates_in_place = skip_on_error  # nothing is rolled back
    own = {n: p for n, p in stage.parameters.items() if n not in replicas}
    updater = Updater(
        f"stage {index}",
        own,
        optimizer,
        groups=settings.param_groups,
        lr_schedule=settings.lr_schedule,
        # Predicted weights compensate for the delay: an optimizer must not do so once more.
        delay=0.0 if settings.synchronous or stage.weights.predicted is not None else delay,
    )
    gradient_predictor = None
    if program.method.order is Order.SYNTHETIC and not is_last:
        gradient_predictor = GradientPredictor(index, program.outputs, optimizer, stage._device())
    return StageExecutor(
        stage,
        updater,
        transport,
        loss_head=loss_head if is_last else None,
        gradient_predictor=gradient_predictor,
        clip_grad_norm=settings.clip_grad_norm,
        tied_owners=owners,
        tied_replicas=holders,
        skip_on_error=skip_on_error,
        delay=delay,
        synchronous=settings.synchronous,
        scaling=scaling_of(settings.loss_scale, program.method, stage._device()),
    )


def _check_rewound(stage: Stage, tied: Sequence[str]) -> None:
    """Refuse parameters from whose latest values those of earlier updates cannot be computed."""
    where = f"net.trainer: weights='rewound', stage {stage.program.index}: "
    if tied:
        raise InputError(
            f"{where}{tied[0]} is shared with another stage, whose copy would be rounded "
            "otherwise; use weights='stashed', or cut the model so that one stage has both"
        )
    for name, parameter in stage.parameters.items():
        if parameter.requires_grad and parameter.dtype not in (torch.float32, torch.float64):
            raise InputError(
                f"{where}{name} is in {str(parameter.dtype).removeprefix('torch.')}, which has too "
                "few digits to undo an update; use weights='stashed', or keep parameters in "
                "float32 and give autocast="
            )


def choose_cpu_matmul(dtype: torch.dtype | None) -> None:
    """Let torch choose its CPU matmul for `dtype` now, not in the middle of training.

    On a CPU without bf16 instructions the first bf16 matmul of some size makes torch switch
    oneDNN off for the whole process, and float32 convolutions and products round differently from
    then on. Ranks would meet that first product at different moments, or never, and no longer
    equal a run in one process.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return
    operand = torch.ones(64, 64, dtype=dtype)
    with torch.autocast("cpu", enabled=False), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it does what is wanted here
        F.linear(operand, operand)
