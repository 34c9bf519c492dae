"""Steady states without replay every action: what a pipeline of thousands of stages would do.

A schedule that is never drained is a marked graph: forward and backward pass of every stage, and
edges that say "not before". In the long run a micro-batch takes as long as the worst circle in
that graph takes, divided by the micro-batches that run around it. Circles go forward from a stage
i to a stage k and back again, so with windows w

    period = max over i <= k of  (all work and links from i to k and back) / (w_i - w_k + 1)

where i = k says that a stage cannot be faster than its own work. Orders that drain repeat their
group, which is played once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from revcompile.errors import InputError
from revcompile.schedule.dryrun import Costs
from revcompile.schedule.methods import Method, Order, choose, window

__all__ = [
    "Wire",
    "busy_share",
    "hiding_alpha",
    "in_one_process",
    "own_work",
    "period",
    "zero_bubble_period",
]

_CLOSE: Final = 1e-9
_ALPHA_STEPS: Final = 20
"""Values of alpha tried between two whole numbers."""
_LARGEST_ALPHA: Final = 1024.0


@dataclass(frozen=True)
class Wire:
    """A link between two devices: bytes a second, and seconds until the first arrives.

    >>> Wire(bandwidth=1e9, latency=0.01).time(5e8)
    0.51
    """

    bandwidth: float
    latency: float = 0.0

    def __post_init__(self) -> None:
        if not self.bandwidth > 0 or not 0 <= self.latency < math.inf:
            raise InputError(
                f"Wire: bandwidth={self.bandwidth}, latency={self.latency}; expected bytes a "
                "second above 0 and seconds from 0 on"
            )

    def time(self, size: float) -> float:
        """From the first byte sent to the last one there."""
        return self.latency + self.occupied(size)

    def occupied(self, size: float) -> float:
        """How long a message keeps the link from carrying another."""
        return size / self.bandwidth


def period(
    method: str | Method, costs: Costs, group: int = 1, occupied: Sequence[float] = ()
) -> float:
    """Time between two micro-batches once the pipeline is full.

    `group` is the number of micro-batches an update, `occupied` how long a message keeps each
    link busy, if that matters (a dry run lets messages overtake time on a link, not a real one).

    >>> costs = Costs.uniform(4, forward=1, backward=3)
    >>> period("petra", costs), period("backprop", costs)
    (4.0, 16.0)
    """
    method = choose(method)
    narrowest = max(occupied, default=0.0)
    match method.order:
        case Order.CONTINUOUS:
            windows = [window(method, len(costs.forward), j) for j in range(len(costs.forward))]
            found = _worst_circle(costs, windows, group)
        case Order.SYNTHETIC:
            found = max(own_work(costs, group))
        case Order.LOCKED | Order.GPIPE | Order.ONE_F_ONE_B:
            found = _repeated_group(method, costs, group) / group
    return max(found, narrowest)


def busy_share(costs: Costs, period: float, group: int = 1) -> float:
    """Mean share of the time at which a stage computes, at a given period.

    >>> busy_share(Costs.uniform(4, forward=1, backward=3), period=16)
    0.25
    """
    work = own_work(costs, group)
    return math.fsum(work) / (len(work) * period) if period else 1.0


def in_one_process(costs: Costs) -> Costs:
    """All stages on one device, one after the other, as one stage.

    >>> in_one_process(Costs.uniform(4, forward=1, backward=3)).backward
    (12.0,)
    """
    sums = {
        field.name: (math.fsum(getattr(costs, field.name)),)
        for field in dataclasses.fields(costs)
        if not field.name.startswith("link")
    }
    return Costs(**sums, link_forward=(), link_backward=())


def hiding_alpha(
    method: str | Method,
    costs: Costs,
    group: int = 1,
    occupied: Sequence[float] = (),
    tolerance: float = 0.01,
) -> float:
    """The least alpha with which links cost no throughput: more micro-batches are on their way.

    Some throughput may be lost to links, at most the share `tolerance`. Where links are too
    narrow for any alpha, the least that reaches what they can carry.

    >>> hiding_alpha("petra", Costs.uniform(8, link=0.0))
    1.0
    >>> hiding_alpha("petra", Costs.uniform(8, forward=1, backward=3, link=4.0))
    2.9
    """
    bound = (1 + tolerance) * max((*own_work(costs, group), *occupied))

    def alpha_of(steps: int) -> float:
        return steps / _ALPHA_STEPS  # the nearest float to a short decimal number

    def hides(steps: int) -> bool:
        chosen = choose(method, alpha=alpha_of(steps))
        return period(chosen, costs, group, occupied) <= bound

    low = _ALPHA_STEPS
    if hides(low):
        return 1.0
    high = 2 * low
    while not hides(high):
        if alpha_of(high) >= _LARGEST_ALPHA:
            return alpha_of(high)
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if hides(middle) else (middle, high)
    return alpha_of(high)


def zero_bubble_period(costs: Costs, group: int, weight_share: float = 0.5) -> float:
    """An optimistic bound for schedules that fill bubbles with weight gradients.

    1F1B whose backward pass is split: the gradient of the input goes on at once, that of the
    weights (`weight_share` of the pass) waits for a bubble. What is left of a bubble at each
    stage is forward + input - weight (zero-bubble H1), and the links' time once around.

    >>> costs = Costs.uniform(4, forward=1, backward=2)
    >>> zero_bubble_period(costs, group=8), period("1f1b", costs, group=8)
    (3.375, 4.125)
    """
    work = own_work(costs, group)
    slowest = work.index(max(work))
    left = 0.0
    for stage, (forward, backward) in enumerate(zip(costs.forward, costs.backward, strict=True)):
        if stage != slowest:
            weights = weight_share * backward
            left += max(forward + backward - weights - weights, 0.0)
    links = math.fsum((*costs.link_forward, *costs.link_backward))
    return max(work) + (left + links) / group


def own_work(costs: Costs, group: int) -> list[float]:
    """Work of each stage for a micro-batch; an update is shared by its group."""
    stages = zip(costs.forward, costs.backward, costs.update, strict=True)
    return [forward + backward + update / group for forward, backward, update in stages]


def _worst_circle(costs: Costs, windows: Sequence[int], group: int) -> float:
    """The period of a schedule that is never drained: Dinkelbach's search for the worst circle."""
    time = max(own_work(costs, group))
    while True:
        excess, length, passing = _longest(costs, windows, group, time)
        if excess <= _CLOSE * max(length, time) or length / passing <= time:
            return time
        time = length / passing


def _longest(
    costs: Costs, windows: Sequence[int], group: int, time: float
) -> tuple[float, float, int]:
    """The circle that takes the most beyond `time` a micro-batch: excess, length, micro-batches.

    `reached` is all work up to and with a stage, and the links before it; the circle from i to k
    takes `reached_k - reached_{i-1} - links before i`, and the update of i.
    """
    best = (-math.inf, 0.0, 1)
    start_value, start_length, start_window = -math.inf, 0.0, 0
    reached = 0.0
    links = (0.0, *map(sum, zip(costs.link_forward, costs.link_backward, strict=True)))
    stages = zip(links, costs.forward, costs.backward, costs.update, windows, strict=True)
    for link, forward, backward, update, width in stages:
        reached += link
        length = update / group - reached
        if length - time * width > start_value:
            start_value, start_length, start_window = length - time * width, length, width
        reached += forward + backward
        excess = reached + time * width + start_value - time
        if excess > best[0]:
            best = (excess, reached + start_length, start_window - width + 1)
    return best


def _repeated_group(method: Method, costs: Costs, group: int) -> float:
    """How long after one group the next can begin: no stage is still at work on the first.

    Round by round as in `Schedule`: forward passes from first stage to last, then the backward
    passes that are due from last to first. Plain lists: this runs stages x group times.
    """
    stages = len(costs.forward)
    windows = [window(method, stages, stage, group) for stage in range(stages)]
    clock, started, behind = [0.0] * stages, [0.0] * stages, [0] * stages
    arrived: list[list[float]] = [[] for _ in range(stages)]
    into = (*costs.link_forward, 0.0)
    back = (0.0, *costs.link_backward)
    for round_ in range(group):
        x = 0.0
        for stage, (forward, link) in enumerate(zip(costs.forward, into, strict=True)):
            begins = max(clock[stage], x)
            if not round_:
                started[stage] = begins
            clock[stage] = begins + forward
            x = clock[stage] + link
        last = round_ == group - 1
        for stage in reversed(range(stages)):
            waiting = round_ + 1 - behind[stage]
            due = waiting if last else int(waiting == windows[stage])
            if method.order is Order.GPIPE and not last:
                due = 0
            now, comes = clock[stage], arrived[stage]
            for number in range(behind[stage], behind[stage] + due):
                if stage < stages - 1:
                    now = max(now, comes[number])
                now += costs.backward[stage]
                if stage:
                    arrived[stage - 1].append(now + back[stage])
            clock[stage], behind[stage] = now, behind[stage] + due
    ends = (now + update for now, update in zip(clock, costs.update, strict=True))
    return max(end - start for end, start in zip(ends, started, strict=True))
