"""The time between two micro-batches in a full pipeline.

A schedule that is never drained is a marked graph: its nodes are the forward and backward passes of
every stage, and an edge says that a pass must wait for another. In the long run a micro-batch takes
as long as the critical cycle of that graph, divided by the micro-batches in it. Cycles go forward
from a stage i to a stage k and back again, so with windows w (micro-batches in flight)

    period = max over i <= k of  (all work and links from i to k and back) / (w_i - w_k + 1)

where i = k says that a stage cannot be faster than its own work. With one micro-batch in flight per
stage the cycle through all stages has no slack: the time of its messages, divided by the stages,
comes on top. Orders that drain repeat the same passes for every update (`drained`).
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

import numpy as np

from revcompile.schedule.delay import window
from revcompile.schedule.drained import OTHERS, drained_passes, update_time
from revcompile.schedule.dryrun import Costs
from revcompile.schedule.methods import Method, Order, choose

_DRAINING: Final = (Order.LOCKED, Order.GPIPE, Order.ONE_F_ONE_B)
_ALPHA_STEPS: Final = 20
"""Values of in_flight_per_stage tried between two whole numbers."""
_MOST_IN_FLIGHT: Final = 1024
_LOST_TO_LINKS: Final = 0.01


def period(
    method: str | Method, costs: Costs, accumulation_steps: int = 1, devices: int | None = None
) -> float:
    """Forecast: time between two micro-batches once the pipeline is full.

    Args:
        method: A row of the methods' table, its name, or a name of `OTHERS`.
        costs: Times of stages and links. Backward passes include the time to recompute the forward
            pass or to rebuild inputs.
        accumulation_steps: Micro-batches per update.
        devices: For "interleaved": stage s runs on device s % devices. Default: as many as stages.

    >>> costs = Costs.uniform(4, forward=1, backward=3)
    >>> period("petra", costs), period("backprop", costs)
    (4.0, 16.0)
    >>> costs = Costs.uniform(4, forward=1, backward=2)
    >>> [period(name, costs, accumulation_steps=8) for name in ("gpipe", "1f1b", "zero-bubble")]
    [4.125, 4.125, 3.375]
    """
    stages = len(costs.forward)
    if method in OTHERS or choose(method).order in _DRAINING:
        lists = drained_passes(method, stages, devices or stages, accumulation_steps)
        return update_time(lists, costs) / accumulation_steps
    chosen = choose(method)
    work = max(stage_work(costs, accumulation_steps))
    if chosen.order is Order.CONTINUOUS:
        work = max(work, _critical_cycle(chosen, costs, accumulation_steps))
    return max(work, costs.link_busy)


def _critical_cycle(method: Method, costs: Costs, accumulation_steps: int) -> float:
    stages, time = len(costs.forward), 0.0
    windows = np.array([window(method, stages, stage) for stage in range(stages)])
    links = np.add((0.0, *costs.link_forward), (0.0, *costs.link_backward))
    reached = np.cumsum(np.add(costs.forward, costs.backward) + links)  # including the stage
    for i in range(stages):
        before = (reached[i - 1] if i else 0.0) + links[i]
        in_cycle = windows[i] - windows[i:] + 1
        updating = costs.update[i] / np.maximum(in_cycle, accumulation_steps)
        time = max(time, float(np.max((reached[i:] - before) / in_cycle + updating)))
    return time


def hiding_in_flight(method: str | Method, costs: Costs, accumulation_steps: int = 1) -> float:
    """The least `in_flight_per_stage` at which links cost no throughput.

    Links may cost at most one per cent of the throughput. If their bandwidth is the limit, the
    result is the least value that uses all of it. The arguments are those of `period`.

    >>> hiding_in_flight("petra", Costs.uniform(8, link=0.0))
    1.0
    >>> hiding_in_flight("petra", Costs.uniform(8, forward=1, backward=3, link=4.0))
    2.9
    """
    bound = (1 + _LOST_TO_LINKS) * max((*stage_work(costs, accumulation_steps), costs.link_busy))

    def in_flight_of(steps: int) -> float:
        return steps / _ALPHA_STEPS  # the nearest float to a short decimal number

    def hides(steps: int) -> bool:
        chosen = choose(method, in_flight_per_stage=in_flight_of(steps))
        return period(chosen, costs, accumulation_steps) <= bound

    tried = range(_ALPHA_STEPS, _ALPHA_STEPS * _MOST_IN_FLIGHT)
    return in_flight_of(_ALPHA_STEPS + bisect_left(tried, True, key=hides))


def stage_work(costs: Costs, accumulation_steps: int) -> list[float]:
    """Time each stage computes for a micro-batch, with its share of an update."""
    stages = zip(costs.forward, costs.backward, costs.update, strict=True)
    return [
        forward + backward + update / accumulation_steps for forward, backward, update in stages
    ]
