"""Action lists played against each other without a tensor: do they end, and how busy is each stage?

Each list is right when the dry run says so: change one only with the other in sight.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from revcompile.errors import InputError, RevcompileError
from revcompile.schedule.action import SHORT, Action, Op
from revcompile.schedule.methods import Method, choose, window
from revcompile.schedule.rounds import actions

__all__ = ["Costs", "ScheduleError", "Span", "Timeline", "dry_run", "throughput"]


class ScheduleError(RevcompileError):
    """Action lists that do not fit together: some stage would wait for ever."""


@dataclass(frozen=True)
class Costs:
    """Time each stage and each link takes. Links: from stage j to j + 1, and back."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    update: tuple[float, ...]
    link_forward: tuple[float, ...]
    link_backward: tuple[float, ...]

    def __post_init__(self) -> None:
        stages = len(self.forward)
        for one in dataclasses.fields(self):
            expected = stages - 1 if one.name.startswith("link") else stages
            times = getattr(self, one.name)
            if len(times) != expected:
                raise InputError(
                    f"Costs: {one.name} has {len(times)} entries, but {stages} stages "
                    f"(by forward) need {expected}"
                )
            if not all(0 <= time < math.inf for time in times):
                raise InputError(f"Costs: {one.name}={times}, but no time is below 0 or infinite")

    @classmethod
    def uniform(
        cls,
        stages: int,
        forward: float = 1,
        backward: float = 3,
        update: float = 0,
        link: float = 0,
    ) -> Costs:
        """The same everywhere. By default a backward pass recomputes: three forward passes."""
        links = (link,) * (stages - 1)
        return cls((forward,) * stages, (backward,) * stages, (update,) * stages, links, links)

    def of(self, stage: int, op: Op) -> float:
        """Time a stage is busy with an action; training a gradient_predictor counts as free."""
        match op:
            case Op.FORWARD:
                return self.forward[stage]
            case Op.BACKWARD:
                return self.backward[stage]
            case Op.UPDATE:
                return self.update[stage]
            case _:
                return 0.0


@dataclass(frozen=True, slots=True)
class Span:
    """When a stage did an action. A receive lasts as long as the stage waits for it."""

    stage: int
    action: Action
    start: float
    end: float


_WORK: Final = frozenset((Op.FORWARD, Op.BACKWARD, Op.UPDATE, Op.TRAIN))
_COLUMNS: Final = 120


@dataclass(frozen=True)
class Timeline:
    """What a dry run saw; as a string, a picture of stages and time.

    >>> costs = Costs.uniform(2, forward=1, backward=2)
    >>> print(dry_run(actions("petra", 2, microbatches=3), costs))
    0 |F0 F1    B0... F2 B1...    B2... |
    1 |   F0 B0... F1 B1... F2 B2...    |
    """

    spans: tuple[Span, ...]
    stages: int
    makespan: float

    def busy(self, stage: int) -> float:
        """Share of the time at which a stage computes."""
        worked = math.fsum(s.end - s.start for s in self._work() if s.stage == stage)
        return worked / self.makespan if self.makespan else 0.0

    def efficiency(self) -> float:
        """Mean share of the time at which a stage computes: 1 is a pipeline without bubbles."""
        worked = math.fsum(s.end - s.start for s in self._work())
        return worked / (self.makespan * self.stages) if self.makespan else 0.0

    def peak(self, stage: int) -> int:
        """Most micro-batches that were in flight at a stage."""
        most = now = 0
        for span in self.spans:
            if span.stage == stage:
                now += (span.action.op is Op.FORWARD) - (span.action.op is Op.BACKWARD)
                most = max(most, now)
        return most

    def _work(self) -> Iterator[Span]:
        return (span for span in self.spans if span.action.op in _WORK)

    def __str__(self) -> str:
        shown = [span for span in self._work() if span.end > span.start]
        if not shown:
            return "\n".join(f"{stage} |" for stage in range(self.stages))
        letters = 1 + max(len(str(span.action)) for span in shown)
        scale = letters / min(span.end - span.start for span in shown)
        columns = math.ceil(self.makespan * scale)
        rows = [[" "] * min(columns, _COLUMNS) for _ in range(self.stages)]
        for span in shown:
            start, end = round(span.start * scale), round(span.end * scale)
            text = str(span.action).ljust(end - start - 1, ".") + " "
            row = rows[span.stage]
            row[start:end] = text[: max(0, len(row) - start)]
        tail = "|" if columns <= _COLUMNS else "..."
        margin = len(str(self.stages - 1))
        return "\n".join(f"{j:{margin}} |{''.join(row)}{tail}" for j, row in enumerate(rows))


_Channel = tuple[int, int, Op]
"""From, to, and the kind of send: messages of a channel arrive in the order they were sent."""

_SEND_OF: Final = {
    Op.RECV_X: Op.SEND_Y,
    Op.RECV_DY: Op.SEND_DX,
    Op.RECV_TIED_GRAD: Op.SEND_TIED_GRAD,
    Op.RECV_TIED_WEIGHT: Op.SEND_TIED_WEIGHT,
}
_SENDS: Final = frozenset(_SEND_OF.values())
_STEP: Final = {Op.RECV_X: -1, Op.SEND_Y: 1, Op.RECV_DY: 1, Op.SEND_DX: -1}
_AFTER: Final = {
    Op.FORWARD: (Op.RECV_X,),
    Op.SEND_Y: (Op.FORWARD,),
    Op.BACKWARD: (Op.FORWARD, Op.RECV_DY),
    Op.SEND_DX: (Op.BACKWARD,),
    Op.TRAIN: (Op.FORWARD, Op.RECV_DY),
    Op.SEND_TIED_WEIGHT: (Op.UPDATE,),
}
"""What a stage must have done before, with the same index."""

_BEFORE_UPDATE: Final = frozenset((Op.SEND_TIED_GRAD, Op.RECV_TIED_GRAD))
_SHOWN: Final = 6
"""Most stages, and most actions of a stage before and after a problem, that an error shows."""


def dry_run(lists: Sequence[Sequence[Action]], costs: Costs) -> Timeline:
    """Play the lists against each other; ScheduleError if they do not come to an end.

    Every stage follows its own list strictly. Sends cost it nothing and arrive after the link's
    time (tied parameters: at once); a receive waits.
    """
    if len(lists) != len(costs.forward):
        raise InputError(
            f"dry_run: {len(lists)} action lists, but costs of {len(costs.forward)} stages"
        )
    return _DryRun(lists, costs).run()


class _DryRun:
    """The state of a dry run: where each stage is, and what is on its way."""

    def __init__(self, lists: Sequence[Sequence[Action]], costs: Costs) -> None:
        self.lists = lists
        self.costs = costs
        self.next = [0] * len(lists)
        self.clock = [0.0] * len(lists)
        self.done: list[set[tuple[Op, int]]] = [set() for _ in lists]
        self.synthetic = [any(a.op is Op.TRAIN for a in stage) for stage in lists]
        self.mail: dict[_Channel, deque[tuple[int, float]]] = {}
        self.waiting: dict[_Channel, int] = {}
        self.updated: list[int | None] = [None for _ in lists]
        self.spans: list[Span] = []

    def run(self) -> Timeline:
        ready = deque(range(len(self.lists)))
        while ready:
            self._play(ready.popleft(), ready)
        self._check_end()
        return Timeline(tuple(self.spans), len(self.lists), max(self.clock, default=0.0))

    def _play(self, stage: int, ready: deque[int]) -> None:
        """Go on with one stage until it has to wait; revive_zero_init those it sends to."""
        listed = self.lists[stage]
        while self.next[stage] < len(listed):
            action = listed[self.next[stage]]
            self._check_local(stage, action)
            start = self.clock[stage]
            if action.op in _SEND_OF:
                channel = self._channel(stage, action)
                if not self.mail.get(channel):
                    self.waiting[channel] = stage
                    return
                index, arrival = self.mail[channel].popleft()
                if index != action.index:
                    sent = f"{SHORT[channel[2]]}{index} of stage {channel[0]}"
                    raise self._error(stage, f"gets {sent} instead")
                self.clock[stage] = max(start, arrival)
            elif action.op in _SENDS:
                channel = self._channel(stage, action)
                box = self.mail.setdefault(channel, deque())
                box.append((action.index, start + self._link(channel)))
                if channel in self.waiting:
                    ready.append(self.waiting.pop(channel))
            else:
                self.clock[stage] = start + self.costs.of(stage, action.op)
            self.spans.append(Span(stage, action, start, self.clock[stage]))
            self.done[stage].add((action.op, action.index))
            self.next[stage] += 1

    def _channel(self, stage: int, action: Action) -> _Channel:
        peer = stage + _STEP[action.op] if action.peer is None else action.peer
        if not 0 <= peer < len(self.lists):
            raise self._error(stage, f"there is no stage {peer}")
        if action.op in _SEND_OF:
            return peer, stage, _SEND_OF[action.op]
        return stage, peer, action.op

    def _link(self, channel: _Channel) -> float:
        match channel[2]:
            case Op.SEND_Y:
                return self.costs.link_forward[channel[0]]
            case Op.SEND_DX:
                return self.costs.link_backward[channel[1]]
            case _:
                return 0.0

    def _check_local(self, stage: int, action: Action) -> None:
        """Whether the stage itself has what the action needs."""
        done = self.done[stage]
        for before in _AFTER.get(action.op, ()):
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
        """Whether every list is at its end, and nothing was left over."""
        stuck = [j for j, listed in enumerate(self.lists) if self.next[j] < len(listed)]
        if stuck:
            raise self._deadlock(stuck)
        for (source, target, op), box in self.mail.items():
            if box:
                raise ScheduleError(
                    f"stage {source} sends {SHORT[op]}{box[0][0]} to stage {target}, which never "
                    f"receives it:\n{self._around(target, 'ends here')}"
                )
        for stage, done in enumerate(self.done):
            self._check_complete(stage, done)

    def _check_complete(self, stage: int, done: set[tuple[Op, int]]) -> None:
        """Whether a stage has used all it had, and is as far as the first one."""
        follows = {Op.FORWARD: Op.BACKWARD}
        if self.synthetic[stage]:
            follows[Op.RECV_DY] = Op.TRAIN
        for op, index in sorted(done, key=lambda one: one[1]):
            if op in follows and (follows[op], index) not in done:
                missing = Action(follows[op], index)
                raise self._error(stage, f"ends here, but {missing} is missing")
        if self._gradients_left(stage):
            raise self._error(stage, "ends here, but its last gradients are in no update")
        here, first = ({i for op, i in self.done[j] if op is Op.UPDATE} for j in (stage, 0))
        if here != first:
            odd = min(here ^ first)
            raise ScheduleError(
                f"stage {stage if odd in first else 0} never does U{odd}, "
                f"stage {0 if odd in first else stage} does"
            )

    def _gradients_left(self, stage: int) -> bool:
        ops = (a.op for a in reversed(self.lists[stage]) if a.op in (Op.BACKWARD, Op.UPDATE))
        return next(ops, Op.UPDATE) is Op.BACKWARD

    def _deadlock(self, stuck: Sequence[int]) -> ScheduleError:
        """What each stage waits for, with the stages that will never send it named first."""
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
        """A stage's list around where it is, the problem marked."""
        listed, at = self.lists[stage], self.next[stage]
        before = " ".join(map(str, listed[max(0, at - _SHOWN) : at + 1]))
        after = " ".join(map(str, listed[at + 1 : at + 1 + _SHOWN]))
        dots = "... " if at > _SHOWN else ""
        then = f" (then {after})" if after else ""
        return f"  stage {stage}: {dots}{before} <-- {problem}{then}"


def throughput(
    method: str | Method, costs: Costs, accumulate: int = 1, microbatches: int | None = None
) -> float:
    """Micro-batches per unit of time once the pipeline is full, from a dry run.

    >>> costs = Costs.uniform(4, forward=1, backward=3)
    >>> throughput("petra", costs), throughput("backprop", costs)
    (0.25, 0.0625)
    """
    method, stages = choose(method), len(costs.forward)
    filling = max(window(method, stages, 0, accumulate), stages)
    if microbatches is None:
        microbatches = 4 * filling + 8 * accumulate
    # After the filling and before the drain; whole groups, and if possible whole fillings: behind
    # slow links micro-batches come in bursts of that many.
    last = (microbatches - filling) // accumulate * accumulate
    burst = math.lcm(accumulate, filling)
    unit = burst if burst <= 2 * last // 3 else accumulate
    first = last - 2 * last // 3 // unit * unit
    if first >= last:
        raise InputError(
            f"throughput: microbatches={microbatches}, but {stages} stages with accumulate="
            f"{accumulate} need {filling + 2 * accumulate} at least"
        )
    work = [
        f + b + u / accumulate
        for f, b, u in zip(costs.forward, costs.backward, costs.update, strict=True)
    ]
    slowest = work.index(max(work))
    timeline = dry_run(actions(method, stages, microbatches, accumulate), costs)
    ends = {
        span.action.index: span.end
        for span in timeline.spans
        if span.stage == slowest and span.action.op is Op.BACKWARD
    }
    took = ends[last] - ends[first]
    return (last - first) / took if took else math.inf
