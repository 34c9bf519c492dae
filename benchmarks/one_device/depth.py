"""Memory and time of one training step against depth: ViT blocks, 12 to 192 of them.

    python -m benchmarks run depth                               # narrow blocks on the CPU
    python -m benchmarks run depth --device cuda --dtype bf16

Counted is what a step takes on top of parameters, gradients and optimizer state. Both figures are
fitted as `depth ** exponent`. The bars: memory the same at every depth within 5 %, time linear (an
exponent up to 1.1).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import revcompile
from benchmarks.harness import autocast, exponent, interleave, measure_memory, mib, show
from benchmarks.registry import Benchmark, Row
from benchmarks.stacks import Sizes, batch_of, transformer_stack

CPU = Sizes(depth=0, width=32, side=16, batch=2)
CUDA = Sizes(depth=0, width=384, side=197, batch=64)
DEPTHS = (12, 24, 48, 96, 192)
MEMORY_BAR = 0.05
TIME_BAR = 1.1


@dataclass(frozen=True)
class Point:
    """One depth: bytes at the peak above what stays, and seconds of a step with its update."""

    depth: int
    peak: int
    seconds: float


def measure(depth: int, sizes: Sizes, args: argparse.Namespace) -> Point:
    """One stack of this depth, trained a few steps."""
    device = torch.device(args.device)
    with device:
        model = transformer_stack(depth, sizes.width)
        x, y = batch_of("transformer", sizes, device)
    net: nn.Module = revcompile.reversify(
        model, x[:2], policy="same_parameters", check="off", overlap=args.overlap
    ).train()
    del model
    optimizer = torch.optim.AdamW(net.parameters(), foreach=True)

    def forward() -> Tensor:
        with autocast(device, args.dtype):
            return F.cross_entropy(net(x), y)

    def step() -> None:
        optimizer.zero_grad()
        forward().backward()
        optimizer.step()

    step()  # creates the optimizer's state
    peak = measure_memory(forward, device).peak
    seconds = interleave({"step": step}, args.rounds, 1, device)["step"]
    return Point(depth, peak, median(seconds))


def report(title: str, points: Sequence[Point]) -> dict[str, float]:
    """Print the table and the verdicts; returns the growth."""
    first = points[0]
    rows = [
        (p.depth, mib(p.peak), f"{p.peak / first.peak:.3f}", f"{p.seconds * 1e3:.1f} ms",
         f"{p.seconds / p.depth * 1e3:.3f} ms")
        for p in points
    ]  # fmt: skip
    show(title, ("blocks", "peak", "of the first", "step", "a block"), rows)
    depths = [p.depth for p in points]
    growth = {
        "memory": exponent(depths, [p.peak for p in points]),
        "time": exponent(depths, [p.seconds for p in points]),
    }
    spread = max(p.peak for p in points) / min(p.peak for p in points) - 1
    constant = "meets" if spread <= MEMORY_BAR else "MISSES"
    linear = "meets" if growth["time"] <= TIME_BAR else "MISSES"
    print(
        f"memory ~ depth^{growth['memory']:.3f}, within {spread:.1%} ({constant} {MEMORY_BAR:.0%})"
    )
    print(f"time   ~ depth^{growth['time']:.3f} ({linear} {TIME_BAR})\n")
    return {**growth, "spread": spread}


def arguments(parser: argparse.ArgumentParser) -> None:
    """Its options."""
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="bf16: autocast")
    parser.add_argument("--depths", type=int, nargs="+", default=DEPTHS)
    parser.add_argument("--overlap", default="auto", help="see reversify")
    parser.add_argument("--rounds", type=int, default=5)


def main(args: argparse.Namespace) -> Iterator[Row]:
    """Measure and print."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    sizes = CUDA if torch.device(args.device).type == "cuda" else CPU
    points = [measure(depth, sizes, args) for depth in args.depths]
    title = f"ViT blocks of width {sizes.width}, {sizes.side} tokens, batch {sizes.batch}"
    growth = report(f"{title}, {args.dtype}, overlap {args.overlap}", points)
    yield {"sizes": sizes, "points": points, "growth": growth}


BENCHMARK = Benchmark("depth", arguments, main, smallest=("--depths", "2", "6", "--rounds", "2"))
