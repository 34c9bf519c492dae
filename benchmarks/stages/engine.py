"""All stages on one device: milliseconds a micro-batch and memory, backends and orders in turn.

    python -m benchmarks run engine --model revnet18 --backends eager cudagraphs
    python -m benchmarks run engine --model revnet50 --backends eager cudagraphs inductor
    python -m benchmarks run engine --model revnet50 --orders 1f1b paper --buffers bf16
    python -m benchmarks run engine --model revnet50 --orders 1f1b backprop --backends inductor \
        --buffers bf16 --messages bf16
    python -m benchmarks run engine --device cpu --batch 4 --backends eager static
    python -m benchmarks run engine --model conv-12x64 --size 32 --sweep depth 6 12 24

Every variant trains the same weights on the same micro-batches with a full pipeline. Times are of
whole turns of `--steps` steps, one variant after the other; losses are compared with those of the
first backend in the same order. Memory is what the process takes of the device while one variant
trains alone; on the CPU, where bytes are counted, what training adds to the parameters. `moved` is
how many of the allocator's counters change over 100 steps. `start` is the time until all steps are
captured, compilation included; torch keeps what it has compiled on disk, for the next process.

The order `backprop` is plain backpropagation of the same rewired model. On a GPU a second table
says what takes the memory: `pool` is what the graphs compute in, `rest` what the allocator caches
and what libraries take.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import revcompile
from benchmarks.harness import (
    device_bytes,
    interleave,
    measure_peak,
    mib,
    ratio,
    show,
    synchronize,
)
from benchmarks.models import Case, create, of_depth
from benchmarks.registry import Benchmark
from benchmarks.registry import Row as Found
from revcompile.runtime.executor.graphs import CudaGraphReplay
from revcompile.runtime.trainer.trainer import Trainer
from revcompile.staged import StagedModel

QUIET: Final = 100
"""Steps over which the allocator's counters should stand still."""


MODELS: Final = {
    "revnet18": (Case("resnet18", 32, 256), 10),
    "revnet34": (Case("resnet34", 32, 256), 18),
    "revnet50": (Case("resnet50", 224, 64, 1000), 18),
}
"""The paper's: what is trained, and its stages."""


@dataclass
class Row:
    """What is known of one variant."""

    backend: str
    order: str
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    bytes: int = 0
    categories: dict[str, int] = field(default_factory=dict)
    start: float = 0.0
    moved: list[str] = field(default_factory=list)
    deviation: float = 0.0

    @property
    def name(self) -> str:
        """Backend and order."""
        return f"{self.backend}, {self.order}"


def chosen(options: argparse.Namespace) -> tuple[Case, int]:
    """What is trained, and its stages: the paper's, or as the options say."""
    case, stages = MODELS.get(options.model, (Case(options.model, 32, 64), 4))
    asked = {"size": options.size, "batch": options.batch}
    case = replace(case, **{name: value for name, value in asked.items() if value})
    return replace(case, model=of_depth(case.model, options.depth)), options.stages or stages


def build(case: Case, stages: int, device: torch.device) -> StagedModel:
    """The compiled model: the same weights each time."""
    net = create(case.model, case.size, case.classes, small=case.size < 64)
    net = net.to(device).to(memory_format=torch.channels_last)
    x, _ = replace(case, batch=2).data(device)
    return revcompile.petrafy(net, stages, x, check="off")


class Feed:
    """A few micro-batches on the device, over and over."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.batches: list[tuple[Tensor, Tensor]] = []
        for seed in range(4):
            x, y = case.data(device, seed)
            self.batches.append((x.to(memory_format=torch.channels_last), y))
        self._next = 0

    def turn(self, trainer: Trainer, steps: int) -> list[Tensor]:
        """So many steps; the losses, still on the device."""
        found = []
        for _ in range(steps):
            x, y = self.batches[self._next % len(self.batches)]
            self._next += 1
            loss = trainer.step(x, y).loss_tensor
            assert loss is not None
            found.append(loss)
        return found


class Bench:
    """All variants of one model."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.case, self.stages = chosen(options)
        self.device = torch.device(options.device)
        self.rows = [Row(b, o) for o in options.orders for b in options.backends]

    def trainer(self, row: Row) -> Trainer:
        """A trainer with a model of its own."""
        return build(self.case, self.stages, self.device).trainer(
            lambda p: torch.optim.SGD(p, lr=self.options.lr, momentum=0.9, weight_decay=1e-4),
            F.cross_entropy,
            **({"method": "backprop"} if row.order == "backprop" else {"order": row.order}),
            autocast=torch.bfloat16 if self.options.dtype == "bf16" else None,
            backend=row.backend,
            buffers=torch.bfloat16 if self.options.buffers == "bf16" else None,
            messages=torch.bfloat16 if self.options.messages == "bf16" else None,
        )

    def run(self) -> list[Row]:
        """Each variant alone, for losses and memory; then all of them in turn, for time."""
        turns = {}
        for row in self.rows:
            trainer, feed = self._alone(row)
            turns[row.name] = lambda t=trainer, f=feed: f.turn(t, self.options.steps)
            if self.options.alone:
                timed = {row.name: turns.pop(row.name)}
                seconds = interleave(timed, self.options.rounds, 1, self.device)
                row.seconds = [s / self.options.steps for s in seconds[row.name]]
                del trainer, feed, timed
        if turns:
            seconds = interleave(turns, self.options.rounds, 1, self.device)
            for row in self.rows:
                row.seconds = [s / self.options.steps for s in seconds[row.name]]
        self._compare()
        return self.rows

    def _alone(self, row: Row) -> tuple[Trainer, Feed]:
        """A variant filled and warmed up: losses, memory, and what moves."""
        is_gpu = self.device.type == "cuda"
        before, began = device_bytes(self.device) if is_gpu else 0, time.perf_counter()
        trainer, feed = self.trainer(row), Feed(self.case, self.device)
        steps = 2 * self.stages * (2 if row.order == "paper" else 1) + 8

        def warm() -> None:
            row.losses = [float(loss) for loss in feed.turn(trainer, steps)]
            row.start = time.perf_counter() - began

        if is_gpu:
            warm()
            row.moved = self._moved(trainer, feed)
            row.bytes = device_bytes(self.device) - before
            row.categories = categories(trainer, row.bytes)
        else:
            row.bytes = measure_peak(warm, self.device)
        return trainer, feed

    def _compare(self) -> None:
        for row in self.rows:
            base = next(other for other in self.rows if other.order == row.order)
            pairs = zip(base.losses, row.losses, strict=True)
            row.deviation = max(abs(a - b) / abs(a) for a, b in pairs)

    def _moved(self, trainer: Trainer, feed: Feed) -> list[str]:
        """The allocator's counters that change over some steps, with a step's memory cached."""
        if self.options.skip_quiet:
            return []
        feed.turn(trainer, 4)
        synchronize(self.device)
        before = torch.cuda.memory_stats(self.device)
        for _ in range(QUIET):
            feed.turn(trainer, 1)
        synchronize(self.device)
        after = torch.cuda.memory_stats(self.device)
        return [key for key in before if before[key] != after[key]]


def categories(trainer: Trainer, total: int) -> dict[str, int]:
    """The bytes that a process takes of a GPU for training, by what they are."""
    executors, transport = trainer.executors, trainer.transport
    optimizers = [e.updater.optimizer for e in executors if e.updater.optimizer is not None]
    states = [value for o in optimizers for state in o.state.values() for value in state.values()]
    casts = [e.stage.cast_weights.current() or {} for e in executors]
    weights = [dict(e.stage.parameters) for e in executors] + casts
    kept: list[Any] = [held.kept for e in executors for held in e.stage.in_flight.values()]
    messages: list[Any] = [m.payload for queue in transport.queues.values() for m in queue]
    stashed: list[Any] = [dict(copy) for e in executors for copy in e.stage.stashed()]
    pipeline = trainer.runner._captured
    rings = [e.stage.ring for e in executors if e.stage.ring is not None]
    kept += [ring.slot(number).value for ring in rings for number in range(ring.count)]
    found = {
        "weights": storage_bytes([weights, states]),
        "kept": storage_bytes(kept),
        "messages": storage_bytes(messages),
        "stashed": storage_bytes(stashed),
        "pool": 0,
    }
    if pipeline is not None and isinstance(pipeline._replay, CudaGraphReplay):
        pool = tuple(pipeline._replay._graphs._pool or ())
        segments = torch.cuda.memory_snapshot()
        in_pool = (s["total_size"] for s in segments if tuple(s["segment_pool_id"]) == pool)
        found["pool"] = sum(in_pool)
    return found | {"rest": total - sum(found.values())}


def storage_bytes(tree: Any) -> int:
    """The memory that the tensors of nested values lie in."""
    tensors = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
    storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def report(title: str, rows: list[Row]) -> None:
    """Print the table."""
    shown = []
    for row in rows:
        base = next(other for other in rows if other.order == row.order)
        shown.append(
            (
                row.name,
                f"{1e3 * median(row.seconds):.2f}",
                f"{1e3 * min(row.seconds):.2f}",
                f"{ratio(row.seconds, base.seconds).median:.2f}",
                mib(row.bytes),
                len(row.moved),
                f"{row.deviation:.1e}",
                f"{row.losses[-1]:.4f}",
                f"{row.start:.1f}",
            )
        )
    names = ("variant", "ms", "best", "ratio", "memory", "moved", "loss off by", "last loss")
    show(title, (*names, "start, s"), shown)
    parts = [(row.name, *map(mib, row.categories.values())) for row in rows if row.categories]
    if parts:
        show("memory by what it is", ("variant", *rows[0].categories), parts)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Its options."""
    parser.add_argument("--model", default="revnet18", help=f"{', '.join(MODELS)}, or any other")
    parser.add_argument("--device", default="cuda")
    for name, help in (
        ("batch", "samples a micro-batch"),
        ("size", "pixels"),
        ("stages", "how many"),
        ("depth", "blocks of a stack"),
    ):
        parser.add_argument(f"--{name}", type=int, help=help)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="bf16")
    for name in ("buffers", "messages"):
        parser.add_argument(f"--{name}", choices=("as they are", "bf16"), default="as they are")
    parser.add_argument("--backends", nargs="+", default=["eager", "cudagraphs"])
    parser.add_argument("--orders", nargs="+", default=["1f1b"])
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--alone", action="store_true", help="one variant in memory at a time")
    parser.add_argument("--skip-quiet", action="store_true", help="no look at the counters")


def main(options: argparse.Namespace) -> Iterator[Found]:
    """Run, and print the table."""
    bench = Bench(options)
    rows = bench.run()
    report(f"{bench.case}, {bench.stages} stages, {options.dtype}", rows)
    for row in rows:
        yield {"variant": row.name, "case": bench.case, "stages": bench.stages, **asdict(row)}


SMALLEST = (
    "--device",
    "cpu",
    "--model",
    "conv-2x4",
    "--size",
    "8",
    "--batch",
    "2",
    "--stages",
    "2",
)
BENCHMARK = Benchmark(
    "engine",
    arguments,
    main,
    smallest=(*SMALLEST, "--steps", "1", "--rounds", "1", "--backends", "eager", "static"),
    sweeps=("batch", "depth", "stages"),
)
