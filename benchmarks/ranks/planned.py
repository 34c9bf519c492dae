"""Plan against reality: predicted throughput beside the measured one, in the same run.

    taskset -c 0,1 python -m benchmarks run planned
    python -m benchmarks run planned --device cuda

On the CPU two ranks over gloo train, one thread each: pieces are measured on both at once, a rank's
throughput is that of its steps, and a trace of the run says which share of the time each rank
computed, beside the share it did not spend waiting for messages. On a GPU all stages are in this
process: once with captured steps, against the time of the pieces' kernels, and once action by
action, against the time of calls.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from statistics import median
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn import functional as F

import revcompile
from benchmarks.harness import ratio, show, synchronize
from benchmarks.models import Case
from benchmarks.ranks.launch import RANKS, on_ranks
from benchmarks.registry import Benchmark, Row
from revcompile.compiler.cost import Workload, piece_costs
from revcompile.ir.program import Partition
from revcompile.plan.cluster import NetworkLink, TimeModel, stage_times, update_speed
from revcompile.runtime.distributed.trainer import DistributedTrainer
from revcompile.schedule import Costs, choose, in_one_process, period
from revcompile.staged import StagedModel

CLOCKS = {"cudagraphs": "replayed", "eager": "measured"}
"""By backend: how pieces are timed."""
CPU = (
    Case("resnet18", 64, 16),
    Case("vit_tiny_patch16_224", 96, 12),
    Case("mixer_s32_224", 224, 4),
)
CUDA = {
    Case("resnet18", 64, 256): 10,
    Case("resnet50", 224, 64): 18,
    Case("vit_small_patch16_224", 224, 64): 8,
}
"""Each with its number of stages."""


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer that the planner assumes."""
    return torch.optim.SGD(parameters, lr=1e-4, momentum=0.9)


def made(case: Case, stages: int, device: str) -> tuple[StagedModel, Tensor, Tensor]:
    """The staged model, captured at its real batch size, and a micro-batch."""
    x, y = case.data(device)
    return revcompile.petrafy(case.create().to(device), stages, x, check="off"), x, y


def measured(cut: Partition, how: str) -> Partition:
    """The same stages with times of this machine as their costs."""
    pieces = [piece for part in cut.parts for piece in part.pieces]
    found = iter(piece_costs(cut.rewired, pieces, cut.types, how))
    parts = tuple(replace(p, costs=tuple(next(found) for _ in p.pieces)) for p in cut.parts)
    return replace(cut, parts=parts)


def costs_here(
    cut: Partition, case: Case, link: NetworkLink, device: str, how: str = "measured"
) -> Costs:
    """What the planner would say of these stages on this machine."""
    time_model = TimeModel.measured(update_speed(device))
    workload = Workload(choose("petra"), case.batch)
    return stage_times(measured(cut, how), workload, time_model, link)


# -- two ranks ------------------------------------------------------------------------------------


def work(rank: int, case: Case, options: argparse.Namespace, place: str) -> dict[str, Any]:
    """One rank: predict, train, predict, train, ...; then a traced run."""
    net, x, y = made(case, RANKS, "cpu")
    plain, _, _ = made(case, RANKS, "cpu")
    trainer = net.trainer(sgd, F.cross_entropy)
    assert isinstance(trainer, DistributedTrainer)
    for _ in range(2 * RANKS):
        trainer.step(x, y)
    found: dict[str, list[float]] = {"predicted": [], "measured": []}
    for _ in range(options.rounds):
        distributed.barrier()
        costs = costs_here(plain.partition, case, NetworkLink(1e9, 1e-4), "cpu")
        found["predicted"].append(period("petra", costs))
        distributed.barrier()
        start = time.perf_counter()
        for _ in range(options.steps):
            trainer.step(x, y)
        distributed.barrier()
        found["measured"].append((time.perf_counter() - start) / options.steps)
    return found | _traced(trainer, x, y, options.steps, place)


def _traced(
    trainer: DistributedTrainer, x: Tensor, y: Tensor, steps: int, place: str
) -> dict[str, Any]:
    """Share of the time that this rank computes: by the trace, and as what it does not wait."""
    waited: list[float] = []
    wait = trainer.transport.wait

    def timed(what: str) -> None:
        start = time.perf_counter()
        wait(what)
        waited.append(time.perf_counter() - start)

    trainer.transport.wait = timed
    distributed.barrier()
    trace = trainer.trace(f"{place}/run.json")
    start = time.perf_counter()
    for _ in range(2 * steps):
        trainer.step(x, y)
    whole = time.perf_counter() - start
    trace.stop()
    trainer.transport.wait = wait
    assert trace.busy is not None
    return {"busy": trace.busy[trainer.rank], "working": 1 - sum(waited) / whole}


def on_two_ranks(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """Round by round: seconds a micro-batch, predicted and measured; shares by rank."""
    with tempfile.TemporaryDirectory() as place:
        found = on_ranks(work, case, options, place)
    pairs = zip(*(one["predicted"] for one in found), strict=True)
    return {
        "predicted": [max(pair) for pair in pairs],
        "measured": found[0]["measured"],
        "busy": [one["busy"] for one in found],
        "working": [one["working"] for one in found],
    }


# -- one process ----------------------------------------------------------------------------------


def in_process(case: Case, options: argparse.Namespace, backend: str) -> dict[str, Any]:
    """All stages on one device, one after the other."""
    device, stages = torch.device(options.device), CUDA.get(case, 8)
    net, x, y = made(case, stages, options.device)
    plain, _, _ = made(case, stages, options.device)
    trainer = net.trainer(sgd, F.cross_entropy, backend=backend)
    for _ in range(2 * stages + 4):
        trainer.step(x, y)
    found: dict[str, list[float]] = {"predicted": [], "measured": []}
    for _ in range(options.rounds):
        link = NetworkLink(1e12)
        costs = costs_here(plain.partition, case, link, options.device, CLOCKS[backend])
        found["predicted"].append(period("petra", in_one_process(costs)))
        synchronize(device)
        start = time.perf_counter()
        for _ in range(options.steps):
            trainer.step(x, y)
        synchronize(device)
        found["measured"].append((time.perf_counter() - start) / options.steps)
    return found


def arguments(parser: argparse.ArgumentParser) -> None:
    """Its options."""
    parser.add_argument("cases", nargs="*", type=Case.parse, help="model:pixels:batch")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--backends", nargs="+", choices=CLOCKS, default=list(CLOCKS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)


def main(options: argparse.Namespace) -> Iterator[Row]:
    """Every case, one table."""
    cpu = options.device == "cpu"
    rows = []
    cases = options.cases or (CPU if cpu else CUDA)
    for case, backend in product(cases, ("",) if cpu else options.backends):
        name = f"{case}, {backend}" if backend else str(case)
        found = on_two_ranks(case, options) if cpu else in_process(case, options, backend)
        off = ratio(found["measured"], found["predicted"])  # of throughputs: predicted / measured
        rows.append(
            (
                name,
                *(f"{1e3 * median(found[kind]):.1f}" for kind in ("predicted", "measured")),
                f"{off.median:.2f}",
                " ".join(f"{share:.3f}" for share in found.get("busy", ())),
                " ".join(f"{share:.3f}" for share in found.get("working", ())),
                f"{sum(found['busy']) / sum(found['working']):.3f}" if cpu else "",
            )
        )
        yield {"case": case, "backend": backend, "ratio": off, **found}
    columns = ("case", "plan ms", "real ms", "ratio", "busy", "not waiting", "busy / that")
    show("plan against reality: ratio of throughputs, predicted / measured", columns, rows)


SMALLEST = ("conv-2x4:8:2", "--rounds", "1", "--steps", "2")
BENCHMARK = Benchmark("planned", arguments, main, smallest=SMALLEST)
