"""Point-to-point messages between two ranks: one direction between two stages.

All tensors of a message are one buffer on the wire, each where torch could have allocated it.

Over gloo (CPU) header and tensors are one packet, received into memory that is used again. A
receive is posted before the packet is sent, so both ends must know the size of the next packet.
The rule: after two messages of one form a third is expected. A message of another form fills a
packet of the expected size with its header alone, and its tensors follow in a packet of their own.
Gloo sends a packet when it knows that its receive is posted, which takes the time once around a
link: where several messages are on their way, a channel has as many tags, which take turns.

Over NCCL (GPU) tensors go from device to device, headers over gloo. The header is sent after the
tensors' send was enqueued, and the receive is enqueued after the header has arrived. So whatever a
device waits for was enqueued earlier on the other one: there is no deadlock, whichever calls block
a device in between.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from revcompile.runtime.distributed.message_format import HEADER, Description, Flag, Header, Packing
from revcompile.runtime.executor.captured.streams import current_stream, stream_for
from revcompile.runtime.executor.transport import Message, MessageKind, Packet
from revcompile.runtime.stage.static_buffers import BufferPool

_NO_TIMEOUT: Final = timedelta(days=365)
"""Receives are posted long before a message is due: `Transport.wait` has the timeout."""
_HEADER_BYTES: Final = 8 * HEADER
_MOST_PACKETS: Final = 64
"""How many packets of one size are remembered to be used again."""
_MOST_RELEASED: Final = 4
"""How much memory, in messages, a channel between GPUs has to be received into again."""


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
    tags: int = 1
    """Over gloo between CPUs: how many receives are posted at a time."""

    @property
    def uses_cuda(self) -> bool:
        return self.device.type == "cuda"

    def exchange(self, tensor: Tensor, sends: bool) -> Any:
        """Enqueue a send or a receive over NCCL, after what the current stream does so far."""
        # As batch_isend_irecv with one operation, at a third of its time. Without coalescing NCCL
        # would make another communicator, and warn of it.
        group, peer = self.payload, self._peer(sends)
        group._start_coalescing(self.device)
        (group.send if sends else group.recv)([tensor], peer, 0)
        return group._end_coalescing(self.device)

    def connect(self, sends: bool) -> None:
        """A first exchange: NCCL connects two ranks when both have called."""
        self.exchange(torch.zeros(1, dtype=torch.uint8, device=self.device), sends).wait()
        torch.cuda.synchronize(self.device)

    def _peer(self, sends: bool) -> int:
        """The other rank's number in the groups."""
        return sorted(self.ranks).index(self.ranks[1] if sends else self.ranks[0])

    def control_exchange(self, tensor: Tensor, sends: bool, tag: int = 0) -> None:
        """Send or receive bytes over gloo."""
        self.post(tensor, sends, tag).wait(_NO_TIMEOUT)

    def post(self, tensor: Tensor, sends: bool, tag: int) -> Any:
        """Start to send or to receive bytes over gloo; the work to wait for."""
        return (self.control.send if sends else self.control.recv)([tensor], self._peer(sends), tag)


@dataclass
class Arrival:
    """A received message; on a GPU its bytes are there when `work` is done."""

    kind: MessageKind
    message: Message
    work: Any = None
    memory: Tensor | None = None
    _waited: int | None = None
    """The number of the stream that waits already."""

    def ready(self, packed: bool = False) -> Message:
        """The message, after making the current stream wait for its bytes."""
        if self.work is not None and self.memory is not None:
            stream = current_stream(self.memory)
            if self._waited != stream.stream_id:  # a stream itself may be equal to None
                self._waited = stream.stream_id
                self.work.wait()
                self.memory.record_stream(stream)
        if self.message.packet is not None and not packed:
            self.message = self.message.packet.unpack()
        return self.message


def _arrival(
    header: Header,
    description: Description,
    memory: Tensor,
    device: torch.device,
    work: Any = None,
    release: Callable[[], None] | None = None,
) -> Arrival:
    unpack = partial(description.message, header, memory, device)
    message = header.message(packet=Packet(memory, description, unpack, release))
    return Arrival(header.kind, message, work, memory)


class Outbound(NamedTuple):
    """A message to send: its header, its description if that has changed, and its tensors."""

    header: Header
    text: bytes = b""
    tensors: Tensor | Sequence[Tensor] = ()
    """Or their bytes, in one buffer."""
    packing: Packing | None = None

    def write(self, buffer: Tensor) -> None:
        """Copy the tensors to a buffer of bytes."""
        assert self.packing is not None
        if isinstance(self.tensors, Tensor):
            buffer.copy_(self.tensors)
        else:
            self.packing.pack(self.tensors, buffer)

    def described(self, *packets: Tensor) -> list[Tensor]:
        """The packets, or only the header, with the description after the first."""
        first, *rest = packets or (torch.tensor(self.header.numbers()),)
        if self.text:
            rest.insert(0, torch.frombuffer(bytearray(self.text), dtype=torch.uint8))
        return [first, *rest]


Packets = Callable[[], list[Tensor]]
"""What to send over gloo, made by the thread that sends it."""
Wait = Callable[[str], None]
"""Waits for another thread; says for what."""


# -- gloo -----------------------------------------------------------------------------------------


class _ExpectedPacket:
    """The size of the next packet of a tag; both ends follow the same rule to the same result.

    At each end the messages that follow one description have one `Packing`.
    """

    def __init__(self) -> None:
        self.packing: Packing | None = None
        """None if only a header is expected."""
        self.size = _HEADER_BYTES
        self._last: Packing | None = None

    def passed(self, packing: Packing) -> None:
        """A message with tensors has been sent or received."""
        self.packing, self._last = packing if packing is self._last else None, packing
        self.size = _HEADER_BYTES + (packing.size if self.packing is not None else 0)


class PacketSender:
    """The sending end of one tag of a channel between two CPUs."""

    def __init__(self) -> None:
        self._expected = _ExpectedPacket()
        self._size = 0
        self._packets = BufferPool(limit=_MOST_PACKETS)

    def packets(self, outbound: Outbound) -> tuple[Packets, None]:
        """What to send over gloo, copied: the message's own memory may be written to."""
        header, expected = outbound.header, self._expected
        packing = outbound.packing
        is_separate = packing is not None and packing is not expected.packing
        if is_separate:
            header = replace(header, flags=header.flags | Flag.SEPARATE)
        if expected.size != self._size:
            self._size = expected.size
            self._packets.clear()
        first = self._packets.take(self._size, partial(_bytes, self._size))
        first[:_HEADER_BYTES].copy_(torch.tensor(header.numbers()).view(torch.uint8))
        packets = [first]
        if packing is not None:
            if is_separate:
                packets.append(_bytes(packing.size))
            outbound.write(packets[-1] if is_separate else first[_HEADER_BYTES:])
            expected.passed(packing)
        described = outbound.described(*packets)
        return lambda: described, None


def _bytes(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8)


class PacketReceiver:
    """The receiving end of one tag of a channel between two CPUs."""

    def __init__(self, channel: Channel, tag: int = 0) -> None:
        self._channel, self._tag = channel, tag
        self._expected = _ExpectedPacket()
        self.pool = BufferPool(limit=_MOST_PACKETS)
        self._size = 0
        self._packet = _bytes(0)
        self._posted: Any = None

    def post(self) -> None:
        """Post the receive of the tag's next message, unless it is posted."""
        if self._posted is not None:
            return
        size = self._expected.size
        if size != self._size:
            self._size = size
            self.pool.clear()
        # The last packet belongs to its message now: let go of it before the next one is chosen.
        self._packet = _bytes(0)
        self._packet = self.pool.take(size, partial(_bytes, size))
        self._posted = self._channel.post(self._packet, sends=False, tag=self._tag)

    def header(self) -> Header:
        """Wait for the tag's next message, whose tensors may have come with it."""
        self._posted.wait(_NO_TIMEOUT)
        self._posted = None
        return Header.of(self._packet[:_HEADER_BYTES].view(torch.int64).tolist())

    def arrival(self, header: Header, description: Description) -> Arrival:
        """The message of a header."""
        memory = self._packet[_HEADER_BYTES:]
        if header.flags & Flag.SEPARATE:
            memory = _bytes(description.packing.size)
            self._channel.control_exchange(memory, sends=False, tag=self._tag)
        self._expected.passed(description.packing)
        return _arrival(header, description, memory, self._channel.device)


# -- NCCL -----------------------------------------------------------------------------------------


class DeviceSending:
    """A message that a thread sends over NCCL, after what the device was given to do before it.

    Args:
        computed: An event that is free to be recorded here.
        wait: Waits until `notify` is called, or raises if a rank is gone.
    """

    def __init__(
        self,
        channel: Channel,
        memory: Tensor,
        computed: torch.cuda.Event,
        notify: Callable[[], None],
        wait: Wait,
    ) -> None:
        self._channel, self._memory = channel, memory
        self._notify, self._wait = notify, wait
        self._computed = computed
        computed.record(current_stream(memory))
        self._work: Any = None
        self._is_awaited = False

    def enqueue(self) -> Any:
        """Called by the thread; the work to wait for."""
        current_stream(self._memory).wait_event(self._computed)
        self._work = self._channel.exchange(self._memory, sends=True)
        if self._is_awaited:
            self._notify()
        return self._work

    def wait(self) -> None:
        """Have the current stream wait until the message's memory may be written to."""
        self._is_awaited = True
        while self._work is None:
            self._wait(f"a message to stage {self._channel.target} that is not sent yet")
        self._work.wait()


def use_own_stream(channel: Channel, purpose: str) -> None:
    """In a thread, which gets a stream of its own if there are any."""
    if channel.uses_cuda:
        torch.cuda.set_device(channel.device)
        name = f"{purpose} {channel.source}, {channel.target}"
        torch.cuda.set_stream(stream_for(name, channel.device))


class DeviceSender:
    """The sending end of a channel between two GPUs."""

    def __init__(self, channel: Channel, notify: Callable[[], None], wait: Wait) -> None:
        self._channel, self._notify, self._wait = channel, notify, wait
        self._unfinished: deque[tuple[Any, Tensor]] = deque()
        """Sends with their memory, which must not be freed meanwhile."""
        self._events: list[torch.cuda.Event] = []
        """Those that nobody is going to wait for."""

    def packets(self, outbound: Outbound) -> tuple[Packets, DeviceSending | None]:
        """What to send over gloo, after the send of the tensors is enqueued."""
        if outbound.packing is None or not outbound.packing.size:
            return outbound.described, None
        memory = outbound.tensors
        if not isinstance(memory, Tensor):
            size = outbound.packing.size
            memory = torch.empty(size, dtype=torch.uint8, device=self._channel.device)
            outbound.write(memory)
        computed = self._events.pop() if self._events else torch.cuda.Event()
        sending = DeviceSending(self._channel, memory, computed, self._notify, self._wait)

        def enqueue() -> list[Tensor]:
            self._unfinished.append((sending.enqueue(), memory))
            self._events.append(computed)
            while self._unfinished and self._unfinished[0][0].is_completed():
                self._unfinished.popleft()
            return outbound.described()

        return enqueue, sending


class DeviceReceiver:
    """The receiving end of a channel between two GPUs.

    Memory that captured steps have copied to their static buffers is received into again. So it
    does not matter how many steps the host is ahead of the device.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._released: deque[tuple[Tensor, torch.cuda.Event]] = deque(maxlen=_MOST_RELEASED)
        """Memory, and when it may be written to."""

    def post(self) -> None:
        """Receives are posted when they are waited for."""

    def header(self) -> Header:
        """Wait for the next message's header."""
        numbers = torch.empty(HEADER, dtype=torch.int64)
        self._channel.control_exchange(numbers, sends=False)
        return Header.of(numbers.tolist())

    def arrival(self, header: Header, description: Description) -> Arrival:
        """The message of a header; its tensors are still being received."""
        device, size = self._channel.device, description.packing.size
        memory, free = self._take(size)
        work = self._channel.exchange(memory, sends=False) if size else None
        release = partial(self._release, memory, free) if size else None
        return _arrival(header, description, memory, device, work, release)

    def _take(self, size: int) -> tuple[Tensor, torch.cuda.Event]:
        """Memory of so many bytes, and the event that says when it is free.

        Of what was released last the device may not have read anything yet: that one is left.
        """
        while len(self._released) > 1:
            memory, free = self._released.popleft()
            if len(memory) == size:
                current_stream(memory).wait_event(free)
                return memory, free
        memory = torch.empty(size, dtype=torch.uint8, device=self._channel.device)
        return memory, torch.cuda.Event()

    def _release(self, memory: Tensor, free: torch.cuda.Event) -> None:
        free.record(current_stream(memory))
        self._released.append((memory, free))
