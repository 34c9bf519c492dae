"""What a cluster would do with a model: each method's throughput, memory and delay, predicted."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from revcompile.compiler.cost import How, MemoryModel
from revcompile.compiler.cost.analytic import FLOPS_PER_BYTE
from revcompile.compiler.partition import partition
from revcompile.compiler.partition.pieces import whole_pieces
from revcompile.errors import InputError
from revcompile.ir.program import Part, Partition
from revcompile.ir.types import Cost, Rewired, TensorType
from revcompile.runtime.stage.tensors import all_finite
from revcompile.schedule import (
    Costs,
    Keep,
    Method,
    Order,
    Wire,
    busy_share,
    choose,
    delay,
    hiding_alpha,
    period,
    zero_bubble_period,
)
from revcompile.schedule.periods import own_work

__all__ = [
    "METHODS",
    "Device",
    "Forecast",
    "Seconds",
    "forecast",
    "plan",
    "stage_costs",
    "update_speed",
]

METHODS: Final = ("petra", "1f1b", "gpipe", "zero-bubble")
"""What is compared unless asked otherwise; zero-bubble is a bound, not a schedule we run."""

_TOUCHED: Final = 5
"""Times SGD with momentum moves a parameter's bytes: three reads, two writes."""


@dataclass(frozen=True)
class Device:
    """What one device really reaches: FLOPs and bytes of memory traffic, a second.

    The defaults are somewhat less than half and two thirds of an H200's data sheet (bfloat16).
    """

    flops: float = 400e12
    bandwidth: float = 3.3e12

    def __post_init__(self) -> None:
        if not (self.flops > 0 and self.bandwidth > 0):
            raise InputError(
                f"Device: flops={self.flops}, bandwidth={self.bandwidth}; both are above 0"
            )


@dataclass(frozen=True)
class Seconds:
    """How costs become seconds: counted work on a device, or costs that are seconds already.

    `moved` is how many bytes of parameters an update handles in a second.
    """

    of: Callable[[Cost], tuple[float, float]]
    moved: float

    @classmethod
    def on(cls, device: Device) -> Seconds:
        """Arithmetic and memory traffic one after the other, on a device of these figures."""

        def of(cost: Cost) -> tuple[float, float]:
            moved = (cost.forward - cost.flops) / FLOPS_PER_BYTE
            forward = cost.flops / device.flops + max(moved, 0.0) / device.bandwidth
            ratio = cost.backward / cost.forward if cost.forward else 0.0
            return forward, ratio * forward

        return cls(of, device.bandwidth / _TOUCHED)

    @classmethod
    def measured(cls, moved: float) -> Seconds:
        """Costs measured on this machine."""
        return cls(lambda cost: (cost.forward, cost.backward), moved)


@dataclass(frozen=True)
class Forecast:
    """One method on so many devices; times in seconds, memory in bytes a device."""

    method: str
    stages: int
    replicas: int
    group: int
    """Micro-batches an update."""
    alpha: float | None
    throughput: float
    """Samples a second, all replicas together."""
    period: float
    efficiency: float
    """Mean share of the time at which a device computes."""
    delay: int
    """Most updates between forward and backward pass of a micro-batch."""
    memory: int
    fits: bool | None
    limit: str
    """What sets the pace."""


def stage_costs(
    cut: Partition, method: Method, seconds: Seconds, *, batch: int, wire: Wire, replicas: int = 1
) -> Costs:
    """Time of every stage and link for a micro-batch of `batch` samples."""
    parts, last = cut.parts, len(cut.parts) - 1
    passes = [_passes(part, method, seconds, batch, part.index == last) for part in parts]
    sizes = [_sent(cut, part, batch) for part in parts[:-1]]
    doubled = [
        (2 if method.keep is Keep.NOTHING and part.pieces[-1].reversible else 1)
        for part in parts[:-1]
    ]
    trained = [sum(cost.trained for cost in part.costs) for part in parts]
    return Costs(
        forward=tuple(forward for forward, _ in passes),
        backward=tuple(backward for _, backward in passes),
        update=tuple(n / seconds.moved + _all_reduce(n, replicas, wire) for n in trained),
        link_forward=tuple(wire.time(size) for size in sizes),
        link_backward=tuple(
            wire.time(many * size) for many, size in zip(doubled, sizes, strict=True)
        ),
    )


def _passes(
    part: Part, method: Method, seconds: Seconds, batch: int, last: bool
) -> tuple[float, float]:
    """Forward and backward of a stage. Where the graph is kept nothing is computed again."""
    forward = backward = 0.0
    for piece, cost in zip(part.pieces, part.costs, strict=True):
        ahead, back = (time * batch / cost.batch for time in seconds.of(cost))
        forward += ahead
        backward += back if piece.recomputed(method.keep, last) else back - ahead
    return forward, max(backward, 0.0)


def _sent(cut: Partition, part: Part, batch: int) -> int:
    kinds = (cut.types.get(name) for name in part.outputs)
    return sum(kind.nbytes(batch) for kind in kinds if isinstance(kind, TensorType))


def _all_reduce(size: int, replicas: int, wire: Wire) -> float:
    """A ring's traffic, a tree's latency; not overlapped with anything."""
    if replicas < 2:
        return 0.0
    hops = 2 * math.ceil(math.log2(replicas))
    return wire.occupied(2 * size * (replicas - 1) / replicas) + hops * wire.latency


def forecast(
    cut: Partition,
    method: str,
    seconds: Seconds,
    *,
    batch: int,
    wire: Wire,
    group: int = 1,
    replicas: int = 1,
    alpha: float | None = None,
    memory: int | None = None,
    optimizer_copies: int = 1,
    buffer_bytes: int | None = None,
) -> Forecast:
    """What one method would do with these stages, one a device.

    Methods that are never drained get the least alpha that hides the links, unless one is given.
    `group` is the number of micro-batches an update, `buffer_bytes` what an element of a float32
    input takes that waits for its backward pass.
    """
    bound = method == "zero-bubble"
    chosen = choose("1f1b" if bound else method)
    alone = stage_costs(cut, chosen, seconds, batch=batch, wire=wire)
    costs = stage_costs(cut, chosen, seconds, batch=batch, wire=wire, replicas=replicas)
    occupied = _occupied(costs, wire)
    if chosen.order is Order.CONTINUOUS:
        alpha = alpha or hiding_alpha(chosen, costs, group, occupied)
        chosen = choose(chosen, alpha=alpha)
    else:
        alpha = None
    if bound:
        pace = max((zero_bubble_period(costs, group), *occupied))
    else:
        pace = period(chosen, costs, group, occupied)
    held = _memory(cut, chosen, batch, group, optimizer_copies, buffer_bytes)
    return Forecast(
        method=method + (" (bound)" if bound else ""),
        stages=len(cut.parts),
        replicas=replicas,
        group=group,
        alpha=alpha,
        throughput=replicas * batch / pace if pace else math.inf,
        period=pace,
        efficiency=busy_share(alone, pace, group),
        delay=max(delay(chosen, len(cut.parts), j, group) for j in range(len(cut.parts))),
        memory=held,
        fits=None if memory is None else held <= memory,
        limit=_limit(pace, own_work(alone, group), own_work(costs, group), occupied),
    )


def _occupied(costs: Costs, wire: Wire) -> tuple[float, ...]:
    links = (*costs.link_forward, *costs.link_backward)
    return tuple(max(time - wire.latency, 0.0) for time in links)


def _limit(
    pace: float, work: Sequence[float], averaged: Sequence[float], occupied: Sequence[float]
) -> str:
    """What sets the pace: work alone, with averaging over copies, a link, or nothing of these."""
    if pace <= 1.02 * max(work):
        return f"stage {work.index(max(work))}"
    if pace <= 1.02 * max(averaged):
        return "averaging"
    if pace <= 1.02 * max(occupied, default=0.0):
        return f"link {occupied.index(max(occupied)) % max(len(work) - 1, 1)}"
    return "bubbles"


def _memory(
    cut: Partition, method: Method, batch: int, group: int, copies: int, buffer_bytes: int | None
) -> int:
    """The most that one device holds."""
    model = MemoryModel.of(
        cut,
        method,
        batch=batch,
        optimizer_copies=copies,
        buffer_bytes=buffer_bytes,
        group=group,
    )
    return max(model.stage(j, *ends).total for j, ends in enumerate(cut.ranges))


# -- a whole plan ---------------------------------------------------------------------------------


def plan(
    rewired: Rewired,
    devices: int,
    *,
    batch: int,
    wire: Wire,
    seconds: Seconds,
    cost: How = "analytic",
    stages: int | None = None,
    microbatches: int | None = None,
    accumulate: int = 1,
    alpha: float | None = None,
    methods: Sequence[str] = METHODS,
    memory: int | None = None,
    optimizer_copies: int = 1,
    buffer_bytes: int | None = None,
) -> tuple[Partition, tuple[Forecast, ...]]:
    """Cut a model for so many devices and predict each method; returns the cut as well.

    One stage a device; with more devices than stages whole pipelines are copied. Without `stages`
    there are as many as the model has segments, or, given the `memory` of a device, as many as
    make PETRA fastest among those that fit. `microbatches` an update for methods that drain
    (default: four a stage), `accumulate` for those that do not.
    """
    if devices < 1:
        raise InputError(f"plan: devices={devices}; there is at least 1")
    most = len(whole_pieces(rewired.body))
    if stages is not None and not 1 <= stages <= devices:
        raise InputError(f"plan: stages={stages} on {devices} devices; use 1 to {devices}")
    counts = [stages] if stages else _counts(devices, most, memory is not None)
    best: tuple[Partition, tuple[Forecast, ...]] | None = None
    for count in counts:
        cut = partition(rewired, count, choose("petra"), how=cost)
        found = tuple(
            forecast(
                cut,
                method,
                seconds,
                batch=batch,
                wire=wire,
                group=_group(method, count, microbatches, accumulate),
                replicas=devices // count,
                alpha=alpha,
                memory=memory,
                optimizer_copies=optimizer_copies,
                buffer_bytes=buffer_bytes,
            )
            for method in methods
        )
        if best is None or _rank(found[0]) > _rank(best[1][0]):
            best = cut, found
    assert best is not None
    return best


def _counts(devices: int, most: int, search: bool) -> list[int]:
    """Numbers of stages worth trying: those that leave the fewest devices idle.

    >>> _counts(64, 18, search=False), _counts(64, 18, search=True)
    ([16], [16, 8, 4, 2, 1])
    """
    within = range(min(devices, most), 0, -1)
    used = {count: count * (devices // count) for count in within}
    full = [count for count in within if used[count] == max(used.values())]
    return full if search else full[:1]


def _rank(found: Forecast) -> tuple[bool, float]:
    """What fits comes first, then what is fast; if nothing fits, what is small."""
    fits = found.fits is not False
    return fits, found.throughput if fits else -found.memory


def _group(method: str, stages: int, microbatches: int | None, accumulate: int) -> int:
    drains = method == "zero-bubble" or choose(method).order in (Order.GPIPE, Order.ONE_F_ONE_B)
    return (microbatches or 4 * stages) if drains else accumulate


def update_speed(device: str = "cpu", elements: int = 2**23, repeats: int = 5) -> float:
    """Bytes of parameters whose gradients are checked and that SGD updates in a second here."""
    parameters = [torch.zeros(elements // 8, device=device, requires_grad=True) for _ in range(8)]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    times = []
    gradients = [torch.ones_like(parameter) for parameter in parameters]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    for _ in range(repeats + 1):
        start = time.perf_counter()
        all_finite(gradients)
        optimizer.step()
        if device != "cpu":
            torch.accelerator.synchronize()
        times.append(time.perf_counter() - start)
    return 4 * elements / statistics.median(times[1:])
