"""Messages between stages that may be on other ranks: queues, reductions, and the end of a run.

With replicas of the pipeline, a stage's gradients are averaged over its replicas at every update.
Each stage has a communicator and a thread of its own: the stages of one rank update in an order
that depends on timing, and must not wait for each other's replicas. A stage's all-reduce overlaps
with the work of the rank's other stages and of neighbouring ranks, which have their messages
already. Its own next micro-batch waits, because it needs the updated weights, as in one process.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final, NoReturn

import torch
from torch import Tensor, distributed

from revcompile.errors import RankError
from revcompile.kernels.autocast import wide_dtype
from revcompile.runtime.distributed.channel import Channel, ReceiveThread, SendThread
from revcompile.runtime.distributed.failures import (
    GRACE,
    POLL_PERIOD,
    Failures,
    Worker,
    own_store,
    short_error,
)
from revcompile.runtime.distributed.layout import Ranks, gather_plain, new_group
from revcompile.runtime.executor.messages import Message, MessageKind, Route, Transport, Wait

_SAME_CALLS: Final = (
    "If no rank has ended or hangs, one called another method than the others: all ranks call "
    "step, flush and evaluate in the same order and equally often, so their loaders need the same "
    "number of batches (trainer.loader gives them)"
)


class DistributedTransport(Transport):
    """Delivers messages within the rank by reference, to other ranks over channels.

    `receive` never blocks. `wait` blocks until a message has arrived, or raises `RankError` when
    another rank is gone or silent for longer than `timeout` seconds.
    """

    def __init__(self, ranks: Ranks, channels: Sequence[Channel], timeout: float) -> None:
        super().__init__(len(ranks.layout.stage_to_rank))
        self.ranks, self.timeout = ranks, timeout
        self.failures = Failures(own_store(), ranks.rank, ranks.layout.world)
        self._delivered: Counter[tuple[int, int]] = Counter()
        self._ended: set[tuple[int, int]] = set()
        self._awaited: set[int] = set()
        """Ranks whose messages were missing since a message last arrived."""
        self._channels = list(channels)
        self._closed = False
        self._senders: dict[tuple[int, int], SendThread] = {}
        self._receivers: list[ReceiveThread] = []
        self.averages: dict[int, ReplicaAverage] = {}
        for channel in self._channels:
            peer = next(rank for rank in channel.ranks if rank != ranks.rank)
            lost = self.on_lost(ranks.named(peer))
            if channel.ranks[0] == ranks.rank:
                sender = SendThread(channel, lost, self.failures.notify, self.wait)
                self._senders[channel.source, channel.target] = sender
            else:
                receiver = ReceiveThread(channel, self._deliver, self._on_end, lost)
                self._receivers.append(receiver)

    # -- messages -----------------------------------------------------------------------------

    def send(self, route: Route, message: Message) -> Wait | None:
        sender = self._senders.get(route[:2])
        if sender is not None and self.captured is None:
            return sender.send(route[2], message)
        return super().send(route, message)

    def receive(self, route: Route, number: int | None = None, **how: Any) -> Message | None:
        source, target, _ = route
        has_ended = (source, target) in self._ended  # read before the queue: nothing comes after
        message = super().receive(route, number, **how)
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
        if not self.failures.wait(self.timeout):
            silent = self.failures.missing() or self._awaited - {self.ranks.rank}
            who = " and ".join(self.ranks.named(rank) for rank in sorted(silent))
            self.failures.conclude(
                f"{self.ranks.named(self.ranks.rank)} had no answer from {who} for "
                f"{self.timeout:g} s: {what}. {_SAME_CALLS}"
            )
        self._awaited.clear()
        self._check()

    def wait_all_delivered(self) -> None:
        sent = [[*s.channel.ranks, *pair, s.sent] for pair, s in self._senders.items()]
        with self.collective():
            of_ranks = gather_plain(sent, self.ranks.control)
        for _, receiver, source, target, count in (row for rows in of_ranks for row in rows):
            while receiver == self.ranks.rank and self._delivered[source, target] < count:
                self.wait(f"stage {target} for what stage {source} has sent")

    def is_here(self, stage: int) -> bool:
        return self.ranks.owner(stage) == self.ranks.rank

    # -- reductions ---------------------------------------------------------------------------

    def replicate(self, parameters: Mapping[int, Mapping[str, Tensor]], backend: str) -> None:
        """From now on average the gradients of this rank's stages. Every rank calls it."""
        layout, timeout = self.ranks.layout, timedelta(seconds=self.timeout)
        stages, copies = range(len(layout.stage_to_rank)), range(layout.replicas)
        of_stages = [[layout.rank(stage, copy) for copy in copies] for stage in stages]
        groups = [new_group(members, backend, timeout) for members in of_stages]
        for stage, members, group in zip(stages, of_stages, groups, strict=True):
            if stage in parameters:
                others = (self.ranks.named(rank) for rank in members if rank != self.ranks.rank)
                who = " or ".join(others)
                self.averages[stage] = ReplicaAverage(self, who, parameters[stage], group)

    def _sum(self, of_stages: Tensor) -> Tensor:
        with self.collective():
            distributed.all_reduce(of_stages, group=self.ranks.pipeline)
        self.failures.notify()  # stages that wait for the sum check again
        return super()._sum(of_stages)

    @contextlib.contextmanager
    def collective(self) -> Iterator[None]:
        """Around a collective: a failure there names the rank that is gone."""
        self._check()
        try:
            yield
        except RankError:
            raise
        except (RuntimeError, ValueError) as error:  # ValueError: the process group is gone
            if not self.failures.wait_for_failure(GRACE):
                gone = sorted(self.failures.missing())
                who = " and ".join(map(self.ranks.named, gone)) or "another rank"
                self.failures.conclude(f"{who} is gone: {short_error(error)}. {_SAME_CALLS}")
            self._stop(self.failures.cause or short_error(error))

    # -- called by threads --------------------------------------------------------------------

    def _deliver(self, channel: Channel, kind: MessageKind, message: Message) -> None:
        route = channel.source, channel.target, kind
        self.queues.setdefault(route, deque()).append(message)
        self._delivered[channel.source, channel.target] += 1
        self.failures.notify()

    def _on_end(self, channel: Channel, cause: str) -> None:
        if cause:
            self.failures.fail(cause)
        else:
            self._ended.add((channel.source, channel.target))
            self.failures.notify()

    def on_lost(self, who: str) -> Callable[[str], None]:
        def failed(error: str) -> None:
            if not self._closed:
                self.failures.conclude(f"{who} is gone: {error}")

        return failed

    # -- the end ------------------------------------------------------------------------------

    def _check(self) -> None:
        cause = self.failures.cause
        if cause is not None:
            self._stop(cause)

    def _stop(self, cause: str) -> NoReturn:
        self.abort(cause)
        raise RankError(
            f"{self.failures.cause}; last completed micro-batch here "
            f"({self.ranks.named(self.ranks.rank)}): {self.completed}"
        )

    def stop_all(self, error: BaseException) -> None:
        if not isinstance(error, RankError):
            who = self.ranks.named(self.ranks.rank)
            self.abort(f"{who} stopped: {type(error).__name__}: {error}")

    def abort(self, cause: str) -> None:
        """Tell every other rank why this one stops."""
        self.failures.conclude(cause)
        if not self._closed:
            self._closed = True
            for sender in self._senders.values():
                sender.end(self.failures.cause or cause)
            for sender in self._senders.values():
                sender.join(GRACE)
            self.failures.close()
            if self.ranks.rank == 0:  # the store may end with this process: let all ranks poll it
                time.sleep(2 * POLL_PERIOD)

    def close(self) -> bool:
        """Tell the others that this rank is done, and wait for them; True if all went well."""
        # Stop polling first: rank 0 may end its store once it has the last message of every rank.
        ended = [self.failures.close()]
        if not self._closed:
            self._closed = True
            for sender in self._senders.values():
                sender.end()
        limit = self.timeout if self.failures.cause is None else GRACE
        ended += [sender.join(limit) for sender in self._senders.values()]
        ended += [receiver.join(limit) for receiver in self._receivers]
        ended += [average.close(limit) for average in self.averages.values()]
        # A script may have ended torch.distributed, and all groups with it.
        if all(ended) and self.failures.cause is None and distributed.is_initialized():
            groups = [g for channel in self._channels for g in (channel.control, channel.payload)]
            for group in {id(group): group for group in groups}.values():
                distributed.destroy_process_group(group)
        self._channels.clear()
        self.averages.clear()
        return all(ended)


# -- replicas -------------------------------------------------------------------------------------


class ReplicaAverage:
    """Averages one stage's gradients over its replicas.

    Gradients are summed in static buffers, one per dtype. `presence` is summed before them: the
    number of micro-batches, and for each parameter whether this replica has a gradient of it.
    """

    def __init__(
        self,
        transport: DistributedTransport,
        who: str,
        parameters: Mapping[str, Tensor],
        group: Any,
    ) -> None:
        self._parameters = {n: p for n, p in parameters.items() if p.requires_grad}
        self._group, self._transport = group, transport
        summed = list(self._parameters.values())
        device = summed[0].device if summed else torch.device("cpu")
        presence = torch.zeros(1 + len(self._parameters), dtype=torch.float64, device=device)
        self._buffers, (self._presence, *views) = _buffers([presence, *summed])
        self._sums = dict(zip(self._parameters, views, strict=True))
        self._jobs: queue.SimpleQueue[tuple[Any] | None] = queue.SimpleQueue()
        self.is_reduced = False
        """Whether the sums over all replicas are known."""
        self._thread = Worker(self._run, transport.on_lost(who))

    def fill(self, gradients: Mapping[str, Tensor], count: Tensor) -> None:
        """Copy this replica's sums over `count` micro-batches."""
        self._presence.copy_((count > 0).expand_as(self._presence))
        self._presence[0].copy_(count)
        for row, (name, total) in enumerate(self._sums.items(), 1):
            if name in gradients:
                total.copy_(gradients[name])
            else:  # this replica has no gradient of it
                self._presence[row].zero_()
                total.zero_()

    def start(self) -> None:
        """Have the thread sum over all replicas."""
        on_gpu = self._presence.is_cuda
        self._jobs.put((torch.cuda.current_stream().record_event() if on_gpu else None,))

    def reduce(self) -> None:
        """Sum over all replicas."""
        with self._transport.collective():
            self._all_reduce()

    def read(self, gradients: dict[str, Tensor], adds: bool) -> Tensor:
        """Write the means to `gradients`; returns the number of micro-batches of all replicas.

        Args:
            adds: Add the gradients that only other replicas have; waits for the device.
        """
        self.is_reduced = False
        presence = self._presence[1:].tolist() if adds else ()
        for name, is_present in zip(self._sums, presence, strict=False):
            if is_present and name not in gradients:
                gradients[name] = torch.empty_like(self._parameters[name].detach())
        count = self._presence[0]
        for name, gradient in gradients.items():
            gradient.copy_(self._sums[name].div_(count.clamp(min=1)))
        return count

    def close(self, timeout: float) -> bool:
        """End the thread; False if it does not end in time."""
        self._jobs.put(None)
        return self._thread.join(timeout)

    def _all_reduce(self) -> None:
        for buffer in self._buffers:
            distributed.all_reduce(buffer, group=self._group)

    def _run(self) -> None:
        # A stream of its own: on the default stream, all-reduces of several stages would wait for
        # each other, in an order that may differ between ranks.
        stream = torch.cuda.Stream(self._presence.device) if self._presence.is_cuda else None
        while (job := self._jobs.get()) is not None:
            (filled,) = job
            if stream is None:
                self._all_reduce()
            else:
                with torch.cuda.stream(stream):
                    stream.wait_event(filled)
                    self._all_reduce()
                stream.synchronize()
            self.is_reduced = True
            self._transport.failures.notify()


def _buffers(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """A buffer for each dtype, and for each tensor a view into its buffer.

    Low-precision gradients are summed in float32.
    """
    members: dict[torch.dtype, list[int]] = {}
    for index, tensor in enumerate(tensors):
        members.setdefault(wide_dtype(tensor.dtype), []).append(index)
    buffers, views = [], list(tensors)
    for dtype, indices in members.items():
        sizes = [tensors[index].numel() for index in indices]
        buffers.append(torch.zeros(sum(sizes), dtype=dtype, device=tensors[0].device))
        for index, part in zip(indices, buffers[-1].split(sizes), strict=True):
            views[index] = part.view(tensors[index].shape)
    return buffers, views
