"""Forecasts for a model on a cluster: throughput, memory and delay of each method.

Baselines (data parallel, GPipe, 1F1B, interleaved 1F1B, zero-bubble) train the original model, cut
by the same rule. PETRA trains the rewired model: the first stages rebuild activations, the last
stages keep their graphs, and the cut balances this work.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Final

import torch

from revcompile.compiler.cost import MemoryModel, Workload
from revcompile.compiler.cost.analytic import FLOPS_PER_BYTE
from revcompile.compiler.partition import Pieces, partition
from revcompile.compiler.partition.partition import bytes_sent
from revcompile.errors import InputError
from revcompile.ir.program import Partition
from revcompile.ir.types import Cost, TensorType
from revcompile.schedule import (
    Costs,
    Keep,
    Method,
    choose,
    delay,
    drained_passes,
    hiding_in_flight,
    peak_in_flight,
    period,
    stage_work,
)

BASELINES: Final = {
    "gpipe": ("gpipe", 1, Keep.GRAPH),
    "1f1b": ("1f1b", 1, Keep.GRAPH),
    "1f1b, recomputed": ("1f1b", 1, Keep.INPUT),
    "interleaved": ("interleaved", 2, Keep.GRAPH),
    "zero-bubble": ("zero-bubble", 1, Keep.GRAPH),
}
"""Pipelines that drain: the order of passes, stages per device, and what stages keep."""
NEARLY: Final = 0.99
"""A method is as good as the fastest if it reaches this share of its throughput."""
_SGD_TRAFFIC: Final = 6
_SUM_TRAFFIC: Final = 3
"""Bytes that an SGD update, or adding a gradient to a sum, moves per byte of parameters."""


@dataclass(frozen=True)
class Cluster:
    """Equal devices and links, with the bytes and FLOPs per second that they reach in practice."""

    devices: int
    link: float
    latency: float
    flops: float
    memory_bandwidth: float
    memory: int


@dataclass(frozen=True)
class Training:
    """Settings that all methods share."""

    microbatch_size: int
    accumulation_steps: int
    """Micro-batches per update of one pipeline."""
    optimizer_copies: float
    low_precision: bool
    """Whether to use bfloat16 except for weights and PETRA's streams; not for measured costs."""
    measured: bool = False
    """Whether costs are measured seconds instead of FLOPs."""


@dataclass(frozen=True)
class Forecast:
    """The forecast of one method; `memory` is in bytes, for the device that needs the most."""

    method: str
    stages: int
    replicas: int
    accumulation_steps: int
    throughput: float
    """Samples per second, all replicas together."""
    busy: float
    """Share of the time in which devices compute, averaged over devices."""
    bubbles: float
    """Share of the time in which they wait for other stages, even if links took no time."""
    links: float
    """Share of the time that links and gradient averaging add."""
    memory: int
    delay: int
    """The largest delay of gradients, in updates."""
    fits: bool
    in_flight_per_stage: float | None = None
    keeps: tuple[str, ...] = ()
    """What each stage keeps; for PETRA only."""


@dataclass(frozen=True)
class Planner:
    """Forecasts for pipelines of `stages` stages, replicated on all devices."""

    original: Pieces
    rewired: Pieces
    cluster: Cluster
    training: Training
    stages: int
    in_flight_per_stage: float | None = None
    """For PETRA; None tries values up to what links need."""

    @property
    def replicas(self) -> int:
        return self.cluster.devices // self.stages

    def rows(self) -> tuple[Forecast, ...]:
        """A row per method that the model allows; PETRA's rows come last."""
        steps, devices = self.training.accumulation_steps, self.cluster.devices
        # Data parallel: the whole model on each device, with the same number of samples per update.
        alone = math.ceil(steps * self.replicas / devices)
        samples = steps * self.replicas * self.training.microbatch_size
        smaller = dataclasses.replace(
            self.training, microbatch_size=math.ceil(samples / (alone * devices))
        )
        parallel = dataclasses.replace(self, training=smaller)
        rows = [parallel._baseline("data parallel", 1, alone, "1f1b", 1, Keep.GRAPH)]
        for name, (order, chunks, keep) in BASELINES.items() if self.stages > 1 else ():
            # Several stages per device need enough pieces, and micro-batches divisible by devices.
            with suppress(InputError) if chunks > 1 else nullcontext():
                rows.append(self._baseline(name, self.stages, steps, order, chunks, keep))
        named = {"petra, all rebuilt": [row for row in self.petra if "graph" not in row.keeps]}
        for baseline in rows:
            if baseline.method == "1f1b":
                named["petra in 1f1b's memory"] = self._within(baseline.memory)
        named["petra on this device"] = self._within(self.cluster.memory)
        petra = list[Forecast]()
        for name, found in named.items():
            if found and (not petra or best(found).throughput * NEARLY > petra[-1].throughput):
                petra.append(dataclasses.replace(best(found), method=name))
        return (*rows, *petra)

    def _within(self, memory: int) -> list[Forecast]:
        return [row for row in self.petra if row.memory <= memory]

    def frontier(self) -> tuple[Forecast, ...]:
        """PETRA's rows that are the fastest in their memory, in the order of their memory."""
        front = list[Forecast]()
        for row in sorted(self.petra, key=lambda row: (row.memory, -row.throughput)):
            if not front or row.throughput > front[-1].throughput:
                front.append(row)
        return tuple(front)

    # -- methods ----------------------------------------------------------------------------------

    def _baseline(
        self, name: str, devices: int, steps: int, order: str, chunks: int, keep: Keep
    ) -> Forecast:
        """The original model on `devices` devices, each with `chunks` stages."""
        stages, replicas = devices * chunks, self.cluster.devices // devices
        workload = self._workload("backprop")  # one micro-batch in flight
        keeps = [keep] * stages
        cut = self._precise(partition(self.original, stages, workload, keeps=keeps))
        model = MemoryModel(cut, workload)
        memories = [model.stage(j, *pieces, keep) for j, pieces in enumerate(cut.ranges)]
        kept = [memory.buffers + memory.ends for memory in memories]
        transient = [memory.messages + memory.working for memory in memories]
        memory = max(
            sum(memories[j].total - kept[j] - transient[j] for j in range(device, stages, devices))
            + max(transient[device::devices])
            + peak_in_flight(passes, kept)
            for device, passes in enumerate(drained_passes(order, stages, devices, steps))
        )
        costs = [self._times(cut, keeps, replicas, steps, is_free) for is_free in (False, True)]
        return self._forecast(name, order, costs, devices, steps, memory)

    @functools.cached_property
    def petra(self) -> tuple[Forecast, ...]:
        """PETRA with the graphs of the last 0, 1, 2, ... stages kept, up to all of them."""
        stages, steps = self.stages, self.training.accumulation_steps
        name = "petra_stashed" if self.rewired.rewired.policy.averaged else "petra"
        found = []
        for kept in range(stages + 1) if name == "petra" else [0]:
            keeps = (Keep.NOTHING,) * (stages - kept) + (Keep.GRAPH,) * kept
            cut = self._precise(partition(self.rewired, stages, self._workload(name), keeps=keeps))
            costs = [
                self._times(cut, keeps, self.replicas, steps, is_free) for is_free in (False, True)
            ]
            most = hiding_in_flight(name, costs[0], steps)
            quarters = [quarter / 4 for quarter in range(4, math.ceil(4 * most))]
            given = self.in_flight_per_stage
            for in_flight in [*quarters, most] if given is None else [given]:
                method = choose(name, in_flight_per_stage=in_flight)
                memory, late = self._memory(cut, method), delay(method, stages, 0, steps)
                row = self._forecast("petra", method, costs, stages, steps, memory, late)
                names = tuple(keep.value for keep in keeps)
                found.append(dataclasses.replace(row, in_flight_per_stage=in_flight, keeps=names))
        return tuple(found)

    def _memory(self, cut: Partition, method: Method) -> int:
        model = MemoryModel(cut, self._workload(method, self.training.accumulation_steps))
        stages = enumerate(zip(cut.ranges, cut.keeps, strict=True))
        return max(model.stage(j, *pieces, keep).total for j, (pieces, keep) in stages)

    def _forecast(
        self,
        name: str,
        order: str | Method,
        costs: Sequence[Costs],
        devices: int,
        steps: int,
        memory: int,
        late: int = 0,
    ) -> Forecast:
        """A pipeline on `devices` devices; `costs`: with real links and with free links."""
        time, without_links = (period(order, each, steps, devices) for each in costs)
        replicas, work = self.cluster.devices // devices, sum(stage_work(costs[1], steps)) / devices
        return Forecast(
            name,
            len(costs[1].forward),
            replicas,
            steps,
            throughput=replicas * self.training.microbatch_size / time,
            busy=work / time,
            bubbles=(without_links - work) / time,
            links=(time - without_links) / time,
            memory=memory,
            delay=late,
            fits=memory <= self.cluster.memory,
        )

    # -- costs ------------------------------------------------------------------------------------

    def _workload(self, method: str | Method, steps: int = 1) -> Workload:
        training = self.training
        return Workload(
            choose(method),
            training.microbatch_size,
            steps,
            training.optimizer_copies,
            autocast=torch.bfloat16 if training.low_precision else None,
        )

    def _precise(self, cut: Partition) -> Partition:
        """The partition, with costs and types in low precision if the training uses it."""
        if not self.training.low_precision:
            return cut
        streams = {name for piece in cut.rewired.couplings for name in piece.streams_in}
        streams |= cut.stream_outputs
        types = {
            name: dataclasses.replace(kind, dtype=torch.bfloat16)
            if isinstance(kind, TensorType) and kind.dtype == torch.float32 and name not in streams
            else kind
            for name, kind in cut.types.items()
        }
        sizes = ("saved", "shared", "passing", "unsaved")

        def halved(cost: Cost) -> Cost:
            halves = {name: getattr(cost, name) // 2 for name in sizes}
            forward = cost.flops + (cost.forward - cost.flops) / 2
            backward = cost.backward * forward / (cost.forward or 1)
            return dataclasses.replace(cost, forward=forward, backward=backward, **halves)

        parts = tuple(
            dataclasses.replace(part, costs=tuple(map(halved, part.costs))) for part in cut.parts
        )
        return dataclasses.replace(cut, parts=parts, types=types)

    def _times(
        self, cut: Partition, keeps: Sequence[Keep], replicas: int, steps: int, is_free: bool
    ) -> Costs:
        """Time of every stage and link for a micro-batch; with `is_free`, links take no time."""
        parts, cluster, training = cut.parts, self.cluster, self.training
        bandwidth, latency = (math.inf, 0.0) if is_free else (cluster.link, cluster.latency)
        forward, backward, update = [], [], []
        for part, keep in zip(parts, keeps, strict=True):
            ahead = back = updating = 0.0
            for piece, cost in zip(part.pieces, part.costs, strict=True):
                samples = training.microbatch_size / cost.batch
                seconds = samples * self._seconds(cost)
                again = piece.recomputed(keep, part is parts[-1])
                ahead += seconds
                back += seconds * (cost.backward / (cost.forward or 1) - (not again))
                in_sgd = _SGD_TRAFFIC * cost.trained / cluster.memory_bandwidth
                updating += cost.update if training.measured else in_sgd
            # The first gradient of an update needs no addition.
            summing = (1 - 1 / steps) * updating * _SUM_TRAFFIC / _SGD_TRAFFIC
            traffic = 4 + 2 * training.optimizer_copies
            trained = sum(cost.trained for cost in part.costs)
            averaging = 2 * trained * (replicas - 1) / replicas / bandwidth
            averaging += 2 * math.ceil(math.log2(replicas)) * latency
            if len(parts) == 1:  # data parallel averages while the last backward pass runs
                averaging = max(averaging - back, 0.0)
            forward.append(ahead)
            backward.append(back + summing)
            update.append(updating * traffic / _SGD_TRAFFIC + averaging)
        batch = training.microbatch_size
        sent = [bytes_sent(part.outputs, cut.types, batch) for part in parts[:-1]]
        # A stage that rebuilds its activations gets its outputs back with their gradients.
        sent_back = [
            size * (2 if keep is Keep.NOTHING and part.pieces[-1].reversible else 1)
            for size, part, keep in zip(sent, parts, keeps, strict=False)
        ]
        return Costs(
            tuple(forward),
            tuple(backward),
            tuple(update),
            tuple(latency + size / bandwidth for size in sent),
            tuple(latency + size / bandwidth for size in sent_back),
            latency,
        )

    def _seconds(self, cost: Cost) -> float:
        """Seconds of a forward pass: arithmetic plus memory traffic, or as measured."""
        if self.training.measured:
            return cost.forward
        moved = max(cost.forward - cost.flops, 0.0) / FLOPS_PER_BYTE
        return cost.flops / self.cluster.flops + moved / self.cluster.memory_bandwidth


def best(rows: Sequence[Forecast]) -> Forecast:
    """Among the rows nearly as fast as the fastest, the one with the least delay, then memory."""
    fastest = max(row.throughput for row in rows)
    near = [row for row in rows if row.throughput >= NEARLY * fastest]
    return min(near, key=lambda row: (row.delay, row.memory))


def fewest_idle(devices: int, most: int) -> int:
    """The largest number of stages, up to `most`, that leaves the fewest devices idle.

    >>> fewest_idle(64, 18), fewest_idle(7, 18)
    (16, 7)
    """
    return max(range(1, min(devices, most) + 1), key=lambda n: (devices // n * n, n))
