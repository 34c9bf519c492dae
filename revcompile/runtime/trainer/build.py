"""An executor from a stage's program: its numerics, its optimizer, what it exchanges."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from revcompile.ir.program import StageProgram
from revcompile.runtime.executor.stage_executor import StageExecutor
from revcompile.runtime.executor.transport import Transport
from revcompile.runtime.stage.gradient_predictor import GradientPredictor
from revcompile.runtime.stage.loss_head import Objective
from revcompile.runtime.stage.loss_scale import scaling_of
from revcompile.runtime.stage.stage import Stage
from revcompile.runtime.stage.update import OptimizerFactory, Updater
from revcompile.runtime.trainer.settings import Settings
from revcompile.schedule import Order, Tie

__all__ = ["build_executor"]


def build_executor(
    program: StageProgram,
    model: nn.Module,
    ties: Mapping[Tie, tuple[str, ...]],
    optimizer: OptimizerFactory,
    settings: Settings,
    transport: Transport,
    *,
    seed: int,
    delay: float,
    objective: Objective | None,
    guarded: bool,
) -> StageExecutor:
    """The executor of one stage, whose gradients are so many updates late.

    The last one is given the objective.
    """
    index = program.index
    held = {tie.owner: names for tie, names in ties.items() if tie.holder == index}
    owned = {tie.holder: names for tie, names in ties.items() if tie.owner == index}
    replicas = [name for names in held.values() for name in names]
    stage = Stage(
        program,
        model,
        seed=seed,
        autocast=settings.autocast,
        replicas=replicas,
        check_finite=settings.check_finite,
        buffers=settings.buffers,
    )
    stage.accumulates_in_place = guarded
    own = {n: p for n, p in stage.parameters.items() if n not in replicas}
    updater = Updater(
        f"stage {index}",
        own,
        optimizer,
        groups=settings.param_groups,
        lr_schedule=settings.lr_schedule,
        delay=delay,
    )
    gradient_predictor = None
    if program.method.order is Order.SYNTHETIC and objective is None:
        gradient_predictor = GradientPredictor(index, program.outputs, optimizer, stage._device())
    return StageExecutor(
        stage,
        updater,
        transport,
        objective=objective,
        gradient_predictor=gradient_predictor,
        clip_grad_norm=settings.clip_grad_norm,
        held=held,
        owned=owned,
        guarded=guarded,
        scaling=scaling_of(settings.loss_scale, program.method),
    )
