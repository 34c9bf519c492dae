"""Messages between stages that may be on other ranks: threads that send and receive, and queues.

    main thread --send--> SendThread --channel--> ReceiveThread --> queue --receive--> main thread
         rank 0                                        rank 1

Receives are posted before the message is needed, and sends return at once: both overlap with
compute. Each direction between two stages has a communicator of its own.
"""

from __future__ import annotations

import contextlib
import queue
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NoReturn

import torch
from torch import Tensor, distributed

from revcompile.errors import RankError, VerificationError
from revcompile.runtime.distributed.collectives import gather_plain
from revcompile.runtime.distributed.liveness import (
    FailureMonitor,
    LivenessCheck,
    RootCause,
    Worker,
    own_store,
    short_error,
)
from revcompile.runtime.distributed.message_format import (
    NO_FLAG,
    Describer,
    Description,
    Flag,
    Header,
)
from revcompile.runtime.distributed.p2p import (
    Arrival,
    Channel,
    DeviceReceiver,
    DeviceSender,
    Outbound,
    PacketReceiver,
    Packets,
    PacketSender,
    Wait,
    use_own_stream,
)
from revcompile.runtime.distributed.process_groups import Ranks
from revcompile.runtime.distributed.replicas import ReplicaAverage
from revcompile.runtime.executor.transport import (
    Mean,
    Message,
    MessageKind,
    Route,
    Sending,
    Transport,
)

_GRACE: Final = 2.0
"""Seconds for a failing rank's last messages to be sent."""


class SendThread(Worker):
    """Sends a channel's messages in order.

    What is sent over NCCL must not be written to before `Sending.wait`, and what is sent over gloo
    is copied.

    Args:
        on_failure: Called by the thread.
        notify: Ends a call of `wait`.
        wait: Waits for something that the thread does.
    """

    def __init__(
        self,
        channel: Channel,
        on_failure: Callable[[str], None],
        notify: Callable[[], None],
        wait: Wait,
    ) -> None:
        self.channel = channel
        self.sent = 0
        """How many messages were handed over."""
        self._packets: queue.SimpleQueue[tuple[int, Packets] | None] = queue.SimpleQueue()
        self._describers: dict[MessageKind, Describer] = {}
        self._by_tag: list[DeviceSender | PacketSender] = (
            [DeviceSender(channel, notify, wait)]
            if channel.uses_cuda
            else [PacketSender() for _ in range(channel.tags)]
        )
        super().__init__(self._run, on_failure)

    def send(self, kind: MessageKind, message: Message) -> Sending | None:
        """Hand a message over; returns at once."""
        if message.void:
            return self._put(Outbound(self._header(kind, message, Flag.VOID)))
        describer = self._describers.get(kind)
        if describer is None:
            describer = self._describers[kind] = Describer(self.channel.device)
        text, tensors = describer.describe(message)
        flags = Flag.DESCRIBED if text else NO_FLAG
        if message.is_exact:
            flags |= Flag.EXACT
        header = self._header(kind, message, flags, len(text))
        return self._put(Outbound(header, text, tensors, describer.packing))

    def _header(self, kind: MessageKind, message: Message, flags: Flag, length: int = 0) -> Header:
        index, scale, fingerprint = message.index, message.scale, message.fingerprint
        return Header(kind, index, flags, length, self.sent, scale, fingerprint)

    def end(self, cause: str | None = None) -> None:
        """Send the last message, by every tag: the run has ended, or failed because of `cause`."""
        text = b"" if cause is None else cause.encode()
        flags = Flag.END if cause is None else Flag.ABORT
        for _ in self._by_tag:
            self._put(Outbound(self._header(MessageKind.X, Message(0), flags, len(text)), text))
        self._packets.put(None)

    def bytes_by_kind(self) -> dict[MessageKind, int]:
        """The size of a message of each kind that was sent."""
        return {kind: each.packing.size for kind, each in self._describers.items()}

    def _put(self, outbound: Outbound) -> Sending | None:
        tag = self.sent % len(self._by_tag)
        packets, sending = self._by_tag[tag].packets(outbound)
        self.sent += 1
        self._packets.put((tag, packets))
        return sending

    def _run(self) -> None:
        use_own_stream(self.channel, "send")
        while (waiting := self._packets.get()) is not None:
            tag, make = waiting
            packets = make()
            del make, waiting  # they hold on to the packets, which are used again once sent
            while packets:
                self.channel.control_exchange(packets.pop(0), True, tag)


class ReceiveThread(Worker):
    """Receives a channel's messages and delivers them."""

    def __init__(
        self,
        channel: Channel,
        deliver: Callable[[Channel, Arrival], None],
        on_end: Callable[[Channel, str | None], None],
        on_failure: Callable[[str], None],
    ) -> None:
        self.channel = channel
        self._deliver, self._on_end = deliver, on_end
        self._descriptions: dict[MessageKind, Description] = {}
        self._received = self._ended = 0
        self.receivers: list[DeviceReceiver | PacketReceiver] = (
            [DeviceReceiver(channel)]
            if channel.uses_cuda
            else [PacketReceiver(channel, tag) for tag in range(channel.tags)]
        )
        super().__init__(self._run, on_failure)

    def _run(self) -> None:
        use_own_stream(self.channel, "receive")
        while self._receive():
            pass

    def _receive(self) -> bool:
        """Receive one message; False if it is the last."""
        for each in self.receivers:
            each.post()
        number = self._received % len(self.receivers)
        receiver = self.receivers[number]
        header = receiver.header()
        if header.sequence != self._received:
            raise VerificationError(f"message {header.sequence} came, not {self._received}")
        self._received += 1
        text = self._text(header.length, number)
        if header.flags & (Flag.END | Flag.ABORT):
            has_ended = bool(header.flags & Flag.END)
            self._ended += 1
            if self._ended == 1:
                self._on_end(self.channel, None if has_ended else text.decode(errors="replace"))
            return has_ended and self._ended < len(self.receivers)
        if header.flags & Flag.DESCRIBED:
            self._descriptions[header.kind] = Description(text)
        if header.flags & Flag.VOID:
            arrival = Arrival(header.kind, header.message())
        else:
            description = self._descriptions.get(header.kind)
            if description is None:
                raise VerificationError(f"a message {header} came before its description")
            arrival = receiver.arrival(header, description)
        self._deliver(self.channel, arrival)
        return True

    def _text(self, length: int, tag: int) -> bytes:
        text = torch.empty(length, dtype=torch.uint8)
        if length:
            self.channel.control_exchange(text, sends=False, tag=tag)
        return text.numpy().tobytes()


class DistributedTransport(Transport):
    """Delivers messages within the rank by reference, to other ranks over channels.

    `receive` never blocks. `wait` blocks until a message has arrived, or raises `RankError` when
    another rank is gone or silent for longer than `timeout` seconds.
    """

    def __init__(self, ranks: Ranks, channels: Sequence[Channel], timeout: float) -> None:
        super().__init__(len(ranks.layout.stage_to_rank))
        self.ranks, self.timeout = ranks, timeout
        self.completed = -1
        """The last micro-batch this rank has finished its part of."""
        self._monitor = FailureMonitor()
        store = own_store()
        self._root_cause = RootCause(store, self._monitor.fail)
        self._liveness = LivenessCheck(store, ranks.rank, ranks.layout.world)
        self._delivered: Counter[tuple[int, int]] = Counter()
        self._ended: set[tuple[int, int]] = set()
        self._awaited: set[int] = set()
        """Ranks from which a message was missing since the last one arrived."""
        self._channels = list(channels)
        self._closed = False
        self._senders: dict[tuple[int, int], SendThread] = {}
        self._receivers: list[ReceiveThread] = []
        self.averages: dict[int, ReplicaAverage] = {}
        for channel in self._channels:
            peer = next(rank for rank in channel.ranks if rank != ranks.rank)
            lost = self._on_lost(ranks.named(peer))
            if channel.ranks[0] == ranks.rank:
                sender = SendThread(channel, lost, self._monitor.notify, self.wait)
                self._senders[channel.source, channel.target] = sender
            else:
                receiver = ReceiveThread(channel, self._deliver, self._on_end, lost)
                self._receivers.append(receiver)

    # -- messages -----------------------------------------------------------------------------

    def send(self, route: Route, message: Message) -> Sending | None:
        sender = self._senders.get(route[:2])
        if sender is not None:
            return sender.send(route[2], message)
        return super().send(route, message)

    def receive(self, route: Route, *, keep: bool = False, packed: bool = False) -> Message | None:
        source, target, _ = route
        has_ended = (source, target) in self._ended  # read before the queue: nothing comes after
        message = super().receive(route, keep=keep, packed=packed)
        if message is not None:
            return message
        if has_ended:
            who = self.ranks.named(self.ranks.owner(source))
            self._stop(
                f"{who} has ended or closed its trainer, but stage {target} waits for more from it"
            )
        self._awaited.add(self.ranks.owner(source))
        return None

    def wait(self, what: str) -> None:
        if not self._monitor.wait(self.timeout):
            silent = self._liveness.missing(_GRACE) or self._awaited - {self.ranks.rank}
            who = " and ".join(self.ranks.named(rank) for rank in sorted(silent))
            self._conclude(f"no answer from {who} for {self.timeout:g} s: {what}")
        self._awaited.clear()
        self._check()

    def wait_all_delivered(self) -> None:
        """Wait until every message that was sent is in its receiver's queue. Every rank calls it.

        Between two steps nothing else is in flight between ranks: a checkpoint can hold it.
        """
        sent = [[*s.channel.ranks, *pair, s.sent] for pair, s in self._senders.items()]
        with self.collective():
            of_ranks = gather_plain(sent, self.ranks.control)
        for _, receiver, source, target, count in (row for rows in of_ranks for row in rows):
            while receiver == self.ranks.rank and self._delivered[source, target] < count:
                self.wait(f"stage {target} for what stage {source} has sent")

    def is_here(self, stage: int) -> bool:
        return self.ranks.owner(stage) == self.ranks.rank

    @property
    def allocations(self) -> int:
        """How often memory for messages had to be allocated; constant in steady state."""
        receivers = (each for thread in self._receivers for each in thread.receivers)
        return sum(each.pool.allocations for each in receivers if isinstance(each, PacketReceiver))

    # -- reductions ---------------------------------------------------------------------------

    def replicate(
        self, stage: int, parameters: Mapping[str, Tensor], statistics: Sequence[Tensor], group: Any
    ) -> None:
        """From now on average a stage's gradients (and `statistics`) over its replicas."""
        replicas = range(self.ranks.layout.replicas)
        members = {self.ranks.layout.rank(stage, r) for r in replicas} - {self.ranks.rank}
        who = " or ".join(self.ranks.named(rank) for rank in sorted(members))
        self.averages[stage] = ReplicaAverage(
            parameters,
            statistics,
            group,
            self._monitor.notify,
            self._on_lost(who),
            self.collective,
        )

    def mean(self, stage: int, gradients: dict[str, Tensor], count: int) -> Mean | None:
        average = self.averages.get(stage)
        if average is None:
            return super().mean(stage, gradients, count)
        return average.mean(gradients, count)

    def _sum(self, of_stages: Tensor) -> Tensor:
        with self.collective():
            distributed.all_reduce(of_stages, group=self.ranks.pipeline)
        self._monitor.notify()  # stages that wait for the sum look again
        return super()._sum(of_stages)

    @contextlib.contextmanager
    def collective(self) -> Iterator[None]:
        """Around a collective: a failure there names the rank that is gone."""
        self._check()
        try:
            yield
        except RankError:
            raise
        except RuntimeError as error:
            self._stop_for_lost_rank(error)

    def _stop_for_lost_rank(self, error: Exception) -> NoReturn:
        if not self._monitor.wait_for_failure(_GRACE):
            gone = sorted(self._liveness.missing(_GRACE))
            who = " and ".join(map(self.ranks.named, gone)) or "another rank"
            self._conclude(f"{who} is gone: {short_error(error)}")
        self._stop(self._monitor.cause or short_error(error))

    # -- called by threads --------------------------------------------------------------------

    def _deliver(self, channel: Channel, arrival: Arrival) -> None:
        route = channel.source, channel.target, arrival.kind
        self.queues.setdefault(route, deque()).append(arrival)
        self._delivered[channel.source, channel.target] += 1
        self._monitor.notify()

    def _on_end(self, channel: Channel, cause: str | None) -> None:
        if cause is not None:
            self._monitor.fail(cause)
        else:
            self._ended.add((channel.source, channel.target))
            self._monitor.notify()

    def _on_lost(self, who: str) -> Callable[[str], None]:
        def failed(error: str) -> None:
            if not self._closed:
                self._conclude(f"{who} is gone: {error}")

        return failed

    def _conclude(self, cause: str) -> None:
        """Stop this rank for the first cause any rank has had, which may not be `cause`."""
        if self._monitor.cause is None:
            first = self._root_cause.agree(cause, _GRACE)
            if first is None:
                self._monitor.wait_for_failure(_GRACE)  # a neighbour may still send its cause
            self._monitor.fail(first or cause)

    # -- the end ------------------------------------------------------------------------------

    def _check(self) -> None:
        cause = self._monitor.cause
        if cause is not None:
            self._stop(cause)

    def _stop(self, cause: str) -> NoReturn:
        self.abort(cause)
        raise RankError(
            f"{self._monitor.cause}; last completed micro-batch here "
            f"({self.ranks.named(self.ranks.rank)}): {self.completed}"
        )

    def stop_all(self, error: BaseException) -> None:
        """Tell every other rank that this one stops, unless it only follows another one."""
        if not isinstance(error, RankError):
            who = self.ranks.named(self.ranks.rank)
            self.abort(f"{who} stopped: {type(error).__name__}: {error}")

    def abort(self, cause: str) -> None:
        """Tell every other rank why this one stops."""
        self._conclude(cause)
        if not self._closed:
            self._closed = True
            for sender in self._senders.values():
                sender.end(self._monitor.cause)
            for sender in self._senders.values():
                sender.join(_GRACE)
            self._root_cause.close(_GRACE)
            if self.ranks.rank == 0:
                self._root_cause.linger()

    def close(self) -> bool:
        """Tell the others that this rank is done, and wait for them; True if all went well."""
        # First, because rank 0 may end its store as soon as it has everybody's last message.
        ended = [self._root_cause.close(_GRACE)]
        if not self._closed:
            self._closed = True
            for sender in self._senders.values():
                sender.end()
        limit = self.timeout if self._monitor.cause is None else _GRACE
        ended += [sender.join(limit) for sender in self._senders.values()]
        ended += [receiver.join(limit) for receiver in self._receivers]
        ended += [average.close(limit) for average in self.averages.values()]
        # A script may have ended torch.distributed, and all groups with it.
        if all(ended) and self._monitor.cause is None and distributed.is_initialized():
            groups = [g for channel in self._channels for g in (channel.control, channel.payload)]
            for group in {id(group): group for group in groups}.values():
                distributed.destroy_process_group(group)
        self._channels.clear()
        return all(ended)
