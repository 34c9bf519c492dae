"""The fast way through a training step, and when to take it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Final

import torch

from revcompile.errors import NonFiniteError
from revcompile.runtime.executor.captured.backends import Backend, device_of, why_not_capturable
from revcompile.runtime.executor.captured.fusion import Fused
from revcompile.runtime.executor.captured.graphs import CaptureUnsupported, CudaGraphs, Direct
from revcompile.runtime.executor.captured.in_flight import on_device
from revcompile.runtime.executor.captured.static_buffers import StaticBuffers
from revcompile.runtime.executor.captured.step import Engine, Outcome
from revcompile.runtime.executor.stage_executor import StageExecutor
from revcompile.runtime.executor.transport import InProcess
from revcompile.runtime.stage.loss_head import Objective
from revcompile.schedule import Schedule

__all__ = ["GraphRunner"]

MOST_CHANGES: Final = 3
"""So often rounds are recorded anew because optimizers' settings have changed."""
MOST_FAILURES: Final = 2
"""So often a recording may fail before no more is tried: a device that others use may be busy."""


class GraphRunner:
    """Recorded rounds where they are possible; whoever asks does without where they are not."""

    def __init__(
        self,
        backend: Backend,
        executors: Sequence[StageExecutor],
        objective: Objective,
        schedule: Schedule,
        *,
        check_finite: bool,
    ) -> None:
        self._executors, self._objective = executors, objective
        self._check_finite = check_finite
        device = device_of(executors)
        self._backend = backend
        if backend is Backend.AUTO:
            self._backend = Backend.CUDAGRAPHS if device.type == "cuda" else Backend.EAGER
        self._engine: Engine | None = None
        self._like: StaticBuffers | None = None
        self._alike = self._changes = self._failures = 0
        self._is_on = self._backend is not Backend.EAGER
        if self._is_on and (why := why_not_capturable(executors, schedule, self._backend)):
            self._give_up(why)

    @property
    def is_active(self) -> bool:
        """Is what is in flight here, and not with the stages?"""
        return self._engine is not None and self._engine.active

    @property
    def is_on(self) -> bool:
        """Will rounds be recorded once the pipeline is full?"""
        return self._is_on

    def _give_up(self, why: str) -> None:
        self._is_on, self._engine = False, None
        warnings.warn(
            f"backend={self._backend.value!r}: rounds are run one action at a time, because {why}. "
            "backend='eager' says that this is meant",
            stacklevel=5,
        )

    def step(
        self, schedule: Schedule, transport: InProcess, batch: Any, allowed: bool
    ) -> Outcome | None:
        """The round in which this micro-batch enters; None if it must go the ordinary way.

        `allowed`: does nobody want to look on?
        """
        if not self._is_on:
            return None
        if self._engine is None:
            self._engine = self._made(schedule)
        engine = self._engine
        if engine is None:
            return None
        # What has been replaced is refused by name on the ordinary way.
        allowed = allowed and not any(
            executor.stage.module_guard.problem() for executor in self._executors
        )
        if engine.active and not (allowed and engine.takes(batch)):
            engine.leave(schedule, transport)
            self._changes += engine.is_outdated
        if self._changes > MOST_CHANGES:
            self._give_up(
                "the optimizer's settings change from step to step (of schedules only learning "
                "rates may; OneCycleLR takes cycle_momentum=False)"
            )
            return None
        try:
            if not engine.active:
                alike = self._alike if self._like is not None and self._like.fits(batch) else 0
                if not allowed or not engine.enter(schedule, transport, batch, alike):
                    return None
            return engine.step(schedule, batch)
        except CaptureUnsupported as error:
            engine.leave(schedule, transport)
            engine.forget()
            self._failures += 1
            if self._failures >= MOST_FAILURES:
                self._give_up(str(error))
            return None

    def _made(self, schedule: Schedule) -> Engine | None:
        """Made late: what stages and optimizers do is known only after some steps."""
        if min(schedule.updates) < 1:
            return None
        changing = [executor.index for executor in self._executors if executor.stage.is_stateful]
        if changing:
            self._give_up(f"stage {changing[0]} has layers whose buffers change in every call")
            return None
        device = device_of(self._executors)
        graphs = self._backend is not Backend.RECORDED
        return Engine(
            self._executors,
            self._objective,
            schedule,
            CudaGraphs(device) if graphs else Direct(),
            check_finite=self._check_finite,
            fused=Fused() if self._backend is Backend.INDUCTOR else None,
        )

    def saw(self, batch: Any) -> None:
        """A micro-batch has entered, here or the ordinary way."""
        if not self._is_on:
            return
        if self._like is None or not self._like.fits(batch):
            self._like, self._alike = StaticBuffers(on_device(torch.device("meta"), batch)), 0
        self._alike += 1

    def leave(self, schedule: Schedule, transport: InProcess) -> None:
        """What is in flight is with the stages afterwards."""
        if self._engine is not None:
            self._engine.leave(schedule, transport)

    def forget(self) -> None:
        """Parameters, optimizers or what is in flight have been replaced."""
        self._like, self._alike = None, 0
        if self._engine is not None:
            self._engine.forget()

    def failures(self) -> list[NonFiniteError]:
        """Bad micro-batches that have become known since: some rounds late, or when it is left."""
        waits = self._engine is not None and not self._engine.active
        return self._engine.failures(everything=waits) if self._engine is not None else []
