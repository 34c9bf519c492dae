"""The generator of action lists: what every stage does, step by step.

PETRA in the 1F1B order on three stages. In every step one more micro-batch enters; a stage does
its forward pass, and then its oldest backward pass once its window is full (`delay.window`, here 3,
2 and 1 micro-batches):

    step    stage 0                    stage 1                         stage 2
    0       F0 SY0                     RX0 F0 SY0                      RX0 F0 B0 SDX0 U0
    1       F1 SY1                     RX1 F1 SY1 RDY0 B0 SDX0 U0      RX1 F1 B1 SDX1 U1
    2       F2 SY2 RDY0 B0 U0          RX2 F2 SY2 RDY1 B1 SDX1 U1      RX2 F2 B2 SDX2 U2
    3       F3 SY3 RDY1 B1 U1          RX3 F3 SY3 RDY2 B2 SDX2 U2      RX3 F3 B3 SDX3 U3
    drain   RDY2 B2 U2 RDY3 B3 U3      RDY3 B3 SDX3 U3

    F forward   B backward   U update   SY send y   RX receive x   SDX send dx   RDY receive dy

Between F2 and B2 stage 0 applies U0 and U1: its gradients are J-1-j = 2 updates late (those of F0
and F1 less, while the pipeline fills). The lists depend on nothing but these rules, never on how
long anything takes.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from revcompile.schedule.action import Action, Op, Tie
from revcompile.schedule.delay import check_sizes, delay, window
from revcompile.schedule.methods import Keep, Method, Order, Weights, choose


@dataclass(slots=True)
class _Progress:
    """How far a stage is. Lists and ints only: a checkpoint stores it as JSON."""

    outstanding: list[int] = field(default_factory=list)
    """Micro-batches in flight, oldest first."""
    accumulated: int = 0
    """Micro-batches whose gradients the next update will use."""
    updates: int = 0
    untrained: list[int] = field(default_factory=list)
    """Micro-batches whose true gradient the gradient predictor has not seen yet."""
    arriving: list[list[int]] = field(default_factory=list)
    """Owner and number of each update of tied weights to receive before the next step."""


_action: Final = functools.lru_cache(4096)(Action)
"""Equal actions are one object: to look one up is faster than to make it."""


class Schedule:
    """Generates the actions of all stages, one step of the pipeline at a time.

    A holder of tied parameters begins every step by receiving the owner's updates of the steps
    before: a micro-batch meets the same version at both stages.

    Args:
        method: A row of the methods' table, or its name.
        stages: How many there are.
        accumulation_steps: Micro-batches per update.
        ties: Stages that share parameters.

    >>> schedule = Schedule("petra", stages=2)
    >>> for step in (schedule.inject(), schedule.inject(), schedule.drain()):
    ...     print(*(" ".join(map(str, stage)) for stage in step), sep=" | ")
    F0 SY0 | RX0 F0 B0 SDX0 U0
    F1 SY1 RDY0 B0 U0 | RX1 F1 B1 SDX1 U1
    RDY1 B1 U1 |
    """

    def __init__(
        self,
        method: str | Method,
        stages: int,
        accumulation_steps: int = 1,
        ties: Iterable[Tie] = (),
    ) -> None:
        check_sizes(stages, accumulation_steps)
        self.method = choose(method)
        self.stages = stages
        self.accumulation_steps = accumulation_steps
        self.ties = tuple(sorted(set(ties), key=lambda tie: (tie.owner, tie.holder)))
        self.injected = 0
        self.windows = [window(self.method, stages, j, accumulation_steps) for j in range(stages)]
        """Micro-batches in flight at each stage of a full pipeline."""
        self.delays = tuple(
            delay(self.method, stages, j, accumulation_steps) for j in range(stages)
        )
        """How many updates late the gradients of each stage are."""
        self._progress = [_Progress() for _ in range(stages)]
        self._owners: list[list[int]] = [[] for _ in range(stages)]
        self._holders: list[list[int]] = [[] for _ in range(stages)]
        for tie in self.ties:
            self._owners[tie.holder].append(tie.owner)
            self._holders[tie.owner].append(tie.holder)

    @property
    def outstanding(self) -> tuple[tuple[int, ...], ...]:
        """Micro-batches in flight at each stage, oldest first."""
        return tuple(tuple(at.outstanding) for at in self._progress)

    @property
    def accumulated(self) -> tuple[int, ...]:
        """Micro-batches in each stage's gradient that no update has used yet."""
        return tuple(at.accumulated for at in self._progress)

    @property
    def updates(self) -> tuple[int, ...]:
        """Updates each stage has done."""
        return tuple(at.updates for at in self._progress)

    def is_updating(self, stage: int) -> bool:
        """Whether a stage of a full pipeline updates in the next step."""
        return self._progress[stage].accumulated + 1 == self.accumulation_steps

    def waiting_tied(self, source: int, target: int) -> Sequence[int]:
        """The updates whose tied messages from one stage to another are sent, but not received.

        An owner's messages carry weights, which the holder receives at the beginning of the next
        step. A holder's messages carry gradients: the owner, an earlier stage, updates later.
        """
        here, there = self._progress[target], self._progress[source]
        if target < source:
            return range(here.updates, there.updates)
        return [update for owner, update in here.arriving if owner == source]

    @property
    def idle(self) -> bool:
        """Whether a drain would do nothing: no stage has anything to finish, apply or receive."""
        return not any(
            at.outstanding or at.accumulated or at.untrained or at.arriving for at in self._progress
        )

    def inject(self) -> tuple[tuple[Action, ...], ...]:
        """What each stage does in the step in which one more micro-batch enters."""
        microbatch = self.injected
        self.injected += 1
        lists = self._receive_tied()
        for stage, todo in enumerate(lists):
            todo += self._forward(stage, microbatch)
            todo += self._train(stage)
            for _ in range(self._due(stage)):
                todo += self._backward(stage)
        return tuple(map(tuple, lists))

    def advance(self) -> None:
        """As `inject`, without the actions, for a full pipeline that never drains."""
        for at in self._progress if self.ties else ():
            at.arriving.clear()
        for stage, at in enumerate(self._progress):
            at.outstanding.append(self.injected)
            del at.outstanding[0]
            at.accumulated += 1
            if at.accumulated == self.accumulation_steps:
                self._count_update(stage)
        self.injected += 1

    def drain(self) -> tuple[tuple[Action, ...], ...]:
        """Finish what is in flight; fewer gradients than `accumulation_steps` are applied too."""
        lists = self._receive_tied()
        for stage, todo in enumerate(lists):
            at = self._progress[stage]
            todo += self._train(stage)
            while at.outstanding:
                todo += self._backward(stage)
            if at.accumulated:
                todo += self._update(stage)
        for todo, receives in zip(lists, self._receive_tied(), strict=True):
            todo += receives
        return tuple(map(tuple, lists))

    def receive_tied_weights(self) -> tuple[tuple[Action, ...], ...]:
        """Have each stage receive waiting tied weights now, and not in the next step."""
        return tuple(map(tuple, self._receive_tied()))

    def state(self) -> dict[str, Any]:
        """Everything, as values that JSON can hold; `load` makes a schedule of them."""
        method = dataclasses.asdict(self.method)
        method |= {key: value.value for key, value in method.items() if key in _CHOICES}
        return {
            "method": method,
            "stages": self.stages,
            "accumulation_steps": self.accumulation_steps,
            "ties": [[tie.owner, tie.holder] for tie in self.ties],
            "injected": self.injected,
            "progress": [dataclasses.asdict(at) for at in self._progress],
        }

    @classmethod
    def load(cls, state: Mapping[str, Any]) -> Schedule:
        """A new schedule that continues exactly where `state` was taken."""
        choices = {key: kind(state["method"][key]) for key, kind in _CHOICES.items()}
        method = Method(**(state["method"] | choices))
        ties = [Tie(*pair) for pair in state["ties"]]
        sizes = state["stages"], state["accumulation_steps"]
        schedule = cls(method, *sizes, ties)
        schedule.injected = state["injected"]
        # A copy: the lists inside belong to the caller.
        schedule._progress = [_Progress(**copy.deepcopy(at)) for at in state["progress"]]
        return schedule

    def copy(self) -> Schedule:
        return Schedule.load(self.state())

    def _receive_tied(self) -> list[list[Action]]:
        """For each stage: receive the tied weights whose owners were updated before now."""
        lists = []
        for at in self._progress:
            lists.append([_action(Op.RECV_TIED_WEIGHT, u, owner) for owner, u in at.arriving])
            at.arriving.clear()
        return lists

    def _forward(self, stage: int, microbatch: int) -> Iterator[Action]:
        if stage > 0:
            yield _action(Op.RECV_X, microbatch)
        yield _action(Op.FORWARD, microbatch)
        if stage < self.stages - 1:
            yield _action(Op.SEND_Y, microbatch)
        self._progress[stage].outstanding.append(microbatch)

    def _train(self, stage: int) -> Iterator[Action]:
        """Fit the gradient predictor to the true gradient of the micro-batch before this one."""
        if self.method.order is Order.SYNTHETIC and stage < self.stages - 1:
            at = self._progress[stage]
            for microbatch in at.untrained:
                yield _action(Op.RECV_DY, microbatch)
                yield _action(Op.TRAIN, microbatch)
            at.untrained = list(at.outstanding)

    def _due(self, stage: int) -> int:
        """How many backward passes follow the forward pass just done."""
        at = self._progress[stage]
        in_flight = len(at.outstanding)
        full = in_flight == self.windows[stage]
        # No more forward passes before the next update: a pipeline that drains does so now.
        complete = at.accumulated + in_flight == self.accumulation_steps
        match self.method.order:
            case Order.LOCKED | Order.SYNTHETIC | Order.CONTINUOUS:
                return int(full)
            case Order.GPIPE:
                return in_flight if complete else 0
            case Order.ONE_F_ONE_B:
                return in_flight if complete else int(full)

    def _backward(self, stage: int) -> Iterator[Action]:
        """Backward of the oldest micro-batch; its gradient is sent before the optimizer runs."""
        at = self._progress[stage]
        microbatch = at.outstanding.pop(0)
        if stage < self.stages - 1 and self.method.order is not Order.SYNTHETIC:
            yield _action(Op.RECV_DY, microbatch)
        yield _action(Op.BACKWARD, microbatch)
        if stage > 0:
            yield _action(Op.SEND_DX, microbatch)
        at.accumulated += 1
        if at.accumulated == self.accumulation_steps:
            yield from self._update(stage)

    def _update(self, stage: int) -> Iterator[Action]:
        """An update; the owner of tied parameters adds the gradients of all holders first."""
        number = self._progress[stage].updates
        for owner in self._owners[stage]:
            yield _action(Op.SEND_TIED_GRAD, number, owner)
        for holder in self._holders[stage]:
            yield _action(Op.RECV_TIED_GRAD, number, holder)
        yield _action(Op.UPDATE, number)
        for holder in self._holders[stage]:
            yield _action(Op.SEND_TIED_WEIGHT, number, holder)
        self._count_update(stage)

    def _count_update(self, stage: int) -> None:
        at = self._progress[stage]
        for holder in self._holders[stage]:
            self._progress[holder].arriving.append([stage, at.updates])
        at.updates += 1
        at.accumulated = 0


_CHOICES: Final = {"order": Order, "keep": Keep, "weights": Weights}


def actions(
    method: str | Method,
    stages: int,
    microbatches: int,
    accumulation_steps: int = 1,
    ties: Iterable[Tie] = (),
) -> tuple[tuple[Action, ...], ...]:
    """Each stage's whole action list for `microbatches` micro-batches and a drain.

    >>> for stage in actions("petra", stages=2, microbatches=3):
    ...     print(*stage)
    F0 SY0 F1 SY1 RDY0 B0 U0 F2 SY2 RDY1 B1 U1 RDY2 B2 U2
    RX0 F0 B0 SDX0 U0 RX1 F1 B1 SDX1 U1 RX2 F2 B2 SDX2 U2
    """
    schedule = Schedule(method, stages, accumulation_steps, ties)
    steps = [*(schedule.inject() for _ in range(microbatches)), schedule.drain()]
    return tuple(tuple(itertools.chain(*stage)) for stage in zip(*steps, strict=True))
