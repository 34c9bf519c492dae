"""Messages between stages, and the transport that carries them within one process."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from revcompile.errors import VerificationError
from revcompile.kernels.autocast import widest_dtype
from revcompile.runtime.executor.fingerprints import Fingerprint
from revcompile.runtime.stage.loss_scale import OVERFLOW
from revcompile.runtime.stage.static_buffers import Flat
from revcompile.runtime.stage.tensors import TreeCopy, clone_tree


class MessageKind(enum.Enum):
    """What a message carries. Messages of one kind between two stages keep their order."""

    X = "x"
    DY = "dy"
    TIED_GRAD = "tied grad"
    TIED_WEIGHT = "tied weight"
    EVALUATE = "evaluate"

    # As part of a route it is looked up for every message; `Enum` has a hash in Python.
    __hash__ = object.__hash__


@dataclass(frozen=True)
class Packet:
    """All tensors of a message in one buffer."""

    memory: Tensor
    """Bytes."""
    form: Any
    """Packets with the same object here have equal names and layouts: its `layout`."""
    unpack: Callable[[], Message]
    """The whole message, with views of the buffer."""
    release: Callable[[], None] | None = None
    """Says that nothing that comes later, here or on the device, reads the buffer."""


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
    """In a captured step: a flag on the device, 1 if a gradient so far was not finite, OVERFLOW if
    that was because of the loss scale."""
    scale: Any = None
    """In a message back, the loss scale that the gradients have; in a message forward, the least
    scale at which gradients have overflowed since the message before. A number; in a captured step
    it is on the device."""
    fingerprint: Fingerprint | None = None
    """In a message forward to another rank: of the data that the first stage was given."""
    is_exact: bool = False
    """In a message back: are the values those of the forward pass, but for rounding?"""
    packet: Packet | None = field(default=None, compare=False, repr=False)
    """If its tensors lie in one buffer. One that was received may have nothing else."""

    def ready(self, packed: bool = False) -> Message:
        """As messages from other ranks: they may have to arrive first."""
        return self

    @property
    def payload(self) -> tuple[Any, ...]:
        """The part that static buffers hold."""
        return dict(self.values), dict(self.gradients), self.scale, self.found_inf

    @classmethod
    def of_payload(cls, index: int, value: Flat) -> Message:
        values, gradients, scale, found_inf = value.value
        return cls(index, values, gradients, scale=scale, found_inf=found_inf)

    def flagged(self, flag: Tensor | None) -> Message:
        """The same with a flag `found_inf` like this one, which is not set unless it was."""
        if flag is None or self.found_inf is not None:
            return self
        return replace(self, found_inf=torch.zeros_like(flag))

    def resolved(self) -> Message:
        """The same with nothing but tensors on the device; void if the flag is set."""
        if self.found_inf is None and not isinstance(self.scale, Tensor):
            return self
        scale = None if self.scale is None else float(self.scale)
        if flag := self.found_inf is not None and float(self.found_inf):
            return Message(self.index, void=True, scale=scale if flag == OVERFLOW else None)
        return replace(self, found_inf=None, scale=scale)

    def state_dict(self, copy: TreeCopy) -> dict[str, Any]:
        message = self.resolved()
        return {
            "index": message.index,
            "values": copy(dict(message.values)),
            "gradients": copy(dict(message.gradients)),
            "void": message.void,
            "scale": message.scale,
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


Route = tuple[int, int, MessageKind]
"""Sender, receiver, kind of message."""


Mean = tuple[dict[str, Tensor], int]
"""Of gradients, and over how many micro-batches."""


class Sending(Protocol):
    """A message on its way to another rank."""

    def wait(self) -> None:
        """Have what comes next, here or on the device, wait until its tensors may be changed."""


class Average(Protocol):
    """The mean of a stage's gradients over its replicas, in captured steps."""

    def fill(self, gradients: Mapping[str, Tensor], count: Tensor) -> None:
        """Take over sums over `count` micro-batches here."""

    def reduce(self) -> None:
        """Add up what all replicas have; not captured."""

    def read(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Write the means to `gradients`; how many micro-batches all replicas have had."""


class Transport:
    """Delivers messages in order, and combines what several stages or replicas have.

    This one is for stages in one process: messages are passed on by reference.
    """

    def __init__(self, stages: int) -> None:
        self.stages = stages
        self.queues: dict[Route, deque[Any]] = {}
        """Messages that wait for their receivers: what has `Message.ready`."""
        self.averages: Mapping[int, Average] = {}
        """By stage, if there are replicas of it."""
        self._norms: dict[int, dict[int, Tensor]] = {}
        self._totals: dict[int, Tensor] = {}
        """By update: the squared norms of stages here, and of all stages once those are known."""

    def send(self, route: Route, message: Message) -> Sending | None:
        """Send a message, without waiting for it to arrive; None if it is passed by reference."""
        self.queues.setdefault(route, deque()).append(message)
        return None

    def receive(self, route: Route, *, keep: bool = False, packed: bool = False) -> Message | None:
        """The next message; None if it has not arrived yet.

        Args:
            keep: It stays the next message.
            packed: It may have nothing but its packet, with values not looked at yet.
        """
        queue = self.queues.get(route)
        if not queue:
            return None
        message: Message = (queue[0] if keep else queue.popleft()).ready(packed)
        return message

    def queued(self, target: int, kind: MessageKind) -> Iterable[Message]:
        """Messages of a kind that have arrived for a stage and were not received yet."""
        return (
            message.ready()
            for (_, receiver, sort), queue in list(self.queues.items())  # threads may add some
            if receiver == target and sort is kind
            for message in queue
        )

    def state_dict(self, copy: TreeCopy) -> list[list[Any]]:
        """The messages that wait in this process: `[source, target, kind, message]`."""
        return [
            [source, target, kind.value, message.ready().state_dict(copy)]
            for (source, target, kind), queue in list(self.queues.items())
            for message in queue
        ]

    def load_state_dict(self, messages: Sequence[Sequence[Any]]) -> None:
        """Replace all waiting messages by those of a state that are for this process's stages."""
        for queue in list(self.queues.values()):
            queue.clear()
        self._norms.clear()
        self._totals.clear()
        for source, target, kind, message in messages:
            if self.is_here(target):
                route = source, target, MessageKind(kind)
                self.queues.setdefault(route, deque()).append(Message.from_state_dict(message))

    def is_here(self, stage: int) -> bool:
        """Is it a stage of this process?"""
        return True

    def mean(self, stage: int, gradients: dict[str, Tensor], count: int) -> Mean | None:
        """The mean of a stage's gradients over the micro-batches of all its replicas.

        Args:
            gradients: Sums over the micro-batches here; may be divided in place.
            count: How many micro-batches these are.

        Returns:
            None while other replicas have not added theirs.
        """
        if count > 1 and gradients:
            torch._foreach_div_(list(gradients.values()), float(count))
        return gradients, count

    def sum_squared_norms(self, stage: int, update: int, squared: Tensor) -> Tensor | None:
        """The sum over all stages of the squared norm of a gradient; None until all are known."""
        norms = self._norms.setdefault(update, {})
        norms[stage] = squared
        if len(norms) < sum(map(self.is_here, range(self.stages))):
            return None
        if update not in self._totals:
            dtype = widest_dtype(squared.device)
            of_stages = torch.zeros(self.stages, dtype=dtype, device=squared.device)
            for index, norm in norms.items():
                of_stages[index] = norm
            self._totals = {update: self._sum(of_stages)}
            self._norms = {u: n for u, n in self._norms.items() if u >= update}
        return self._totals[update].to(squared.device)

    def _sum(self, of_stages: Tensor) -> Tensor:
        """The sum of all stages' norms, from those of the stages here."""
        return of_stages.sum()

    def wait(self, what: str) -> None:
        """Wait for a message, because no stage here can go on; `what` says who waits for what."""
        raise VerificationError(f"the stages wait for each other: {what}")


def next_message(
    transport: Transport, route: Route, where: str, *, keep: bool = False, packed: bool = False
) -> Message:
    """Wait for a message; `where` says for what. See `Transport.receive`."""
    while True:
        message = transport.receive(route, keep=keep, packed=packed)
        if message is not None:
            return message
        transport.wait(where)
