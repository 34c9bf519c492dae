"""Messages between stages that wait for the next step, in static buffers.

Each message is copied once, to the buffers of its route; several that wait on one route lie in
buffers that take turns. Stages run first to last, so a stage has read its message before the next
stage writes the following one to the same buffers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from revcompile.errors import VerificationError
from revcompile.runtime.executor.transport import Message, Route, Sending, Transport
from revcompile.runtime.stage.static_buffers import Flat, RingBuffer, StaticBuffers


class StaticTransport(Transport):
    """Messages between stages; those that wait for the next step lie in static buffers.

    Args:
        stages: How many there are.
        take: Takes messages to other ranks; False if it is not one.
    """

    def __init__(
        self, stages: int, take: Callable[[Route, Message], bool] = lambda *_: False
    ) -> None:
        super().__init__(stages)
        self._take = take
        self.clear()

    def clear(self) -> None:
        """Free all buffers."""
        self.rings: dict[Route, RingBuffer] = {}
        """Of routes on which many messages wait, and are copied when they are received."""
        self._buffers: dict[Route, list[StaticBuffers]] = {}

    @property
    def routes(self) -> list[Route]:
        """Those of messages that wait for the next step."""
        return [*self._buffers, *self.rings]

    def open(self, route: Route, like: Message, count: int) -> None:
        """Have messages of a route wait in static buffers, so many at a time."""
        self._buffers[route] = [StaticBuffers(like.payload) for _ in range(count)]

    def _at(self, route: Route, index: int) -> StaticBuffers:
        """The buffers of a message."""
        if (ring := self.rings.get(route)) is not None:
            return ring.slot(index)
        return self._buffers[route][index % len(self._buffers[route])]

    def matches(self, route: Route, message: Message) -> bool:
        is_open = route in self.rings or bool(self._buffers.get(route))
        return is_open and self._at(route, message.index).matches(message.payload)

    def load(self, route: Route, message: Message) -> None:
        """Have a message wait for the next step."""
        self._at(route, message.index).copy_(message.payload)

    def begin(self, route: Route, indices: Sequence[int]) -> None:
        """Queue the messages that wait for the step to come."""
        self.queues[route] = deque(self.waiting(route, indices))

    def waiting(self, route: Route, indices: Sequence[int]) -> list[Message]:
        """The messages of these micro-batches, which wait for the next step."""
        return [Message.of_payload(index, self._at(route, index)) for index in indices]

    def send(self, route: Route, message: Message) -> Sending | None:
        """Queue a message; if it waits for the next step, in static buffers.

        Raises:
            VerificationError: The buffer holds a message that has not been read.
        """
        if self._take(route, message):
            return None
        if (ring := self.rings.get(route)) is not None:
            ring.push(message.payload)
            ring.newest.add_(1).remainder_(ring.count)
            message = Message(message.index)
        elif buffers := self._buffers.get(route):
            unread = self.queues.get(route) or deque()
            if len(unread) >= len(buffers):
                source, target, kind = route
                raise VerificationError(
                    f"stage {source}: {kind.value} of {message.index} would overwrite that of "
                    f"{unread[0].index}, which stage {target} has not read"
                )
            static = self._at(route, message.index)
            static.copy_(message.payload)
            message = Message.of_payload(message.index, static)
        return super().send(route, message)

    def buffers(self, route: Route, index: int) -> Sequence[Mapping[str, Tensor | None]]:
        """Where a message's values and gradients, by name, may be written as they are computed."""
        if route not in self._buffers:
            return {}, {}
        values, gradients, *_ = self._at(route, index).value
        return values, gradients

    def receive(self, route: Route, *, keep: bool = False, packed: bool = False) -> Message | None:
        message, ring = super().receive(route, keep=keep), self.rings.get(route)
        if message is None or ring is None:
            return message
        value = Flat.of(ring.pop())
        if not keep:
            ring.oldest.add_(1).remainder_(ring.count)
        return Message.of_payload(message.index, value)
