"""Messages between stages, and the transport that carries them within one process.

A message that waits for a later step lies in a slot of its route, where steps may be captured. One
that has another form than those before it, as of an odd batch, stays where it was computed.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from revcompile.errors import VerificationError
from revcompile.kernels.autocast import widest_dtype
from revcompile.runtime.executor.fingerprints import NOT_COMPARED, Fingerprint
from revcompile.runtime.executor.streams import current_stream
from revcompile.runtime.stage.loss import OVERFLOW
from revcompile.runtime.stage.slots import Flat, Ring, StaticBuffers, free_cached
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


@dataclass
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
    work: Any = None
    """A receive between GPUs, which may not have ended."""
    _waited: int | None = None
    """The number of the stream that waits for it already."""

    def wait(self) -> None:
        """Have the current stream wait until the buffer is filled."""
        if self.work is not None:
            stream = current_stream(self.memory)
            if self._waited != stream.stream_id:  # a stream itself may be equal to None
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
    """A flag on the device, 1 if a gradient so far was not finite, OVERFLOW if that was because of
    the loss scale. None: known to be 0."""
    scale: Tensor | None = None
    """In a message back, the loss scale that the gradients have; in a message forward, the least
    scale at which gradients have overflowed since the message before. On the device."""
    fingerprint: Fingerprint = NOT_COMPARED
    """In a message forward to another rank: of the data that the first stage was given."""
    is_exact: bool = False
    """In a message back: whether the values are those of the forward pass, but for rounding."""
    packet: Packet | None = field(default=None, compare=False, repr=False)
    """If its tensors lie in one buffer. One that was received may have nothing else."""
    is_in_slot: bool = field(default=False, compare=False)
    """Whether its tensors lie in a slot of its route."""

    @property
    def payload(self) -> tuple[Any, ...]:
        """The part that slots hold."""
        return dict(self.values), dict(self.gradients), self.scale, self.found_inf

    @classmethod
    def of_payload(cls, index: int, value: Flat, **others: Any) -> Message:
        values, gradients, scale, found_inf = value.value
        return cls(index, values, gradients, scale=scale, found_inf=found_inf, **others)

    def ready(self, packed: bool = False) -> Message:
        """The same for the current stream, which waits for it; with its values if not `packed`."""
        if self.packet is None:
            return self
        self.packet.wait()
        return self if packed else self.packet.unpack()

    def flagged(self, flag: Tensor | None) -> Message:
        """The same with a flag `found_inf` like this one, which is not set unless it was."""
        if flag is None or self.found_inf is not None:
            return self
        return replace(self, found_inf=torch.zeros_like(flag))

    def resolved(self) -> Message:
        """The same, void if its flag is set; waits for the device."""
        flag = 0.0 if self.void or self.found_inf is None else float(self.found_inf)
        if not flag:
            return self
        return Message(self.index, void=True, scale=self.scale if flag == OVERFLOW else None)

    def state_dict(self, copy: TreeCopy) -> dict[str, Any]:
        message = self.ready().resolved()
        scale = math.inf if message.scale is None else float(message.scale)
        return {
            "index": message.index,
            "values": {} if message.void else copy(dict(message.values)),
            "gradients": {} if message.void else copy(dict(message.gradients)),
            "void": message.void,
            "scale": None if math.isinf(scale) else scale,
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Message:
        scale = state.get("scale")
        return cls(
            state["index"],
            clone_tree(dict(state["values"])),
            clone_tree(dict(state["gradients"])),
            state["void"],
            scale=None if scale is None else torch.tensor(scale, dtype=torch.float64),
        )


Route = tuple[int, int, MessageKind]
"""Sender, receiver, kind of message."""


class MessageSlot:
    """Memory of one message, which stays where it is."""

    def __init__(self, buffers: Flat) -> None:
        self.buffers = buffers
        self._values, self._gradients, self._scale, self.flag = buffers.value
        self._form: Any = None
        """Of packets that are laid out as the buffers are."""

    def message(self, index: int, **others: Any) -> Message:
        """The message that lies here."""
        payload = {"scale": self._scale, "found_inf": self.flag, **others}
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
        """Copy a message, or what stands for a lost one; False if it has another form."""
        if message.void:
            if self.flag is not None:  # what is in the buffers will be left out
                self.flag.fill_(1.0 if message.scale is None else OVERFLOW)
            return self.flag is not None
        packet = message.packet
        if packet is not None and self.matches(message) and packet.form is self._form:
            self.buffers.memory.copy_(packet.memory)
            if packet.release is not None:
                packet.release()
            return True
        message = message.ready()
        if not message.values and message.gradients.keys() < self._gradients.keys():
            # Of a stage that does not differentiate a tied parameter, or has left all
            # micro-batches of an update out.
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

    A message has the slot of its number. In a captured step that is known, as steps of other slots
    are steps of other kinds; in those of a `ring` it is on the device.

    Args:
        count: How many messages wait at most.
        has_flags: Whether messages have flags.
        in_ring: Whether the slots are a ring.
    """

    def __init__(
        self, count: int, device: torch.device, has_flags: bool = False, in_ring: bool = False
    ) -> None:
        self.count, self._device, self._in_ring = count, device, in_ring
        self._flag = torch.zeros(1, device=device) if has_flags else None
        self.clear()

    def clear(self) -> None:
        """Let the next message tell their form."""
        self.slots: list[MessageSlot] = []
        self.ring: Ring | None = None

    def at(self, index: int) -> MessageSlot:
        return self.slots[index % self.count]

    def put(self, message: Message, unread: int) -> Message:
        """The message in its slot; itself if it has another form, or if so many fill all slots."""
        if unread >= self.count or (message.void and not self.slots):
            return message
        if not self.slots:
            scale = None if message.scale is None else message.scale.to(self._device)
            self._allocate(replace(message, scale=scale).flagged(self._flag).payload)
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
        """In a captured step: the message that lies in a slot."""
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
    """Messages of a captured step to and from other ranks."""

    def take(self, route: Route, message: Message) -> bool:
        """Copy one to another rank to where it is sent from; False if it stays here."""

    def received(self, route: Route, number: int | None) -> Message | None:
        """The one from another rank, which was received before; None if it is from this one."""


Wait = Callable[[], None]
"""Has what comes next, here or on the device, wait until a message's tensors may be changed."""


class Average(Protocol):
    """The mean of a stage's gradients over its replicas."""

    is_reduced: bool
    """Whether the sums of all replicas are known."""

    def fill(self, gradients: Mapping[str, Tensor], count: Tensor) -> None:
        """Take over sums over `count` micro-batches here."""

    def start(self) -> None:
        """Add up what all replicas have, without waiting for them."""

    def reduce(self) -> None:
        """Add up what all replicas have; not captured."""

    def read(self, gradients: dict[str, Tensor], adds: bool) -> Tensor:
        """Write the means to `gradients`; how many micro-batches all replicas have had.

        Args:
            adds: Also those that only other replicas have; waits for the device.
        """


class Transport:
    """Delivers messages in order, and combines what several stages or replicas have.

    This one is for stages in one process: messages are passed on by reference.
    """

    def __init__(self, stages: int) -> None:
        self.stages = stages
        self.queues: dict[Route, deque[Message]] = {}
        """Messages that wait for their receivers."""
        self.slots: dict[Route, MessageSlots] = {}
        """Of messages that wait from one step to the next, where steps may be captured."""
        self.captured: Captured | None = None
        """While a captured step runs."""
        self.averages: Mapping[int, Average] = {}
        """By stage, if there are replicas of it."""
        self.completed = -1
        """The last micro-batch that this process has finished its part of."""
        self._norms: dict[int, dict[int, Tensor]] = {}
        self._totals: dict[int, Tensor] = {}
        """By update: the squared norms of stages here, and of all stages once those are known."""

    def send(self, route: Route, message: Message) -> Wait | None:
        """Send a message, without waiting for it to arrive; None if it is passed by reference."""
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
            number: Of the micro-batch or update that it has to be of.
            keep: It stays the next message.
            packed: It may have nothing but its packet, with values not looked at yet.
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
        """No update is under way."""
        self._norms.clear()
        self._totals.clear()

    def _sum(self, of_stages: Tensor) -> Tensor:
        """The sum of all stages' norms, from those of the stages here."""
        return of_stages.sum()

    def wait_all_delivered(self) -> None:
        """Wait until every message that was sent is in its receiver's queue. Every rank calls it.

        Between two steps nothing else is in flight between ranks: a checkpoint can hold it.
        """

    def stop_all(self, error: BaseException) -> None:
        """Tell every other rank that this one stops, unless it only follows another one."""

    def wait(self, what: str) -> None:
        """Wait for a message, because no stage here can go on; `what` says who waits for what."""
        raise VerificationError(f"the stages wait for each other: {what}")


def next_message(transport: Transport, route: Route, where: str, **how: Any) -> Message:
    """Wait for a message; `where` says for what. See `Transport.receive`."""
    while (message := transport.receive(route, **how)) is None:
        transport.wait(where)
    return message
