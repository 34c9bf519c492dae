"""Messages between stages that wait for the next step, in static buffers.

A coupling's backward pass hands one stream and one gradient on as they are: `(b, y) -> (y - F(b),
b)`. Where one message waits for each stage, they stay where they are. The stage that wrote them
does not write there in the next step, but in the one after that:

    step     message to stage j     message of the same micro-batch to stage j-1
    t        v in buffer 0
    t + 1    (another, buffer 1)    v, still in buffer 0 of stage j
    t + 2    written to buffer 0    (read before)

What was handed on once is copied the next time. What nobody hands on has one buffer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from revcompile.errors import VerificationError
from revcompile.runtime.executor.transport import Message, Route, Sending, Transport
from revcompile.runtime.stage.static_buffers import (
    LARGE,
    Flat,
    RingBuffer,
    copy_tensors,
    empty_on,
    free_cached,
)
from revcompile.runtime.stage.tensors import clone_tree, storage


@dataclass
class _Waiting:
    """The payload of a message that waits."""

    payload: Flat
    own: dict[int, int]
    """The places of tensors that lie in its own buffers, by the address of their memory."""
    handed_on: set[int] = field(default_factory=set)
    """The places of tensors that lie in the next message of the micro-batch, too."""


class StaticTransport(Transport):
    """Messages between stages; those that wait for the next step lie in static buffers.

    Args:
        stages: How many there are.
        hands_on: One message waits for each stage, and what it contains may be handed on.
        take: Takes messages to other ranks; False if it is not one.
    """

    def __init__(
        self,
        stages: int,
        hands_on: bool = False,
        take: Callable[[Route, Message], bool] = lambda *_: False,
    ) -> None:
        super().__init__(stages)
        self._take, self._hands_on = take, hands_on
        self.clear()

    def clear(self) -> None:
        """Forget all buffers."""
        self.rings: dict[Route, RingBuffer] = {}
        """Of routes on which many messages wait, and are copied when they are received."""
        self._counts: dict[Route, int] = {}
        self._forms: dict[Route, Flat] = {}
        self._static: dict[tuple[Route, int], _Waiting] = {}
        """Where messages lie that a step has left there, called or replayed."""
        self._moved: dict[tuple[Route, int], _Waiting] = {}
        """Those that wait instead, with tensors of eager execution."""
        self._replaced: list[_Waiting] = []
        """Of these, those of this step. Other streams may still read them: if they were freed,
        their memory would be given away at once."""
        self._buffers: dict[tuple[Route, int, int], Tensor] = {}
        self._storages: set[int] = set()
        """Of these buffers."""

    @property
    def routes(self) -> list[Route]:
        """Those of messages that wait for the next step."""
        return [*self._counts, *self.rings]

    @property
    def is_static(self) -> bool:
        """Do all messages lie where those of later steps will? Not in the first steps."""
        return not self._moved

    @property
    def tensors(self) -> list[Tensor]:
        """All static buffers."""
        return list(self._buffers.values())

    def open(self, route: Route, like: Message, count: int) -> None:
        """Have messages of a route wait in static buffers, so many at a time."""
        self._counts[route] = count
        self._forms[route] = Flat.of(empty_on(torch.device("meta"), like.payload))

    def matches(self, route: Route, message: Message) -> bool:
        if (ring := self.rings.get(route)) is not None:
            return ring.slot(message.index).matches(message.payload)
        return route in self._forms and self._forms[route].is_alike(Flat.of(message.payload))

    def load(self, route: Route, message: Message, is_new: bool) -> None:
        """Have a message wait for the next step, which reads it where it is.

        Args:
            is_new: Nothing has run over static buffers yet, so no part of it lies in one.
        """
        value = Flat.of(message.payload if is_new else clone_tree(message.payload))
        if (ring := self.rings.get(route)) is not None:
            ring.slot(message.index).copy_(value)
            return
        places = {storage(t): n for n, t in enumerate(value.leaves) if isinstance(t, Tensor)}
        self._moved[route, self._place(route, message.index)] = _Waiting(value, places)

    def begin(self, route: Route, indices: Sequence[int]) -> None:
        """Queue the messages that wait for the step to come; all before it are over."""
        self._replaced.clear()
        self.queues[route] = deque(self.waiting(route, indices))

    def waiting(self, route: Route, indices: Sequence[int]) -> list[Message]:
        """The messages of these micro-batches, which wait for the next step."""
        if (ring := self.rings.get(route)) is not None:
            return [Message.of_payload(index, ring.slot(index)) for index in indices]
        places = [(index, (route, self._place(route, index))) for index in indices]
        waiting = [
            (index, self._moved.get(place) or self._static[place]) for index, place in places
        ]
        return [Message.of_payload(index, each.payload) for index, each in waiting]

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
        elif count := self._counts.get(route):
            unread = self.queues.get(route) or deque()
            if len(unread) >= count:
                source, target, kind = route
                raise VerificationError(
                    f"stage {source}: {kind.value} of {message.index} would overwrite that of "
                    f"{unread[0].index}, which stage {target} has not read"
                )
            message = Message.of_payload(message.index, self._store(route, message))
        return super().send(route, message)

    def buffers(
        self, route: Route, index: int, in_order: bool
    ) -> Sequence[Mapping[str, Tensor | None]]:
        """Where a message's values and gradients, by name, may be written as they are computed:
        buffers that `send` would copy them to, and that nobody reads any more.

        Args:
            in_order: The backward passes of all stages before have ended.
        """
        if route not in self._forms:
            return {}, {}
        form, place = self._forms[route], self._place(route, index)
        before = self._waiting(route, 1 - place)
        found = []
        for number, like in enumerate(form.leaves):
            buffer = self._buffer(route, place, number) if isinstance(like, Tensor) else None
            is_read = before is None or buffer is before.payload.leaves[number]
            found.append(buffer if in_order or not is_read else None)
        values, gradients, *_ = form.with_leaves(found).value
        return values, gradients

    def receive(self, route: Route, *, keep: bool = False, packed: bool = False) -> Message | None:
        message, ring = super().receive(route, keep=keep), self.rings.get(route)
        if message is None or ring is None:
            return message
        value = Flat.of(ring.pop())
        if not keep:
            ring.oldest.add_(1).remainder_(ring.count)
        return Message.of_payload(message.index, value)

    def _place(self, route: Route, index: int) -> int:
        return index % (2 if self._hands_on else self._counts[route])

    def _waiting(self, route: Route, place: int) -> _Waiting | None:
        """A message that waits or has just been read, if stages hand on what they receive."""
        if not self._hands_on:
            return None
        return self._moved.get((route, place)) or self._static.get((route, place))

    def _buffer(self, route: Route, place: int, number: int) -> Tensor | None:
        """The buffer of a tensor of a new message, if there is one that may be written to."""
        buffer, before = self._buffers.get((route, place, number)), self._waiting(route, 1 - place)
        if before is None:
            return buffer
        if number not in before.handed_on:  # read by now
            return self._buffers.get((route, 1 - place, number)) if buffer is None else buffer
        return None if buffer is before.payload.leaves[number] else buffer

    def _store(self, route: Route, message: Message) -> Flat:
        """Copy a message to static buffers, but for what the stage has received and hands on."""
        source, _, kind = route
        place, value = self._place(route, message.index), Flat.of(message.payload)
        received = self._waiting((source + 1, source, kind), message.index % 2)
        leaves, copies, own = list(value.leaves), [], {}
        is_static = True
        for number, (leaf, like) in enumerate(zip(leaves, self._forms[route].leaves, strict=True)):
            if not isinstance(leaf, Tensor):
                continue
            if received is not None and leaf.dtype == like.dtype and storage(leaf) in received.own:
                received.handed_on.add(received.own[storage(leaf)])
                is_static = is_static and storage(leaf) in self._storages
                continue
            buffer = self._buffer(route, place, number)
            if buffer is None:
                if like.nbytes >= LARGE:
                    free_cached(leaf.device)
                buffer = torch.empty_like(like, device=leaf.device)
                self._buffers[route, place, number] = buffer
                self._storages.add(storage(buffer))
            copies.append((buffer, leaf))
            leaves[number], own[storage(buffer)] = buffer, number
        copy_tensors(copies)
        stored = _Waiting(value.with_leaves(leaves), own)
        for read in (place, 1 - place) if self._hands_on else (place,):
            if (moved := self._moved.pop((route, read), None)) is not None:
                self._replaced.append(moved)
        (self._static if is_static else self._moved)[route, place] = stored
        return stored.payload
