"""All stages on one device: milliseconds per micro-batch and memory of backends and orders.

    python -m benchmarks.engine --model revnet18 --backends eager cudagraphs
    python -m benchmarks.engine --model revnet50 --backends eager cudagraphs inductor
    python -m benchmarks.engine --model revnet50 --orders 1f1b paper --buffers bf16
    python -m benchmarks.engine --model revnet50 --orders 1f1b backprop --backends inductor \
        --buffers bf16 --messages bf16
    python -m benchmarks.engine --device cpu --batch 4 --backends eager static

Every variant trains the same weights on the same micro-batches with a full pipeline. Variants take
turns; a turn of `--steps` steps is timed as a whole. Losses are compared with those of the first
backend in the same order. Memory is what the process takes on the device while one variant trains
alone (`allocated`: the part in torch's allocator); on the CPU, where bytes are counted, it is what
training adds to the parameters. `moved` is the number of the allocator's counters that change over
100 steps. `start` is the time until all steps are captured, compilation included; torch keeps
compiled code on disk for the next process.

The order `backprop` is plain backpropagation of the same rewired model. The order `kept` is `1f1b`
with as many graphs kept as `--memory-budget` allows.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

import revcompile
from benchmarks.harness import (
    device_bytes,
    interleave,
    measure_peak,
    mib,
    parser_of,
    ratio,
    save,
    show,
    synchronize,
)
from benchmarks.models import Case, create
from revcompile import TrainerOptions
from revcompile.runtime.trainer.trainer import Trainer
from revcompile.staged import StagedModel

QUIET: Final = 100
"""Steps over which the allocator's counters should not change."""


MODELS: Final = {
    "revnet18": (Case("resnet18", 32, 256), 10),
    "revnet34": (Case("resnet34", 32, 256), 18),
    "revnet50": (Case("resnet50", 224, 64, 1000), 18),
}
"""The paper's models: the case, and the number of stages."""


@dataclass
class Row:
    """The measurements of one variant."""

    backend: str
    order: str
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    bytes: int = 0
    allocated: int = 0
    """The part of `bytes` in torch's allocator and outside of CUDA graphs."""
    start: float = 0.0
    moved: list[str] = field(default_factory=list)
    deviation: float = 0.0

    @property
    def name(self) -> str:
        """The name of the variant: backend and order."""
        return f"{self.backend}, {self.order}"


def chosen(options: argparse.Namespace) -> tuple[Case, int]:
    """The case and the number of stages: the paper's, unless options change them."""
    case, stages = MODELS.get(options.model, (Case(options.model, 32, 64), 4))
    asked = {"size": options.size, "batch": options.batch}
    case = replace(case, **{name: value for name, value in asked.items() if value})
    return case, options.stages or stages


def build(case: Case, stages: int, device: torch.device) -> StagedModel:
    """The compiled model, with the same weights each time."""
    net = create(case.model, case.size, case.classes, small=case.size < 64)
    net = net.to(device).to(memory_format=torch.channels_last)
    x, _ = replace(case, batch=2).data(device)
    return revcompile.petrafy(net, stages, x, check="off", microbatch_size=case.batch)


class Feed:
    """A few micro-batches on the device, over and over."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.batches: list[tuple[Tensor, Tensor]] = []
        for seed in range(4):
            x, y = case.data(device, seed)
            self.batches.append((x.to(memory_format=torch.channels_last), y))
        self._next = 0

    def turn(self, trainer: Trainer, steps: int) -> list[Tensor]:
        """Run some steps; returns the losses, still on the device."""
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
            method="backprop" if row.order == "backprop" else "petra",
            autocast=torch.bfloat16 if self.options.dtype == "bf16" else None,
            backend=row.backend,
            memory_budget=self.options.memory_budget if row.order == "kept" else None,
            options=TrainerOptions(
                in_flight_per_stage={"1f1b": 1, "kept": 1, "paper": 2}.get(row.order),
                kept_input_dtype=torch.bfloat16 if self.options.buffers == "bf16" else None,
                gradient_message_dtype=torch.bfloat16 if self.options.messages == "bf16" else None,
            ),
        )

    def run(self) -> list[Row]:
        """Run each variant alone, for losses and memory; then time all of them in turns."""
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
        """Fill and warm up a variant; record its losses, memory and changing counters."""
        is_gpu = self.device.type == "cuda"
        before, began = device_bytes(self.device) if is_gpu else 0, time.perf_counter()
        allocated = torch.cuda.memory_allocated(self.device) if is_gpu else 0
        trainer, feed = self.trainer(row), Feed(self.case, self.device)
        steps = 2 * self.stages * (2 if row.order == "paper" else 1) + 8

        def warm() -> None:
            row.losses = [float(loss) for loss in feed.turn(trainer, steps)]
            row.start = time.perf_counter() - began

        if is_gpu:
            warm()
            row.moved = self._moved(trainer, feed)
            row.bytes = device_bytes(self.device) - before
            row.allocated = torch.cuda.memory_allocated(self.device) - allocated
        else:
            row.bytes = measure_peak(warm, self.device)
        return trainer, feed

    def _compare(self) -> None:
        for row in self.rows:
            base = next(other for other in self.rows if other.order == row.order)
            pairs = zip(base.losses, row.losses, strict=True)
            row.deviation = max(abs(a - b) / abs(a) for a, b in pairs)

    def _moved(self, trainer: Trainer, feed: Feed) -> list[str]:
        """The allocator's counters that change over some steps, once a step's memory is cached."""
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
                mib(row.allocated) if row.allocated else "",
                len(row.moved),
                f"{row.deviation:.1e}",
                f"{row.losses[-1]:.4f}",
                f"{row.start:.1f}",
            )
        )
    names = ("variant", "ms", "best", "ratio", "memory", "allocated", "moved", "loss off by")
    show(title, (*names, "last loss", "start, s"), shown)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command-line options."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--model", default="revnet18", help=f"{', '.join(MODELS)}, or any other")
    add("--device", default="cuda")
    add("--batch", type=int, help="samples per micro-batch")
    add("--size", type=int, help="pixels")
    add("--stages", type=int, help="how many")
    add("--dtype", choices=("fp32", "bf16"), default="bf16")
    for name in ("buffers", "messages"):
        add(f"--{name}", choices=("as they are", "bf16"), default="as they are")
    add("--backends", nargs="+", default=["eager", "cudagraphs"])
    add("--orders", nargs="+", default=["1f1b"])
    add("--memory-budget", default="auto", help="of a device, for the order `kept`")
    add("--lr", type=float, default=1e-3)
    add("--steps", type=int, default=20)
    add("--rounds", type=int, default=5)
    add("--alone", action="store_true", help="one variant in memory at a time")
    add("--skip-quiet", action="store_true", help="no look at the counters")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Run, and print the table."""
    args = parse_args(argv)
    bench = Bench(args)
    rows = bench.run()
    report(f"{bench.case}, {bench.stages} stages, {args.dtype}", rows)
    same = {"case": bench.case, "stages": bench.stages}
    save(args, [{"variant": row.name, **same, **asdict(row)} for row in rows])


if __name__ == "__main__":
    main()
