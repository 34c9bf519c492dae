"""Messages between stages on different ranks: a channel for each direction between two of them.

    main thread --send--> channel --> ReceiveThread --> queue --receive--> main thread
         rank 0                                    rank 1

Sends return at once, and messages are received before they are needed: both overlap with compute.
A message is its header, the description if that has changed, and the payload. Over gloo a packet is
sent at once only if its receive was posted before. So the payload is in one packet with the header,
if it is not larger than the last one: that much room is posted ahead.

Over NCCL (GPU) payloads go from device to device, the rest over gloo. A thread sends both: the
header after the payload's send was enqueued. The receive is enqueued after the header has arrived.
So whatever a device waits for was enqueued earlier on the other one: there is no deadlock,
whichever calls block a device in between.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import queue
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from revcompile.errors import VerificationError
from revcompile.runtime.distributed.failures import Worker, report_to
from revcompile.runtime.distributed.layout import Ranks, new_group
from revcompile.runtime.distributed.wire import HEADER_BYTES, Describer, Description, Flag, Header
from revcompile.runtime.executor.messages import Message, MessageKind, Packet, Wait
from revcompile.runtime.executor.streams import current_stream, stream_for
from revcompile.schedule import Tie

_NO_TIMEOUT: Final = timedelta(days=365)
"""Receives are started long before a message is due: `Transport.wait` has the timeout."""
_TIED: Final = (MessageKind.TIED_GRAD, MessageKind.TIED_WEIGHT)
"""They may be large: with room for them, every message would hold that much memory."""
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
    """Group of the two ranks for payloads: over NCCL if the stages are on GPUs."""
    device: torch.device

    @property
    def uses_cuda(self) -> bool:
        return self.device.type == "cuda"

    def start(self, tensor: Tensor, sends: bool, group: Any = None) -> Any:
        """Start to send or receive; over gloo, whose own thread does it, if no group is given."""
        group = group or self.control
        peer = sorted(self.ranks).index(self.ranks[1] if sends else self.ranks[0])
        return (group.send if sends else group.recv)([tensor], peer, 0)

    def start_on_device(self, tensor: Tensor, sends: bool) -> Any:
        """Enqueue a send or a receive over NCCL, after what the current stream does so far."""
        # As batch_isend_irecv with one operation, at a third of its time. Without coalescing NCCL
        # would make another communicator, and warn of it.
        self.payload._start_coalescing(self.device)
        self.start(tensor, sends, self.payload)
        return self.payload._end_coalescing(self.device)

    def connect(self, sends: bool) -> None:
        """A first exchange: NCCL connects two ranks when both have called."""
        self.start_on_device(torch.zeros(1, dtype=torch.uint8, device=self.device), sends).wait()
        torch.cuda.synchronize(self.device)

    def use_own_stream(self, purpose: str) -> None:
        """In a thread, which gets a stream of its own if there are any."""
        if self.uses_cuda:
            torch.cuda.set_device(self.device)
            name = f"{purpose} {self.source}, {self.target}"
            torch.cuda.set_stream(stream_for(name, self.device))


def open_channels(
    ranks: Ranks, ties: list[Tie], device: torch.device, timeout: timedelta
) -> list[Channel]:
    """A channel for every two stages and direction; returns those this rank is part of.

    Making a process group is a collective: all ranks make all of them, in the same order.
    """
    stages = len(ranks.layout.stage_to_rank)
    pairs = {(s, s + 1) for s in range(stages - 1)} | {(t.owner, t.holder) for t in ties}
    directed = sorted(pairs | {(b, a) for a, b in pairs})
    channels = []
    for replica in range(ranks.layout.replicas):
        for source, target in directed:
            ends = ranks.layout.rank(source, replica), ranks.layout.rank(target, replica)
            if ends[0] == ends[1]:
                continue
            control = new_group(ends, "gloo", timeout)
            payload = new_group(ends, "nccl", timeout) if device.type == "cuda" else control
            if ranks.rank in ends:
                channels.append(Channel(source, target, ends, control, payload, device))
    for channel in channels:
        if channel.uses_cuda:
            channel.connect(ranks.rank == channel.ranks[0])
    return channels


# -- sending --------------------------------------------------------------------------------------


class DevicePayload:
    """A payload that a thread sends over NCCL, after what the device was given to do before it."""

    def __init__(self, sender: Sender, memory: Tensor) -> None:
        self._sender, self._memory = sender, memory
        self._computed = current_stream(memory).record_event()
        self._work: Any = None
        self._is_awaited = False

    def start(self) -> None:
        """Called by the thread."""
        current_stream(self._memory).wait_event(self._computed)
        self._work = self._sender.channel.start_on_device(self._memory, sends=True)
        if self._is_awaited:
            self._sender.notify()

    def is_sent(self) -> bool:
        """Whether its memory may be freed."""
        return bool(self._work.is_completed())

    def wait(self) -> None:
        """Have the current stream wait until its memory may be written to."""
        self._is_awaited, sender = True, self._sender
        while self._work is None:
            sender.wait(f"a message to stage {sender.channel.target} that is not sent yet")
        self._work.wait()


class Sender:
    """Sends a channel's messages in order: between GPUs in a thread.

    A payload on a GPU must not be written to until `send`'s result was called; on a CPU it is
    a copy, which gloo sends while the main thread goes on.

    Args:
        on_failure: Called when the channel has failed. The main thread raises when it waits next.
        notify: Ends a call of `wait`.
        wait: Waits for another thread, or raises if a rank is gone; it is told for what.
    """

    def __init__(
        self,
        channel: Channel,
        on_failure: Callable[[str], None],
        notify: Callable[[], None],
        wait: Callable[[str], None],
    ) -> None:
        self.channel = channel
        self.sent = 0
        """How many messages were handed over."""
        self.notify, self.wait, self._on_failure = notify, wait, on_failure
        self._describers = {kind: Describer(channel.device) for kind in MessageKind}
        self._room = 0
        """See `Header.room`."""
        self._sending: list[tuple[Any, Tensor]] = []
        """What gloo sends, and memory that must not be freed meanwhile."""
        self._jobs: queue.SimpleQueue[tuple[DevicePayload | None, list[Tensor]] | None]
        self._jobs = queue.SimpleQueue()
        self._thread = Worker(self._run, on_failure) if channel.uses_cuda else None

    def send(self, kind: MessageKind, message: Message) -> Wait | None:
        """Hand a message over; returns at once, or on a CPU when the last one has been sent."""
        describer, on_gpu, room = self._describers[kind], self.channel.uses_cuda, self._room
        text, memory = describer.describe(message)
        size = describer.description.size
        if not (on_gpu or kind in _TIED):
            self._room = size
        numbers = {"number": self.sent, "length": len(text), "size": size, "room": self._room}
        header = Header.of(message, kind, **numbers)
        if on_gpu:
            payload = DevicePayload(self, memory) if size else None
            self._put(payload, header.packed(), _as_bytes(text))
            return payload.wait if payload else None
        with report_to(self._on_failure):
            for work, _ in self._sending:
                work.wait()
            self._sending.clear()
        first = HEADER_BYTES + (size if size <= room else 0)
        header.write(memory)
        self._put(None, memory[:first], _as_bytes(text), memory[first:])
        return None

    def end(self, cause: str = "") -> None:
        """Send the last message: the run has ended, or failed because of `cause`."""
        text = cause.encode()
        header = Header(self.sent, flags=Flag.END, length=len(text))
        self._put(None, header.packed(), _as_bytes(text))
        self._jobs.put(None)

    def join(self, timeout: float) -> bool:
        """Wait until everything was sent, or the channel has failed; False if a thread goes on."""
        for work, _ in self._sending:
            with contextlib.suppress(RuntimeError):
                work.wait(timedelta(seconds=timeout))
        return self._thread is None or self._thread.join(timeout)

    def _put(self, payload: DevicePayload | None, *parts: Tensor) -> None:
        """Hand over what goes over gloo, and a payload for NCCL."""
        packets = [each for each in parts if len(each)]
        self.sent += 1
        if self.channel.uses_cuda:
            self._jobs.put((payload, packets))
        else:
            with report_to(self._on_failure):
                self._sending += [(self.channel.start(each, sends=True), each) for each in packets]

    def _run(self) -> None:
        self.channel.use_own_stream("send")
        unfinished: deque[DevicePayload] = deque()  # whose memory must not be freed meanwhile
        while (job := self._jobs.get()) is not None:
            payload, packets = job
            if payload is not None:
                payload.start()
                unfinished.append(payload)
            for work in [self.channel.start(each, sends=True) for each in packets]:
                work.wait(_NO_TIMEOUT)
            while unfinished and unfinished[0].is_sent():
                unfinished.popleft()


def _as_bytes(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0)


# -- receiving ------------------------------------------------------------------------------------


class ReceiveThread(Worker):
    """Receives a channel's messages and delivers them.

    It does so whatever the main thread does: no send waits for that. CPU memory for the next
    message is allocated by the main thread, which frees it, too: across threads allocators are
    slow. GPU memory that captured steps have copied to their static buffers is received into again.
    So it does not matter how many steps the host is ahead of the device.
    """

    def __init__(
        self,
        channel: Channel,
        deliver: Callable[[Channel, MessageKind, Message], None],
        on_end: Callable[[Channel, str], None],
        on_failure: Callable[[str], None],
    ) -> None:
        self.channel = channel
        self._deliver, self._on_end = deliver, on_end
        self._descriptions: dict[MessageKind, Description] = {}
        self._released: deque[tuple[Tensor, torch.cuda.Event]] = deque(maxlen=_MOST_RELEASED)
        """Memory, and when it may be written to."""
        self._spare: deque[Tensor] = deque(maxlen=1)
        """CPU memory for the next message."""
        super().__init__(self._run, on_failure)

    def _run(self) -> None:
        self.channel.use_own_stream("receive")
        room = 0
        for number in itertools.count():
            packet = self._received(HEADER_BYTES + room)
            header = Header.read(packet)
            if header.number != number:
                raise VerificationError(f"message {header.number} came, not {number}")
            text = self._received(header.length).numpy().tobytes() if header.length else b""
            if header.flags & Flag.END:
                self._on_end(self.channel, text.decode())
                return
            if text:
                self._descriptions[header.kind] = Description(json.loads(text))
            self._deliver(self.channel, header.kind, self._message(header, packet))
            room = header.room

    def _received(self, size: int) -> Tensor:
        """So many bytes from the other CPU."""
        memory = self._spare.pop() if self._spare else None
        if memory is None or len(memory) != size:
            memory = torch.empty(size, dtype=torch.uint8)
        self.channel.start(memory, sends=False).wait(_NO_TIMEOUT)
        return memory

    def _message(self, header: Header, packet: Tensor) -> Message:
        """The message of a header, which came in this packet; over NCCL its payload comes later."""
        description, device = self._descriptions[header.kind], self.channel.device
        if not header.size:
            nothing = torch.empty(0, dtype=torch.uint8, device=device)
            return description.unpack(header, nothing, device)
        work = release = None
        if self.channel.uses_cuda:
            memory = self._take(header.size)
            work = self.channel.start_on_device(memory, sends=False)
            release = partial(self._release, memory)
        elif HEADER_BYTES + header.size <= len(packet):
            memory = packet[HEADER_BYTES:][: header.size]
        else:
            memory = self._received(header.size)
        unpack = partial(self._unpack, description, header, memory)
        return header.message(packet=Packet(memory, description, unpack, release, work))

    def _unpack(self, description: Description, header: Header, memory: Tensor) -> Message:
        """Called by the main thread."""
        if header.room:
            self._spare.append(torch.empty(HEADER_BYTES + header.room, dtype=torch.uint8))
        return description.unpack(header, memory, self.channel.device)

    def _take(self, size: int) -> Tensor:
        """Memory of so many bytes on the GPU.

        Of what was released last the device may not have read anything yet: that one is left.
        """
        while len(self._released) > 1:
            memory, free = self._released.popleft()
            if len(memory) == size:
                current_stream(memory).wait_event(free)
                return memory
        return torch.empty(size, dtype=torch.uint8, device=self.channel.device)

    def _release(self, memory: Tensor) -> None:
        self._released.append((memory, current_stream(memory).record_event()))
