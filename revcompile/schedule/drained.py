"""Pipelines that drain at every update: the passes of each device, their time and memory.

Stages are dealt out in turn: stage s is on device s % devices. Interleaved 1F1B has several stages
on each device. Zero-bubble splits a backward pass: B is the gradient of the inputs, which is sent
at once; W, that of the weights, fills bubbles later. Two devices and four micro-batches:

    1f1b          device 0   F0 F1 B0 F2 B1 F3 B2 B3
                  device 1   F0 B0 F1 B1 F2 B2 F3 B3
    zero-bubble   device 0   F0 F1 B0 W0 F2 B1 W1 F3 B2 W2 B3 W3
                  device 1   F0 B0 F1 B1 W0 F2 B2 W1 F3 B3 W2 W3

The orders are those of the papers: GPipe; PipeDream-flush (1F1B); Megatron-LM (interleaved 1F1B);
Zero Bubble Pipeline Parallelism (ZB-H1).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from revcompile.errors import InputError
from revcompile.schedule.dryrun import Costs

_WARM_UP: Final[dict[str, Callable[[int, int, int], int]]] = {
    "locked": lambda later, devices, chunks: 0,
    "gpipe": lambda later, devices, chunks: -1,
    "1f1b": lambda later, devices, chunks: later,
    "interleaved": lambda later, devices, chunks: 2 * later + (chunks - 1) * devices,
    "zero-bubble": lambda later, devices, chunks: later,
}
"""Forward passes before the first backward pass, -1: all; by the number of later devices."""
DRAINED: Final = tuple(_WARM_UP)
_WEIGHT_SHARE: Final = 0.5
"""Of a backward pass, what the gradients of weights take."""


class Pass(NamedTuple):
    """A pass of one stage: F, B or W."""

    kind: str
    stage: int
    microbatch: int


def drained_passes(
    order: str, stages: int, devices: int, microbatches: int
) -> tuple[tuple[Pass, ...], ...]:
    """What each device does for one update, in order.

    >>> for device in drained_passes("1f1b", 2, 2, microbatches=2):
    ...     print(*(f"{kind}{microbatch}" for kind, _, microbatch in device))
    F0 F1 B0 B1
    F0 B0 F1 B1
    """
    chunks, total = stages // devices, microbatches * stages // devices
    if stages % devices or (chunks > 1 and microbatches % devices):
        raise InputError(
            f"{order}: {stages} stages and {microbatches} micro-batches on {devices} devices; "
            "use multiples of the number of devices"
        )
    lists = []
    for device in range(devices):
        forward, backward = (
            [
                Pass(kind, device + chunk * devices, block * devices + within)
                for block in range(-(-microbatches // devices))
                for chunk in (range(chunks) if kind == "F" else reversed(range(chunks)))
                for within in range(min(devices, microbatches - block * devices))
            ]
            for kind in "FB"
        )
        warm_up = _WARM_UP[order](devices - 1 - device, devices, chunks)
        warm_up = total if warm_up < 0 else min(warm_up, total)
        late = device if order == "zero-bubble" else None  # how many passes B is ahead of W
        passes = forward[:warm_up]
        for done in range(total):
            passes += [*forward[warm_up + done : warm_up + done + 1], backward[done]]
            if late is not None and done >= late:
                passes.append(backward[done - late]._replace(kind="W"))
        if late:
            passes += [each._replace(kind="W") for each in backward[-late:]]
        lists.append(tuple(passes))
    return tuple(lists)


def update_time(order: str, costs: Costs, devices: int, microbatches: int) -> float:
    """How long after the first micro-batch of an update that of the next update can enter."""
    stages = len(costs.forward)
    lists = drained_passes(order, stages, devices, microbatches)
    queues = [deque(passes) for passes in lists]
    clock, started = [0.0] * devices, dict[int, float]()
    arrived: dict[Pass, float] = {}
    link_free: dict[tuple[int, str], float] = {}
    weights = _WEIGHT_SHARE if order == "zero-bubble" else 0.0
    while any(queues):
        for device, queue in enumerate(queues):
            while queue:
                kind, stage, microbatch = queue[0]
                step = {"F": 1, "B": -1, "W": 0}[kind]
                source = Pass(kind, stage - step, microbatch)
                if step and 0 <= source.stage < stages:
                    if source not in arrived:
                        break
                    clock[device] = max(clock[device], arrived[source])
                one = queue.popleft()
                started.setdefault(device, clock[device])
                share = {"B": 1 - weights, "W": weights}.get(kind)
                clock[device] += (
                    costs.forward[stage] if share is None else share * costs.backward[stage]
                )
                if step and 0 <= stage + step < stages:
                    links = costs.link_forward if step > 0 else costs.link_backward
                    time = links[min(stage, stage + step)] if devices > 1 else 0.0
                    sent = max(clock[device], link_free.get((device, kind), 0.0))
                    link_free[device, kind] = sent + max(time - costs.latency, 0.0)
                    arrived[one] = sent + time
    for stage, update in enumerate(costs.update):
        clock[stage % devices] += update
    return max(end - started[device] for device, end in enumerate(clock))


def peak_in_flight(passes: Sequence[Pass], sizes: Sequence[int]) -> int:
    """The most that a device keeps from forward to its last backward pass, by stage's size.

    >>> peak_in_flight(drained_passes("1f1b", 4, 4, microbatches=8)[0], [1, 1, 1, 1])
    4
    """
    last = "W" if any(one.kind == "W" for one in passes) else "B"
    held = most = 0
    for kind, stage, _ in passes:
        held += {"F": sizes[stage], last: -sizes[stage]}.get(kind, 0)
        most = max(most, held)
    return most
