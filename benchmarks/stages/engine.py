"""All stages on one device: milliseconds a micro-batch and memory, backends and orders in turn.

    python -m benchmarks run engine --model revnet18 --backends eager cudagraphs
    python -m benchmarks run engine --model revnet50 --backends eager cudagraphs inductor
    python -m benchmarks run engine --model revnet50 --orders half paper --buffers bf16
    python -m benchmarks run engine --device cpu --batch 4 --backends eager recorded

Every variant trains the same weights on the same micro-batches with a full pipeline. Times are of
whole turns of `--steps` steps, one variant after the other; losses are compared with those of the
first backend in the same order. Memory is what the process takes of the device while one variant
trains alone. `moved` is how many of the allocator's counters change over 100 steps.
"""

from __future__ import annotations

import argparse
import gc
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

import timm
import torch
from torch import Tensor
from torch.nn import functional as F

import revcompile
from benchmarks.harness import interleave, save, show, synchronize
from examples.recipe import small_stem
from revcompile.runtime.trainer import Trainer
from revcompile.staged import StagedModel

GIB: Final = 2**30
QUIET: Final = 100
"""Steps over which the allocator's counters should stand still."""


@dataclass(frozen=True)
class Model:
    """A timm model, its stages and the paper's micro-batches."""

    name: str
    stages: int
    size: int
    batch: int
    classes: int


MODELS: Final = {
    "revnet18": Model("resnet18", 10, 32, 256, 10),
    "revnet34": Model("resnet34", 18, 32, 256, 10),
    "revnet50": Model("resnet50", 18, 224, 64, 1000),
}


@dataclass
class Row:
    """What is known of one variant."""

    backend: str
    order: str
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    gib: float = 0.0
    moved: list[str] = field(default_factory=list)
    deviation: float = 0.0

    @property
    def name(self) -> str:
        """Backend and order."""
        return f"{self.backend}, {self.order}"


def build(model: Model, options: argparse.Namespace) -> StagedModel:
    """The compiled model: the same weights each time."""
    torch.manual_seed(0)
    net: Any = timm.create_model(model.name, num_classes=model.classes)
    if model.size < 64:
        small_stem(net)
    example = torch.zeros(2, 3, model.size, model.size, device=options.device)
    net = net.to(options.device, memory_format=torch.channels_last)
    return revcompile.petrafy(net, model.stages, example, check="off")


class Feed:
    """A few micro-batches on the device, over and over."""

    def __init__(self, model: Model, batch: int, device: str) -> None:
        generator = torch.Generator().manual_seed(1)
        shape = batch, 3, model.size, model.size
        self.batches: list[tuple[Tensor, Tensor]] = []
        for _ in range(4):
            x = torch.randn(shape, generator=generator).to(memory_format=torch.channels_last)
            y = torch.randint(0, model.classes, (batch,), generator=generator)
            self.batches.append((x.to(device), y.to(device)))
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
        self.model: Model = MODELS[options.model]
        self.batch = options.batch or self.model.batch
        self.device = torch.device(options.device)
        self.rows = [Row(b, o) for o in options.orders for b in options.backends]

    def trainer(self, row: Row) -> Trainer:
        """A trainer with a model of its own."""
        return build(self.model, self.options).trainer(
            lambda p: torch.optim.SGD(p, lr=self.options.lr, momentum=0.9, weight_decay=1e-4),
            F.cross_entropy,
            order=row.order,
            autocast=torch.bfloat16 if self.options.dtype == "bf16" else None,
            backend=row.backend,
            buffers=torch.bfloat16 if self.options.buffers == "bf16" else None,
        )

    def run(self) -> list[Row]:
        """Each variant alone, for losses and memory; then all of them in turn, for time."""
        turns = {}
        for row in self.rows:
            before = self._used()
            trainer, feed = self.trainer(row), Feed(self.model, self.batch, self.options.device)
            warm = 2 * self.model.stages * (2 if row.order == "paper" else 1) + 8
            found = feed.turn(trainer, warm)
            row.losses = [float(loss) for loss in found]
            del found
            row.moved = self._moved(trainer, feed)
            row.gib = (self._used() - before) / GIB
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

    def _compare(self) -> None:
        for row in self.rows:
            base = next(other for other in self.rows if other.order == row.order)
            pairs = zip(base.losses, row.losses, strict=True)
            row.deviation = max(abs(a - b) / abs(a) for a, b in pairs)

    def _used(self) -> float:
        """Bytes of the device that are taken, caches left out."""
        if self.device.type != "cuda":
            return 0.0
        synchronize(self.device)
        gc.collect()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        return float(total - free)

    def _moved(self, trainer: Trainer, feed: Feed) -> list[str]:
        """The allocator's counters that change over some steps, with a step's memory cached."""
        if self.device.type != "cuda" or self.options.skip_quiet:
            return []
        feed.turn(trainer, 4)
        synchronize(self.device)
        before = torch.cuda.memory_stats(self.device)
        for _ in range(QUIET):
            feed.turn(trainer, 1)
        synchronize(self.device)
        after = torch.cuda.memory_stats(self.device)
        return [key for key in before if before[key] != after[key]]


def report(options: argparse.Namespace, model: Model, rows: list[Row]) -> None:
    """A table, and JSON where asked for."""
    shown = []
    for row in rows:
        base = next(other for other in rows if other.order == row.order)
        shown.append(
            (
                row.name,
                f"{1e3 * median(row.seconds):.2f}",
                f"{1e3 * min(row.seconds):.2f}",
                f"{median(row.seconds) / median(base.seconds):.2f}",
                f"{row.gib:.2f}",
                len(row.moved),
                f"{row.deviation:.1e}",
                f"{row.losses[-1]:.4f}",
            )
        )
    title = f"{options.model}: {model.stages} stages, batch {options.batch or model.batch}, "
    title += f"{model.size} px, {options.dtype}"
    columns = ("variant", "ms", "best", "ratio", "GiB", "moved", "loss off by", "last loss")
    show(title, columns, shown)
    save(options.json, "engine", torch.device(options.device), {"title": title, "rows": rows})


def main() -> None:
    """Run, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="revnet18")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--buffers", choices=("as they are", "bf16"), default="as they are")
    parser.add_argument("--backends", nargs="+", default=["eager", "cudagraphs"])
    parser.add_argument("--orders", nargs="+", default=["half"])
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--alone", action="store_true", help="one variant in memory at a time")
    parser.add_argument("--skip-quiet", action="store_true", help="no look at the counters")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    bench = Bench(options)
    report(options, bench.model, bench.run())


if __name__ == "__main__":
    main()
