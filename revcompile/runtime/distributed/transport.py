"""Messages between stages that may live on other ranks."""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NoReturn

import torch
from torch import Tensor, distributed

from revcompile.errors import RankError
from revcompile.runtime.distributed.channel import Arrival, Channel
from revcompile.runtime.distributed.channel_threads import Incoming, Outgoing
from revcompile.runtime.distributed.collectives import gather_plain
from revcompile.runtime.distributed.gloo import PacketReceiver
from revcompile.runtime.distributed.liveness import Alarm, LivenessCheck, RootCause, own_store, told
from revcompile.runtime.distributed.process_groups import Ranks
from revcompile.runtime.distributed.replicas import Copies
from revcompile.runtime.executor.transport import Message, MessageKind, mean_of

__all__ = ["Distributed"]

_GRACE: Final = 2.0
"""Seconds for the last words to get out before a failing rank goes."""
_DTYPES: Final = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Distributed:
    """Delivers within the rank by reference, to other ranks over links.

    It is safe to ask for what has not come: `wait` blocks until something has, or raises
    `RankError` when another rank is gone or silent for longer than `timeout` seconds.
    """

    def __init__(self, ranks: Ranks, links: Sequence[Channel], timeout: float) -> None:
        self.ranks, self.timeout = ranks, timeout
        self.completed = -1
        """The last micro-batch this rank has finished its part of."""
        self._alarm = Alarm()
        store = own_store()
        self._first = RootCause(store, self._alarm.sound)
        self._roll = LivenessCheck(store, ranks.rank, ranks.layout.world)
        self._queues: dict[tuple[int, int, MessageKind], deque[Arrival]] = {}
        self._delivered: Counter[tuple[int, int]] = Counter()
        self._over: set[tuple[int, int]] = set()
        self._asked: set[int] = set()
        self._norms: dict[int, dict[int, Tensor]] = {}
        self._totals: dict[int, Tensor] = {}
        self._links = list(links)
        self._closed = False
        self._out: dict[tuple[int, int], Outgoing] = {}
        self._in: list[Incoming] = []
        self._copies: dict[int, Copies] = {}
        for link in self._links:
            peer = next(rank for rank in link.ranks if rank != ranks.rank)
            failed = self._gone(ranks.named(peer))
            if link.ranks[0] == ranks.rank:
                self._out[link.source, link.target] = Outgoing(link, failed)
            else:
                self._in.append(Incoming(link, self._deliver, self._ended, failed))

    # -- transport ----------------------------------------------------------------------------

    def send(self, source: int, target: int, channel: MessageKind, message: Message) -> None:
        """Hand a message over; returns at once."""
        link = self._out.get((source, target))
        if link is not None:
            link.send(channel, message)
        else:
            self._queue(source, target, channel).append(Arrival(channel, message))

    def receive(self, source: int, target: int, channel: MessageKind) -> Message | None:
        """The next message, if it has arrived."""
        found = self._queue(source, target, channel)
        if found:
            return found.popleft().ready()
        if (source, target) in self._over and not found:
            who = self.ranks.named(self.ranks.owner(source))
            self._stop(
                f"{who} has ended or closed its trainer, but stage {target} waits for more from it"
            )
        self._asked.add(self.ranks.owner(source))
        return None

    def wait(self, what: str) -> None:
        """Until something has arrived; `what` says who waits for what."""
        if not self._alarm.wait(self.timeout):
            silent = self._roll.missing(_GRACE) or self._asked - {self.ranks.rank}
            who = " and ".join(self.ranks.named(rank) for rank in sorted(silent))
            self._conclude(f"no answer from {who} for {self.timeout:g} s: {what}")
        self._asked.clear()
        self._check()

    def deliver(self, source: int, target: int, channel: MessageKind, message: Message) -> None:
        """Have a message of a checkpoint wait for its receiver, if that is on this rank."""
        if self.ranks.owner(target) == self.ranks.rank:
            self._queue(source, target, channel).append(Arrival(channel, message))

    def all_arrived(self) -> None:
        """Wait until every message that was sent lies where it will be read. Every rank calls it.

        Between two steps that is all there is in flight between ranks: a checkpoint can hold it.
        """
        sent = [[*link.link.ranks, *pair, link.sent] for pair, link in self._out.items()]
        with self.together():
            of_all = gather_plain(sent, self.ranks.control)
        for _, receiver, source, target, count in (one for found in of_all for one in found):
            while receiver == self.ranks.rank and self._delivered[source, target] < count:
                self.wait(f"stage {target} for what stage {source} has sent")

    @property
    def queues(self) -> dict[tuple[int, int, MessageKind], list[Message]]:
        """The messages that wait on this rank, by source, target and channel."""
        found = list(self._queues.items())
        return {key: [arrival.ready() for arrival in queue] for key, queue in found}

    def clear(self) -> None:
        """Forget the messages that wait here; none may be on its way (`all_arrived`)."""
        for queue in list(self._queues.values()):
            queue.clear()
        self._norms.clear()
        self._totals.clear()

    def replicate(
        self, stage: int, parameters: Mapping[str, Tensor], statistics: Sequence[Tensor], group: Any
    ) -> None:
        """From now on a stage's gradients are averaged over its copies (and `statistics`)."""
        copies = range(self.ranks.layout.replicas)
        members = {self.ranks.layout.rank(stage, r) for r in copies} - {self.ranks.rank}
        who = " or ".join(self.ranks.named(rank) for rank in sorted(members))
        self._copies[stage] = Copies(
            parameters, statistics, group, self._alarm.arrived, self._gone(who)
        )

    def mean(
        self, stage: int, gradients: dict[str, Tensor], count: int
    ) -> dict[str, Tensor] | None:
        """A stage's gradient, over all its copies."""
        copies = self._copies.get(stage)
        if copies is None:
            return mean_of(gradients, count)
        self._settle()
        return copies.mean(gradients, count)

    def sum_squared_norms(self, stage: int, update: int, squared: Tensor) -> Tensor | None:
        """The sum over all stages, once this rank's have all come and the others agree."""
        norms = self._norms.setdefault(update, {})
        norms[stage] = squared
        if len(norms) < len(self.ranks.stages):
            return None
        if update not in self._totals:
            self._totals = {update: self._sum(norms)}
            self._norms = {u: n for u, n in self._norms.items() if u >= update}
            self._alarm.arrived()  # stages that wait for the sum look again
        return self._totals[update].to(squared.device)

    def _sum(self, norms: dict[int, Tensor]) -> Tensor:
        """Every stage's norm in its own precision, added in the order of the stages."""
        some = next(iter(norms.values()))
        table = torch.zeros(len(self.ranks.layout.places), 2, dtype=torch.float64)
        table = table.to(some.device)
        for stage, squared in norms.items():
            table[stage, 0] = squared.double()
            table[stage, 1] = _DTYPES.index(squared.dtype)
        with self.together():
            distributed.all_reduce(table, group=self.ranks.pipeline)
        kinds = table[:, 1].tolist()
        total = table[0, 0].to(_DTYPES[int(kinds[0])])
        for value, kind in zip(table[1:, 0], kinds[1:], strict=True):
            total = total + value.to(_DTYPES[int(kind)])
        return total

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Around what all ranks do at once: a failure there names the rank that is gone."""
        self._check()
        self._settle()
        try:
            yield
        except RankError:
            raise
        except RuntimeError as error:
            if not self._alarm.sounded(_GRACE):
                gone = sorted(self._roll.missing(_GRACE))
                who = " and ".join(map(self.ranks.named, gone)) or "another rank"
                self._conclude(f"{who} is gone: {told(error)}")
            self._check()

    def _settle(self) -> None:
        """Let what was sent be enqueued first: a GPU may hold it back behind a collective.

        A collective ends when all ranks have joined it, and some of them may wait for a message
        before they do.
        """
        for link in self._out.values():
            if link.link.uses_cuda:
                link.settle(self.timeout)

    @property
    def allocations(self) -> int:
        """How often memory for messages had to be allocated; it stays the same in steady state."""
        ends = (link.end for link in self._in)
        return sum(end.packets.allocations for end in ends if isinstance(end, PacketReceiver))

    # -- what threads report ------------------------------------------------------------------

    def _queue(self, source: int, target: int, channel: MessageKind) -> deque[Arrival]:
        return self._queues.setdefault((source, target, channel), deque())

    def _deliver(self, link: Channel, arrival: Arrival) -> None:
        self._queue(link.source, link.target, arrival.channel).append(arrival)
        self._delivered[link.source, link.target] += 1
        self._alarm.arrived()

    def _ended(self, link: Channel, cause: str | None) -> None:
        if cause is not None:
            self._alarm.sound(cause)
        else:
            self._over.add((link.source, link.target))
            self._alarm.arrived()

    def _gone(self, who: str) -> Callable[[str], None]:
        def failed(error: str) -> None:
            if not self._closed:
                self._conclude(f"{who} is gone: {error}")

        return failed

    def _conclude(self, cause: str) -> None:
        """Stop everybody here, for the first cause any rank has had: a rank may have followed."""
        if self._alarm.cause is None:
            first = self._first.agree(cause, _GRACE)
            if first is None:
                self._alarm.sounded(_GRACE)  # links may still tell
            self._alarm.sound(first or cause)

    # -- the end ------------------------------------------------------------------------------

    def _check(self) -> None:
        cause = self._alarm.cause
        if cause is not None:
            self._stop(cause)

    def _stop(self, cause: str) -> NoReturn:
        self.abort(cause)
        raise RankError(
            f"{self._alarm.cause}; last completed micro-batch here "
            f"({self.ranks.named(self.ranks.rank)}): {self.completed}"
        )

    def abort(self, cause: str) -> None:
        """Tell every other rank why this one stops."""
        self._conclude(cause)
        if not self._closed:
            self._closed = True
            for link in self._out.values():
                link.end(self._alarm.cause)
            for link in self._out.values():
                link.join(_GRACE)
            self._first.close(_GRACE)
            if self.ranks.rank == 0:
                self._first.stay()

    def close(self) -> bool:
        """Say that all is done, and wait for the others to say so; True if all went well."""
        ended = [self._first.close(_GRACE)]  # before the store goes, which the last word may allow
        if not self._closed:
            self._closed = True
            for link in self._out.values():
                link.end()
        limit = self.timeout if self._alarm.cause is None else _GRACE
        ended += [link.join(limit) for link in self._out.values()]
        ended += [link.join(limit) for link in self._in]
        ended += [copies.close(limit) for copies in self._copies.values()]
        if all(ended) and self._alarm.cause is None:
            for group in {id(g): g for k in self._links for g in (k.control, k.payload)}.values():
                distributed.destroy_process_group(group)
        self._links.clear()
        return all(ended)
