"""Many micro-batches on two ranks: memory, files, threads and semaphores stay what they were.

    python -m benchmarks run soak --microbatches 100000

The smallest model there can be, PETRA, an evaluation and a checkpoint now and then. Each rank notes
its resident memory, open files, threads and shared-memory objects a hundred times; the first tenth
of the run, in which caches fill, is not compared.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import revcompile
from benchmarks.harness import show
from benchmarks.ranks.launch import on_ranks
from benchmarks.registry import Benchmark, Row
from revcompile.errors import InputError

SAMPLES: Final = 100
"""How often a rank notes what it holds."""
COUNTED: Final = ("files", "threads", "semaphores")
FLAT: Final = 0.01
"""By how much memory may grow from the second tenth to the last."""


class Block(nn.Module):
    """One weight for each feature."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        """x + F(x)."""
        return x + x * self.weight


def held() -> dict[str, int]:
    """What this process holds."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "bytes": pages * os.sysconf("SC_PAGE_SIZE"),
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "semaphores": sum("/dev/shm/" in line for line in Path("/proc/self/maps").open()),
    }


def work(rank: int, microbatches: int, seconds: float, place: str) -> list[dict[str, float]]:
    """One rank: train, and note what it holds."""
    torch.manual_seed(0)
    x, y = torch.randn(2, 4), torch.randn(2, 4)
    net = revcompile.petrafy(nn.Sequential(Block(), Block()), 2, x, check="off")
    trainer: Any = net.trainer(lambda p: torch.optim.SGD(p, lr=1e-4), F.mse_loss)
    noted: list[dict[str, float]] = []
    each = max(1, microbatches // SAMPLES)
    gc.collect()
    gc.freeze()  # what is there before training need not be looked at a hundred times
    start = time.monotonic()
    for step in range(1, microbatches + 1):
        trainer.step(x, y)
        if step % each == 0:
            trainer.evaluate([(x, y)])
            trainer.save(Path(place) / "checkpoints")
            noted.append({"step": step, "seconds": time.monotonic() - start, **held()})
            if any(trainer.everyone(noted[-1]["seconds"] > seconds)):
                break
    trainer.close()
    return noted


def arguments(parser: argparse.ArgumentParser) -> None:
    """Its options."""
    parser.add_argument("--microbatches", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after these")


def main(options: argparse.Namespace) -> Iterator[Row]:
    """Both ranks."""
    if not Path("/proc/self/statm").exists():
        raise InputError("soak: reads /proc, which is Linux's")
    with tempfile.TemporaryDirectory() as place:
        of_ranks = on_ranks(work, options.microbatches, options.seconds, place)
        files = [file.name for file in (Path(place) / "checkpoints").iterdir()]
    rows = []
    for rank, noted in enumerate(of_ranks):
        early, late = noted[len(noted) // 10 : len(noted) // 5 + 1], noted[-len(noted) // 10 - 1 :]
        growth = median(n["bytes"] for n in late) / median(n["bytes"] for n in early) - 1
        most = {k: (max(n[k] for n in early), max(n[k] for n in late)) for k in COUNTED}
        grown = [name for name, (first, last) in most.items() if last > first]
        problems = [f"more {name} than at the start" for name in grown]
        problems += [f"memory has grown by {growth:.1%}"] if growth > FLAT else []
        problems += [f"left on disk: {files}"] if len(files) > 3 else []
        last = noted[-1]
        rate = last["step"] / last["seconds"]
        figures = (f"{last['bytes'] / 2**20:.0f} MiB", f"{growth:+.2%}")
        counts = [f"{early[0][k]} → {last[k]}" for k in COUNTED]
        rows.append((rank, last["step"], f"{rate:.0f}/s", *figures, *counts))
        yield {"rank": rank, "growth": growth, "noted": noted, "failed": problems}
    show("Soak", ("rank", "micro-batches", "rate", "memory", "growth", *COUNTED), rows)


BENCHMARK = Benchmark("soak", arguments, main, smallest=("--microbatches", "40"))
