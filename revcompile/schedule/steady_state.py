"""The time between two micro-batches in a full pipeline.

A schedule that is never drained is a marked graph: the forward and backward passes of every stage,
with edges for "not before". In the long run a micro-batch takes as long as the critical cycle of
that graph, divided by the micro-batches in it. Cycles go forward from a stage i to a stage k and
back again, so with windows w (micro-batches in flight)

    period = max over i <= k of  (all work and links from i to k and back) / (w_i - w_k + 1)

where i = k says that a stage cannot be faster than its own work. Orders that drain repeat the same
steps for every update: the dry run of one update says how long it takes.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

import numpy as np

from revcompile.schedule.delay import window
from revcompile.schedule.dryrun import Costs, dry_run
from revcompile.schedule.generate import actions
from revcompile.schedule.methods import Method, Order, choose

_ALPHA_STEPS: Final = 20
"""Values of in_flight_per_stage tried between two whole numbers."""
_MOST_IN_FLIGHT: Final = 1024


def period(
    method: str | Method, costs: Costs, accumulation_steps: int = 1, link_busy: Sequence[float] = ()
) -> float:
    """Time between two micro-batches once the pipeline is full.

    Args:
        method: A row of the methods' table, or its name.
        costs: Times of stages and links; links carry any number of messages at once.
        accumulation_steps: Micro-batches an update.
        link_busy: How long a message occupies each link, if links carry one at a time.

    >>> costs = Costs.uniform(4, forward=1, backward=3)
    >>> period("petra", costs), period("backprop", costs)
    (4.0, 16.0)
    """
    method = choose(method)
    match method.order:
        case Order.CONTINUOUS:
            time = _critical_cycle(method, costs, accumulation_steps)
        case Order.SYNTHETIC:
            time = max(stage_work(costs, accumulation_steps))
        case Order.LOCKED | Order.GPIPE | Order.ONE_F_ONE_B:
            time = _one_update(method, costs, accumulation_steps) / accumulation_steps
    return max(time, *link_busy, 0.0)


def _critical_cycle(method: Method, costs: Costs, accumulation_steps: int) -> float:
    stages = len(costs.forward)
    windows = np.array([window(method, stages, stage) for stage in range(stages)])
    links = np.add((0.0, *costs.link_forward), (0.0, *costs.link_backward))
    reached = np.cumsum(np.add(costs.forward, costs.backward) + links)  # up to and with a stage
    time = max(stage_work(costs, accumulation_steps))
    for i in range(stages):
        before = (reached[i - 1] if i else 0.0) + links[i] - costs.update[i] / accumulation_steps
        time = max(time, float(np.max((reached[i:] - before) / (windows[i] - windows[i:] + 1))))
    return time


def _one_update(method: Method, costs: Costs, accumulation_steps: int) -> float:
    """How long after the first micro-batch of an update that of the next update can enter."""
    stages = len(costs.forward)
    spans = dry_run(actions(method, stages, accumulation_steps, accumulation_steps), costs)
    started, ended = [math.inf] * stages, [0.0] * stages
    for span in spans:
        # A receive lasts from when the stage begins to wait: its end is when the message is there.
        begin = span.end - costs.of(span.stage, span.action.op)
        started[span.stage] = min(started[span.stage], begin)
        ended[span.stage] = max(ended[span.stage], span.end)
    return max(end - start for end, start in zip(ended, started, strict=True))


def busy_share(costs: Costs, period: float, accumulation_steps: int = 1) -> float:
    """Mean share of the time during which a stage computes, at a given period.

    >>> busy_share(Costs.uniform(4, forward=1, backward=3), period=16)
    0.25
    """
    work = stage_work(costs, accumulation_steps)
    return math.fsum(work) / (len(work) * period) if period else 1.0


def hiding_in_flight(
    method: str | Method,
    costs: Costs,
    accumulation_steps: int = 1,
    link_busy: Sequence[float] = (),
    tolerance: float = 0.01,
) -> float:
    """The least `in_flight_per_stage` at which links cost no throughput.

    At most the share `tolerance` of the throughput may be lost to links. Where links are too
    narrow for any, it is the least that uses all of their bandwidth. Arguments as `period`.

    >>> hiding_in_flight("petra", Costs.uniform(8, link=0.0))
    1.0
    >>> hiding_in_flight("petra", Costs.uniform(8, forward=1, backward=3, link=4.0))
    2.9
    """
    bound = (1 + tolerance) * max((*stage_work(costs, accumulation_steps), *link_busy))

    def in_flight_of(steps: int) -> float:
        return steps / _ALPHA_STEPS  # the nearest float to a short decimal number

    def hides(steps: int) -> bool:
        chosen = choose(method, in_flight_per_stage=in_flight_of(steps))
        return period(chosen, costs, accumulation_steps, link_busy) <= bound

    tried = range(_ALPHA_STEPS, _ALPHA_STEPS * _MOST_IN_FLIGHT)
    return in_flight_of(_ALPHA_STEPS + bisect_left(tried, True, key=hides))


def zero_bubble_period(costs: Costs, accumulation_steps: int, weight_share: float = 0.5) -> float:
    """An optimistic bound for schedules that fill bubbles with weight gradients.

    1F1B whose backward pass is split: the gradient of the input is sent at once, that of the
    weights (`weight_share` of the pass) is computed in a bubble. What is left of a bubble at each
    stage is forward + input - weight (zero-bubble H1), and the links' time once around. The
    slowest stage updates meanwhile.

    >>> costs = Costs.uniform(4, forward=1, backward=2)
    >>> zero_bubble_period(costs, accumulation_steps=8), period("1f1b", costs, accumulation_steps=8)
    (3.375, 4.125)
    """
    work = stage_work(costs, accumulation_steps)
    slowest = work.index(max(work))
    bubbles = [
        max(forward + (1 - 2 * weight_share) * backward, 0.0)
        for forward, backward in zip(costs.forward, costs.backward, strict=True)
    ]
    waiting = math.fsum((*bubbles, *costs.link_forward, *costs.link_backward)) - bubbles[slowest]
    return max(work) + max(waiting - costs.update[slowest], 0.0) / accumulation_steps


def stage_work(costs: Costs, accumulation_steps: int) -> list[float]:
    """Time each stage computes for a micro-batch, with its share of an update."""
    stages = zip(costs.forward, costs.backward, costs.update, strict=True)
    return [
        forward + backward + update / accumulation_steps for forward, backward, update in stages
    ]
