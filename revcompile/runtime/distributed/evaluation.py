"""Evaluation across ranks: batches go from stage to stage, nothing comes back."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from revcompile.errors import InputError
from revcompile.runtime.executor.fingerprints import Fingerprint
from revcompile.runtime.executor.stage_executor import StageExecutor
from revcompile.runtime.executor.transport import (
    Message,
    MessageKind,
    next_message,
)
from revcompile.runtime.trainer.inputs import split_batch

Batch = tuple[Mapping[str, Any], Fingerprint | None]
"""The inputs of a stage, and the fingerprint of the batch's data."""
Source = Callable[[int], Batch | None]
"""The inputs of the model, batch by batch; None after the last."""
Sink = Callable[[int, Mapping[str, Any], Fingerprint | None], None]
"""Takes a batch's outputs at the last stage."""


class LoaderEnds:
    """A loader's batches for the first and the last stage: read once, also if both are here."""

    def __init__(
        self, loader: Iterable[Any] | None, is_first: bool, is_last: bool, has_target: bool = True
    ) -> None:
        batches = (split_batch(batch, has_target) for batch in (() if loader is None else loader))
        self._ends, self._is_last = itertools.tee(batches, is_first + is_last), is_last

    def for_first_stage(self) -> tuple[Any, Any] | None:
        """The next batch; None after the last."""
        return next(self._ends[0], None)

    def for_last_stage(self, number: int) -> tuple[Any, Any]:
        """The batch that has reached the last stage."""
        batch = next(self._ends[-1], None)
        if batch is None:
            raise InputError(
                f"the loader ends after {number} batches where targets are needed, but goes on "
                "where inputs are; give every rank a loader of the same batches"
            )
        return batch

    def check_end(self) -> None:
        """Refuse targets without inputs."""
        if self._is_last and next(self._ends[-1], None) is not None:
            raise InputError(
                "the loader has more batches where targets are needed than where inputs are; give "
                "every rank a loader of the same batches"
            )


@dataclass
class EvaluationPass:
    """A rank's part of an evaluation.

    A void message ends it. A stage that fails sends one at once and discards the batches that
    still arrive, so that no rank waits for it; the error is kept until the end.
    """

    executors: Sequence[StageExecutor]
    source: Source
    sink: Sink
    error: Exception | None = None
    _running: set[int] = field(default_factory=set)
    """Stages that have not seen the last batch."""
    _ended: set[int] = field(default_factory=set)
    """Stages that have sent their void message."""

    def run(self) -> None:
        """Run all stages of this rank until each has seen the last batch."""
        self._running = {executor.index for executor in self.executors}
        for number in itertools.count():
            for executor in self.executors:
                if executor.index in self._running:
                    self._run_batch(executor, number)
            if not self._running:
                return

    def _run_batch(self, executor: StageExecutor, number: int) -> None:
        stage, last = executor.index, executor.program.stages - 1
        batch = self._next(executor, number)
        if batch is None:
            self._running.discard(stage)
        outputs = None
        if batch is not None and stage not in self._ended:
            try:
                outputs = executor.stage.evaluate(batch[0])
                if stage == last:
                    self.sink(number, outputs, batch[1])
            except Exception as error:
                self.error, outputs = self.error or error, None
        if outputs is None and stage in self._ended:
            return
        if outputs is None:
            self._ended.add(stage)
        if stage < last:
            fingerprint = batch[1] if batch is not None else None
            message = Message(number, outputs or {}, void=outputs is None, fingerprint=fingerprint)
            executor.transport.send((stage, stage + 1, MessageKind.EVALUATE), message)

    def check(self, check: Callable[[], None]) -> None:
        """Run a final check; what it raises counts if there was no error before."""
        try:
            if self.error is None:
                check()
        except Exception as error:
            self.error = error

    def _next(self, executor: StageExecutor, number: int) -> Batch | None:
        if (stage := executor.index) == 0:
            try:
                return self.source(number)
            except Exception as error:
                self.error = self.error or error
                return None
        where = f"stage {stage} for batch {number} of an evaluation"
        route = stage - 1, stage, MessageKind.EVALUATE
        message = next_message(executor.transport, route, where)
        return None if message.void else (message.values, message.fingerprint)
