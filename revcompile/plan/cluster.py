"""A cluster's devices and links, and how long a stage takes on them."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from revcompile.compiler.cost import Workload
from revcompile.compiler.cost.analytic import FLOPS_PER_BYTE
from revcompile.compiler.partition.partition import bytes_sent
from revcompile.ir.program import Part, Partition
from revcompile.ir.types import Cost
from revcompile.runtime.stage.tensors import all_finite
from revcompile.schedule import Costs, Keep

_SUM_TRAFFIC: Final = 3
"""Times that adding a gradient to a sum moves its bytes: two reads, one write."""


@dataclass(frozen=True)
class NetworkLink:
    """A link between two devices: bytes a second, and seconds until the first byte arrives.

    >>> NetworkLink(bandwidth=1e9, latency=0.01).transfer_time(5e8)
    0.51
    """

    bandwidth: float
    latency: float = 0.0

    def transfer_time(self, nbytes: float) -> float:
        """From sending the first byte to receiving the last one."""
        return self.latency + self.busy_time(nbytes)

    def busy_time(self, nbytes: float) -> float:
        """How long a message keeps the link from carrying another."""
        return nbytes / self.bandwidth


@dataclass(frozen=True)
class Device:
    """What one device really reaches: FLOPs and bytes of memory traffic, a second.

    The defaults are somewhat less than half and two thirds of an H200's data sheet (bfloat16).
    """

    flops: float = 400e12
    bandwidth: float = 3.3e12


@dataclass(frozen=True)
class TimeModel:
    """How costs become seconds: counted work on a device, or costs that are seconds already."""

    passes: Callable[[Cost], tuple[float, float]]
    """Seconds of a forward and of a backward pass that computes forward again."""
    update_speed: float
    """Bytes of parameters that an update handles in a second."""
    sum_speed: float = math.inf
    """Bytes of gradients that are added to their sum in a second."""

    @classmethod
    def on(cls, device: Device, optimizer_copies: float = 1.0) -> TimeModel:
        """Arithmetic and memory traffic one after the other, on a device of these figures.

        `optimizer_copies` is as in `Workload`: an update reads and writes parameters and optimizer
        state, and reads gradients twice, as it checks first that they are finite.
        """

        def passes(cost: Cost) -> tuple[float, float]:
            moved = (cost.forward - cost.flops) / FLOPS_PER_BYTE
            forward = cost.flops / device.flops + max(moved, 0.0) / device.bandwidth
            ratio = cost.backward / cost.forward if cost.forward else 0.0
            return forward, ratio * forward

        update_traffic = 4 + 2 * optimizer_copies
        return cls(passes, device.bandwidth / update_traffic, device.bandwidth / _SUM_TRAFFIC)

    @classmethod
    def measured(cls, update_speed: float, sum_speed: float = math.inf) -> TimeModel:
        """Costs measured on this machine are seconds."""
        return cls(lambda cost: (cost.forward, cost.backward), update_speed, sum_speed)


@dataclass(frozen=True)
class Cluster:
    """Equal devices, with equal links between neighbours of a pipeline."""

    devices: int
    link: NetworkLink
    time: TimeModel


def stage_times(
    partition: Partition,
    workload: Workload,
    time_model: TimeModel,
    link: NetworkLink,
    replicas: int = 1,
) -> Costs:
    """Time of every stage and link for a micro-batch.

    Args:
        partition: The stages, one on each device.
        workload: Method, batch size, and micro-batches to an update.
        time_model: How costs become seconds.
        link: Between two stages, and between replicas.
        replicas: Copies of the pipeline, whose gradients are averaged at every update.
    """
    parts, keep = partition.parts, workload.method.keep
    passes = [_passes(part, workload, time_model, part is parts[-1]) for part in parts]
    sent = [
        bytes_sent(part.outputs, partition.types, workload.microbatch_size) for part in parts[:-1]
    ]
    # A stage that ends in a coupling is sent its outputs back beside their gradients.
    rebuilds = [keep is Keep.NOTHING and part.pieces[-1].reversible for part in parts[:-1]]
    sent_back = [2 * size if twice else size for size, twice in zip(sent, rebuilds, strict=True)]
    trained = [sum(cost.trained for cost in part.costs) for part in parts]
    summed = 1 - 1 / workload.accumulation_steps  # the first gradient of an update begins the sum
    return Costs(
        forward=tuple(forward for forward, _ in passes),
        backward=tuple(
            backward + summed * size / time_model.sum_speed
            for (_, backward), size in zip(passes, trained, strict=True)
        ),
        update=tuple(
            size / time_model.update_speed + _all_reduce(size, replicas, link) for size in trained
        ),
        link_forward=tuple(link.transfer_time(size) for size in sent),
        link_backward=tuple(link.transfer_time(size) for size in sent_back),
    )


def _passes(
    part: Part, workload: Workload, time_model: TimeModel, is_last: bool
) -> tuple[float, float]:
    """Forward and backward of a stage. Where the graph is kept nothing is computed again."""
    forward = backward = 0.0
    for piece, cost in zip(part.pieces, part.costs, strict=True):
        samples = workload.microbatch_size / cost.batch
        ahead, back = (samples * seconds for seconds in time_model.passes(cost))
        forward += ahead
        backward += back if piece.recomputed(workload.method.keep, is_last) else back - ahead
    return forward, max(backward, 0.0)


def _all_reduce(nbytes: int, replicas: int, link: NetworkLink) -> float:
    """A ring's traffic, a tree's latency; not overlapped with anything."""
    if replicas < 2:
        return 0.0
    hops = 2 * math.ceil(math.log2(replicas))
    return link.busy_time(2 * nbytes * (replicas - 1) / replicas) + hops * link.latency


def update_speed(
    device: str = "cpu", optimizer_copies: float = 1.0, elements: int = 2**23, repeats: int = 5
) -> float:
    """Bytes of parameters that SGD (or, with two copies of state, AdamW) updates in a second here.

    Gradients are checked for infinities first, as in training.
    """
    parameters = [torch.zeros(elements // 8, device=device, requires_grad=True) for _ in range(8)]
    gradients = [torch.ones_like(parameter) for parameter in parameters]
    optimizer: torch.optim.Optimizer = (
        torch.optim.AdamW(parameters)
        if optimizer_copies > 1
        else torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    )
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient

    def update() -> None:
        all_finite(gradients)
        optimizer.step()

    return 4 * elements / _seconds(update, device, repeats)


def sum_speed(device: str = "cpu", elements: int = 2**23, repeats: int = 5) -> float:
    """Bytes of gradients that are added to their sum in a second here."""
    total, gradient = (torch.ones(elements, device=device) for _ in range(2))
    return 4 * elements / _seconds(lambda: total.add_(gradient), device, repeats)


def _seconds(step: Callable[[], object], device: str, repeats: int) -> float:
    """The median time of a step; the first one is not counted."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        step()
        if device != "cpu":
            torch.accelerator.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])
