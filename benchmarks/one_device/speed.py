"""Step time (forward and backward) of the same blocks: plain, checkpointed, reversible, memcnn.

    python -m benchmarks run speed                        # small stacks on the CPU
    python -m benchmarks run speed --device cuda --dtype bf16
    python -m benchmarks run whole --device cuda --dtype bf16       # the same for whole models

`reversify` evaluates each branch twice and differentiates it once, as checkpointing does; memcnn
evaluates it three times. By default checkpointing leaves out what no gradient needs of the second
evaluation, a block's last linear layer above all; a reversible block needs that very value. So
checkpointing is timed both ways: as it comes, and on equal work (`checkpoint, all`).
"""

from __future__ import annotations

import argparse
import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import set_checkpoint_early_stop

import revcompile
from benchmarks.harness import autocast, count_flops, interleave, ratio, show
from benchmarks.registry import Benchmark, Row
from benchmarks.stacks import KINDS, Block, Sizes, Stack, batch_of

CPU = {
    "transformer": Sizes(depth=6, width=128, side=64, batch=8),
    "conv": Sizes(depth=6, width=32, side=28, batch=8),
}
CUDA = {
    "transformer": Sizes(depth=12, width=768, side=196, batch=64),
    "conv": Sizes(depth=12, width=128, side=56, batch=64),
}

OURS = "reversify"
NOISE = 0.01  # two runs of one variant differ by as much


class MemcnnStack(nn.Module):
    """A stack whose blocks memcnn makes reversible: `y1 = x1 + F(x2); y2 = x2 + G(y1)`.

    The two streams lie one after the other along the batch, where splitting them copies nothing.
    """

    def __init__(self, stack: Stack, memcnn: Any) -> None:
        super().__init__()
        self.stem, self.head = stack.stem, stack.head
        couplings = [
            memcnn.AdditiveCoupling(block.f, block.g, split_dim=0)
            for block in stack.blocks
            if isinstance(block, Block)
        ]
        self.blocks = nn.ModuleList(memcnn.InvertibleModuleWrapper(c) for c in couplings)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = self.stem(x)
        x = torch.cat([x, x])
        for block in self.blocks:
            x = block(x)
        first, second = x.chunk(2)
        out: Tensor = self.head(torch.lerp(first, second, 0.5))
        return out


def import_memcnn(dtype: str) -> Any:
    """The package, or None with the reason printed."""
    if dtype != "fp32":
        print("memcnn is left out: it does not replay autocast in its backward")
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            import memcnn
        except Exception as error:
            print(f"memcnn is left out: {type(error).__name__}: {error}")
            return None
    warnings.filterwarnings("ignore", message="TypedStorage is deprecated")
    return memcnn


def build(
    kind: str, sizes: Sizes, x: Tensor, memcnn: Any, tolerance: float | None
) -> dict[str, nn.Module]:
    """Every variant with the same weights, each with its own copy of them."""
    plain = KINDS[kind](sizes.depth, sizes.width).to(x.device).train()
    checkpointed = copy.deepcopy(plain)
    checkpointed.checkpointed = True
    ours = revcompile.reversify(
        plain, x[:2], policy="same_parameters", check="off", tolerance=tolerance
    )
    stored = copy.deepcopy(ours)
    stored.reversible = False
    nets: dict[str, nn.Module] = {
        "plain": plain,
        "checkpoint": checkpointed,
        "checkpoint, all": copy.deepcopy(checkpointed),
        OURS: ours,
        "rewired, stored": stored,
    }
    if memcnn is not None:
        nets["memcnn"] = MemcnnStack(copy.deepcopy(plain), memcnn)
    return {name: net.train() for name, net in nets.items()}


def step_of(name: str, net: nn.Module, x: Tensor, y: Tensor, dtype: str) -> Callable[[], Tensor]:
    """A training step of one variant without the optimizer; returns the loss."""
    early_stop: Callable[[], AbstractContextManager[Any]] = nullcontext
    if name == "checkpoint, all":
        early_stop = lambda: set_checkpoint_early_stop(False)  # noqa: E731

    def step() -> Tensor:
        net.zero_grad()
        with early_stop(), autocast(x.device, dtype):
            loss = F.cross_entropy(net(x), y)
        loss.backward()
        return loss.detach()

    return step


def assert_same_work(
    nets: dict[str, nn.Module], steps: dict[str, Callable[[], Tensor]], dtype: str
) -> None:
    """Variants that share a formula must give one loss and one gradient of the stem."""
    tolerance = 0.01 if dtype == "fp32" else 0.1  # TF32 and bf16 reconstruct no better
    groups = (("plain", "checkpoint", "checkpoint, all"), (OURS, "rewired, stored", "memcnn"))
    for group in groups:
        results = {}
        for name in group:
            if name in nets:
                loss = steps[name]()
                stem = next(nets[name].parameters())
                assert stem.grad is not None
                results[name] = torch.cat([loss.reshape(1), stem.grad.flatten()])
        first = results[group[0]]
        for name, value in results.items():
            deviation = float((value - first).norm() / first.norm())
            if deviation > tolerance:
                raise AssertionError(f"{name} differs from {group[0]} by {deviation:.1e}")


def report(title: str, seconds: dict[str, list[float]], flops: dict[str, int]) -> dict[str, object]:
    """Print the table and the bars' verdicts; returns the figures."""
    rows = []
    for name, times in seconds.items():
        of_plain = ratio(times, seconds["plain"])
        ours = ratio(seconds[OURS], times)
        work = f"{flops[name] / flops['plain']:.2f}"
        rows.append((name, f"{median(times) * 1e3:.2f} ms", work, of_plain, ours))
    columns = ("variant", "median", "FLOPs / plain", "time / plain", "reversify / this")
    show(title, columns, rows)
    bars = {}
    for rival in ("checkpoint", "checkpoint, all", "memcnn"):
        if rival in seconds:
            bars[rival] = ratio(seconds[OURS], seconds[rival])
            verdict = "meets" if bars[rival].median <= 1 + NOISE else "MISSES"
            print(f"no slower than {rival}: {bars[rival]} ({verdict} the bar of 1 ± {NOISE})")
    print()
    return {"seconds": seconds, "flops": flops, "reversify_over": bars}


def arguments(parser: argparse.ArgumentParser) -> None:
    """Its options."""
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="bf16: autocast")
    parser.add_argument("--kind", choices=tuple(KINDS), action="append", help="one stack only")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of the CPU")
    for name in ("depth", "width", "side", "batch"):
        parser.add_argument(f"--{name}", type=int, help="another size")
    parser.add_argument("--tolerance", type=float, help="of the reconstruction; see reversify")


def main(args: argparse.Namespace) -> Iterator[Row]:
    """Time and print."""
    device = torch.device(args.device)
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    memcnn = import_memcnn(args.dtype)
    for kind in args.kind or KINDS:
        default = (CUDA if device.type == "cuda" else CPU)[kind]
        sizes = Sizes(
            **{name: getattr(args, name) or value for name, value in vars(default).items()}
        )
        x, y = batch_of(kind, sizes, device)
        nets = build(kind, sizes, x, memcnn, args.tolerance)
        steps = {name: step_of(name, net, x, y, args.dtype) for name, net in nets.items()}
        assert_same_work(nets, steps, args.dtype)
        seconds = interleave(steps, args.rounds, args.warmup, device)
        flops = {name: count_flops(step) for name, step in steps.items()}
        figures = report(f"{kind}: {sizes}, {args.dtype}", seconds, flops)
        yield {"kind": kind, "sizes": sizes, **figures}


SMALLEST = ("--rounds", "1", "--warmup", "1", "--depth", "2", "--width", "8", "--side", "4")
BENCHMARK = Benchmark("speed", arguments, main, smallest=(*SMALLEST, "--batch", "2"))
