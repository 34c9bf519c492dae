"""One direction between two stages on different ranks: a sending and a receiving thread.

Receives are posted before anybody asks for the message, and sends return at once: both overlap
with compute. Each direction has a communicator of its own.

With NCCL the header travels by gloo, after the tensors' send was enqueued, and the receive is
enqueued after the header has come. So whatever a device waits for was enqueued earlier, somewhere:
no circle can close, whichever calls block a device in between.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

import torch
from torch import Tensor, distributed

from revcompile.errors import VerificationError
from revcompile.runtime.distributed.alarm import told
from revcompile.runtime.distributed.wire import HEADER, Description, Flag, Form, Header, described
from revcompile.runtime.transport import Channel, Message

__all__ = ["Arrival", "Incoming", "Link", "Outgoing"]

_PATIENCE: Final = timedelta(days=365)
"""Receives are posted long before a message is due: the one who waits for it has the timeout."""


@dataclass(frozen=True)
class Link:
    """From a stage to a stage, each on its rank. Gloo carries headers, `payload` the tensors."""

    source: int
    target: int
    ranks: tuple[int, int]
    control: Any
    payload: Any
    device: torch.device

    @property
    def uses_cuda(self) -> bool:
        """Do tensors travel by NCCL?"""
        return self.device.type == "cuda"

    def exchange(self, tensors: list[Tensor], sends: bool) -> None:
        """Send or receive tensors by the payload's communicator."""
        peer = self.ranks[1] if sends else self.ranks[0]
        call = distributed.isend if sends else distributed.irecv
        if self.uses_cuda:
            ops = [distributed.P2POp(call, tensor, peer, self.payload) for tensor in tensors]
            works = distributed.batch_isend_irecv(ops) if ops else []
            for work in works:
                work.wait()
        else:
            for tensor in tensors:
                _wait(call(tensor, peer, group=self.payload))

    def control_exchange(self, tensor: Tensor, sends: bool) -> None:
        """Send or receive numbers by gloo."""
        if sends:
            _wait(distributed.isend(tensor, self.ranks[1], group=self.control))
        else:
            _wait(distributed.irecv(tensor, self.ranks[0], group=self.control))


def _wait(work: Any) -> None:
    work.wait(_PATIENCE)


@dataclass(frozen=True)
class Arrival:
    """A message that has come; `event`: when its tensors are there, on a GPU."""

    channel: Channel
    message: Message
    event: Any = None

    def ready(self) -> Message:
        """The message, once the current stream is told to wait for it."""
        if self.event is not None:
            stream = torch.cuda.current_stream()
            stream.wait_event(self.event)
            for tensor in _tensors(self.message):
                if tensor.is_cuda:
                    tensor.record_stream(stream)
        return self.message


def _tensors(message: Message) -> Iterator[Tensor]:
    for part in (message.values, message.gradients):
        leaves = torch.utils._pytree.tree_leaves(dict(part))
        yield from (leaf for leaf in leaves if isinstance(leaf, Tensor))


@dataclass
class _Parcel:
    """Something to send."""

    header: Header
    text: bytes = b""
    tensors: list[tuple[Form, Tensor]] = field(default_factory=list)
    event: Any = None


class Outgoing:
    """Sends a link's messages in order, from a thread of its own."""

    def __init__(self, link: Link, failed: Callable[[str], None]) -> None:
        self.link = link
        self._failed = failed
        self._waiting: queue.SimpleQueue[_Parcel] = queue.SimpleQueue()
        self._last: dict[Channel, bytes] = {}
        self._sent = 0
        self._stream = torch.cuda.Stream(link.device) if link.uses_cuda else None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def send(self, channel: Channel, message: Message) -> None:
        """Hand a message over; returns at once."""
        text, flags = b"", Flag.VOID
        tensors: list[tuple[Form, Tensor]] = []
        if not message.void:
            flags = Flag(0)
            text, tensors = described(message, self.link.device)
            if self._last.get(channel) != text:
                self._last[channel], flags = text, Flag.DESCRIBED
            else:
                text = b""
        event = torch.cuda.current_stream().record_event() if self._stream is not None else None
        self._put(Header(channel, message.index, flags, len(text)), text, tensors, event)

    def end(self, cause: str | None = None) -> None:
        """The last word: nothing comes any more, because all is done or because of `cause`."""
        text = b"" if cause is None else cause.encode()
        flags = Flag.END if cause is None else Flag.ABORT
        self._put(Header(Channel.X, 0, flags, len(text)), text)

    def join(self, timeout: float) -> bool:
        """Wait until all is sent; False if it takes too long."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _put(
        self,
        header: Header,
        text: bytes,
        tensors: list[tuple[Form, Tensor]] | None = None,
        event: Any = None,
    ) -> None:
        numbered = Header(header.channel, header.index, header.flags, header.length, self._sent)
        self._sent += 1
        self._waiting.put(_Parcel(numbered, text, tensors or [], event))

    def _run(self) -> None:
        try:
            while True:
                parcel = self._waiting.get()
                self._send(parcel)
                if parcel.header.flags & (Flag.END | Flag.ABORT):
                    return
        except Exception as error:
            self._failed(told(error))

    def _send(self, parcel: _Parcel) -> None:
        link = self.link
        if link.uses_cuda:
            self._send_on_device(parcel)
        link.control_exchange(torch.tensor(parcel.header.numbers()), sends=True)
        if parcel.text:
            link.control_exchange(_bytes(parcel.text), sends=True)
        if not link.uses_cuda:
            link.exchange([f.flat(t) for f, t in parcel.tensors if f.numel], sends=True)

    def _send_on_device(self, parcel: _Parcel) -> None:
        assert self._stream is not None
        with torch.cuda.device(self.link.device), torch.cuda.stream(self._stream):
            if parcel.event is not None:
                self._stream.wait_event(parcel.event)
            moved = [(f, t.to(self.link.device)) for f, t in parcel.tensors if f.numel]
            self.link.exchange([form.flat(tensor) for form, tensor in moved], sends=True)
            for _, tensor in moved:
                tensor.record_stream(self._stream)


class Incoming:
    """Receives a link's messages, from a thread of its own, and delivers them."""

    def __init__(
        self,
        link: Link,
        deliver: Callable[[Link, Arrival], None],
        ended: Callable[[Link, str | None], None],
        failed: Callable[[str], None],
    ) -> None:
        self.link = link
        self._deliver, self._ended, self._failed = deliver, ended, failed
        self._known: dict[Channel, Description] = {}
        self._received = 0
        self._stream = torch.cuda.Stream(link.device) if link.uses_cuda else None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def join(self, timeout: float) -> bool:
        """Wait for the sender's last word; False if it does not come."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while self._receive():
                pass
        except Exception as error:
            self._failed(told(error))

    def _receive(self) -> bool:
        """One message; False after the last."""
        link = self.link
        numbers = torch.empty(HEADER, dtype=torch.int64)
        link.control_exchange(numbers, sends=False)
        header = Header.of(numbers.tolist())
        if header.sequence != self._received:
            raise VerificationError(f"message {header.sequence} came, not {self._received}")
        self._received += 1
        text = torch.empty(header.length, dtype=torch.uint8)
        if header.length:
            link.control_exchange(text, sends=False)
        if header.flags & (Flag.END | Flag.ABORT):
            is_end = bool(header.flags & Flag.END)
            self._ended(link, None if is_end else _text(text).decode())
            return False
        if header.flags & Flag.DESCRIBED:
            self._known[header.channel] = Description(_text(text))
        if header.flags & Flag.VOID:
            self._deliver(link, Arrival(header.channel, Message(header.index, void=True)))
        else:
            self._deliver(link, self._tensors(header, self._known[header.channel]))
        return True

    def _tensors(self, header: Header, description: Description) -> Arrival:
        link = self.link
        with contextlib.ExitStack() as stack:
            if self._stream is not None:
                stack.enter_context(torch.cuda.device(link.device))
                stack.enter_context(torch.cuda.stream(self._stream))
            rooms = [form.room(link.device) for form in description.forms]
            link.exchange([room for room in rooms if room.numel()], sends=False)
            message = description.message(header, rooms, link.device)
            event = self._stream.record_event() if self._stream is not None else None
        return Arrival(header.channel, message, event)


def _bytes(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _text(found: Tensor) -> bytes:
    return bytes(found.tolist())
