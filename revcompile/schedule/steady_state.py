"""The time between two micro-batches in a full pipeline: by formula, or from a dry run.

A schedule that is never drained is a marked graph: the forward and backward passes of every stage,
with edges for "not before". In the long run a micro-batch takes as long as the critical cycle of
that graph, divided by the micro-batches in it. Cycles go forward from a stage i to a stage k and
back again, so with windows w (micro-batches in flight)

    period = max over i <= k of  (all work and links from i to k and back) / (w_i - w_k + 1)

where i = k says that a stage cannot be faster than its own work. This takes no time even for
thousands of stages. Orders that drain repeat the same steps for every update; one update's worth
is simulated.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Final

from revcompile.errors import InputError
from revcompile.schedule.action import Op
from revcompile.schedule.delay import window
from revcompile.schedule.dryrun import LINKS, Costs, dry_run
from revcompile.schedule.generate import actions
from revcompile.schedule.methods import Method, Order, choose

_TOLERANCE: Final = 1e-9
_ALPHA_STEPS: Final = 20
"""Values of alpha tried between two whole numbers."""
_LARGEST_ALPHA: Final = 1024.0


def period(
    method: str | Method, costs: Costs, accumulate: int = 1, link_busy: Sequence[float] = ()
) -> float:
    """Time between two micro-batches once the pipeline is full.

    Args:
        method: A row of the methods' table, or its name.
        costs: Times of stages and links; links carry any number of messages at once.
        accumulate: Micro-batches an update.
        link_busy: How long a message occupies each link, if links carry one at a time.

    >>> costs = Costs.uniform(4, forward=1, backward=3)
    >>> period("petra", costs), period("backprop", costs)
    (4.0, 16.0)
    """
    method = choose(method)
    match method.order:
        case Order.CONTINUOUS:
            windows = [window(method, len(costs.forward), j) for j in range(len(costs.forward))]
            time = _critical_cycle(costs, windows, accumulate)
        case Order.SYNTHETIC:
            time = max(stage_work(costs, accumulate))
        case Order.LOCKED | Order.GPIPE | Order.ONE_F_ONE_B:
            time = _time_of_an_update(method, costs, accumulate) / accumulate
    return max(time, *link_busy, 0.0)


def busy_share(costs: Costs, period: float, accumulate: int = 1) -> float:
    """Mean share of the time during which a stage computes, at a given period.

    >>> busy_share(Costs.uniform(4, forward=1, backward=3), period=16)
    0.25
    """
    work = stage_work(costs, accumulate)
    return math.fsum(work) / (len(work) * period) if period else 1.0


def in_one_process(costs: Costs) -> Costs:
    """The costs of all stages on one device, one after the other, as one stage.

    >>> in_one_process(Costs.uniform(4, forward=1, backward=3)).backward
    (12.0,)
    """
    sums = {
        field.name: (math.fsum(getattr(costs, field.name)),)
        for field in dataclasses.fields(costs)
        if field.name not in LINKS
    }
    return Costs(**sums, link_forward=(), link_backward=())


def hiding_alpha(
    method: str | Method,
    costs: Costs,
    accumulate: int = 1,
    link_busy: Sequence[float] = (),
    tolerance: float = 0.01,
) -> float:
    """The least alpha at which links cost no throughput: enough micro-batches are in flight.

    At most the share `tolerance` of the throughput may be lost to links. Where links are too
    narrow for any alpha, it is the least that uses all of their bandwidth. Arguments as `period`.

    >>> hiding_alpha("petra", Costs.uniform(8, link=0.0))
    1.0
    >>> hiding_alpha("petra", Costs.uniform(8, forward=1, backward=3, link=4.0))
    2.9
    """
    bound = (1 + tolerance) * max((*stage_work(costs, accumulate), *link_busy))

    def alpha_of(steps: int) -> float:
        return steps / _ALPHA_STEPS  # the nearest float to a short decimal number

    def hides(steps: int) -> bool:
        chosen = choose(method, alpha=alpha_of(steps))
        return period(chosen, costs, accumulate, link_busy) <= bound

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


def zero_bubble_period(costs: Costs, accumulate: int, weight_share: float = 0.5) -> float:
    """An optimistic bound for schedules that fill bubbles with weight gradients.

    1F1B whose backward pass is split: the gradient of the input is sent at once, that of the
    weights (`weight_share` of the pass) is computed in a bubble. What is left of a bubble at each
    stage is forward + input - weight (zero-bubble H1), and the links' time once around. The
    slowest stage updates meanwhile.

    >>> costs = Costs.uniform(4, forward=1, backward=2)
    >>> zero_bubble_period(costs, accumulate=8), period("1f1b", costs, accumulate=8)
    (3.375, 4.125)
    """
    work = stage_work(costs, accumulate)
    slowest = work.index(max(work))
    bubbles = 0.0
    for stage, (forward, backward) in enumerate(zip(costs.forward, costs.backward, strict=True)):
        if stage != slowest:
            weights = weight_share * backward
            bubbles += max(forward + backward - weights - weights, 0.0)
    waiting = bubbles + math.fsum((*costs.link_forward, *costs.link_backward))
    return max(work) + max(waiting - costs.update[slowest], 0.0) / accumulate


def stage_work(costs: Costs, accumulate: int) -> list[float]:
    """Time each stage computes for a micro-batch, with its share of an update."""
    stages = zip(costs.forward, costs.backward, costs.update, strict=True)
    return [forward + backward + update / accumulate for forward, backward, update in stages]


def _critical_cycle(costs: Costs, windows: Sequence[int], accumulate: int) -> float:
    """The largest ratio of length to micro-batches of a cycle, by Dinkelbach's method."""
    time = max(stage_work(costs, accumulate))
    while True:
        excess, length, microbatches = _longest_cycle(costs, windows, accumulate, time)
        if excess <= _TOLERANCE * max(length, time) or length / microbatches <= time:
            return time
        time = length / microbatches


def _longest_cycle(
    costs: Costs, windows: Sequence[int], accumulate: int, time: float
) -> tuple[float, float, int]:
    """The cycle that takes the most beyond `time` a micro-batch: excess, length, micro-batches.

    `reached` is all work up to and with a stage, and the links before it; the cycle from i to k
    takes `reached_k - reached_{i-1} - links before i`, and the update of i.
    """
    best = (-math.inf, 0.0, 1)
    start_value, start_length, start_window = -math.inf, 0.0, 0
    reached = 0.0
    links = (0.0, *map(sum, zip(costs.link_forward, costs.link_backward, strict=True)))
    stages = zip(links, costs.forward, costs.backward, costs.update, windows, strict=True)
    for link, forward, backward, update, width in stages:
        reached += link
        length = update / accumulate - reached
        if length - time * width > start_value:
            start_value, start_length, start_window = length - time * width, length, width
        reached += forward + backward
        excess = reached + time * width + start_value - time
        if excess > best[0]:
            best = (excess, reached + start_length, start_window - width + 1)
    return best


def _time_of_an_update(method: Method, costs: Costs, accumulate: int) -> float:
    """How long after the first micro-batch of an update that of the next update can enter.

    Step by step as in `generate.Schedule`: forward passes from first stage to last, then the
    backward passes that are due from last to first. Plain lists: this runs stages x accumulate
    times.
    """
    stages = len(costs.forward)
    windows = [window(method, stages, stage, accumulate) for stage in range(stages)]
    clock, started, finished = [0.0] * stages, [0.0] * stages, [0] * stages
    arrivals: list[list[float]] = [[] for _ in range(stages)]  # of gradients, by micro-batch
    to_next = (*costs.link_forward, 0.0)
    to_previous = (0.0, *costs.link_backward)
    for step in range(accumulate):
        arrival = 0.0
        for stage, (forward, link) in enumerate(zip(costs.forward, to_next, strict=True)):
            start = max(clock[stage], arrival)
            if step == 0:
                started[stage] = start
            clock[stage] = start + forward
            arrival = clock[stage] + link
        is_last = step == accumulate - 1
        for stage in reversed(range(stages)):
            in_flight = step + 1 - finished[stage]
            due = in_flight if is_last else int(in_flight == windows[stage])
            if method.order is Order.GPIPE and not is_last:
                due = 0
            now = clock[stage]
            for microbatch in range(finished[stage], finished[stage] + due):
                if stage < stages - 1:
                    now = max(now, arrivals[stage][microbatch])
                now += costs.backward[stage]
                if stage:
                    arrivals[stage - 1].append(now + to_previous[stage])
            clock[stage], finished[stage] = now, finished[stage] + due
    ends = (now + update for now, update in zip(clock, costs.update, strict=True))
    return max(end - start for end, start in zip(ends, started, strict=True))


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
    # Measure between filling and drain, over whole updates, and if possible over multiples of
    # `filling`: behind slow links micro-batches come in bursts of that many.
    last = (microbatches - filling) // accumulate * accumulate
    burst = math.lcm(accumulate, filling)
    unit = burst if burst <= 2 * last // 3 else accumulate
    first = last - 2 * last // 3 // unit * unit
    if first >= last:
        raise InputError(
            f"throughput: microbatches={microbatches}, but {stages} stages with accumulate="
            f"{accumulate} need {filling + 2 * accumulate} at least"
        )
    work = stage_work(costs, accumulate)
    slowest = work.index(max(work))
    timeline = dry_run(actions(method, stages, microbatches, accumulate), costs)
    ends = {
        span.action.index: span.end
        for span in timeline.spans
        if span.stage == slowest and span.action.op is Op.BACKWARD
    }
    took = ends[last] - ends[first]
    return (last - first) / took if took else math.inf
