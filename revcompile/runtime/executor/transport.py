"""Messages between stages, and the transport that carries them within one process."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from revcompile.errors import VerificationError
from revcompile.runtime.executor.fingerprints import Fingerprint

__all__ = ["InProcess", "Message", "MessageKind", "Transport", "mean_of"]


class MessageKind(enum.Enum):
    """What a message carries. Messages of one kind between two stages keep their order."""

    X = "x"
    DY = "dy"
    TIED_GRAD = "tied grad"
    TIED_WEIGHT = "tied weight"
    EVALUATE = "evaluate"


@dataclass(frozen=True)
class Message:
    """Values and gradients by name, of one micro-batch or one update."""

    index: int
    """The micro-batch, or the update."""
    values: Mapping[str, Any] = field(default_factory=dict)
    gradients: Mapping[str, Tensor | None] = field(default_factory=dict)
    void: bool = False
    """The micro-batch was lost on the way, and there are no values."""
    found_inf: Tensor | None = None
    """In a captured step: a flag on the device, set if a gradient so far was not finite."""
    scale: float | None = None
    """In a message back, the loss scale that the gradients have; in a message forward, the least
    scale at which gradients have overflowed since the message before."""
    fingerprint: Fingerprint | None = None
    """In a message forward to another rank: of the data that the first stage was given."""


class Transport(Protocol):
    """Delivers messages in order, and combines what several replicas or stages have."""

    def send(self, source: int, target: int, channel: MessageKind, message: Message) -> None:
        """Send a message, without waiting for it to arrive."""
        ...

    def receive(self, source: int, target: int, channel: MessageKind) -> Message | None:
        """The next message; None if it has not arrived yet."""
        ...

    def deliver(self, source: int, target: int, channel: MessageKind, message: Message) -> None:
        """Put a message of a checkpoint into its receiver's queue."""
        ...

    def mean(
        self, stage: int, gradients: dict[str, Tensor], count: int
    ) -> dict[str, Tensor] | None:
        """The mean of a stage's gradients over the micro-batches of all its replicas.

        Args:
            gradients: Sums over the micro-batches here; may be divided in place.
            count: How many micro-batches these are.

        Returns:
            None while other replicas have not added theirs.
        """
        ...

    def sum_squared_norms(self, stage: int, update: int, squared: Tensor) -> Tensor | None:
        """The sum over all stages of the squared gradient norm; None until all have added theirs.

        Args:
            squared: That of the stage's gradient for this update.
        """
        ...

    def wait(self, what: str) -> None:
        """Wait for a message, because no stage here can go on.

        Args:
            what: Which stages wait at which actions, for an error message.
        """
        ...


def mean_of(sums: dict[str, Tensor], count: int) -> dict[str, Tensor]:
    """Divide sums over `count` micro-batches, in place."""
    if count > 1 and sums:
        torch._foreach_div_(list(sums.values()), float(count))
    return sums


class InProcess:
    """The transport of stages in one process: messages are passed on by reference."""

    def __init__(self, stages: int) -> None:
        self.stages = stages
        self.queues: dict[tuple[int, int, MessageKind], deque[Message]] = {}
        self._norms: dict[int, dict[int, Tensor]] = {}

    def send(self, source: int, target: int, channel: MessageKind, message: Message) -> None:
        self.queues.setdefault((source, target, channel), deque()).append(message)

    def receive(self, source: int, target: int, channel: MessageKind) -> Message | None:
        queue = self.queues.get((source, target, channel))
        return queue.popleft() if queue else None

    def deliver(self, source: int, target: int, channel: MessageKind, message: Message) -> None:
        self.send(source, target, channel, message)

    def clear(self) -> None:
        self.queues.clear()
        self._norms.clear()

    def mean(
        self, stage: int, gradients: dict[str, Tensor], count: int
    ) -> dict[str, Tensor] | None:
        return mean_of(gradients, count)

    def sum_squared_norms(self, stage: int, update: int, squared: Tensor) -> Tensor | None:
        norms = self._norms.setdefault(update, {})
        norms[stage] = squared
        if len(norms) < self.stages:
            return None
        self._norms = {u: n for u, n in self._norms.items() if u >= update}
        # Always in the order of the stages: sums of floats depend on it.
        total = norms[0]
        for index in range(1, self.stages):
            total = total + norms[index].to(total.device)
        return total

    def wait(self, what: str) -> None:
        """There is no other process that could send something."""
        raise VerificationError(f"the stages wait for each other: {what}")
