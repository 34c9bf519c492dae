"""What every stage keeps, chosen so that a device's memory suffices and its work is least.

    keep       memory                                                      work
    nothing    what cannot be rebuilt, and the graph of one block          4N: forward, rebuild, 2N
    input      the stage's inputs, and the whole graph of one micro-batch  4N: forward, again, 2N
    graph      the whole graph of every micro-batch in flight              3N: forward, 2N

The choice of one stage changes nothing for the others: what a stage holds and does depends on what
it keeps itself. So each device is a knapsack of its own, solved exactly: stage by stage all sums
that no other sum beats in both memory and work are carried along. Stages of a device take turns, so
of what they need only while they work the largest counts; that largest is tried out. Only beyond
`_MOST` sums some are left out, evenly, and the plan may miss the best by a little.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from revcompile.compiler.cost import MemoryModel, StageMemory
from revcompile.errors import InputError
from revcompile.ir.program import Partition
from revcompile.schedule import Keep, Method, Order, Weights
from revcompile.units import is_whole, readable, size_of

__all__ = [
    "Choice",
    "MemoryPlan",
    "Terms",
    "budget",
    "choices",
    "on_device",
    "plan_memory",
]

_MOST: Final = 4096
"""Sums carried along from stage to stage."""
_EVEN: Final = 1.03
"""Up to here devices' work is called balanced."""
_KEEPS: Final = (Keep.NOTHING, Keep.INPUT, Keep.GRAPH)
"""In the order they are preferred among equals."""


@dataclass(frozen=True)
class Terms:
    """What a plan depends on besides the stages and the budget."""

    method: Method
    batch: int
    """Samples a micro-batch."""
    accumulate: int = 1
    optimizer_copies: float = 1.0
    """Numbers of optimizer state a parameter: SGD with momentum 1, Adam 2."""
    buffer_bytes: int | None = None
    """What an element of a float32 input that waits takes; None: all of it."""
    autocast: torch.dtype | None = None

    def __post_init__(self) -> None:
        if not is_whole(self.batch) or self.batch < 1:
            raise InputError(f"batch_size={self.batch!r}; a micro-batch has 1 sample at least")
        if self.method.keep is not Keep.NOTHING or self.method.weights is not Weights.LATEST:
            raise InputError(
                f"memory=: stages trained by {self.method.name!r} keep what the method says; use "
                "method='petra' or 'reversible_backprop', or leave out memory="
            )


@dataclass(frozen=True)
class Choice:
    """One stage if it keeps one thing: the most it holds, and its work for a micro-batch."""

    stage: int
    keep: Keep
    memory: StageMemory
    work: float


@dataclass(frozen=True)
class MemoryPlan:
    """What every stage keeps under a budget.

    `print(plan)` shows it; `plan.keeps` are the choices, `plan.memory(device)` is predicted.
    """

    limit: int
    """Bytes a device."""
    batch: int
    """Samples a micro-batch."""
    places: tuple[int, ...]
    """The device of each stage."""
    chosen: tuple[Choice, ...]
    peaks: tuple[int, ...]
    """The most each device holds."""
    full: float
    """All stages' work if nothing were kept."""
    expected: Keep = Keep.NOTHING
    """What the stages were balanced for."""

    @property
    def keeps(self) -> tuple[Keep, ...]:
        """What each stage keeps."""
        return tuple(choice.keep for choice in self.chosen)

    @property
    def work(self) -> float:
        """All stages' work for a micro-batch, in the unit of the costs."""
        return math.fsum(choice.work for choice in self.chosen)

    @property
    def balance(self) -> float:
        """The largest device's work, in means of all devices."""
        works = [
            math.fsum(
                c.work for c, place in zip(self.chosen, self.places, strict=True) if place == d
            )
            for d in sorted(set(self.places))
        ]
        return max(works) * len(works) / (math.fsum(works) or 1.0)

    def memory(self, device: int) -> int:
        """The most a device holds, in bytes."""
        return self.peaks[device]

    def __str__(self) -> str:
        lines = [f"at most {readable(self.limit)} a device, micro-batches of {self.batch}"]
        for choice, place in zip(self.chosen, self.places, strict=True):
            lines.append(
                f"stage {choice.stage} (device {place}) keeps {_KEPT[choice.keep]}: "
                f"{readable(choice.memory.total)}, {100 * choice.work / self.full:.1f} % of the "
                "work of keeping nothing"
            )
        held = ", ".join(f"device {i} {readable(peak)}" for i, peak in enumerate(self.peaks))
        lines.append(f"in all {100 * self.work / self.full:.1f} %; {held}")
        if self.balance > _EVEN and set(self.keeps[:-1]) == {Keep.GRAPH} != {self.expected}:
            lines.append(
                f"the largest device has {self.balance:.2f}x the mean work; petrafy(..., "
                "keep='graph') balances stages that keep their graphs"
            )
        return "\n".join(lines)


_KEPT: Final = {
    Keep.NOTHING: "nothing but what cannot be rebuilt",
    Keep.INPUT: "its input",
    Keep.GRAPH: "its graph",
}


def budget(memory: int | str) -> int:
    """Bytes, from a number or from text.

    >>> budget("2GiB"), budget(1000)
    (2147483648, 1000)
    """
    found = size_of(memory) if isinstance(memory, str) else memory
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise InputError(f'memory={memory!r}; give bytes above 0, or a size like "2GiB"')
    return found


def plan_memory(
    partition: Partition, limit: int, terms: Terms, places: Sequence[int] | None = None
) -> MemoryPlan:
    """The plan of least work that fits `limit` bytes a device.

    `places` are the devices of the stages; without it each has a device of its own.
    """
    where = tuple(places if places is not None else range(len(partition.parts)))
    offered = choices(partition, terms)
    chosen: dict[int, Choice] = {}
    for device in sorted(set(where)):
        mine = [of for of, place in zip(offered, where, strict=True) if place == device]
        found = _fastest(mine, limit, terms, len(mine) == len(where))
        if found is None:
            raise _too_small(limit, device, mine, terms, len(mine) == len(where))
        chosen |= {choice.stage: choice for choice in found}
    return _planned(partition, limit, terms, where, [chosen[j] for j in range(len(where))])


def _planned(
    partition: Partition,
    limit: int,
    terms: Terms,
    places: tuple[int, ...],
    chosen: Sequence[Choice],
) -> MemoryPlan:
    held = [
        [choice.memory for choice in chosen if places[choice.stage] == device]
        for device in sorted(set(places))
    ]
    alone = len(held) == 1
    full = (work for part in partition.parts for work in partition.works(part, Keep.INPUT))
    peaks = tuple(on_device(memory, terms, alone) for memory in held)
    return MemoryPlan(
        limit,
        terms.batch,
        places,
        tuple(chosen),
        peaks,
        math.fsum(full) or 1.0,
        partition.keep,
    )


# -- what can be chosen ---------------------------------------------------------------------------


def choices(partition: Partition, terms: Terms) -> tuple[tuple[Choice, ...], ...]:
    """What each stage can keep, with what that costs."""
    model = MemoryModel.of(
        partition,
        terms.method,
        batch=terms.batch,
        optimizer_copies=terms.optimizer_copies,
        buffer_bytes=terms.buffer_bytes,
        group=terms.accumulate,
        low=terms.autocast,
    )
    return tuple(
        tuple(
            Choice(
                part.index,
                keep,
                model.stage(part.index, *places, keep),
                math.fsum(partition.works(part, keep)),
            )
            for keep in _KEEPS
        )
        for part, places in zip(partition.parts, partition.ranges, strict=True)
    )


# -- one device -----------------------------------------------------------------------------------


def on_device(memories: Sequence[StageMemory], terms: Terms, alone: bool) -> int:
    """The most a device with these stages holds. `alone`: no other device has stages."""
    split = [_split(memory, terms, alone) for memory in memories]
    return sum(lasting for lasting, _ in split) + max(passing for _, passing in split)


def _split(memory: StageMemory, terms: Terms, alone: bool) -> tuple[int, int]:
    """What a stage holds all the time, and what only while it works.

    Gradients go as soon as they are applied; messages from other devices come when they come. In
    one process sums that a step has added to are there until it is over.
    """
    gathers = terms.accumulate > 1 or terms.method.order is not Order.CONTINUOUS
    passing = memory.working + memory.between
    passing += 0 if gathers else memory.gradients
    passing += memory.messages if alone else memory.summing
    return memory.total - passing, passing


@dataclass(frozen=True)
class _Sum:
    """Choices for the first stages of a device, added up."""

    memory: int
    work: float
    picks: tuple[int, ...] = ()


def _fastest(
    offered: Sequence[Sequence[Choice]], limit: int, terms: Terms, alone: bool
) -> list[Choice] | None:
    """The choices of least work that fit; among equals those of least memory."""
    split = [[_split(choice.memory, terms, alone) for choice in of] for of in offered]
    best: _Sum | None = None
    for room in sorted({passing for of in split for _, passing in of}):
        found = _lightest(offered, split, room, limit - room)
        if found is not None and (best is None or _rank(found) < _rank(best)):
            best = found
    if best is None:
        return None
    return [of[pick] for of, pick in zip(offered, best.picks, strict=True)]


def _rank(found: _Sum) -> tuple[float, int, tuple[int, ...]]:
    return found.work, found.memory, found.picks


def _lightest(
    offered: Sequence[Sequence[Choice]],
    split: Sequence[Sequence[tuple[int, int]]],
    room: int,
    limit: int,
) -> _Sum | None:
    """The sum of least work whose stages need at most `room` at work and `limit` lastingly."""
    sums = [_Sum(0, 0.0)]
    for of, sizes in zip(offered, split, strict=True):
        longer = [
            _Sum(before.memory + lasting, before.work + choice.work, (*before.picks, pick))
            for before in sums
            for pick, (choice, (lasting, passing)) in enumerate(zip(of, sizes, strict=True))
            if passing <= room and before.memory + lasting <= limit
        ]
        sums = _thinned(list(_unbeaten(longer)))
    return min(sums, key=_rank, default=None)


def _unbeaten(sums: Sequence[_Sum]) -> Iterator[_Sum]:
    """From the least memory on, every sum that has less work than all before it."""
    least = math.inf
    for found in sorted(sums, key=lambda one: (one.memory, one.work, one.picks)):
        if found.work < least:
            least = found.work
            yield found


def _thinned(sums: list[_Sum]) -> list[_Sum]:
    """At most `_MOST` of them, the first and the last included."""
    if len(sums) <= _MOST:
        return sums
    step = (len(sums) - 1) / (_MOST - 1)
    return [sums[round(index * step)] for index in range(_MOST)]


def _least(
    offered: Sequence[Sequence[Choice]], terms: Terms, alone: bool
) -> tuple[int, list[Choice]]:
    """The least memory a device can do with, and the choices that take it."""

    def lasting(choice: Choice) -> int:
        return _split(choice.memory, terms, alone)[0]

    def fitting(of: Sequence[Choice], room: int) -> list[Choice]:
        return [choice for choice in of if _split(choice.memory, terms, alone)[1] <= room]

    rooms = sorted({_split(choice.memory, terms, alone)[1] for of in offered for choice in of})
    plans = []
    for room in rooms:
        small = [fitting(of, room) for of in offered]
        if all(small):
            chosen = [min(of, key=lasting) for of in small]
            plans.append((on_device([c.memory for c in chosen], terms, alone), chosen))
    return min(plans, key=lambda plan: plan[0])


def _too_small(
    limit: int, device: int, offered: Sequence[Sequence[Choice]], terms: Terms, alone: bool
) -> InputError:
    """Why not even the smallest plan fits: the largest stage, what it needs, and what to do."""
    need, smallest = _least(offered, terms, alone)
    largest = max(smallest, key=lambda choice: choice.memory.total)
    memory = largest.memory
    stages = f"its {len(offered)} stages" if len(offered) > 1 else f"stage {largest.stage}"
    owned = memory.parameters + memory.gradients + memory.optimizer
    return InputError(
        f"memory={limit}: at {terms.batch} samples a micro-batch device {device} needs "
        f"{readable(need)} ({need} bytes) for {stages}, however little is kept, but has "
        f"{readable(limit)}. Stage {largest.stage} needs the most, {readable(memory.total)}: "
        f"{readable(owned)} for parameters, gradients and optimizer, {readable(memory.buffers)} "
        f"for micro-batches in flight, {readable(memory.working)} at work. Use smaller "
        "micro-batches (batch_size=), more stages or devices, or buffers=torch.bfloat16"
    )
