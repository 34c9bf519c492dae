"""Messages between stages on different ranks: a channel for each direction between two of them.

    main thread --send--> SendThread --channel--> ReceiveThread --> queue --receive--> main thread
         rank 0                                        rank 1

Sends return at once, and messages are received before they are needed: both overlap with compute.
A message consists of a header, a description if it has changed, and a payload.

Payloads of GPUs go from device to device over NCCL, everything else over gloo. The header is sent
after the payload's send was enqueued, and the receive is enqueued after the header has arrived. So
whatever a device waits for was enqueued earlier on the other one: there is no deadlock, whichever
calls block a device in between.
"""

from __future__ import annotations

import itertools
import json
import queue
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from revcompile.errors import VerificationError
from revcompile.runtime.distributed.failures import Worker
from revcompile.runtime.distributed.layout import Ranks, new_group
from revcompile.runtime.distributed.wire import HEADER_BYTES, Describer, Description, Header
from revcompile.runtime.executor.messages import Message, MessageKind, Packet, Wait
from revcompile.runtime.executor.streams import current_stream, stream_for
from revcompile.schedule import Tie

_NO_TIMEOUT: Final = timedelta(days=365)
"""Receives start long before a message is due; `Transport.wait` has the timeout instead."""
_MOST_RELEASED: Final = 4
"""How many released buffers a channel between GPUs holds for further messages."""


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

    def exchange(self, tensors: Sequence[Tensor], sends: bool) -> None:
        """Send or receive bytes over gloo; all transfers start before the first is awaited."""
        for work in [self._start(self.control, each, sends) for each in tensors]:
            work.wait(_NO_TIMEOUT)

    def exchange_on_device(self, tensor: Tensor, sends: bool) -> Any:
        """Enqueue a send or a receive over NCCL, after the current stream's work so far."""
        # The same as batch_isend_irecv with one operation, in a third of its time. Without
        # coalescing, NCCL would make another communicator and warn about it.
        self.payload._start_coalescing(self.device)
        self._start(self.payload, tensor, sends)
        return self.payload._end_coalescing(self.device)

    def _start(self, group: Any, tensor: Tensor, sends: bool) -> Any:
        peer = sorted(self.ranks).index(self.ranks[1] if sends else self.ranks[0])
        return (group.send if sends else group.recv)([tensor], peer, 0)

    def connect(self, sends: bool) -> None:
        """Exchange a first byte: NCCL connects two ranks when both have called."""
        self.exchange_on_device(torch.zeros(1, dtype=torch.uint8, device=self.device), sends).wait()
        torch.cuda.synchronize(self.device)

    def use_own_stream(self, purpose: str) -> None:
        """Give the calling thread a CUDA stream of its own, if the channel uses CUDA."""
        if self.uses_cuda:
            torch.cuda.set_device(self.device)
            name = f"{purpose} {self.source}, {self.target}"
            torch.cuda.set_stream(stream_for(name, self.device))


def open_channels(
    ranks: Ranks, ties: list[Tie], device: torch.device, timeout: timedelta
) -> list[Channel]:
    """Open the channels between stages, one per direction; returns those of this rank.

    Making a process group is a collective: all ranks make all groups, in the same order.
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
    """A GPU payload that a thread sends over NCCL, after the device work enqueued before it."""

    def __init__(self, thread: SendThread, memory: Tensor) -> None:
        self._thread, self._memory = thread, memory
        self._computed = current_stream(memory).record_event()
        self._work: Any = None
        self._is_awaited = False

    def start(self) -> None:
        """Enqueue the send; called by the thread."""
        current_stream(self._memory).wait_event(self._computed)
        self._work = self._thread.channel.exchange_on_device(self._memory, sends=True)
        if self._is_awaited:
            self._thread.notify()

    def is_sent(self) -> bool:
        """Whether its memory may be freed."""
        return bool(self._work.is_completed())

    def wait(self) -> None:
        """Have the current stream wait until its memory may be written to."""
        self._is_awaited, thread = True, self._thread
        while self._work is None:
            thread.wait(f"a message to stage {thread.channel.target} that is not sent yet")
        self._work.wait()


class SendThread(Worker):
    """Sends a channel's messages in order.

    A payload on a GPU must not be written to until the function that `send` returns was called. A
    payload on a CPU is a copy.

    Args:
        on_failure: Called by the thread, with a description of the error.
        notify: Ends a call of `wait`.
        wait: Waits for another thread, or raises if a rank is gone. Its argument says for what.
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
        self.notify, self.wait = notify, wait
        self._describers = {kind: Describer(channel.device) for kind in MessageKind}
        self._jobs: queue.SimpleQueue[tuple[DevicePayload | None, list[Tensor]] | None]
        self._jobs = queue.SimpleQueue()
        super().__init__(self._run, on_failure)

    def send(self, kind: MessageKind, message: Message) -> Wait | None:
        """Hand a message over; returns at once."""
        describer, channel = self._describers[kind], self.channel
        text, tensors = describer.describe(message)
        size = describer.description.size
        header = Header.of(message, kind, number=self.sent, length=len(text), size=size)
        if isinstance(tensors, Tensor):
            memory = tensors
        else:
            memory = torch.empty(size, dtype=torch.uint8, device=channel.device)
            describer.description.pack(tensors, memory)
        if not (channel.uses_cuda and size):
            self._put(header, text, None, memory)
            return None
        payload = DevicePayload(self, memory)
        self._put(header, text, payload)
        return payload.wait

    def end(self, cause: str = "") -> None:
        """Send the last message: the run has ended, or failed because of `cause`."""
        text = cause.encode()
        header = Header(self.sent, is_end=True, length=len(text))
        self._put(header, text, None)
        self._jobs.put(None)

    def _put(
        self, header: Header, text: bytes, payload: DevicePayload | None, *memory: Tensor
    ) -> None:
        """Hand over the packets for gloo, and the payload for NCCL if there is one."""
        packets = header.packed(), _as_bytes(text), *memory
        self._jobs.put((payload, [each for each in packets if len(each)]))
        self.sent += 1

    def _run(self) -> None:
        self.channel.use_own_stream("send")
        unfinished: deque[DevicePayload] = deque()  # keeps their memory until they are sent
        while (job := self._jobs.get()) is not None:
            payload, packets = job
            if payload is not None:
                payload.start()
                unfinished.append(payload)
            self.channel.exchange(packets, sends=True)
            while unfinished and unfinished[0].is_sent():
                unfinished.popleft()


def _as_bytes(text: bytes) -> Tensor:
    return (
        torch.frombuffer(bytearray(text), dtype=torch.uint8)
        if text
        else torch.empty(0, dtype=torch.uint8)
    )


# -- receiving ------------------------------------------------------------------------------------


class ReceiveThread(Worker):
    """Receives a channel's messages and delivers them.

    A GPU buffer is used again once a captured step has copied it to its static buffers. So memory
    does not grow with the number of steps that the host is ahead of the device.
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
        """Buffers, and the events after which they may be written to."""
        super().__init__(self._run, on_failure)

    def _run(self) -> None:
        self.channel.use_own_stream("receive")
        for number in itertools.count():
            header = Header.read(self._received(HEADER_BYTES))
            if header.number != number:
                raise VerificationError(f"message {header.number} came, not {number}")
            text = self._received(header.length).numpy().tobytes()
            if header.is_end:
                self._on_end(self.channel, text.decode())
                return
            if text:
                self._descriptions[header.kind] = Description(json.loads(text))
            self._deliver(self.channel, header.kind, self._message(header))

    def _received(self, size: int) -> Tensor:
        """Receive this many bytes over gloo."""
        memory = torch.empty(size, dtype=torch.uint8)
        if size:
            self.channel.exchange([memory], sends=False)
        return memory

    def _message(self, header: Header) -> Message:
        """The message of a header; over NCCL its payload is still being received."""
        description, device = self._descriptions[header.kind], self.channel.device
        if not header.size:
            nothing = torch.empty(0, dtype=torch.uint8, device=device)
            return description.unpack(header, nothing, device)
        work = release = None
        if self.channel.uses_cuda:
            memory = self._take(header.size)
            work = self.channel.exchange_on_device(memory, sends=False)
            release = partial(self._release, memory)
        else:
            memory = self._received(header.size)
        unpack = partial(description.unpack, header, memory, device)
        return header.message(packet=Packet(memory, description, unpack, release, work))

    def _take(self, size: int) -> Tensor:
        """A GPU buffer of this many bytes: a released one if possible.

        The buffer that was released last is not used: the device may not have read it yet.
        """
        while len(self._released) > 1:
            memory, free = self._released.popleft()
            if len(memory) == size:
                current_stream(memory).wait_event(free)
                return memory
        return torch.empty(size, dtype=torch.uint8, device=self.channel.device)

    def _release(self, memory: Tensor) -> None:
        self._released.append((memory, current_stream(memory).record_event()))
