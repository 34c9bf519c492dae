"""How messages get from stage to stage."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from revcompile.errors import VerificationError
from revcompile.runtime.executor.fingerprints import Fingerprint
from revcompile.runtime.stage.strides import TreeCopy, clone_tree

__all__ = ["InProcess", "Message", "MessageKind", "Transport", "mean_of", "queues_state"]


class MessageKind(enum.Enum):
    """What a message is about. Messages of one channel between two stages keep their order."""

    X = "x"
    DY = "dy"
    TIED_GRAD = "tied grad"
    TIED_WEIGHT = "tied weight"
    EVALUATE = "evaluate"


@dataclass(frozen=True)
class Message:
    """Values and gradients by name; `index` is the micro-batch or the update they belong to.

    A `void` message says that its micro-batch was lost on the way; `bad`, a flag on the device,
    says it where nobody waits for the device to find out. `scale` belongs to the scaling of the
    loss: on the way back, what the gradients are multiplied with; on the way forward, the least
    scale at which gradients have overflowed since the message before. `fingerprint` goes forward
    with a micro-batch from rank to rank: what its data were where the inputs are read.
    """

    index: int
    values: Mapping[str, Any] = field(default_factory=dict)
    gradients: Mapping[str, Tensor | None] = field(default_factory=dict)
    void: bool = False
    bad: Tensor | None = None
    scale: float | None = None
    fingerprint: Fingerprint | None = None

    def state_dict(self, copy: TreeCopy) -> dict[str, Any]:
        return {
            "index": self.index,
            "values": copy(dict(self.values)),
            "gradients": copy(dict(self.gradients)),
            "void": self.void,
            "scale": self.scale,
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Message:
        return cls(
            state["index"],
            clone_tree(dict(state["values"])),
            clone_tree(dict(state["gradients"])),
            state["void"],
            scale=state.get("scale"),
        )


Queues = Mapping[tuple[int, int, MessageKind], Iterable[Message]]
"""Messages that wait for their receivers, by source, target and kind."""


def queues_state(queues: Queues, copy: TreeCopy) -> list[list[Any]]:
    """Waiting messages as plain values: `[source, target, kind, message]`."""
    return [
        [source, target, kind.value, message.state_dict(copy)]
        for (source, target, kind), queue in queues.items()
        for message in queue
    ]


class Transport(Protocol):
    """Delivers messages in order. What is not there yet is `None`."""

    def send(self, source: int, target: int, channel: MessageKind, message: Message) -> None:
        """Hand a message over; returns at once."""
        ...

    def receive(self, source: int, target: int, channel: MessageKind) -> Message | None:
        """The next message, if it has arrived."""
        ...

    def queued(self, target: int, kind: MessageKind) -> Iterable[Message]:
        """Messages of a kind that have arrived for a stage and were not received yet."""
        ...

    def state_dict(self, copy: TreeCopy) -> list[list[Any]]:
        """The messages that wait in this process: `[source, target, kind, message]`."""
        ...

    def load_state_dict(self, messages: Sequence[Sequence[Any]]) -> None:
        """Replace all waiting messages by those of a state that are for this process's stages."""
        ...

    def mean(
        self, stage: int, gradients: dict[str, Tensor], count: int
    ) -> dict[str, Tensor] | None:
        """A stage's gradient from the sums over `count` micro-batches, over all its copies."""
        ...

    def share(self, stage: int, update: int, squared: Tensor) -> Tensor | None:
        """Add a stage's squared gradient norm to an update's; the sum once all have added."""
        ...

    def wait(self, what: str) -> None:
        """No stage here can go on: wait for a message. `what` says who waits for what."""
        ...


def mean_of(sums: dict[str, Tensor], count: int) -> dict[str, Tensor]:
    """Sums divided by their number, in place."""
    if count > 1 and sums:
        torch._foreach_div_(list(sums.values()), float(count))
    return sums


class InProcess:
    """All stages in one process: messages are references, nothing is copied."""

    def __init__(self, stages: int) -> None:
        self.stages = stages
        self.queues: dict[tuple[int, int, MessageKind], deque[Message]] = {}
        self._norms: dict[int, dict[int, Tensor]] = {}

    def send(self, source: int, target: int, channel: MessageKind, message: Message) -> None:
        """Put a message at the end of its queue."""
        self.queues.setdefault((source, target, channel), deque()).append(message)

    def receive(self, source: int, target: int, channel: MessageKind) -> Message | None:
        """Take the first message of the queue."""
        queue = self.queues.get((source, target, channel))
        return queue.popleft() if queue else None

    def queued(self, target: int, kind: MessageKind) -> Iterable[Message]:
        return (
            message
            for (_, receiver, sort), queue in self.queues.items()
            if receiver == target and sort is kind
            for message in queue
        )

    def state_dict(self, copy: TreeCopy) -> list[list[Any]]:
        return queues_state(self.queues, copy)

    def load_state_dict(self, messages: Sequence[Sequence[Any]]) -> None:
        self.queues.clear()
        self._norms.clear()
        for source, target, kind, message in messages:
            self.send(source, target, MessageKind(kind), Message.from_state_dict(message))

    def mean(
        self, stage: int, gradients: dict[str, Tensor], count: int
    ) -> dict[str, Tensor] | None:
        """There is one copy of every stage."""
        return mean_of(gradients, count)

    def share(self, stage: int, update: int, squared: Tensor) -> Tensor | None:
        """The sum over all stages, once the last one has come."""
        norms = self._norms.setdefault(update, {})
        norms[stage] = squared
        if len(norms) < self.stages:
            return None
        self._norms = {u: n for u, n in self._norms.items() if u >= update}
        # In the order of the stages, whoever came first: sums of floats depend on it.
        total = norms[0]
        for index in range(1, self.stages):
            total = total + norms[index].to(total.device)
        return total

    def wait(self, what: str) -> None:
        """Nobody else is there who could send something."""
        raise VerificationError(f"the stages wait for each other: {what}")
