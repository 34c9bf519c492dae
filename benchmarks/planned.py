"""Plan against reality: predicted throughput beside the measured one, in the same run.

    taskset -c 0,1 python -m benchmarks.planned
    python -m benchmarks.planned --device cuda

On the CPU two ranks over gloo train, one thread each: pieces are measured on both at once, a rank's
throughput is that of its steps, and a trace of the run says which share of the time each rank
computed, beside the share it did not spend waiting for messages. On a GPU all stages are in this
process: once with recorded rounds, against the time of the pieces' kernels, and once action by
action, against the time of calls.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import timm
import torch
from torch import Tensor, distributed, multiprocessing
from torch.nn import functional as F

import revcompile
from benchmarks.harness import save, show, synchronize
from revcompile.compiler.cost import piece_costs
from revcompile.planning import Seconds, stage_costs, update_speed
from revcompile.program import Partition
from revcompile.runtime.distributed.trainer import DistributedTrainer
from revcompile.schedule import Costs, Wire, choose, in_one_process, period
from revcompile.staged import StagedModel

RANKS = 2
CLOCKS = {"cudagraphs": "replayed", "eager": "measured"}
"""By backend: how pieces are timed."""


@dataclass(frozen=True)
class Case:
    """A model and what it is fed."""

    model: str
    size: int
    batch: int
    stages: int

    def __str__(self) -> str:
        return f"{self.model}, {self.size} px, batch {self.batch}, {self.stages} stages"


CPU = (
    Case("resnet18", 64, 16, 2),
    Case("vit_tiny_patch16_224", 96, 12, 2),
    Case("mixer_s32_224", 224, 4, 2),
)
CUDA = (
    Case("resnet18", 64, 256, 10),
    Case("resnet50", 224, 64, 18),
    Case("vit_small_patch16_224", 224, 64, 8),
)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer that the planner assumes."""
    return torch.optim.SGD(parameters, lr=1e-4, momentum=0.9)


def made(case: Case, device: str) -> tuple[StagedModel, Tensor, Tensor]:
    """The staged model, captured at its real batch size, and a micro-batch."""
    torch.manual_seed(0)
    extra = {"img_size": case.size} if "vit" in case.model else {}
    model = timm.create_model(case.model, num_classes=10, **extra).to(device)
    x = torch.randn(case.batch, 3, case.size, case.size, device=device)
    y = torch.randint(0, 10, (case.batch,), device=device)
    return revcompile.petrafy(model, case.stages, x, check="off"), x, y


def measured(cut: Partition, how: str) -> Partition:
    """The same stages with times of this machine as their costs."""
    pieces = [piece for part in cut.parts for piece in part.pieces]
    found = iter(piece_costs(cut.rewired, pieces, cut.types, how))
    parts = tuple(replace(p, costs=tuple(next(found) for _ in p.pieces)) for p in cut.parts)
    return replace(cut, parts=parts)


def costs_here(cut: Partition, case: Case, wire: Wire, device: str, how: str = "measured") -> Costs:
    """What the planner would say of these stages on this machine."""
    seconds = Seconds.measured(update_speed(device))
    return stage_costs(measured(cut, how), choose("petra"), seconds, batch=case.batch, wire=wire)


# -- two ranks ------------------------------------------------------------------------------------


def work(rank: int, case: Case, options: argparse.Namespace, place: str, results: Any) -> None:
    """One rank: predict, train, predict, train, ...; then a traced run."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(rank)}
    distributed.init_process_group("gloo", f"file://{place}/store", rank=rank, world_size=RANKS)
    net, x, y = made(case, "cpu")
    plain, _, _ = made(case, "cpu")
    trainer = net.trainer(sgd, F.cross_entropy)
    assert isinstance(trainer, DistributedTrainer)
    for _ in range(2 * RANKS):
        trainer.step(x, y)
    found: dict[str, list[float]] = {"predicted": [], "measured": []}
    for _ in range(options.rounds):
        distributed.barrier()
        costs = costs_here(plain.partition, case, Wire(1e9, 1e-4), "cpu")
        found["predicted"].append(period("petra", costs))
        distributed.barrier()
        start = time.perf_counter()
        for _ in range(options.steps):
            trainer.step(x, y)
        distributed.barrier()
        found["measured"].append((time.perf_counter() - start) / options.steps)
    results[rank] = found | _traced(trainer, x, y, options.steps, place)
    distributed.barrier()
    os._exit(0)


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
    """The medians over rounds: seconds a micro-batch, predicted and measured; shares by rank."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as place, context.Manager() as manager:
        results = manager.dict()
        arguments = (case, options, place, results)
        ranks = [context.Process(target=work, args=(rank, *arguments)) for rank in range(RANKS)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        found = dict(results)
    pairs = zip(*(found[rank]["predicted"] for rank in range(RANKS)), strict=True)
    return {
        "predicted": [max(pair) for pair in pairs],
        "measured": found[0]["measured"],
        "busy": [found[rank]["busy"] for rank in range(RANKS)],
        "working": [found[rank]["working"] for rank in range(RANKS)],
    }


# -- one process ----------------------------------------------------------------------------------


def in_process(case: Case, options: argparse.Namespace, backend: str) -> dict[str, Any]:
    """All stages on one device, one after the other."""
    device = torch.device(options.device)
    net, x, y = made(case, options.device)
    plain, _, _ = made(case, options.device)
    trainer = net.trainer(sgd, F.cross_entropy, backend=backend)
    for _ in range(2 * case.stages + 4):
        trainer.step(x, y)
    found: dict[str, list[float]] = {"predicted": [], "measured": []}
    for _ in range(options.rounds):
        costs = costs_here(plain.partition, case, Wire(1e12), options.device, CLOCKS[backend])
        found["predicted"].append(period("petra", in_one_process(costs)))
        synchronize(device)
        start = time.perf_counter()
        for _ in range(options.steps):
            trainer.step(x, y)
        synchronize(device)
        found["measured"].append((time.perf_counter() - start) / options.steps)
    return found


def main() -> None:
    """Every case, one table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--backends", nargs="+", choices=CLOCKS, default=list(CLOCKS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    cpu = options.device == "cpu"
    results, rows = {}, []
    variants: list[tuple[Case, str]] = [(case, "") for case in CPU]
    if not cpu:
        variants = [(case, backend) for backend in options.backends for case in CUDA]
    for case, backend in variants:
        name = f"{case}, {backend}" if backend else str(case)
        found = on_two_ranks(case, options) if cpu else in_process(case, options, backend)
        results[name] = found
        pairs = zip(found["measured"], found["predicted"], strict=True)
        ratio = median(real / said for real, said in pairs)  # of throughputs: predicted / measured
        rows.append(
            (
                name,
                *(f"{1e3 * median(found[kind]):.1f}" for kind in ("predicted", "measured")),
                f"{ratio:.2f}",
                " ".join(f"{share:.3f}" for share in found.get("busy", ())),
                " ".join(f"{share:.3f}" for share in found.get("working", ())),
                f"{sum(found['busy']) / sum(found['working']):.3f}" if cpu else "",
            )
        )
    columns = ("case", "plan ms", "real ms", "ratio", "busy", "not waiting", "busy / that")
    show("plan against reality: ratio of throughputs, predicted / measured", columns, rows)
    save(options.json, "planned", torch.device(options.device), results)


if __name__ == "__main__":
    main()
