"""Point-to-point messages between two ranks: one direction between two stages.

Over gloo (CPU) header and tensors are one packet, received into memory that is used again:

    | header | tensor | tensor | ...        each at a multiple of 64 bytes, as torch allocates them

A receive is posted before the packet is sent, so both ends must know the size of the next packet.
The rule: after two messages of one form a third is expected. A message of another form fills a
packet of the expected size with its header alone, and its tensors follow in a packet of their own.

Over NCCL (GPU) tensors go from device to device, headers over gloo. The header is sent after the
tensors' send was enqueued, and the receive is enqueued after the header has arrived. So whatever a
device waits for was enqueued earlier on the other one: there is no deadlock, whichever calls block
a device in between. Received tensors are allocated by torch's caching allocator, which knows the
streams that still read them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Final

import torch
from torch import Tensor, distributed
from torch.utils import _pytree as pytree

from revcompile.runtime.distributed.message_format import (
    HEADER,
    Description,
    Flag,
    Header,
    TensorFormat,
)
from revcompile.runtime.executor.captured.streams import stream_for
from revcompile.runtime.executor.transport import Message, MessageKind
from revcompile.runtime.stage.buffer_pool import BufferPool

__all__ = [
    "Arrival",
    "Channel",
    "DeviceReceiver",
    "DeviceSender",
    "Outbound",
    "PacketReceiver",
    "PacketSender",
]

_NO_TIMEOUT: Final = timedelta(days=365)
"""Receives are posted long before a message is due: `Transport.wait` has the timeout."""
_ALIGNMENT: Final = 64
_MOST_PACKETS: Final = 64
"""How many received packets of one size are remembered to be used again."""
_WITHOUT_TENSORS: Final = Flag.VOID | Flag.END | Flag.ABORT


@dataclass(frozen=True)
class Channel:
    """One direction between two stages on different ranks."""

    source: int
    target: int
    ranks: tuple[int, int]
    control: Any
    """Group of the two ranks over gloo."""
    payload: Any
    """Group of the two ranks over NCCL, if the stages are on GPUs."""
    device: torch.device

    @property
    def uses_cuda(self) -> bool:
        return self.device.type == "cuda"

    def exchange(self, tensors: list[Tensor], sends: bool) -> None:
        """Send or receive a GPU's tensors over NCCL."""
        peer = self.ranks[1] if sends else self.ranks[0]
        call = distributed.isend if sends else distributed.irecv
        ops = [distributed.P2POp(call, tensor, peer, self.payload) for tensor in tensors]
        for work in distributed.batch_isend_irecv(ops) if ops else []:
            work.wait()

    def control_exchange(self, tensor: Tensor, sends: bool) -> None:
        """Send or receive bytes over gloo."""
        peer = self.ranks[1] if sends else self.ranks[0]
        call = distributed.isend if sends else distributed.irecv
        work: Any = call(tensor, peer, group=self.control)
        work.wait(_NO_TIMEOUT)


@dataclass
class Arrival:
    """A received message; on a GPU its tensors are complete at `event`."""

    kind: MessageKind
    message: Message
    event: Any = None
    _waited: Any = None
    """The stream that waits for them already."""

    def ready(self) -> Message:
        """The message, after making the current stream wait for its tensors."""
        if self.event is not None and self._waited != (stream := torch.cuda.current_stream()):
            stream.wait_event(self.event)
            self._waited = stream
            for tensor in _tensors(self.message):
                if tensor.is_cuda:
                    tensor.record_stream(stream)
        return self.message


def _tensors(message: Message) -> Iterator[Tensor]:
    for part in message.parts:
        leaves = pytree.tree_leaves(dict(part))
        yield from (leaf for leaf in leaves if isinstance(leaf, Tensor))


@dataclass
class Outbound:
    """A message to send: its header, its description if that has changed, and its tensors."""

    header: Header
    text: bytes = b""
    tensors: list[tuple[TensorFormat, Tensor]] = field(default_factory=list)
    event: Any = None
    """On a GPU: when the tensors are computed."""
    sent: Any = None
    """On a GPU: when they are sent, and their memory may be written to."""

    def text_bytes(self) -> Tensor:
        return torch.frombuffer(bytearray(self.text), dtype=torch.uint8)


# -- gloo -----------------------------------------------------------------------------------------

FormatId = tuple[MessageKind, int]
"""A kind of message, and how often its description has changed."""


@dataclass(frozen=True)
class _Packing:
    """Where in a packet the tensors of a message are."""

    slices: tuple[slice, ...]
    size: int

    @classmethod
    def of(cls, formats: Sequence[TensorFormat]) -> _Packing:
        slices, end = [], _ALIGNMENT
        for form in formats:
            size = form.numel * form.dtype.itemsize
            slices.append(slice(end, end + size))
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        return cls(tuple(slices), end)


_HEADER_ALONE: Final = _Packing((), _ALIGNMENT)


class _ExpectedPacket:
    """The size of a channel's next packet; both ends follow the same rule to the same result."""

    def __init__(self) -> None:
        self.format_id: FormatId | None = None
        self.size = _ALIGNMENT
        self._last: FormatId | None = None
        self._packings: dict[MessageKind, tuple[int, _Packing]] = {}

    def described(self, kind: MessageKind, formats: Sequence[TensorFormat]) -> None:
        """Messages of a kind have other tensors from now on."""
        number, _ = self._packings.get(kind, (0, _HEADER_ALONE))
        self._packings[kind] = number + 1, _Packing.of(formats)

    def packing(self, kind: MessageKind) -> tuple[FormatId, _Packing]:
        number, packing = self._packings[kind]
        return (kind, number), packing

    def passed(self, format_id: FormatId, packing: _Packing) -> None:
        """A message with tensors has been sent or received."""
        is_steady, self._last = format_id == self._last, format_id
        self.format_id, self.size = (format_id, packing.size) if is_steady else (None, _ALIGNMENT)


class PacketSender:
    """The sending end of a channel between two CPUs."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._expected = _ExpectedPacket()
        self._staging = torch.empty(_ALIGNMENT, dtype=torch.uint8)

    def send(self, outbound: Outbound) -> None:
        """Send, and wait until the memory can be used again."""
        header, expected = outbound.header, self._expected
        if header.flags & Flag.DESCRIBED:
            expected.described(header.kind, [form for form, _ in outbound.tensors])
        format_id, packing = None, _HEADER_ALONE
        if not header.flags & _WITHOUT_TENSORS:
            format_id, packing = expected.packing(header.kind)
        is_separate = format_id is not None and format_id != expected.format_id
        if is_separate:
            header = replace(header, flags=header.flags | Flag.SEPARATE)
        if len(self._staging) != expected.size:
            self._staging = torch.empty(expected.size, dtype=torch.uint8)
        numbers = torch.tensor(header.numbers()).view(torch.uint8)
        self._staging[: len(numbers)].copy_(numbers)
        if format_id is not None and not is_separate:
            _pack(self._staging, packing, outbound)
        self._channel.control_exchange(self._staging, sends=True)
        if outbound.text:
            self._channel.control_exchange(outbound.text_bytes(), sends=True)
        if is_separate:
            packet = torch.empty(packing.size, dtype=torch.uint8)
            _pack(packet, packing, outbound)
            self._channel.control_exchange(packet, sends=True)
        if format_id is not None:
            expected.passed(format_id, packing)


def _pack(packet: Tensor, packing: _Packing, outbound: Outbound) -> None:
    for part, (form, tensor) in zip(packing.slices, outbound.tensors, strict=True):
        if form.numel:
            packet[part].copy_(form.to_bytes(tensor))


class PacketReceiver:
    """The receiving end of a channel between two CPUs."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._expected = _ExpectedPacket()
        self.packets = BufferPool(limit=_MOST_PACKETS)
        self._size = 0
        self._packet = torch.empty(0, dtype=torch.uint8)

    def header(self) -> Header:
        """Wait for the next message, whose tensors may have come with it."""
        size = self._expected.size
        if size != self._size:
            self._size = size
            self.packets.clear()
        # The last packet belongs to its message now: let go of it before the next one is chosen.
        self._packet = torch.empty(0, dtype=torch.uint8)
        self._packet = self.packets.take(size, lambda: torch.empty(size, dtype=torch.uint8))
        self._channel.control_exchange(self._packet, sends=False)
        return Header.of(self._packet[: 8 * HEADER].view(torch.int64).tolist())

    def arrival(self, header: Header, description: Description) -> Arrival:
        """The message of a header."""
        expected = self._expected
        if header.flags & Flag.DESCRIBED:
            expected.described(header.kind, description.formats)
        format_id, packing = expected.packing(header.kind)
        packet = self._packet
        if header.flags & Flag.SEPARATE:
            packet = torch.empty(packing.size, dtype=torch.uint8)
            self._channel.control_exchange(packet, sends=False)
        parts = [packet[part] for part in packing.slices]
        message = description.message(header, parts, self._channel.device)
        expected.passed(format_id, packing)
        return Arrival(header.kind, message)


# -- NCCL -----------------------------------------------------------------------------------------


class DeviceSender:
    """The sending end of a channel between two GPUs."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._stream = stream_for(f"send {channel.source}, {channel.target}", channel.device)

    def send(self, outbound: Outbound) -> None:
        """Enqueue the tensors, then send the header."""
        device = self._channel.device
        with torch.cuda.device(device), torch.cuda.stream(self._stream):
            if outbound.event is not None:
                self._stream.wait_event(outbound.event)
            moved = [(f, t.to(device)) for f, t in outbound.tensors if f.numel]
            self._channel.exchange([form.to_bytes(tensor) for form, tensor in moved], sends=True)
            for _, tensor in moved:
                tensor.record_stream(self._stream)
            if outbound.sent is not None:
                outbound.sent.record()
        self._channel.control_exchange(torch.tensor(outbound.header.numbers()), sends=True)
        if outbound.text:
            self._channel.control_exchange(outbound.text_bytes(), sends=True)


class DeviceReceiver:
    """The receiving end of a channel between two GPUs."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._stream = stream_for(f"receive {channel.source}, {channel.target}", channel.device)

    def header(self) -> Header:
        """Wait for the next message's header."""
        numbers = torch.empty(HEADER, dtype=torch.int64)
        self._channel.control_exchange(numbers, sends=False)
        return Header.of(numbers.tolist())

    def arrival(self, header: Header, description: Description) -> Arrival:
        """The message of a header; its tensors are still being received."""
        device = self._channel.device
        with torch.cuda.device(device), torch.cuda.stream(self._stream):
            buffers = [form.empty_bytes(device) for form in description.formats]
            self._channel.exchange([buffer for buffer in buffers if buffer.numel()], sends=False)
            message = description.message(header, buffers, device)
            event = self._stream.record_event()
        return Arrival(header.kind, message, event)
