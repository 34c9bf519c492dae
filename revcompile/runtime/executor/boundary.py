"""Messages of a rank's captured steps to and from other ranks.

    previous rank                                next rank
        ---- x ---->  inputs --> forward  ---- y ---->
        <--- dx ----  backward, updates <--- incoming  <--- dy ----

A rank captures the sections of a step between its messages, which are in static buffers. A received
message is copied there before its section is replayed. The section itself copies outgoing messages
there, and a later step waits until they are sent before it overwrites them. All tensors of a
message are in one buffer, as on the wire: sending, receiving or copying it is one operation. A
message looks the same whether or not its sender captures steps: each rank decides for itself.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from revcompile.errors import VerificationError
from revcompile.runtime.executor.executor import StageExecutor
from revcompile.runtime.executor.messages import (
    Message,
    MessageKind,
    MessageSlot,
    Packet,
    Route,
    Transport,
    Wait,
    next_message,
)
from revcompile.runtime.stage.slots import Flat, StaticBuffers
from revcompile.schedule import Schedule, Tie


class StepInputs:
    """The inputs of a step.

    Args:
        values: The inputs of this process's first stage, or the message that contains them.
    """

    def __init__(self, values: Any) -> None:
        self.values = values
        self.local = Flat.of(None if isinstance(values, Message) else values)
        """The part that does not come from another rank."""

    @property
    def all(self) -> Flat:
        if not isinstance(self.values, Message):
            return self.local
        return Flat.of(dict(self.values.ready().values))


def _slot(like: Message) -> MessageSlot:
    return MessageSlot(StaticBuffers(like.payload))


class Boundary:
    """Exchanges messages between a process's consecutive stages and other ranks.

    Args:
        stages: The numbers of the process's stages.
        ties: Pairs of stages that share parameters.
    """

    def __init__(self, transport: Transport, stages: Sequence[int], ties: Sequence[Tie]) -> None:
        self._transport = transport
        self.first, self.last = stages[0], stages[-1]
        self.has_previous, self.has_next = self.first > 0, self.last < transport.stages - 1
        self._x: Route = (self.first - 1, self.first, MessageKind.X)
        self.y: Route = (self.last, self.last + 1, MessageKind.X)
        self._dy: Route = (self.last + 1, self.last, MessageKind.DY)
        self.dx: Route = (self.first, self.first - 1, MessageKind.DY)
        tied = [(tie.holder, tie.owner, MessageKind.TIED_GRAD) for tie in ties]
        tied += [(tie.owner, tie.holder, MessageKind.TIED_WEIGHT) for tie in ties]
        self._tied_out = [route for route in tied if route[0] in stages and route[1] not in stages]
        self._tied_in = [route for route in tied if route[1] in stages and route[0] not in stages]
        self.routes = [self.y] * self.has_next + [self.dx] * self.has_previous + self._tied_out
        """The routes of messages to other ranks."""
        self.clear()

    def clear(self) -> None:
        """Free all buffers."""
        self._incoming: dict[Route, MessageSlot] = {}
        self.buffer_key: Hashable = None
        """Selects the buffers of outgoing messages: steps with other keys use other buffers."""
        self._outgoing: dict[tuple[Hashable, Route], Message] = {}
        self._buffers: dict[tuple[Hashable, Route], StaticBuffers] = {}
        self._sending: dict[tuple[Hashable, Route], Wait] = {}

    # -- receiving ----------------------------------------------------------------------------

    @property
    def flag(self) -> Tensor | None:
        """`found_inf` of the next rank's message."""
        return self._incoming[self._dy].flag if self._dy in self._incoming else None

    def expected(self, flag: Tensor) -> Message:
        """Wait for the next gradient message, and leave it in its queue.

        The next rank sends it in an earlier step than the one to come, so waiting cannot deadlock.
        Without a next rank the message is empty.
        """
        if not self.has_next:
            return Message(0)
        where = f"stage {self.last} for dy"
        return next_message(self._transport, self._dy, where, keep=True).flagged(flag)

    def matches(self, inputs: StepInputs, expected: Message | None = None) -> bool:
        """Whether the static buffers fit the messages of the other ranks."""
        messages = {self._x: inputs.values} if self.has_previous else {}
        if self.has_next and expected is not None:
            messages[self._dy] = expected
        static = self._incoming
        return all(r in static and static[r].matches(message) for r, message in messages.items())

    def allocate(
        self,
        inputs: StepInputs,
        expected: Message,
        executors: Mapping[int, StageExecutor],
        flag: Tensor,
    ) -> None:
        """Allocate buffers for messages like these, and for tied parameters and gradients."""
        if self.has_previous:
            self._incoming[self._x] = _slot(inputs.values.ready())
        if self.has_next:
            self._incoming[self._dy] = _slot(expected.ready())
        for route in self._tied_in:
            source, target, kind = route
            executor = executors[target]
            names = executor.updates.tied[source]
            shared = {name: executor.stage.parameters[name] for name in names}
            message = Message(0, shared)
            if kind is MessageKind.TIED_GRAD:
                # No zeros for untrained parameters: updates would apply weight decay.
                trained = {n: p for n, p in shared.items() if n in executor.program.trained}
                message = Message(0, {}, trained).flagged(flag)
            self._incoming[route] = _slot(message)

    def before_forward(self, schedule: Schedule) -> dict[Route, int]:
        """The messages that a step's forward passes wait for, and their numbers."""
        due = {self._x: schedule.injected} if self.has_previous else {}
        for source, target, kind in self._tied_in:
            if kind is MessageKind.TIED_WEIGHT:
                for update in schedule.waiting_tied(source, target):
                    due[source, target, kind] = update
        return due

    def before_backward(self, schedule: Schedule, microbatch: int) -> dict[Route, int]:
        """The messages that a step's backward passes and updates wait for, and their numbers.

        Args:
            microbatch: The micro-batch that the process's last stage differentiates.
        """
        due = {self._dy: microbatch} if self.has_next else {}
        for route in self._tied_in:
            if route[2] is MessageKind.TIED_GRAD and schedule.is_updating(route[1]):
                due[route] = schedule.updates[route[1]]
        return due

    def receive(self, due: Mapping[Route, int]) -> None:
        """Wait for messages, and copy each to its static buffers."""
        for route, number in due.items():
            where = f"stage {route[1]} for {route[2].value} from stage {route[0]}"
            message = next_message(self._transport, route, where, number=number, packed=True)
            if not self._incoming[route].copy_if_alike(message):
                raise VerificationError(f"{where}: it has another form than those before")

    def received(self, route: Route, number: int | None) -> Message | None:
        if route not in self._incoming or number is None:
            return None
        return self._incoming[route].message(number)

    # -- sending ------------------------------------------------------------------------------

    def take(self, route: Route, message: Message) -> bool:
        """In a captured section: copy a message for another rank to its static buffers.

        Tensors that the section has computed are copied too: their memory belongs to the pool of
        the graphs, and the next graph may write to it while the message is being sent.
        """
        if route not in self.routes:
            return False
        value, place = message.payload, (self.buffer_key, route)
        if place not in self._buffers:
            buffers = self._buffers[place] = StaticBuffers(value)
            form = next(each for (_, r), each in self._buffers.items() if r == route)
            packet = Packet(buffers.memory, form, partial(Message.of_payload, 0, buffers))
            self._outgoing[place] = replace(packet.unpack(), packet=packet)
        self._buffers[place].copy_(value)
        return True

    def send_tied(self, schedule: Schedule) -> None:
        """Send tied gradients and weights after a step; `schedule` is as it was before the step."""
        for route in self._tied_out:
            if schedule.is_updating(route[0]):
                self.send(route, schedule.updates[route[0]])

    def send(self, route: Route, index: int) -> None:
        """Send the message that a section has copied to the route's buffers."""
        place = self.buffer_key, route
        wait = self._transport.send(route, replace(self._outgoing[place], index=index))
        if wait is not None:
            self._sending[place] = wait

    def wait_sent(self) -> None:
        """Have the next step wait until the buffers that it writes to are sent."""
        for route in self.routes:
            if wait := self._sending.pop((self.buffer_key, route), None):
                wait()
