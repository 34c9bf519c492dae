"""Evaluation across ranks: batches go from stage to stage, nothing comes back."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from revcompile.errors import InputError
from revcompile.runtime.executor.fingerprints import Fingerprint, compared
from revcompile.runtime.executor.stage_executor import StageExecutor
from revcompile.runtime.executor.transport import Message, MessageKind, next_message
from revcompile.runtime.trainer.inputs import split_batch
from revcompile.runtime.trainer.metrics import RunningMeans

Found = TypeVar("Found")
Batch = tuple[Mapping[str, Any], Fingerprint | None]
"""The inputs of a stage, and the fingerprint of the batch's data."""


class EvaluationPass:
    """A rank's part of an evaluation.

    A void message ends it. A stage that fails sends one at once and discards the batches that
    still arrive, so that no rank waits for it; the error is kept until the end.

    Args:
        trainer: The rank's.
        loader: For the first and the last stage; read once, also if both are here.
        means: Of the batches that reach the last stage here.
    """

    def __init__(self, trainer: Any, loader: Iterable[Any] | None, means: RunningMeans) -> None:
        self._trainer, self._means = trainer, means
        has_target = trainer.loss_head.has_target
        batches = (split_batch(batch, has_target) for batch in (() if loader is None else loader))
        self._ends = itertools.tee(batches, trainer.is_first + trainer.is_last)
        self.error: Exception | None = None
        self._running = {executor.index for executor in trainer.executors}
        """Stages that have not seen the last batch."""
        self._ended: set[int] = set()
        """Stages that have sent their void message."""

    def run(self) -> None:
        """Run all stages of this rank until each has seen the last batch."""
        for number in itertools.count():
            for executor in self._trainer.executors:
                if executor.index in self._running:
                    self._run_batch(executor, number)
            self._trainer.binder.wait_copied()
            if not self._running:
                break
        if self.error is None and self._trainer.is_last and self._tried(next, self._ends[-1], None):
            self.error = InputError(
                "the loader has more batches where targets are needed than where inputs are; give "
                "every rank a loader of the same batches"
            )

    def _tried(self, function: Callable[..., Found], *given: Any) -> Found | None:
        """What a function returns, or None if it fails."""
        try:
            return function(*given)
        except Exception as error:
            self.error = self.error or error
            return None

    def _run_batch(self, executor: StageExecutor, number: int) -> None:
        stage, batch, outputs = executor.index, self._next(executor, number), None
        if batch is None:
            self._running.discard(stage)
        elif stage not in self._ended:
            outputs = self._tried(self._outputs, executor, number, *batch)
        if outputs is None and stage in self._ended:
            return
        if outputs is None:
            self._ended.add(stage)
        if executor.loss_head is None:
            fingerprint = batch[1] if batch is not None else None
            message = Message(number, outputs or {}, void=outputs is None, fingerprint=fingerprint)
            executor.transport.send((stage, stage + 1, MessageKind.EVALUATE), message)

    def _next(self, executor: StageExecutor, number: int) -> Batch | None:
        if (stage := executor.index) == 0:
            return self._tried(self._first, number)
        where = f"stage {stage} for batch {number} of an evaluation"
        route = stage - 1, stage, MessageKind.EVALUATE
        message = next_message(executor.transport, route, where)
        return None if message.void else (message.values, message.fingerprint)

    def _first(self, number: int) -> Batch | None:
        """The inputs of the model; None after the last."""
        batch = next(self._ends[0], None)
        if batch is None:
            return None
        binder = self._trainer.binder
        values = binder.take(binder.prepare(batch[0], f"evaluation, batch {number}"))
        return values, Fingerprint.of(*batch, number)

    def _outputs(
        self, executor: StageExecutor, number: int, inputs: Any, sent: Fingerprint | None
    ) -> Mapping[str, Any]:
        outputs, head = executor.stage.evaluate(inputs), executor.loss_head
        if head is None:
            return outputs
        batch, where = next(self._ends[-1], None), f"evaluation, batch {number}"
        if batch is None:
            raise InputError(
                f"the loader ends after {number} batches where targets are needed, but goes on "
                "where inputs are; give every rank a loader of the same batches"
            )
        if sent and (different := compared(sent, *batch, number)):
            raise self._trainer.mixed_up(where, different)
        binder, output = self._trainer.binder, head.assembled(outputs)
        binder.check_tensors(batch[1], where)
        target = binder.take(batch[1], copy=False)
        loss = head.evaluate(output, target, where)
        self._means.add(loss, output, target, binder.count_samples(outputs))
        return outputs
