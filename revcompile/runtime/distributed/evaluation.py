"""Evaluation across ranks: batches go from stage to stage, nothing comes back."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from revcompile.runtime.transport import Channel, Message, Transport
from revcompile.runtime.worker import Actor

__all__ = ["Passing"]

Source = Iterator[Mapping[str, Any]]
"""The values the model takes, batch by batch."""
Sink = Callable[[int, Mapping[str, Any]], None]
"""What is done with a batch's outputs at the last stage."""


@dataclass
class Passing:
    """A rank's part of an evaluation.

    A void message is the last one. A stage that fails sends it at once and takes in the rest, so
    that nobody waits for it; the error is kept for the end.
    """

    actors: Sequence[Actor]
    transport: Transport
    last: int
    source: Source
    sink: Sink
    error: Exception | None = None
    _open: set[int] = field(default_factory=set)
    _told: set[int] = field(default_factory=set)

    def run(self) -> None:
        """Until every stage here has seen the last batch."""
        self._open = {actor.index for actor in self.actors}
        for number in itertools.count():
            for actor in self.actors:
                if actor.index in self._open:
                    self._batch(actor, number)
            if not self._open:
                return

    def _batch(self, actor: Actor, number: int) -> None:
        stage = actor.index
        inputs = self._next(stage, number)
        if inputs is None:
            self._open.discard(stage)
        outputs = None
        if inputs is not None and stage not in self._told:
            try:
                outputs = actor.stage.evaluate(inputs)
                if stage == self.last:
                    self.sink(number, outputs)
            except Exception as error:
                self.error, outputs = self.error or error, None
        if outputs is None and stage in self._told:
            return
        if outputs is None:
            self._told.add(stage)
        if stage < self.last:
            message = Message(number, outputs or {}, void=outputs is None)
            self.transport.send(stage, stage + 1, Channel.EVALUATE, message)

    def _next(self, stage: int, number: int) -> Mapping[str, Any] | None:
        if stage == 0:
            try:
                return next(self.source, None)
            except Exception as error:
                self.error = self.error or error
                return None
        while True:
            message = self.transport.receive(stage - 1, stage, Channel.EVALUATE)
            if message is not None:
                return None if message.void else message.values
            self.transport.wait(f"stage {stage} for batch {number} of an evaluation")
