"""Messages of a rank's captured steps to and from other ranks.

    previous rank                                next rank
        ---- x ---->  inputs --> forward  ---- y ---->
        <--- dx ----  backward, updates <--- incoming  <--- dy ----

A rank captures what lies between its messages, which are in static buffers: those received are
copied there before a stretch is replayed, those to be sent are copied there by the stretch, and a
later step that writes there waits until they are sent. All tensors of a message lie in one buffer,
as on the wire: to send, receive or copy a message is one operation. A message looks the same
whether its sender captures its steps or not: each rank decides for itself.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from torch import Tensor

from revcompile.errors import VerificationError
from revcompile.runtime.executor.captured.in_flight import flagged
from revcompile.runtime.executor.captured.static_buffers import (
    Flat,
    StaticBuffers,
    message_of,
    payload,
)
from revcompile.runtime.executor.fingerprints import Fingerprint
from revcompile.runtime.executor.transport import (
    Message,
    MessageKind,
    Packet,
    PacketForm,
    Route,
    Sending,
    Transport,
    next_message,
)
from revcompile.schedule import Action, Op


@dataclass(frozen=True)
class StepInputs:
    """What a step is given."""

    values: Any
    """The inputs of the first stage here, or the message that brings them."""
    target: Any
    """Where the last stage is."""

    @cached_property
    def local(self) -> Flat:
        """What is not from another rank."""
        return Flat.of((None if isinstance(self.values, Message) else self.values, self.target))

    @cached_property
    def all(self) -> Flat:
        if not isinstance(self.values, Message):
            return self.local
        return Flat.of((dict(_unpacked(self.values).values), self.target))


def _unpacked(message: Message) -> Message:
    return message if message.packet is None else message.packet.unpack()


class StaticMessage:
    """Static buffers for a message from another rank."""

    def __init__(self, like: Message) -> None:
        self.buffers = StaticBuffers(payload(_unpacked(like)))
        self.flag: Tensor | None = None if like.found_inf is None else self.buffers.leaves[-1]
        """In a message back: `found_inf`."""
        self._form: PacketForm | None = None
        """Of packets that are laid out as the buffers are."""

    def matches(self, message: Message) -> bool:
        packet = message.packet
        if packet is not None and packet.form is self._form:
            return True
        matches = self.buffers.matches(self._payload(message))
        if matches and packet is not None and packet.form.layout == self.buffers.layout:
            self._form = packet.form
        return matches

    def copy_(self, message: Message) -> None:
        """Copy a message that matches."""
        packet = message.packet
        if packet is not None and packet.form is self._form:
            self.buffers.memory.copy_(packet.memory)
        else:
            self.buffers.copy_(self._payload(message))

    def _payload(self, message: Message) -> Any:
        return payload(flagged(_unpacked(message), self.flag))


class Boundary:
    """The ends of a process's stages, which follow each other.

    Args:
        stages: Their numbers.
        count: How many stages the pipeline has.
    """

    def __init__(self, stages: Sequence[int], count: int) -> None:
        self.first, self.last = stages[0], stages[-1]
        self.has_previous, self.has_next = self.first > 0, self.last < count - 1
        self._y: Route = (self.last, self.last + 1, MessageKind.X)
        self._dy: Route = (self.last + 1, self.last, MessageKind.DY)
        self._dx: Route = (self.first, self.first - 1, MessageKind.DY)
        self.clear()

    @property
    def routes(self) -> list[Route]:
        """Those of messages to other ranks."""
        return [self._y] * self.has_next + [self._dx] * self.has_previous

    @property
    def is_split(self) -> bool:
        """Do messages come and go between the forward and the backward passes?"""
        return self.has_previous or self.has_next

    def clear(self) -> None:
        """Forget all buffers."""
        self.x: StaticMessage | None = None
        """The message from the previous rank."""
        self.dy: StaticMessage | None = None
        """The message from the next rank."""
        self.buffer_key: Hashable = None
        """Steps of other keys have other buffers for their messages to other ranks."""
        self._outgoing: dict[tuple[Hashable, Route], Message] = {}
        self._buffers: dict[tuple[Hashable, Route], StaticBuffers] = {}
        self._sendings: dict[tuple[Hashable, Route], Sending] = {}

    @property
    def received(self) -> list[StaticBuffers]:
        """Where messages from other ranks are copied to."""
        return [each.buffers for each in (self.x, self.dy) if each is not None]

    def inner_actions(self, lists: Sequence[Sequence[Action]]) -> list[list[Action]]:
        """The lists of actions without those that receive from other ranks."""
        inner = [list(actions) for actions in lists]
        for stage, op in ((self.first, Op.RECV_X), (self.last, Op.RECV_DY)):
            inner[stage] = [action for action in inner[stage] if action.op is not op]
        return inner

    # -- receiving ----------------------------------------------------------------------------

    def expected(self, transport: Transport, flag: Tensor) -> Message:
        """The message that the next rank has sent in the step before, or soon will.

        This does not depend on the step to come. Without a next rank it is empty.
        """
        if not self.has_next:
            return Message(0)
        return flagged(next_message(transport, self._dy, self._waits, keep=True), flag)

    def matches(self, inputs: StepInputs, expected: Message | None = None) -> bool:
        """Do the buffers fit the messages of the other ranks?"""
        if self.has_previous and (self.x is None or not self.x.matches(inputs.values)):
            return False
        if not self.has_next or expected is None:
            return True
        return self.dy is not None and self.dy.matches(expected)

    def allocate(self, inputs: StepInputs, expected: Message) -> None:
        if self.has_previous:
            self.x = StaticMessage(inputs.values)
        if self.has_next:
            self.dy = StaticMessage(expected)

    def load(self, inputs: StepInputs) -> None:
        """Copy the previous rank's message to its static buffers."""
        if self.x is not None:
            self.x.copy_(inputs.values)

    def receive(self, transport: Transport, microbatch: int) -> None:
        """Copy the next rank's message to its static buffers, as soon as it has come."""
        if self.dy is None:
            return
        message = next_message(transport, self._dy, self._waits, packed=True)
        if message.index != microbatch:
            raise VerificationError(
                f"stage {self.last}: expected dy of {microbatch}, got that of {message.index}"
            )
        if message.void:  # what is in the buffers is finite, and will be left out
            assert self.dy.flag is not None
            self.dy.flag.fill_(1.0)
            return
        if not self.dy.matches(message):
            raise VerificationError(
                f"stage {self.last}: dy of {microbatch} has another form than those before"
            )
        self.dy.copy_(message)

    @property
    def inputs(self) -> Any:
        """The previous rank's values, in their static buffers."""
        return None if self.x is None else message_of(self.x.buffers, 0).values

    def message(self, microbatch: int) -> Message | None:
        """The next rank's message, in its static buffers."""
        return None if self.dy is None else message_of(self.dy.buffers, microbatch)

    @property
    def _waits(self) -> str:
        return f"stage {self.last} for dy"

    # -- sending ------------------------------------------------------------------------------

    def take(self, route: Route, message: Message) -> bool:
        """In a captured stretch: copy a message to another rank to its static buffers.

        Not even what the stretch has computed anew may stay where it is: that memory belongs to the
        pool of the graphs, and the next graph may write to it while the message is sent.
        """
        if route not in self.routes:
            return False
        value, place = payload(message), (self.buffer_key, route)
        if place not in self._buffers:
            buffers = self._buffers[place] = StaticBuffers(value)
            form = next(each for (_, r), each in self._buffers.items() if r == route)
            packet = Packet(buffers.memory, form, partial(message_of, buffers, 0))
            self._outgoing[place] = replace(packet.unpack(), packet=packet)
        self._buffers[place].copy_(value)
        return True

    def send_y(self, transport: Transport, index: int, fingerprint: Fingerprint | None) -> None:
        self._send(self._y, transport, index, fingerprint)

    def send_dx(self, transport: Transport, index: int) -> None:
        self._send(self._dx, transport, index, None)

    def _send(
        self, route: Route, transport: Transport, index: int, fingerprint: Fingerprint | None
    ) -> None:
        if route in self.routes:
            place = self.buffer_key, route
            message = replace(self._outgoing[place], index=index, fingerprint=fingerprint)
            sending = transport.send(*route, message)
            if sending is not None:
                self._sendings[place] = sending

    def wait_sent(self) -> None:
        """Have the step to come wait until the buffers that it writes to are sent."""
        for route in self.routes:
            if sending := self._sendings.pop((self.buffer_key, route), None):
                sending.wait()
