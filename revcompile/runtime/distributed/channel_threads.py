"""A link's two ends at work: a sending and a receiving thread.

Receives are posted before anybody asks for the message, and sends return at once: both overlap
with compute. Each direction has a communicator of its own.
"""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from revcompile.errors import VerificationError
from revcompile.runtime.distributed.channel import Arrival, Channel, Parcel
from revcompile.runtime.distributed.gloo import PacketReceiver, PacketSender
from revcompile.runtime.distributed.liveness import told
from revcompile.runtime.distributed.message_format import Describer, Description, Flag, Form, Header
from revcompile.runtime.distributed.nccl import DeviceReceiver, DeviceSender
from revcompile.runtime.executor.transport import Message, MessageKind

__all__ = ["Incoming", "Outgoing"]


class Outgoing:
    """Sends a link's messages in order, from a thread of its own."""

    def __init__(self, link: Channel, failed: Callable[[str], None]) -> None:
        self.link = link
        self._failed = failed
        self._waiting: queue.SimpleQueue[Parcel] = queue.SimpleQueue()
        self._describers: dict[MessageKind, Describer] = {}
        self._sent = 0
        self._done = 0.0
        self._progress = threading.Condition()
        self._end = DeviceSender(link) if link.uses_cuda else PacketSender(link)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def send(self, channel: MessageKind, message: Message) -> None:
        """Hand a message over; returns at once."""
        text, flags = b"", Flag.VOID
        tensors: list[tuple[Form, Tensor]] = []
        if not message.void:
            describer = self._describers.setdefault(channel, Describer(self.link.device))
            text, tensors = describer.describe(message)
            flags = Flag.DESCRIBED if text else Flag(0)
        event = torch.cuda.current_stream().record_event() if self.link.uses_cuda else None
        header = Header(
            channel,
            message.index,
            flags,
            len(text),
            scale=message.scale,
            fingerprint=message.fingerprint,
        )
        self._put(header, text, tensors, event)

    def end(self, cause: str | None = None) -> None:
        """The last word: nothing comes any more, because all is done or because of `cause`."""
        text = b"" if cause is None else cause.encode()
        flags = Flag.END if cause is None else Flag.ABORT
        self._put(Header(MessageKind.X, 0, flags, len(text)), text)

    def settle(self, timeout: float) -> None:
        """Wait until what was handed over is on its way, or cannot be sent."""
        with self._progress:
            self._progress.wait_for(lambda: self._done >= self._sent, timeout)

    def join(self, timeout: float) -> bool:
        """Wait until all is sent; False if it takes too long."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def sent(self) -> int:
        """How many messages were handed over."""
        return self._sent

    def _put(
        self,
        header: Header,
        text: bytes,
        tensors: list[tuple[Form, Tensor]] | None = None,
        event: Any = None,
    ) -> None:
        numbered = replace(header, sequence=self._sent)
        self._sent += 1
        self._waiting.put(Parcel(numbered, text, tensors or [], event))

    def _run(self) -> None:
        try:
            while self._send(self._waiting.get()):
                self._passed(1)
            self._passed(1)
        except Exception as error:
            self._passed(math.inf)
            self._failed(told(error))

    def _passed(self, count: float) -> None:
        with self._progress:
            self._done += count
            self._progress.notify_all()

    def _send(self, parcel: Parcel) -> bool:
        """One message, which nobody here holds on to; False after the last."""
        self._end.send(parcel)
        return not parcel.header.flags & (Flag.END | Flag.ABORT)


class Incoming:
    """Receives a link's messages, from a thread of its own, and delivers them."""

    def __init__(
        self,
        link: Channel,
        deliver: Callable[[Channel, Arrival], None],
        ended: Callable[[Channel, str | None], None],
        failed: Callable[[str], None],
    ) -> None:
        self.link = link
        self._deliver, self._ended, self._failed = deliver, ended, failed
        self._known: dict[MessageKind, Description] = {}
        self._received = 0
        self.end = DeviceReceiver(link) if link.uses_cuda else PacketReceiver(link)
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
        header = self.end.header()
        if header.sequence != self._received:
            raise VerificationError(f"message {header.sequence} came, not {self._received}")
        self._received += 1
        text = self._text(header.length)
        if header.flags & (Flag.END | Flag.ABORT):
            is_end = bool(header.flags & Flag.END)
            self._ended(self.link, None if is_end else text.decode())
            return False
        if header.flags & Flag.DESCRIBED:
            self._known[header.channel] = Description(text)
        if header.flags & Flag.VOID:
            arrival = Arrival(header.channel, Message(header.index, void=True, scale=header.scale))
        else:
            arrival = self.end.arrival(header, self._known[header.channel])
        self._deliver(self.link, arrival)
        return True

    def _text(self, length: int) -> bytes:
        text = torch.empty(length, dtype=torch.uint8)
        if length:
            self.link.control_exchange(text, sends=False)
        return bytes(text.tolist())
