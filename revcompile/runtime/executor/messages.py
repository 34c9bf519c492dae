"""Messages between stages, and the transport that carries them within one process.

Where steps may be captured, a message that waits for a later step is copied to a slot of its route.
A message whose form differs from those before it (an odd batch) stays where it was computed.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from revcompile.errors import VerificationError
from revcompile.kernels.autocast import widest_dtype
from revcompile.runtime.executor.streams import current_stream
from revcompile.runtime.stage.slots import Flat, Ring, StaticBuffers, free_cached
from revcompile.runtime.stage.tensors import TreeCopy, clone_tree

TARGET: Final = "<target>"
"""Names a micro-batch's target and number of samples among its values: `(target, samples)`.

They enter with the inputs and go from stage to stage. No value of a model has such a name."""


class MessageKind(enum.Enum):
    """What a message carries. Messages of one kind between two stages keep their order."""

    X = "x"
    DY = "dy"
    TIED_GRAD = "tied grad"
    TIED_WEIGHT = "tied weight"
    EVALUATE = "evaluate"

    # Routes are looked up for every message, and the hash of `Enum` is computed in Python.
    __hash__ = object.__hash__


@dataclass
class Packet:
    """All tensors of a message in one buffer."""

    memory: Tensor
    """Bytes."""
    form: Any
    """Packets with the same object here have the same names, and its `layout`."""
    unpack: Callable[[], Message]
    """The whole message, with views of the buffer."""
    release: Callable[[], None] | None = None
    """Tells the receiver that nothing reads the buffer after the work enqueued so far."""
    work: Any = None
    """The receive between GPUs that fills the buffer, and may not have ended."""
    _waited: int | None = None
    """The id of the stream that waits for the receive already."""

    def wait(self) -> None:
        """Have the current stream wait until the buffer is filled."""
        if self.work is not None:
            stream = current_stream(self.memory)
            if self._waited != stream.stream_id:  # a stream object may compare equal to None
                self._waited = stream.stream_id
                self.work.wait()
                self.memory.record_stream(stream)


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
    """A flag on the device, 1 if a gradient so far was not finite. None: known to be 0."""
    is_exact: bool = False
    """In a backward message: whether the values equal those of the forward pass, up to rounding."""
    packet: Packet | None = field(default=None, compare=False, repr=False)
    """The buffer, if all tensors are in one. A received message may have nothing else."""
    is_in_slot: bool = field(default=False, compare=False)
    """Whether its tensors are in a slot of its route."""

    @property
    def payload(self) -> tuple[Any, ...]:
        """The part that slots hold."""
        return dict(self.values), dict(self.gradients), self.found_inf

    @classmethod
    def of_payload(cls, index: int, value: Flat, **others: Any) -> Message:
        values, gradients, found_inf = value.value
        return cls(index, values, gradients, found_inf=found_inf, **others)

    def ready(self, packed: bool = False) -> Message:
        """The message, once the current stream waits for it; unpacked unless `packed`."""
        if self.packet is None:
            return self
        self.packet.wait()
        return self if packed else self.packet.unpack()

    def flagged(self, flag: Tensor | None) -> Message:
        """The message with a flag `found_inf`: its own, or a zero like `flag`."""
        if flag is None or self.found_inf is not None:
            return self
        return replace(self, found_inf=torch.zeros_like(flag))

    def resolved(self) -> Message:
        """The message, void if its flag is set; waits for the device."""
        is_known = self.void or self.found_inf is None
        return self if is_known or not bool(self.found_inf) else Message(self.index, void=True)

    def state_dict(self, copy: TreeCopy) -> dict[str, Any]:
        message = self.ready().resolved()
        return {
            "index": message.index,
            "values": {} if message.void else copy(dict(message.values)),
            "gradients": {} if message.void else copy(dict(message.gradients)),
            "void": message.void,
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Message:
        return cls(
            state["index"],
            clone_tree(dict(state["values"])),
            clone_tree(dict(state["gradients"])),
            state["void"],
        )


Route = tuple[int, int, MessageKind]
"""Sender, receiver, kind of message."""


class MessageSlot:
    """Static buffers of one message."""

    def __init__(self, buffers: Flat) -> None:
        self.buffers = buffers
        self._values, self._gradients, self.flag = buffers.value
        self._form: Any = None
        """The form of packets that are laid out like the buffers."""

    def message(self, index: int, **others: Any) -> Message:
        """The message in these buffers."""
        payload = {"found_inf": self.flag, **others}
        return Message(index, self._values, self._gradients, is_in_slot=True, **payload)

    def matches(self, message: Message) -> bool:
        packet = message.packet
        if packet is not None and packet.form is self._form:
            return True
        matches = self.buffers.matches(self._payload(message))
        if matches and packet is not None and packet.form.layout == self.buffers.layout:
            self._form = packet.form
        return matches

    def copy_if_alike(self, message: Message) -> bool:
        """Copy a message, or only the flag of a void one; False if they do not fit."""
        if message.void:
            if self.flag is not None:  # set, it makes the receiver ignore the other buffers
                self.flag.fill_(1.0)
            return self.flag is not None
        packet = message.packet
        if packet is not None and self.matches(message) and packet.form is self._form:
            self.buffers.memory.copy_(packet.memory)
            if packet.release is not None:
                packet.release()
            return True
        message = message.ready()
        if not message.values and message.gradients.keys() < self._gradients.keys():
            # The sender does not differentiate a tied parameter, or has left out all micro-batches
            # of an update.
            zeros = {n: torch.zeros_like(g) for n, g in self._gradients.items()}
            message = replace(message, gradients=zeros | dict(message.gradients))
        payload = self._payload(message)
        if not self.buffers.matches(payload):
            return False
        self.buffers.copy_(payload)
        return True

    def _payload(self, message: Message) -> Any:
        return message.ready().flagged(self.flag).payload


class MessageSlots:
    """The slots of a route whose messages wait from one step to the next.

    A message's number selects its slot. A captured step knows the slot, because steps with other
    slots are captured separately. If the slots are a `ring`, it reads slot numbers on the device.

    Args:
        count: How many messages wait at most.
        has_flags: Whether messages have flags.
        in_ring: Whether the slots are a ring.
    """

    def __init__(
        self, count: int, device: torch.device, has_flags: bool = False, in_ring: bool = False
    ) -> None:
        self.count, self._device, self._in_ring = count, device, in_ring
        self._flag = torch.zeros(1, dtype=torch.float32, device=device) if has_flags else None
        self.clear()

    def clear(self) -> None:
        """Free the slots; the next message decides their form."""
        self.slots: list[MessageSlot] = []
        self.ring: Ring | None = None

    def at(self, index: int) -> MessageSlot:
        return self.slots[index % self.count]

    def put(self, message: Message, unread: int) -> Message:
        """The message in its slot; the message itself if it does not fit, or no slot is free."""
        if unread >= self.count or (message.void and not self.slots):
            return message
        if not self.slots:
            self._allocate(message.flagged(self._flag).payload)
        slot = self.at(message.index)
        if self.ring is not None and self.ring.ends is not None:
            is_stored = self.ring.put(message.index, message.payload)
        else:
            is_stored = slot.copy_if_alike(message)
        if not is_stored:
            return message
        if message.void:
            return replace(message, is_in_slot=True)
        return slot.message(message.index, is_exact=message.is_exact)

    def take(self, index: int) -> Message:
        """In a captured step: the message in a slot."""
        if self.ring is None:
            return self.at(index).message(index)
        return Message.of_payload(index, Flat.of(self.ring.take(index)))

    def _allocate(self, like: Any) -> None:
        free_cached(self._device)
        if self._in_ring:
            self.ring = Ring(like, self.count)
            self.slots = [MessageSlot(self.ring.slot(number)) for number in range(self.count)]
        else:
            self.slots = [MessageSlot(StaticBuffers(like)) for _ in range(self.count)]


class Captured(Protocol):
    """Handles a captured step's messages to and from other ranks."""

    def take(self, route: Route, message: Message) -> bool:
        """Copy a message for another rank to its send buffers; False if it is for this process."""

    def received(self, route: Route, number: int | None) -> Message | None:
        """The message received from another rank; None if it comes from this process."""


Wait = Callable[[], None]
"""Makes later work, on the host or the device, wait until a message's tensors may be changed."""


class Average(Protocol):
    """The mean of a stage's gradients over its replicas."""

    is_reduced: bool
    """Whether the sums over all replicas are known."""

    def fill(self, gradients: Mapping[str, Tensor], count: Tensor) -> None:
        """Copy this replica's sums over `count` micro-batches."""

    def start(self) -> None:
        """Start to sum over all replicas, without waiting for them."""

    def reduce(self) -> None:
        """Sum over all replicas; not captured."""

    def read(self, gradients: dict[str, Tensor], adds: bool) -> Tensor:
        """Write the means to `gradients`; returns the number of micro-batches of all replicas.

        Args:
            adds: Add the gradients that only other replicas have; waits for the device.
        """


class Transport:
    """Delivers messages in order, and reduces values over stages and replicas.

    This one is for stages in one process: messages are passed on by reference.
    """

    def __init__(self, stages: int) -> None:
        self.stages = stages
        self.queues: dict[Route, deque[Message]] = {}
        """Messages that wait for their receivers."""
        self.slots: dict[Route, MessageSlots] = {}
        """Slots for messages that wait from one step to the next, where steps may be captured."""
        self.captured: Captured | None = None
        """Set while a captured step runs."""
        self.averages: Mapping[int, Average] = {}
        """By stage, if there are replicas of it."""
        self.completed = -1
        """The last micro-batch that this process has finished its part of."""
        self._norms: dict[int, dict[int, Tensor]] = {}
        self._totals: dict[int, Tensor] = {}
        """By update: squared norms by stage (`_norms`); their sum over all stages (`_totals`)."""

    def send(self, route: Route, message: Message) -> Wait | None:
        """Send a message without waiting for its arrival; None if there is nothing to wait for."""
        if self.captured is not None and self.captured.take(route, message):
            return None
        queue, slots = self.queues.setdefault(route, deque()), self.slots.get(route)
        if slots is not None:
            message = slots.put(message, len(queue))
            assert self.captured is None or message.is_in_slot, f"{route}: no slot for it"
        queue.append(message)
        return None

    def receive(
        self, route: Route, number: int | None = None, *, keep: bool = False, packed: bool = False
    ) -> Message | None:
        """The next message; None if it has not arrived yet.

        Args:
            number: The micro-batch or update that the message must belong to.
            keep: Leave the message in the queue.
            packed: Do not unpack it: it may have nothing but its packet.
        """
        captured = self.captured
        if captured is not None and (received := captured.received(route, number)) is not None:
            return received
        queue = self.queues.get(route)
        if not queue:
            return None
        message = queue[0] if keep else queue.popleft()
        if number is not None and message.index != number:
            source, target, kind = route
            raise VerificationError(
                f"stage {target}: expected {kind.value} of {number} from stage {source}, got that "
                f"of {message.index}"
            )
        if captured is not None and route in self.slots:
            return self.slots[route].take(message.index)
        return message.ready(packed)

    def state_dict(self, copy: TreeCopy) -> list[list[Any]]:
        """The messages that wait in this process: `[source, target, kind, message]`."""
        routes = sorted(self.queues, key=lambda route: (*route[:2], route[2].value))
        return [
            [*route[:2], route[2].value, message.state_dict(copy)]
            for route in routes
            for message in self.queues[route]
        ]

    def load_state_dict(self, messages: Sequence[Sequence[Any]]) -> None:
        """Replace all waiting messages by those of a state that are for this process's stages."""
        for queue in list(self.queues.values()):
            queue.clear()
        self.clear_norms()
        for source, target, kind, message in messages:
            if self.is_here(target):
                route = source, target, MessageKind(kind)
                self.send(route, Message.from_state_dict(message))

    def is_here(self, stage: int) -> bool:
        """Whether it is a stage of this process."""
        return True

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

    def clear_norms(self) -> None:
        """Forget the norms of all updates."""
        self._norms.clear()
        self._totals.clear()

    def _sum(self, of_stages: Tensor) -> Tensor:
        """The sum of all stages' norms, given the norms of the stages here."""
        return of_stages.sum()

    def wait_all_delivered(self) -> None:
        """Wait until every message that was sent is in its receiver's queue. Every rank calls it.

        After it, between two steps, no message is in transit between ranks: checkpoints have all.
        """

    def stop_all(self, error: BaseException) -> None:
        """Tell every other rank that this one stops, unless another rank's failure stops it."""

    def wait(self, what: str) -> None:
        """Wait for a message, because no stage here can go on; `what` says who waits for what."""
        raise VerificationError(f"the stages wait for each other: {what}")


def next_message(transport: Transport, route: Route, where: str, **how: Any) -> Message:
    """Wait for a message; `where` says for what. See `Transport.receive`."""
    while (message := transport.receive(route, **how)) is None:
        transport.wait(where)
    return message
