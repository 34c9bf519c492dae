"""One stage of a recorded round: the actions are an executor's, nothing waits for the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from revcompile.runtime.executor.captured.found_inf import Statistics, judge, unless
from revcompile.runtime.executor.captured.fusion import Fused, fuse
from revcompile.runtime.executor.captured.optimizers import CapturedUpdater
from revcompile.runtime.executor.captured.static_buffers import StaticTransport
from revcompile.runtime.executor.captured.streams import Lanes
from revcompile.runtime.executor.captured.weight_stash import Versions
from revcompile.runtime.executor.stage_executor import StageExecutor
from revcompile.runtime.executor.transport import Message
from revcompile.runtime.reversible.graph_code import compile_graph
from revcompile.runtime.stage.loss_head import Objective
from revcompile.runtime.stage.stage import Programs, Stage
from revcompile.schedule import Action, Op

__all__ = ["RecordedActor"]


class RecordedActor(StageExecutor):
    """An executor whose bad micro-batches are flags on the device.

    A bad micro-batch goes all the way back to the first stage; on its way no stage applies its
    gradient or keeps the running statistics it has moved.
    """

    updater: CapturedUpdater

    def __init__(
        self,
        executor: StageExecutor,
        post: StaticTransport,
        objective: Objective | None,
        *,
        accumulate: int,
        check_finite: bool,
        fused: Fused | None = None,
        lanes: Lanes | None = None,
    ) -> None:
        super().__init__(
            executor.stage,
            CapturedUpdater(executor.updater),
            post,
            objective=objective,
            clip_grad_norm=executor.clip_grad_norm,
        )
        self.accumulate, self.check_finite = accumulate, check_finite
        self._lanes = lanes
        self.casts = executor.stage.cast_weights
        self._programs = _fused(executor.stage, fused) if fused is not None else None
        self._losses = objective.losses if objective is not None else {}
        self._statistics = Statistics(executor.stage.statistics())
        self._early = bool(executor.stage.snapshot())
        device = executor.stage._device()
        self.flag = torch.zeros(1, device=device)
        """Was the last micro-batch bad?"""
        self.count = torch.zeros((), device=device)
        """How many micro-batches are in the gathered gradient, where some may be left out."""
        self._noted: Sequence[Tensor] = ()
        self._stashes = executor.stage.is_stashing
        self.versions: Versions | None = None
        """Its weights of some updates ago, if they are stashed."""

    def use(self, on: bool) -> None:
        """Let the stage compute as recorded rounds do, or as it did before."""
        self.stage.run_with(self._programs if on else None)
        self.stage.is_stashing = not on and self._stashes

    def perform(self, action: Action) -> bool:
        """Do it, on the stream it belongs to."""
        with self._stream(action):
            done = super().perform(action)
        if self._lanes is not None and action.op is Op.FORWARD:
            self._lanes.forwarded(self.index)
        return done

    def _stream(self, action: Action) -> AbstractContextManager[None]:
        if self._lanes is None:
            return nullcontext()
        match action.op:
            case Op.BACKWARD:
                return self._lanes.backward(self.index)
            case Op.SEND_DX:
                return self._lanes.sending(self.index)
            case Op.UPDATE:
                used = (self.flag, self.count, *self.stage.gradients.values())
                return self._lanes.updating(self.index, used)
        return nullcontext()

    def _run(self, microbatch: int, inputs: Mapping[str, Any]) -> None:
        if self.check_finite and self._early:
            self._noted = self._statistics.noted()
        super()._run(microbatch, inputs)

    def _differentiate(self, message: Message) -> Message:
        if self.check_finite and not self._early:
            self._noted = self._statistics.noted()
        values, back, found = self.stage.differentiate(
            message.index, message.values, message.gradients
        )
        bad = self._judged(message, found) if self.check_finite else None
        if bad is not None:
            self._statistics.settle(self._noted, bad)
            self._noted = ()
            if self.accumulate > 1:
                found = {n: g if g is None else unless(bad, g) for n, g in found.items()}
                self.count = self.count + (1 - bad).reshape(())
        self.stage.accumulate(found, back)
        return Message(message.index, values, back, bad=bad)

    def _judged(self, message: Message, found: Mapping[str, Tensor | None]) -> Tensor:
        """Bad here, or already where it comes from; at the last stage: by its loss."""
        before = message.bad
        if before is None:
            loss = self._losses[message.index]
            before = (~torch.isfinite(loss)).float().reshape(1)
        self.flag = judge([g for g in found.values() if g is not None], before)
        return self.flag

    def _update(self, action: Action) -> bool:
        if not self.check_finite:
            self.updater.bad = None
        elif self.accumulate == 1:
            self.updater.bad = self.flag
        else:
            self.updater.bad = (self.count == 0).float().reshape(1)
        if self.versions is not None:
            self.versions.shift()
        done = super()._update(action)
        if done:
            self.casts.refresh()
        return done

    def _mean_gradients(self) -> dict[str, Tensor] | None:
        if self.gradients is None:
            found = self.stage.take_gradients()
            if self.accumulate > 1 and found:
                if self.check_finite:
                    torch._foreach_div_(list(found.values()), self.count.clamp(min=1))
                else:
                    torch._foreach_div_(list(found.values()), float(self.accumulate))
            self.count = torch.zeros_like(self.count)
            self.gradients = found
        return self.gradients


def _fused(stage: Stage, fused: Fused) -> Programs:
    program = stage.program
    forward, backward = fuse(program.forward, program.backward, stage.root, fused)
    where = f"stage {program.index}, compiled"
    return compile_graph(forward, f"{where}, forward"), compile_graph(
        backward, f"{where}, backward"
    )
