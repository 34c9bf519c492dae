"""A step that can be rolled back as long as nothing has been updated with its micro-batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from revcompile.errors import NonFiniteError, VerificationError
from revcompile.runtime.executor.stage_executor import StageExecutor, restore
from revcompile.runtime.executor.transport import MessageKind
from revcompile.runtime.reversible.replay import BufferSnapshot
from revcompile.schedule import Action, Op, Order, Schedule


class Transaction:
    """The state of a trainer before a micro-batch enters, to return to if the micro-batch is bad.

    transaction = Transaction(...)              snapshot
    rest = scheduler.forward(schedule.inject())
    transaction.backward(rest)                  the backward passes before the first update
    ...                                         committed: an error from here on stays
    """

    def __init__(self, schedule: Schedule, executors: Sequence[StageExecutor]) -> None:
        self.microbatch = schedule.injected
        self._executors, self._transport = executors, executors[0].transport
        self._schedule = schedule.copy()
        self._queues = {key: deque(queue) for key, queue in self._transport.queues.items()}
        self._accumulated = [
            (
                dict(e.stage.gradients),
                e.contributed,
                None if e.scaling is None else e.scaling.values.clone(),
            )
            for e in executors
        ]
        self._buffers: list[BufferSnapshot] = [s for e in executors for s in e.stage.snapshot()]
        # Tied weights that arrive with this step arrive once more with the next, if it is undone.
        self._undo_tied = [
            e.stage.weights.snapshot(message.values)
            for e in executors
            for message in self._transport.queued(e.index, MessageKind.TIED_WEIGHT)
        ]

    def backward(self, rest: Sequence[deque[Action]]) -> None:
        """The backward passes that can still be rolled back.

        Where one micro-batch is in the pipeline at a time, those of all stages. Else that of the
        last stage: the others are of older micro-batches, with which later stages have updated.

        Args:
            rest: What is left to do of the step; the actions performed here are removed.

        Raises:
            NonFiniteError: A gradient is not finite.
        """
        locked = self._schedule.method.order is Order.LOCKED
        ops = (Op.RECV_DY, Op.BACKWARD, Op.SEND_DX) if locked else (Op.BACKWARD,)
        stages = list(zip(self._executors, rest, strict=True))
        for executor, actions in reversed(stages if locked else stages[-1:]):
            while actions and actions[0].op in ops and actions[0].index == self.microbatch:
                if not executor.perform(actions[0]):
                    raise VerificationError(f"stage {executor.index} waits for {actions[0]}")
                actions.popleft()
            if executor.failures:
                raise _rolled_back(executor.failures[0])
        # Committed. Let messages be freed as they are read.
        self._queues.clear()
        self._accumulated.clear()
        self._buffers.clear()
        self._undo_tied.clear()

    def rollback(self) -> Schedule:
        """Undo the step; returns the schedule to go on with."""
        microbatch, loss_head = self.microbatch, self._executors[-1].loss_head
        for executor, (gradients, contributed, scaling) in zip(
            self._executors, self._accumulated, strict=True
        ):
            executor.forget(microbatch)
            if executor.scaling is not None and scaling is not None:
                executor.scaling.values.copy_(scaling)
            executor.measured.discard(microbatch)
            executor.stage.reconstruction.pop(microbatch, None)
            executor.stage.gradients, executor.contributed = gradients, contributed
            executor.failures = []
        restore(self._buffers)
        for undo in self._undo_tied:
            undo()
        self._transport.queues = self._queues
        assert loss_head is not None
        for by_microbatch in (loss_head.targets, loss_head.losses, loss_head.outputs):
            by_microbatch.pop(microbatch, None)
        return self._schedule


def _rolled_back(error: NonFiniteError) -> NonFiniteError:
    """The same error, of a step that is rolled back."""
    message = str(error).replace(
        "The micro-batch was left out of the update", "Nothing was changed by this step"
    )
    return NonFiniteError(message, stage=error.stage, microbatch=error.microbatch)
