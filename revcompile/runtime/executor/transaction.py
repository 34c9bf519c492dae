"""A step that may fail: what it changes before its first update, and the way back."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from revcompile.errors import NonFiniteError, VerificationError
from revcompile.runtime.executor.stage_executor import StageExecutor, put_back
from revcompile.runtime.executor.transport import InProcess
from revcompile.runtime.reversible.replay import BufferSnapshot
from revcompile.runtime.stage.loss_head import Objective
from revcompile.runtime.stage.loss_scale import Scaling
from revcompile.schedule import Action, Op, Order, Schedule

__all__ = ["Transaction"]


def _noted(executor: StageExecutor) -> Scaling | None:
    return executor.scaling and replace(executor.scaling)


class Transaction:
    """The trainer as it was before a micro-batch entered.

    A micro-batch that turns out bad before anything was updated with it leaves no trace.
    """

    def __init__(
        self,
        schedule: Schedule,
        executors: Sequence[StageExecutor],
        transport: InProcess,
        objective: Objective,
    ) -> None:
        self.microbatch = schedule.injected
        self._actors, self._transport, self._objective = executors, transport, objective
        self._schedule = schedule.copy()
        self._queues = {key: deque(queue) for key, queue in transport.queues.items()}
        self._gathered = [(dict(a.stage.gradients), a.contributed, _noted(a)) for a in executors]
        self._buffers: list[BufferSnapshot] = [s for a in executors for s in a.stage.snapshot()]

    def backward(self, rest: Sequence[deque[Action]]) -> None:
        """The backward passes that can still be taken back; a bad gradient stops them.

        Where one micro-batch is in the pipeline at a time, those of all stages. Else that of the
        last stage: all others are at work for older micro-batches, which later stages have used.
        """
        locked = self._schedule.method.order is Order.LOCKED
        ops = (Op.RECV_DY, Op.BACKWARD, Op.SEND_DX) if locked else (Op.BACKWARD,)
        stages = list(zip(self._actors, rest, strict=True))
        for executor, actions in reversed(stages if locked else stages[-1:]):
            while actions and actions[0].op in ops and actions[0].index == self.microbatch:
                if not executor.perform(actions[0]):
                    raise VerificationError(f"stage {executor.index} waits for {actions[0]}")
                actions.popleft()
            if executor.failures:
                raise self._untried(executor.failures[0])
        # From here on nothing is taken back: let used-up messages go as they are read.
        self._queues.clear()
        self._gathered.clear()
        self._buffers.clear()

    def rollback(self) -> Schedule:
        """Undo everything; returns the schedule to go on with."""
        microbatch, objective = self.microbatch, self._objective
        for executor, (gradients, contributed, scaling) in zip(
            self._actors, self._gathered, strict=True
        ):
            executor.forget(microbatch)
            executor.scaling = scaling
            executor.measured.discard(microbatch)
            executor.stage.reconstruction.pop(microbatch, None)
            executor.stage.gradients, executor.contributed = gradients, contributed
            executor.failures = []
        put_back(self._buffers)
        # Tied weights that have arrived with this round arrive once more in the next.
        self._transport.queues = self._queues
        for found in (objective.targets, objective.losses, objective.outputs):
            found.pop(microbatch, None)
        return self._schedule

    @staticmethod
    def _untried(error: NonFiniteError) -> NonFiniteError:
        """The same error, from a step of which nothing stays."""
        found = str(error).replace(
            "The micro-batch was left out of the update", "Nothing was changed by this step"
        )
        return NonFiniteError(
            found,
            stage=error.stage,
            microbatch=error.microbatch,
        )
