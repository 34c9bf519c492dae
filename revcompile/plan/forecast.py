"""What a cluster would do with a model: each method's throughput, memory and delay, predicted."""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from revcompile.compiler.cost import CostSource, MemoryModel, Workload
from revcompile.compiler.partition import partition
from revcompile.compiler.partition.pieces import whole_pieces
from revcompile.errors import InputError
from revcompile.ir.program import Partition
from revcompile.ir.types import Rewired
from revcompile.plan.cluster import Cluster, NetworkLink, stage_times
from revcompile.schedule import (
    Costs,
    Method,
    Order,
    busy_share,
    choose,
    delay,
    hiding_in_flight,
    period,
    stage_work,
    zero_bubble_period,
)

ZERO_BUBBLE: Final = "zero-bubble"
"""An optimistic bound, not a schedule that we run."""
METHODS: Final = ("petra", "1f1b", "gpipe", ZERO_BUBBLE)
"""The methods that are compared by default."""
_NEARLY: Final = 1.02
"""A period up to this many times a bound is set by that bound."""


@dataclass(frozen=True)
class Forecast:
    """One method on a cluster; times in seconds, memory in bytes a device."""

    method: str
    stages: int
    replicas: int
    accumulation_steps: int
    """Micro-batches an update."""
    in_flight_per_stage: float | None
    throughput: float
    """Samples a second, all replicas together."""
    period: float
    """Between two micro-batches of a full pipeline."""
    efficiency: float
    """Mean share of the time during which a device computes."""
    updating: float
    """Of this, the share that updates take."""
    delay: int
    """Most updates between forward and backward pass of a micro-batch."""
    memory: int
    fits: bool | None
    """Is the memory within the budget? None without one."""
    bottleneck: str
    """What sets the period: a stage, a link, averaging over replicas, or bubbles."""


def forecast(
    cut: Partition,
    workload: Workload,
    cluster: Cluster,
    *,
    replicas: int = 1,
    in_flight_per_stage: float | None = None,
    memory_budget: int | None = None,
    zero_bubble: bool = False,
) -> Forecast:
    """What one method would do with these stages, one a device.

    Args:
        cut: The stages.
        workload: Method, batch size, optimizer and precision.
        cluster: Its devices and links.
        replicas: Copies of the pipeline.
        in_flight_per_stage: For methods that are never drained. Default: the least that
            hides the links, or the largest that fits the budget.
        memory_budget: Bytes that one device may hold.
        zero_bubble: Give the zero-bubble bound for the work of this method instead.
    """
    method, accumulation_steps = workload.method, workload.accumulation_steps
    alone = stage_times(cut, workload, cluster.time, cluster.link)
    costs = stage_times(cut, workload, cluster.time, cluster.link, replicas)
    link_busy = _link_busy(costs, cluster.link)
    choices: list[float | None] = [None]
    if method.order is Order.CONTINUOUS:
        choices = [in_flight_per_stage]
        if in_flight_per_stage is None:
            most = hiding_in_flight(method, costs, accumulation_steps, link_busy)
            choices = [*(step / 10 for step in range(10, math.ceil(10 * most))), most]

    def memory_at(in_flight_per_stage: float | None) -> int:
        how = dataclasses.replace(
            workload, method=choose(workload.method, in_flight_per_stage=in_flight_per_stage)
        )
        model = MemoryModel.of(cut, how)
        return max(model.stage(j, *pieces).total for j, pieces in enumerate(cut.ranges))

    budget = math.inf if memory_budget is None else memory_budget
    in_flight_per_stage = choices[max(bisect_right(choices, budget, key=memory_at) - 1, 0)]
    method, memory = (
        choose(method, in_flight_per_stage=in_flight_per_stage),
        memory_at(in_flight_per_stage),
    )
    if zero_bubble:
        time = max((zero_bubble_period(costs, accumulation_steps), *link_busy))
    else:
        time = period(method, costs, accumulation_steps, link_busy)
    stages = len(cut.parts)
    return Forecast(
        method=f"{ZERO_BUBBLE} (bound)" if zero_bubble else method.name,
        stages=stages,
        replicas=replicas,
        accumulation_steps=accumulation_steps,
        in_flight_per_stage=in_flight_per_stage,
        throughput=replicas * workload.microbatch_size / time if time else math.inf,
        period=time,
        efficiency=busy_share(alone, time, accumulation_steps),
        updating=busy_share(_updates_alone(alone), time, accumulation_steps) if time else 0.0,
        delay=max(delay(method, stages, j, accumulation_steps) for j in range(stages)),
        memory=memory,
        fits=None if memory_budget is None else memory <= budget,
        bottleneck=_bottleneck(
            time,
            stage_work(alone, accumulation_steps),
            stage_work(costs, accumulation_steps),
            link_busy,
        ),
    )


def _updates_alone(costs: Costs) -> Costs:
    nothing = (0.0,) * len(costs.update)
    return dataclasses.replace(costs, forward=nothing, backward=nothing)


def _link_busy(costs: Costs, link: NetworkLink) -> tuple[float, ...]:
    """How long a message occupies each link: latency does not keep others from being sent."""
    transfers = (*costs.link_forward, *costs.link_backward)
    return tuple(max(time - link.latency, 0.0) for time in transfers)


def _bottleneck(
    period: float, work: Sequence[float], averaged: Sequence[float], link_busy: Sequence[float]
) -> str:
    """What sets the period: work alone, with averaging over replicas, a link, or none of these."""
    if period <= _NEARLY * max(work):
        return f"stage {work.index(max(work))}"
    if period <= _NEARLY * max(averaged):
        return "averaging"
    if period <= _NEARLY * max(link_busy, default=0.0):
        return f"link {link_busy.index(max(link_busy)) % max(len(work) - 1, 1)}"
    return "bubbles"


# -- a whole cluster ------------------------------------------------------------------------------


def plan_cluster(
    rewired: Rewired,
    cluster: Cluster,
    workload: Workload,
    *,
    methods: Sequence[str] = METHODS,
    stages: int | None = None,
    accumulation_steps: int | None = None,
    in_flight_per_stage: float | None = None,
    cost: CostSource = "analytic",
    memory_budget: int | None = None,
) -> tuple[Partition, tuple[Forecast, ...]]:
    """Cut a model for a cluster and predict each method on these stages.

    There is one stage a device; with more devices than stages whole pipelines are replicated. All
    methods are compared with the same number of samples to an update. Those that do not need it,
    as they never drain, are also predicted with an update after every micro-batch.

    Args:
        rewired: The model.
        cluster: Its devices and links.
        workload: How to train. The model is cut for its method; not its `accumulation_steps`.
        methods: The methods to predict, by name, and "zero-bubble".
        stages: How many. Default: as many as the model has segments, or, with a memory budget, as
            many as make the first method fastest among those that fit.
        accumulation_steps: Micro-batches to an update, for every method. Default: four a stage.
        in_flight_per_stage: See `forecast`.
        cost: Where the work of a piece comes from.
        memory_budget: Bytes that one device may hold.

    Returns:
        The cut, and a forecast for each method.
    """
    devices = cluster.devices
    if stages is not None and not 1 <= stages <= devices:
        raise InputError(f"plan: stages={stages} on {devices} devices; use 1 to {devices}")
    counts = [stages] if stages else stage_counts(rewired, devices)

    def predict(cut: Partition, memory_budget: int | None) -> tuple[Forecast, ...]:
        return tuple(
            forecast(
                cut,
                dataclasses.replace(workload, method=method, accumulation_steps=each),
                cluster,
                replicas=devices // len(cut.parts),
                in_flight_per_stage=in_flight_per_stage,
                memory_budget=memory_budget,
                zero_bubble=name == ZERO_BUBBLE,
            )
            for name, method in _chosen(methods)
            for each in _accumulations(method, accumulation_steps or 4 * len(cut.parts))
        )

    def cuts(count: int) -> Iterator[Partition]:
        """Balanced by work, and, if the first method does not fit then, within the budget."""
        balanced = partition(rewired, count, workload, cost=cost)
        yield balanced
        for row in _of_first_method(predict(balanced, None)) if memory_budget is not None else ():
            assert memory_budget is not None
            if row.memory <= memory_budget:
                return
            fits = False
            for most in dict.fromkeys(
                (row.in_flight_per_stage, row.in_flight_per_stage and (in_flight_per_stage or 1.0))
            ):
                method = choose(_chosen(methods)[0][1], in_flight_per_stage=most)
                how = dataclasses.replace(
                    workload, method=method, accumulation_steps=row.accumulation_steps
                )
                with suppress(InputError):
                    yield partition(rewired, count, how, cost=cost, memory_budget=memory_budget)
                    fits = True
            if fits:
                return

    tried = counts if memory_budget is not None else counts[:1]
    plans = [(cut, predict(cut, memory_budget)) for count in tried for cut in cuts(count)]
    return max(plans, key=lambda plan: max(map(_rank, _of_first_method(plan[1]))))


def _of_first_method(forecasts: Sequence[Forecast]) -> list[Forecast]:
    return [row for row in forecasts if row.method == forecasts[0].method]


def better_stages(
    rewired: Rewired, cluster: Cluster, workload: Workload, chosen: Forecast, **options: Any
) -> Forecast | None:
    """The same method in another number of stages, if it is faster so; `plan_cluster`'s options.

    As few devices as possible are left idle, and an update has about as many samples.
    """
    found = [chosen]
    for count in stage_counts(rewired, cluster.devices):
        each = max(chosen.accumulation_steps * chosen.replicas * count // cluster.devices, 1)
        if count != chosen.stages:
            options |= {"methods": [chosen.method], "stages": count, "accumulation_steps": each}
            found.append(plan_cluster(rewired, cluster, workload, **options)[1][0])
    best = max(found, key=_rank)
    return None if best is chosen else best


def _chosen(names: Sequence[str]) -> list[tuple[str, Method]]:
    """Methods by name; the zero-bubble bound is that of 1F1B's work."""
    return [(name, choose("1f1b" if name == ZERO_BUBBLE else name)) for name in names]


def _accumulations(method: Method, accumulation_steps: int) -> tuple[int, ...]:
    """The numbers of micro-batches to an update for which a method is predicted."""
    drains = method.order not in (Order.CONTINUOUS, Order.SYNTHETIC)
    return (accumulation_steps,) if drains or accumulation_steps == 1 else (accumulation_steps, 1)


def stage_counts(rewired: Rewired, devices: int) -> list[int]:
    """Numbers of stages worth trying, largest first: those that leave the fewest devices idle."""
    return _fewest_idle(devices, len(whole_pieces(rewired.body)))


def _fewest_idle(devices: int, most: int) -> list[int]:
    """
    >>> _fewest_idle(64, 18)
    [16, 8, 4, 2, 1]
    """
    possible = range(min(devices, most), 0, -1)
    used = {count: count * (devices // count) for count in possible}
    return [count for count in possible if used[count] == max(used.values())]


def _rank(candidate: Forecast) -> tuple[bool, float]:
    """Cuts that fit come first, then fast ones; if none fits, small ones."""
    fits = candidate.fits is not False
    return fits, candidate.throughput if fits else -candidate.memory
