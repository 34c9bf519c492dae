"""Messages of a rank's captured steps to and from other ranks.

    previous rank                                next rank
        ---- x ---->  inputs --> forward  ---- y ---->
        <--- dx ----  backward, updates <--- incoming  <--- dy ----

A rank captures what lies between its messages, which are in static buffers: those received are
copied there before a stretch is replayed, those to be sent are copied there by the stretch, and a
later step that writes there waits until they are sent. A message looks the same whether its sender
captures its steps or not: each rank decides for itself.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

from torch import Tensor

from revcompile.errors import VerificationError
from revcompile.runtime.executor.captured.in_flight import flagged
from revcompile.runtime.executor.captured.static_buffers import (
    Flat,
    StaticBuffers,
    message_in,
    payload,
)
from revcompile.runtime.executor.fingerprints import Fingerprint
from revcompile.runtime.executor.transport import (
    Message,
    MessageKind,
    Route,
    Sending,
    Transport,
    next_message,
)
from revcompile.schedule import Action, Op

__all__ = ["Boundary"]


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
        self.incoming: StaticBuffers | None = None
        """The message from the next rank."""
        self.buffer_key: Hashable = None
        """Steps of other keys have other buffers for their messages to other ranks."""
        self._outgoing: dict[tuple[Hashable, Route], StaticBuffers] = {}
        self._sendings: dict[tuple[Hashable, Route], Sending] = {}

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

    def matches(self, message: Message) -> bool:
        """Do the buffers fit a message of the next rank?"""
        if not self.has_next:
            return True
        return self.incoming is not None and self.incoming.matches(payload(message))

    def allocate(self, message: Message) -> None:
        if self.has_next:
            self.incoming = StaticBuffers(payload(message))

    def receive(self, transport: Transport, microbatch: int) -> None:
        """Copy the next rank's message to its static buffers, as soon as it has come."""
        if not self.has_next:
            return
        message = next_message(transport, self._dy, self._waits)
        assert self.incoming is not None
        flag = self.incoming.leaves[-1]
        if message.index != microbatch:
            raise VerificationError(
                f"stage {self.last}: expected dy of {microbatch}, got that of {message.index}"
            )
        if message.void:  # what is in the buffers is finite, and will be left out
            flag.fill_(1.0)
            return
        value = Flat.of(payload(flagged(message, flag)))
        if not self.incoming.matches(value):
            raise VerificationError(
                f"stage {self.last}: dy of {microbatch} has another form than those before"
            )
        self.incoming.copy_(value)

    def message(self, microbatch: int) -> Message | None:
        """The next rank's message, in its static buffers."""
        return None if self.incoming is None else message_in(self.incoming, microbatch)

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
        if place not in self._outgoing:
            self._outgoing[place] = StaticBuffers(value)
        self._outgoing[place].copy_(value)
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
            message = replace(message_in(self._outgoing[place], index), fingerprint=fingerprint)
            sending = transport.send(*route, message)
            if sending is not None:
                self._sendings[place] = sending

    def wait_sent(self) -> None:
        """Have the step to come wait until the buffers that it writes to are sent."""
        for route in self.routes:
            if sending := self._sendings.pop((self.buffer_key, route), None):
                sending.wait()
