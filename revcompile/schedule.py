"""schedule: every method as three choices, the action list of every stage, and its dry run.

A method is an order, what a stage keeps for its backward pass, and which parameters that pass
uses. The order fixes each stage's list of actions, however long the messages take:

    >>> for stage in actions(choose("petra"), stages=2, microbatches=3):
    ...     print(*stage)
    F0 SY0 F1 SY1 RDY0 B0 U0 F2 SY2 RDY1 B1 U1 RDY2 B2 U2
    RX0 F0 B0 SDX0 U0 RX1 F1 B1 SDX1 U1 RX2 F2 B2 SDX2 U2

The dry run plays the lists against each other without a tensor: it proves that no stage waits for
ever, and says how busy each one is. The file is long because both are here: each list is right
when the dry run says so, and nobody should change one without the other in sight.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import math
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from types import MappingProxyType
from typing import Any, Final

from revcompile.errors import InputError, RevcompileError

__all__ = [
    "METHODS",
    "Action",
    "Costs",
    "Keep",
    "Method",
    "Op",
    "Order",
    "Schedule",
    "ScheduleError",
    "Span",
    "Tie",
    "Timeline",
    "Weights",
    "actions",
    "choose",
    "delay",
    "dry_run",
    "throughput",
    "window",
]


class ScheduleError(RevcompileError):
    """Action lists that do not fit together: some stage would wait for ever."""


class Keep(enum.Enum):
    """What a stage keeps of a micro-batch for its backward pass."""

    GRAPH = "graph"
    INPUT = "input"
    NOTHING = "nothing"


class Weights(enum.Enum):
    """Which parameters the backward pass uses; STASHED are those of the forward pass."""

    LATEST = "latest"
    STASHED = "stashed"


class Order(enum.Enum):
    """In which order forward and backward passes meet at a stage."""

    LOCKED = "locked"
    """One micro-batch at a time."""
    GPIPE = "gpipe"
    """All forward passes of a group, then all backward passes, first in first out."""
    ONE_F_ONE_B = "1f1b"
    """One forward, one backward in turn; the pipeline is drained after every group."""
    CONTINUOUS = "continuous"
    """One forward, one backward in turn, never drained."""
    SYNTHETIC = "synthetic"
    """Backward at once, with a predicted gradient (DNI)."""


@dataclass(frozen=True)
class Method:
    """One row of the methods' table. `alpha` counts for the continuous order only."""

    name: str
    order: Order
    alpha: float
    keep: Keep
    weights: Weights

    def __post_init__(self) -> None:
        if self.order is Order.CONTINUOUS and not 1 <= self.alpha < math.inf:
            raise InputError(
                f"method {self.name!r}: alpha={self.alpha}, but a stage would stall before its "
                "gradients are back with alpha below 1; use alpha >= 1 (1: least delay, "
                "2: the order of the PETRA paper)"
            )


def _table() -> Iterator[Method]:
    latest, stashed = Weights.LATEST, Weights.STASHED
    yield Method("backprop", Order.LOCKED, 0.0, Keep.GRAPH, latest)
    yield Method("reversible_backprop", Order.LOCKED, 0.0, Keep.NOTHING, latest)
    yield Method("gpipe", Order.GPIPE, 0.0, Keep.GRAPH, latest)
    yield Method("1f1b", Order.ONE_F_ONE_B, 0.0, Keep.GRAPH, latest)
    yield Method("pipedream", Order.CONTINUOUS, 1.0, Keep.INPUT, stashed)
    yield Method("ddg", Order.CONTINUOUS, 1.0, Keep.GRAPH, stashed)
    yield Method("features_replay", Order.CONTINUOUS, 1.0, Keep.INPUT, latest)
    yield Method("delayed", Order.CONTINUOUS, 2.0, Keep.INPUT, stashed)
    yield Method("dsp", Order.CONTINUOUS, 2.0, Keep.INPUT, latest)
    yield Method("petra", Order.CONTINUOUS, 1.0, Keep.NOTHING, latest)
    yield Method("dni", Order.SYNTHETIC, 0.0, Keep.GRAPH, latest)


METHODS: Final[Mapping[str, Method]] = MappingProxyType({m.name: m for m in _table()})
"""Every method by name."""

_ALPHAS: Final = {"half": 1.0, "paper": 2.0}


def choose(name: str | Method, *, order: str | None = None, alpha: float | None = None) -> Method:
    """Look a method up, in the order asked for: "half" the delay, or as in the "paper".

    >>> choose("petra").alpha, choose("petra", order="paper").alpha
    (1.0, 2.0)
    """
    if isinstance(name, str) and name not in METHODS:
        near = difflib.get_close_matches(name, METHODS, 1)
        hint = f"did you mean {near[0]!r}?" if near else "use one of: " + ", ".join(METHODS)
        raise InputError(f"method {name!r} does not exist; {hint}")
    method = METHODS[name] if isinstance(name, str) else name
    if order is None and alpha is None:
        return method
    if order is not None and alpha is not None:
        raise InputError(f"order={order!r} and alpha={alpha} say the same thing; give one of them")
    if method.order is not Order.CONTINUOUS:
        free = ", ".join(m.name for m in METHODS.values() if m.order is Order.CONTINUOUS)
        raise InputError(
            f"method {method.name!r} has a fixed order; leave out order= and alpha=, "
            f"or use one of: {free}"
        )
    if order is not None:
        if order not in _ALPHAS:
            raise InputError(f'order={order!r} does not exist; use "half" or "paper"')
        alpha = _ALPHAS[order]
    assert alpha is not None
    return dataclasses.replace(method, alpha=float(alpha))


def window(method: Method, stages: int, stage: int, group: int = 1) -> int:
    """Most micro-batches in flight at a stage: forward done, backward not.

    `group` is the number of micro-batches between two drains of `gpipe` and `1f1b`. DNI has one
    in flight, but keeps its output for one more round, until the true gradient has come and the
    synthesiser can learn from it.

    >>> [window(choose("petra"), 4, stage) for stage in range(4)]
    [4, 3, 2, 1]
    """
    _check_sizes(stages, group)
    if not 0 <= stage < stages:
        raise InputError(f"stage={stage}, but with {stages} stages it is 0 to {stages - 1}")
    behind = stages - 1 - stage
    match method.order:
        case Order.LOCKED | Order.SYNTHETIC:
            return 1
        case Order.GPIPE:
            return group
        case Order.ONE_F_ONE_B:
            return min(group, 1 + behind)
        case Order.CONTINUOUS:
            # As a fraction of its decimal digits: 1.1 * 50 is 55, not a little more.
            return 1 + math.ceil(Fraction(repr(float(method.alpha))) * behind)


def delay(method: Method, stages: int, stage: int, accumulate: int = 1) -> int:
    """Most updates of a stage between forward and backward pass of one micro-batch.

    >>> [delay(choose("petra", order="paper"), 4, stage) for stage in range(4)]
    [6, 4, 2, 0]
    """
    between = window(method, stages, stage, accumulate) - 1
    # All other orders have an update only when nothing is in flight.
    return -(-between // accumulate) if method.order is Order.CONTINUOUS else 0


def _check_sizes(stages: int, accumulate: int) -> None:
    if stages < 1:
        raise InputError(f"stages={stages}; a pipeline has at least 1")
    if accumulate < 1:
        raise InputError(f"accumulate={accumulate}; an update needs at least 1 micro-batch")


class Op(enum.Enum):
    """What a stage can do. TRAIN: fit the synthesiser to a micro-batch's true gradient."""

    RECV_X = "RECV x"
    FORWARD = "FORWARD"
    SEND_Y = "SEND y"
    RECV_DY = "RECV dy"
    BACKWARD = "BACKWARD"
    SEND_DX = "SEND dx"
    UPDATE = "UPDATE"
    TRAIN = "TRAIN"
    SEND_TIED_GRAD = "SEND tied grad"
    RECV_TIED_GRAD = "RECV tied grad"
    SEND_TIED_WEIGHT = "SEND tied weight"
    RECV_TIED_WEIGHT = "RECV tied weight"

    # Members are singletons; the default hashes the name in Python, a third of a dry run's time.
    __hash__ = object.__hash__


_SHORT: Final = {
    Op.RECV_X: "RX",
    Op.FORWARD: "F",
    Op.SEND_Y: "SY",
    Op.RECV_DY: "RDY",
    Op.BACKWARD: "B",
    Op.SEND_DX: "SDX",
    Op.UPDATE: "U",
    Op.TRAIN: "T",
    Op.SEND_TIED_GRAD: "STG",
    Op.RECV_TIED_GRAD: "RTG",
    Op.SEND_TIED_WEIGHT: "STW",
    Op.RECV_TIED_WEIGHT: "RTW",
}
_LONG: Final = {short: op for op, short in _SHORT.items()}
_ARROWS: Final = {
    Op.SEND_TIED_GRAD: ">",
    Op.SEND_TIED_WEIGHT: ">",
    Op.RECV_TIED_GRAD: "<",
    Op.RECV_TIED_WEIGHT: "<",
}
_SPELLING: Final = re.compile(r"([A-Z]+)(\d+)(?:([<>])(\d+))?")


@dataclass(frozen=True, slots=True)
class Action:
    """One thing a stage does.

    `index` is the micro-batch, or the number of the update for UPDATE and the exchange of tied
    parameters; `peer` is the other stage of such an exchange.

    >>> print(Action(Op.FORWARD, 3), Action(Op.SEND_TIED_GRAD, 0, peer=2))
    F3 STG0>2
    >>> Action.parse("RTW1<0")
    Action(op=<Op.RECV_TIED_WEIGHT: 'RECV tied weight'>, index=1, peer=0)
    """

    op: Op
    index: int
    peer: int | None = None

    def __str__(self) -> str:
        tail = "" if self.peer is None else f"{_ARROWS[self.op]}{self.peer}"
        return f"{_SHORT[self.op]}{self.index}{tail}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read what `str` wrote."""
        found = _SPELLING.fullmatch(text)
        op = _LONG.get(found[1]) if found else None
        if found is None or op is None or _ARROWS.get(op) != found[3]:
            raise InputError(f"{text!r} is no action; examples: F3, SDX1, U0, STG0>2, RTW0<0")
        return cls(op, int(found[2]), None if found[4] is None else int(found[4]))


@dataclass(frozen=True)
class Tie:
    """Two stages that hold the same parameters: the owner updates them, the holder has a copy.

    One exchange carries all that the two have in common.
    """

    owner: int
    holder: int

    def __post_init__(self) -> None:
        if not 0 <= self.owner < self.holder:
            raise InputError(f"{self}: the owner must be the earlier stage; swap the two")


@dataclass(slots=True)
class _Stage:
    """How far a stage is. Lists and ints only: this is what a checkpoint holds."""

    outstanding: list[int] = field(default_factory=list)
    accumulated: int = 0
    updates: int = 0
    untrained: list[int] = field(default_factory=list)
    """The micro-batch whose true gradient the synthesiser has not seen yet."""
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
        _check_sizes(stages, accumulate)
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
        """Fit the synthesiser to the true gradient of the micro-batch before this one."""
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
        """Time a stage is busy with an action; training a synthesiser counts as free."""
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
        """Go on with one stage until it has to wait; wake those it sends to."""
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
                    sent = f"{_SHORT[channel[2]]}{index} of stage {channel[0]}"
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
                    f"stage {source} sends {_SHORT[op]}{box[0][0]} to stage {target}, which never "
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
