"""Pipelines that drain at every update: the passes of each device, their time and memory.

GPipe and 1F1B (PipeDream-flush) have the order of `generate`. Two orders are those of other
systems: interleaved 1F1B (Megatron-LM) has several stages on each device, stage s on device
s % devices; zero-bubble (ZB-H1 of Zero Bubble Pipeline Parallelism) splits a backward pass: I is
the gradient of the inputs, which is sent at once; W is the gradient of the weights, which fills
bubbles later. With two devices and four micro-batches:

    1f1b          device 0   F0 F1 B0 F2 B1 F3 B2 B3
                  device 1   F0 B0 F1 B1 F2 B2 F3 B3
    zero-bubble   device 0   F0 F1 I0 W0 F2 I1 W1 F3 I2 W2 I3 W3
                  device 1   F0 I0 F1 I1 W0 F2 I2 W1 F3 I3 W2 W3
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

from revcompile.errors import InputError
from revcompile.schedule.action import Op
from revcompile.schedule.dryrun import Costs
from revcompile.schedule.generate import actions
from revcompile.schedule.methods import Method

OTHERS: Final = ("interleaved", "zero-bubble")
"""Orders that the methods' table does not have."""
_SHARES: Final = {"B": 1.0, "I": 0.5, "W": 0.5}
"""Each kind's share of the time of a backward pass."""
_STEPS: Final = {"F": 1, "B": -1, "I": -1, "W": 0}
"""The stage that a pass sends its result to, relative to its own; 0: it sends none."""


class Pass(NamedTuple):
    """A pass of one stage: F, B, I or W."""

    kind: str
    stage: int
    microbatch: int


def drained_passes(
    order: str | Method, stages: int, devices: int, microbatches: int
) -> tuple[tuple[Pass, ...], ...]:
    """What each device does for one update, in order.

    >>> for device in drained_passes("1f1b", 2, 2, microbatches=2):
    ...     print(*(f"{kind}{microbatch}" for kind, _, microbatch in device))
    F0 F1 B0 B1
    F0 B0 F1 B1
    """
    if order not in OTHERS:
        kinds = {Op.FORWARD: "F", Op.BACKWARD: "B"}
        lists = actions(order, stages, microbatches, microbatches)
        return tuple(
            tuple(Pass(kinds[a.op], stage, a.index) for a in done if a.op in kinds)
            for stage, done in enumerate(lists)
        )
    chunks, total = stages // devices, microbatches * stages // devices
    if stages % devices or (chunks > 1 and microbatches % devices):
        raise InputError(
            f"{order}: {stages} stages and {microbatches} micro-batches on {devices} devices; "
            "use multiples of the number of devices"
        )
    splits = order == "zero-bubble"
    of_devices = []
    for device in range(devices):
        forward, backward = (
            [
                Pass(kind, device + chunk * devices, block * devices + within)
                for block in range(-(-microbatches // devices))
                for chunk in (range(chunks) if kind == "F" else reversed(range(chunks)))
                for within in range(min(devices, microbatches - block * devices))
            ]
            for kind in ("F", "I" if splits else "B")
        )
        later = devices - 1 - device
        warm_up = min(later if splits else 2 * later + (chunks - 1) * devices, total)
        weights = [each._replace(kind="W") for each in backward] if splits else []
        passes = forward[:warm_up]
        for done in range(total):
            passes += [*forward[warm_up + done : warm_up + done + 1], backward[done]]
            passes += weights[max(done - device, 0) : max(done - device + 1, 0)]
        of_devices.append((*passes, *weights[max(total - device, 0) :]))
    return tuple(of_devices)


def update_time(lists: Sequence[Sequence[Pass]], costs: Costs) -> float:
    """Time from the first micro-batch of an update until the first of the next one can enter.

    Args:
        lists: What each device does for the update.
        costs: Times of stages, of their updates, and of messages from one device to another.
    """
    stages, queues = len(costs.forward), [deque(passes) for passes in lists]
    device_of = {one.stage: device for device, passes in enumerate(lists) for one in passes}
    clock, started = [0.0] * len(lists), dict[int, float]()
    arrived: dict[tuple[int, int, int], float] = {}
    link_free: dict[tuple[int, int], float] = {}
    while any(queues):
        for device, queue in enumerate(queues):
            while queue:
                kind, stage, microbatch = queue[0]
                step = _STEPS[kind]
                if step and 0 <= stage - step < stages:
                    if (stage, step, microbatch) not in arrived:
                        break
                    clock[device] = max(clock[device], arrived[stage, step, microbatch])
                queue.popleft()
                started.setdefault(device, clock[device])
                clock[device] += (
                    costs.forward[stage] if kind == "F" else _SHARES[kind] * costs.backward[stage]
                )
                target = stage + step
                if step and 0 <= target < stages:
                    links = costs.link_forward if step > 0 else costs.link_backward
                    time = links[min(stage, target)] if device_of[target] != device else 0.0
                    sent = max(clock[device], link_free.get((device, step), 0.0))
                    link_free[device, step] = sent + max(time - costs.latency, 0.0)
                    arrived[target, step, microbatch] = sent + time
    for stage, update in enumerate(costs.update):
        clock[device_of[stage]] += update
    return max(end - started[device] for device, end in enumerate(clock))


def peak_in_flight(passes: Sequence[Pass], sizes: Sequence[int]) -> int:
    """The most that a device keeps for backward, if each stage keeps `sizes` per micro-batch.

    >>> peak_in_flight(drained_passes("1f1b", 4, 4, microbatches=8)[0], [1, 1, 1, 1])
    4
    """
    held = most = 0
    for kind, stage, _ in passes:
        held += {"F": sizes[stage], "B": -sizes[stage], "W": -sizes[stage]}.get(kind, 0)
        most = max(most, held)
    return most
