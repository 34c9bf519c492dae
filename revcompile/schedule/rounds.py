"""The action lists of all stages, round by round."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from revcompile.errors import InputError
from revcompile.schedule.action import Action, Op, Tie
from revcompile.schedule.methods import Keep, Method, Order, Weights, check_sizes, choose, window

__all__ = ["Schedule", "actions"]


@dataclass(slots=True)
class _Stage:
    """How far a stage is. Lists and ints only: this is what a checkpoint holds."""

    outstanding: list[int] = field(default_factory=list)
    accumulated: int = 0
    updates: int = 0
    untrained: list[int] = field(default_factory=list)
    """The micro-batch whose true gradient the gradient_predictor has not seen yet."""
    arriving: list[list[int]] = field(default_factory=list)
    """Owner and number of each update of tied weights to receive before the next round."""

    def plain(self) -> dict[str, Any]:
        """A copy as plain values."""
        return {
            "outstanding": [*self.outstanding],
            "accumulated": self.accumulated,
            "updates": self.updates,
            "untrained": [*self.untrained],
            "arriving": [[*pair] for pair in self.arriving],
        }


class Schedule:
    """The action lists of all stages, round by round; nothing in it depends on time.

    In a round one more micro-batch enters, and every stage does its forward pass and the backward
    passes that have become due. A holder of tied parameters begins every round with the owner's
    updates of the rounds before: a micro-batch meets the same version at both stages.

    >>> schedule = Schedule("petra", stages=2)
    >>> for round in (schedule.inject(), schedule.inject(), schedule.drain()):
    ...     print(*(" ".join(map(str, stage)) for stage in round), sep=" | ")
    F0 SY0 | RX0 F0 B0 SDX0 U0
    F1 SY1 RDY0 B0 U0 | RX1 F1 B1 SDX1 U1
    RDY1 B1 U1 |
    """

    def __init__(
        self, method: str | Method, stages: int, accumulate: int = 1, ties: Iterable[Tie] = ()
    ) -> None:
        check_sizes(stages, accumulate)
        self.method = choose(method)
        self.stages = stages
        self.accumulate = accumulate
        self.ties = tuple(sorted(set(ties), key=lambda tie: (tie.owner, tie.holder)))
        self.injected = 0
        self._windows = [window(self.method, stages, j, accumulate) for j in range(stages)]
        self._progress = [_Stage() for _ in range(stages)]
        self._owners: list[list[int]] = [[] for _ in range(stages)]
        self._holders: list[list[int]] = [[] for _ in range(stages)]
        for tie in self.ties:
            if tie.holder >= stages:
                raise InputError(f"{tie}: the last of {stages} stages is {stages - 1}")
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

    @property
    def idle(self) -> bool:
        """Whether a drain would do nothing: no stage has anything to finish, apply or receive."""
        return not any(
            at.outstanding or at.accumulated or at.untrained or at.arriving for at in self._progress
        )

    def inject(self) -> tuple[tuple[Action, ...], ...]:
        """One more micro-batch enters: what each stage does in this round."""
        microbatch = self.injected
        self.injected += 1
        lists = self._arrived()
        for stage, found in enumerate(lists):
            found += self._forward(stage, microbatch)
            found += self._train(stage)
            for _ in range(self._due(stage)):
                found += self._backward(stage)
        return tuple(map(tuple, lists))

    def drain(self) -> tuple[tuple[Action, ...], ...]:
        """No more input for now: what is left to do; an incomplete group is applied too."""
        lists = self._arrived()
        for stage, found in enumerate(lists):
            at = self._progress[stage]
            found += self._train(stage)
            while at.outstanding:
                found += self._backward(stage)
            if at.accumulated:
                found += self._update(stage)
        for found, late in zip(lists, self._arrived(), strict=True):
            found += late
        return tuple(map(tuple, lists))

    def settle(self) -> tuple[tuple[Action, ...], ...]:
        """Tied weights on their way: each stage receives them now, not in the next round."""
        return tuple(map(tuple, self._arrived()))

    def state(self) -> dict[str, Any]:
        """All there is to know, as plain values (JSON can hold them); `load` is the way back."""
        method = dataclasses.asdict(self.method)
        method |= {key: value.value for key, value in method.items() if key in _CHOICES}
        return {
            "method": method,
            "stages": self.stages,
            "accumulate": self.accumulate,
            "ties": [[tie.owner, tie.holder] for tie in self.ties],
            "injected": self.injected,
            "progress": [at.plain() for at in self._progress],
        }

    @classmethod
    def load(cls, state: Mapping[str, Any]) -> Schedule:
        """A new schedule that goes on exactly where `state` was taken."""
        choices = {key: kind(state["method"][key]) for key, kind in _CHOICES.items()}
        method = Method(**(state["method"] | choices))
        ties = [Tie(*pair) for pair in state["ties"]]
        schedule = cls(method, state["stages"], state["accumulate"], ties)
        schedule.injected = state["injected"]
        # A copy: the lists inside belong to whoever holds `state`.
        schedule._progress = [_Stage(**_Stage(**at).plain()) for at in state["progress"]]
        return schedule

    def copy(self) -> Schedule:
        """One that goes its own way from here."""
        return Schedule.load(self.state())

    def _arrived(self) -> list[list[Action]]:
        """Tied weights whose owners were updated before now."""
        lists = []
        for at in self._progress:
            lists.append([Action(Op.RECV_TIED_WEIGHT, u, owner) for owner, u in at.arriving])
            at.arriving.clear()
        return lists

    def _forward(self, stage: int, microbatch: int) -> Iterator[Action]:
        if stage > 0:
            yield Action(Op.RECV_X, microbatch)
        yield Action(Op.FORWARD, microbatch)
        if stage < self.stages - 1:
            yield Action(Op.SEND_Y, microbatch)
        self._progress[stage].outstanding.append(microbatch)

    def _train(self, stage: int) -> Iterator[Action]:
        """Fit the gradient_predictor to the true gradient of the micro-batch before this one."""
        if self.method.order is Order.SYNTHETIC and stage < self.stages - 1:
            at = self._progress[stage]
            for microbatch in at.untrained:
                yield Action(Op.RECV_DY, microbatch)
                yield Action(Op.TRAIN, microbatch)
            at.untrained = list(at.outstanding)

    def _due(self, stage: int) -> int:
        """How many backward passes follow the forward pass just done."""
        at = self._progress[stage]
        waiting = len(at.outstanding)
        full = waiting == self._windows[stage]
        complete = at.accumulated + waiting == self.accumulate
        match self.method.order:
            case Order.LOCKED | Order.SYNTHETIC | Order.CONTINUOUS:
                return int(full)
            case Order.GPIPE:
                return waiting if complete else 0
            case Order.ONE_F_ONE_B:
                return waiting if complete else int(full)

    def _backward(self, stage: int) -> Iterator[Action]:
        """The oldest micro-batch; its gradient goes on before the optimizer runs."""
        at = self._progress[stage]
        microbatch = at.outstanding.pop(0)
        if stage < self.stages - 1 and self.method.order is not Order.SYNTHETIC:
            yield Action(Op.RECV_DY, microbatch)
        yield Action(Op.BACKWARD, microbatch)
        if stage > 0:
            yield Action(Op.SEND_DX, microbatch)
        at.accumulated += 1
        if at.accumulated == self.accumulate:
            yield from self._update(stage)

    def _update(self, stage: int) -> Iterator[Action]:
        """An update; the owner of tied parameters has the gradients of all who hold them."""
        at = self._progress[stage]
        number = at.updates
        for owner in self._owners[stage]:
            yield Action(Op.SEND_TIED_GRAD, number, owner)
        for holder in self._holders[stage]:
            yield Action(Op.RECV_TIED_GRAD, number, holder)
        yield Action(Op.UPDATE, number)
        for holder in self._holders[stage]:
            yield Action(Op.SEND_TIED_WEIGHT, number, holder)
            self._progress[holder].arriving.append([stage, number])
        at.updates += 1
        at.accumulated = 0


_CHOICES: Final = {"order": Order, "keep": Keep, "weights": Weights}


def actions(
    method: str | Method,
    stages: int,
    microbatches: int,
    accumulate: int = 1,
    ties: Iterable[Tie] = (),
) -> tuple[tuple[Action, ...], ...]:
    """Each stage's whole list: so many micro-batches and a drain."""
    schedule = Schedule(method, stages, accumulate, ties)
    lists: list[list[Action]] = [[] for _ in range(stages)]
    for _ in range(microbatches):
        for found, new in zip(lists, schedule.inject(), strict=True):
            found += new
    for found, new in zip(lists, schedule.drain(), strict=True):
        found += new
    return tuple(map(tuple, lists))
