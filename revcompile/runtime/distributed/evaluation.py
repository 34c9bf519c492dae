"""Evaluation across ranks: batches go from stage to stage, nothing comes back."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from revcompile.errors import InputError
from revcompile.runtime.executor.fingerprints import Fingerprint
from revcompile.runtime.executor.stage_executor import StageExecutor
from revcompile.runtime.executor.transport import Message, MessageKind, Transport
from revcompile.runtime.trainer.inputs import batch_pair

__all__ = ["Batches", "Passing"]

Batch = tuple[Mapping[str, Any], Fingerprint | None]
"""What a stage takes of a batch, and the fingerprint that goes with it."""
Source = Callable[[int], Batch | None]
"""The values the model takes, batch by batch; None after the last."""
Sink = Callable[[int, Mapping[str, Any], Fingerprint | None], None]
"""What is done with a batch's outputs at the last stage."""


class Batches:
    """A loader's batches for a rank: read once, also where both the first and last stage live."""

    def __init__(self, loader: Iterable[Any] | None, is_first: bool, is_last: bool) -> None:
        self._loader = loader if is_first or is_last else None
        self._is_first, self._is_last = is_first, is_last
        self._read = map(batch_pair, self._loader if self._loader is not None else ())
        self._waiting: deque[tuple[Any, Any]] = deque()

    def first(self) -> tuple[Any, Any] | None:
        """The next batch, for the first stage; None after the last."""
        found = next(self._read, None)
        if found is not None and self._is_last:
            self._waiting.append(found)
        return found

    def last(self, number: int) -> tuple[Any, Any]:
        """The batch that has reached the last stage."""
        if self._is_first:
            return self._waiting.popleft()
        found = next(self._read, None)
        if found is None:
            raise InputError(
                f"the loader ends after {number} batches where targets are needed, but goes on "
                "where inputs are; give every rank a loader of the same batches"
            )
        return found

    def check_end(self) -> None:
        """Refuse targets without inputs."""
        if self._is_last and not self._is_first and next(self._read, None) is not None:
            raise InputError(
                "the loader has more batches where targets are needed than where inputs are; give "
                "every rank a loader of the same batches"
            )


@dataclass
class Passing:
    """A rank's part of an evaluation.

    A void message is the last one. A stage that fails sends it at once and takes in the rest, so
    that nobody waits for it; the error is kept for the end.
    """

    executors: Sequence[StageExecutor]
    transport: Transport
    last: int
    source: Source
    sink: Sink
    error: Exception | None = None
    _open: set[int] = field(default_factory=set)
    _told: set[int] = field(default_factory=set)

    def run(self) -> None:
        """Until every stage here has seen the last batch."""
        self._open = {executor.index for executor in self.executors}
        for number in itertools.count():
            for executor in self.executors:
                if executor.index in self._open:
                    self._batch(executor, number)
            if not self._open:
                return

    def _batch(self, executor: StageExecutor, number: int) -> None:
        stage = executor.index
        batch = self._next(stage, number)
        if batch is None:
            self._open.discard(stage)
        outputs = None
        if batch is not None and stage not in self._told:
            try:
                outputs = executor.stage.evaluate(batch[0])
                if stage == self.last:
                    self.sink(number, outputs, batch[1])
            except Exception as error:
                self.error, outputs = self.error or error, None
        if outputs is None and stage in self._told:
            return
        if outputs is None:
            self._told.add(stage)
        if stage < self.last:
            sent = batch[1] if batch is not None else None
            message = Message(number, outputs or {}, void=outputs is None, fingerprint=sent)
            self.transport.send(stage, stage + 1, MessageKind.EVALUATE, message)

    def note(self, check: Callable[[], None]) -> None:
        """Check something at the end; what it raises counts if all else went well."""
        try:
            if self.error is None:
                check()
        except Exception as error:
            self.error = error

    def _next(self, stage: int, number: int) -> Batch | None:
        if stage == 0:
            try:
                return self.source(number)
            except Exception as error:
                self.error = self.error or error
                return None
        while True:
            message = self.transport.receive(stage - 1, stage, MessageKind.EVALUATE)
            if message is not None:
                return None if message.void else (message.values, message.fingerprint)
            self.transport.wait(f"stage {stage} for batch {number} of an evaluation")
