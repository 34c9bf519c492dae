"""The dry run: action lists executed against each other without tensors.

It proves that the lists fit together (no deadlock, no message that nobody receives), and says how
busy each stage would be. Every schedule is checked this way before it trains.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from revcompile.errors import RevcompileError
from revcompile.schedule.action import SHORT, Action, Op, Tie
from revcompile.schedule.delay import window
from revcompile.schedule.generate import actions
from revcompile.schedule.methods import Method


class ScheduleError(RevcompileError):
    """Action lists that do not fit together: some stage would wait for ever."""


@dataclass(frozen=True)
class Costs:
    """Time that each stage takes for a pass or an update, and each link for a message.

    Link j is between stages j and j + 1, in both directions. During `latency`, a part of a
    message's time, the link can carry other messages; the default is all of its time.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    update: tuple[float, ...]
    link_forward: tuple[float, ...]
    link_backward: tuple[float, ...]
    latency: float = math.inf

    @property
    def link_busy(self) -> float:
        """How long a message occupies the slowest link."""
        return max((0.0, *(t - self.latency for t in (*self.link_forward, *self.link_backward))))

    @classmethod
    def uniform(
        cls,
        stages: int,
        forward: float = 1,
        backward: float = 3,
        update: float = 0,
        link: float = 0,
    ) -> Costs:
        """The same for all stages. By default a backward pass recomputes: three forward passes."""
        links = (link,) * (stages - 1)
        return cls((forward,) * stages, (backward,) * stages, (update,) * stages, links, links)

    def of(self, stage: int, op: Op) -> float:
        """Time a stage is busy with an action; training a gradient predictor counts as free."""
        times = {Op.FORWARD: self.forward, Op.BACKWARD: self.backward, Op.UPDATE: self.update}
        return times[op][stage] if op in times else 0.0


@dataclass(frozen=True, slots=True)
class Span:
    """When a stage did an action. A receive lasts as long as the stage waits for it."""

    stage: int
    action: Action
    start: float
    end: float


_Channel = tuple[int, int, Op]
"""Sender, receiver and kind of send: messages of a channel arrive in the order they were sent."""

_SEND_OF: Final = {
    Op.RECV_X: Op.SEND_Y,
    Op.RECV_DY: Op.SEND_DX,
    Op.RECV_TIED_GRAD: Op.SEND_TIED_GRAD,
    Op.RECV_TIED_WEIGHT: Op.SEND_TIED_WEIGHT,
}
_SENDS: Final = frozenset(_SEND_OF.values())
_PEER: Final = {Op.RECV_X: -1, Op.SEND_Y: 1, Op.RECV_DY: 1, Op.SEND_DX: -1}
"""The other stage of a message, relative to this one."""
_NEEDS: Final = {
    Op.FORWARD: (Op.RECV_X,),
    Op.SEND_Y: (Op.FORWARD,),
    Op.BACKWARD: (Op.FORWARD, Op.RECV_DY),
    Op.SEND_DX: (Op.BACKWARD,),
    Op.TRAIN: (Op.FORWARD, Op.RECV_DY),
    Op.SEND_TIED_WEIGHT: (Op.UPDATE,),
}
"""The actions with the same index that a stage must have done before."""

_BEFORE_UPDATE: Final = frozenset((Op.SEND_TIED_GRAD, Op.RECV_TIED_GRAD))
_SHOWN: Final = 6
"""An error shows at most this many stages, and actions of a stage before and after a problem."""


def dry_run(lists: Sequence[Sequence[Action]], costs: Costs) -> tuple[Span, ...]:
    """When each action runs if the lists are executed against each other.

    Every stage follows its own list strictly. Sends cost it nothing and arrive after the link's
    time (tied parameters: at once); a receive waits.

    Raises:
        ScheduleError: Some stage would wait for ever, or the lists do not fit together.
    """
    return _DryRun(lists, costs).run()


def check_schedule(
    method: Method,
    stages: int,
    accumulation_steps: int = 1,
    ties: Iterable[Tie] = (),
) -> None:
    """Dry-run a schedule from filling to drain; ScheduleError if it could deadlock."""
    longest = max(window(method, stages, stage, accumulation_steps) for stage in range(stages))
    lists = actions(method, stages, longest + 2, accumulation_steps, ties)
    dry_run(lists, Costs.uniform(stages))


class _DryRun:
    """The state of a dry run: where each stage is, and which messages are in transit."""

    def __init__(self, lists: Sequence[Sequence[Action]], costs: Costs) -> None:
        self.lists = lists
        self.costs = costs
        self.next = [0] * len(lists)
        self.clock = [0.0] * len(lists)
        self.done: list[set[tuple[Op, int]]] = [set() for _ in lists]
        self.synthetic = [any(a.op is Op.TRAIN for a in stage) for stage in lists]
        self.in_transit: dict[_Channel, deque[tuple[int, float]]] = {}
        """Index and arrival time of each message that was sent and not received."""
        self.waiting: dict[_Channel, int] = {}
        self.updated: list[int | None] = [None for _ in lists]
        self.spans: list[Span] = []

    def run(self) -> tuple[Span, ...]:
        ready = deque(range(len(self.lists)))
        while ready:
            self._run_stage(ready.popleft(), ready)
        self._check_end()
        return tuple(self.spans)

    def _run_stage(self, stage: int, ready: deque[int]) -> None:
        """Run one stage until it has to wait; stages that waited for its messages become ready."""
        listed = self.lists[stage]
        while self.next[stage] < len(listed):
            action = listed[self.next[stage]]
            self._check_local(stage, action)
            start = self.clock[stage]
            if action.op in _SEND_OF:
                channel = self._channel(stage, action)
                if not self.in_transit.get(channel):
                    self.waiting[channel] = stage
                    return
                index, arrival = self.in_transit[channel].popleft()
                if index != action.index:
                    sent = f"{SHORT[channel[2]]}{index} of stage {channel[0]}"
                    raise self._error(stage, f"gets {sent} instead")
                self.clock[stage] = max(start, arrival)
            elif action.op in _SENDS:
                channel = self._channel(stage, action)
                queue = self.in_transit.setdefault(channel, deque())
                queue.append((action.index, start + self._link(channel)))
                if channel in self.waiting:
                    ready.append(self.waiting.pop(channel))
            else:
                self.clock[stage] = start + self.costs.of(stage, action.op)
            self.spans.append(Span(stage, action, start, self.clock[stage]))
            self.done[stage].add((action.op, action.index))
            self.next[stage] += 1

    def _channel(self, stage: int, action: Action) -> _Channel:
        peer = stage + _PEER[action.op] if action.peer is None else action.peer
        if not 0 <= peer < len(self.lists):
            raise self._error(stage, f"there is no stage {peer}")
        if action.op in _SEND_OF:
            return peer, stage, _SEND_OF[action.op]
        return stage, peer, action.op

    def _link(self, channel: _Channel) -> float:
        source, target, op = channel
        links = {Op.SEND_Y: self.costs.link_forward, Op.SEND_DX: self.costs.link_backward}
        return links[op][min(source, target)] if op in links else 0.0

    def _check_local(self, stage: int, action: Action) -> None:
        """Refuse an action whose requirements within its own stage are not met."""
        done = self.done[stage]
        for before in _NEEDS.get(action.op, ()):
            absent = (
                (before is Op.RECV_X and stage == 0)
                or (before is Op.RECV_DY and stage == len(self.lists) - 1)
                or (before is Op.RECV_DY and action.op is Op.BACKWARD and self.synthetic[stage])
            )
            if not absent and (before, action.index) not in done:
                raise self._error(stage, f"needs {Action(before, action.index)} first")
        if action.op is Op.UPDATE:
            last = self.updated[stage]
            if last is not None and action.index != last + 1:
                raise self._error(stage, f"follows U{last}")
            self.updated[stage] = action.index
        if action.op in _BEFORE_UPDATE and (Op.UPDATE, action.index) in done:
            raise self._error(stage, f"comes too late, after U{action.index}")
        if action.peer is None and (action.op, action.index) in done:
            raise self._error(stage, "is done already")

    def _check_end(self) -> None:
        """Refuse lists that are not at their end, and messages that nobody receives."""
        stuck = [j for j, listed in enumerate(self.lists) if self.next[j] < len(listed)]
        if stuck:
            raise self._deadlock(stuck)
        for (source, target, op), queue in self.in_transit.items():
            if queue:
                raise ScheduleError(
                    f"stage {source} sends {SHORT[op]}{queue[0][0]} to stage {target}, which never "
                    f"receives it:\n{self._around(target, 'ends here')}"
                )
        for stage, done in enumerate(self.done):
            self._check_complete(stage, done)

    def _check_complete(self, stage: int, done: set[tuple[Op, int]]) -> None:
        """Refuse unused forward passes and gradients, and fewer updates than the first stage's."""
        follows = {Op.FORWARD: Op.BACKWARD}
        if self.synthetic[stage]:
            follows[Op.RECV_DY] = Op.TRAIN
        for op, index in sorted(done, key=lambda entry: entry[1]):
            if op in follows and (follows[op], index) not in done:
                missing = Action(follows[op], index)
                raise self._error(stage, f"ends here, but {missing} is missing")
        applied = [a.op for a in self.lists[stage] if a.op in (Op.BACKWARD, Op.UPDATE)]
        if applied and applied[-1] is Op.BACKWARD:
            raise self._error(stage, "ends here, but its last gradients are in no update")
        here, first = ({i for op, i in self.done[j] if op is Op.UPDATE} for j in (stage, 0))
        if here != first:
            odd = min(here ^ first)
            raise ScheduleError(
                f"stage {stage if odd in first else 0} never does U{odd}, "
                f"stage {0 if odd in first else stage} does"
            )

    def _deadlock(self, stuck: Sequence[int]) -> ScheduleError:
        """The error that says what each stage waits for."""
        lines = []
        ended = False
        for stage in stuck:
            action = self.lists[stage][self.next[stage]]
            source, _, op = self._channel(stage, action)
            sent = Action(op, action.index, None if action.peer is None else stage)
            ended |= source not in stuck
            lines.append(self._around(stage, f"waits for {sent} of stage {source}"))
        what = "a message is never sent" if ended else "stages wait for each other"
        more = [f"... and {len(lines) - _SHOWN} stages more"] if len(lines) > _SHOWN else []
        return ScheduleError("\n".join([f"{what}:", *lines[:_SHOWN], *more]))

    def _error(self, stage: int, problem: str) -> ScheduleError:
        listed, at = self.lists[stage], self.next[stage]
        action = f", {listed[at]}" if at < len(listed) else ""
        return ScheduleError(f"stage {stage}{action}:\n{self._around(stage, problem)}")

    def _around(self, stage: int, problem: str) -> str:
        """A stage's list around its current action, with the problem marked."""
        listed, at = self.lists[stage], self.next[stage]
        before = " ".join(map(str, listed[max(0, at - _SHOWN) : at + 1]))
        after = " ".join(map(str, listed[at + 1 : at + 1 + _SHOWN]))
        dots = "... " if at > _SHOWN else ""
        then = f" (then {after})" if after else ""
        return f"  stage {stage}: {dots}{before} <-- {problem}{then}"
