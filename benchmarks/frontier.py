"""Time over memory on one device: plain training, checkpointing, torch's budgets, and reversify's.

    python -m benchmarks.frontier --models vit swin convnext gpt resnet50 resnet152 \
        --json benchmarks/results/frontier.json --plot docs/frontier.svg
    python -m benchmarks.frontier --json benchmarks/results/frontier.json --table
    python -m benchmarks.frontier --models vit gpt --dropout 0.1
    python -m benchmarks.frontier --device cpu --tiny --batch 2 --backend eager --rounds 1

A step is forward and backward in bfloat16 autocast, without stochastic depth. Blocks are compiled
one by one; `--by model` compiles the whole model for plain training and torch's budgets. reversify
has one compiled net, whose `memory_budget` is set. Its budgets are the peaks of all others, and
places in the gaps between them. A peak is that of activations: without parameters, gradients and
batch; for a budget, the first step that runs under it counts, too. Variants take turns.

`--dropout` compares gradients instead: of one net with several budgets, and of torch's budget 0.5
with its budget 1, from equal seeds with deterministic algorithms.

Rows of other models that the JSON file has already are kept.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import revcompile
from benchmarks.compiled import TIMM, checkpoint_blocks, model_of
from benchmarks.harness import Row, interleave, markdown, mib, parser_of, save, show, synchronize
from benchmarks.text import GPT
from benchmarks.whole import GIB
from revcompile.cli.baselines import compile_blocks, within
from revcompile.inspect.drawing import Panel, frontier_svg
from tests.support.measuring import autocast, measure_memory, memory_of_step

TITLES = {"vit": "ViT-L/16", "swin": "Swin-B", "convnext": "ConvNeXt-B", "gpt": "GPT, 32 × 1024"}
TITLES |= {"resnet50": "ResNet-50", "resnet152": "ResNet-152"}
KINDS = ("plain", "checkpointing", "budgets", "least", "default", "ours")
WITHIN, SLOWER = 1.03, 1.0
"""What a peak may be of its budget, and a time of that of torch in the same memory."""


@dataclass
class Variant:
    """One way to train a model."""

    name: str
    kind: str
    net: Any
    x: Tensor
    y: Tensor
    budget: Any = None
    """For reversify: what `memory_budget` is set to."""
    row: Row = field(default_factory=dict)

    @property
    def ours(self) -> bool:
        return self.kind in KINDS[3:]

    def forward(self) -> Tensor:
        with autocast(self.x.device, "bf16"):
            return F.cross_entropy(self.net(self.x).flatten(0, -2), self.y.flatten())

    def step(self) -> None:
        self.forward().backward()
        self.net.zero_grad()

    def guarded(self) -> None:
        """A step; after a failure, nothing."""
        if "failed" not in self.row:
            self.attempt(self.step)

    def attempt(self, run: Callable[[], None]) -> None:
        try:
            run()
        except Exception as error:  # the others are worth their time
            self.row["failed"] = f"{type(error).__name__}: {error}"
            self.net.zero_grad()

    def start(self) -> None:
        """Compile, and measure memory."""
        begin = time.perf_counter()
        device = self.x.device
        if self.ours:
            self.net.memory_budget = "least"
            self.forward().backward()  # gradients, which do not count
            self.net.memory_budget = self.budget
            self.row["first peak"] = memory_of_step(self.forward, device).peak
        self.step()
        synchronize(device)
        self.row["start"] = time.perf_counter() - begin
        peak = measure_memory(self.forward, device).peak
        self.row["peak"] = max(peak, self.row.get("first peak", 0))
        self.row["loss"] = self.forward().item()
        self.net.zero_grad()


# -- variants --------------------------------------------------------------------------------------


def baselines(
    plain: nn.Module, x: Tensor, y: Tensor, args: argparse.Namespace
) -> Iterator[Variant]:
    """Plain training, checkpointing, torch's budgets."""
    one = within(1.0, args.backend)  # plain training and checkpointing share compiled blocks

    def compiled(kind: str, name: str, backend: Any) -> Variant:
        net = copy.deepcopy(plain).train()
        if kind == "checkpointing" or args.by == "blocks":
            compile_blocks(net, backend)
        else:
            net.compile(backend=backend, dynamic=False)
        if kind == "checkpointing":
            checkpoint_blocks(net)
        return Variant(name, kind, net, x, y)

    for kind in KINDS[:2]:
        if kind in args.only:
            yield compiled(kind, kind, one)
    if "budgets" in args.only:
        for fraction in args.fractions:
            yield compiled("budgets", f"torch {fraction:g}", within(fraction, args.backend))


def budgets_between(least: int, peaks: Sequence[int], count: int) -> list[int]:
    """At most `count` budgets: the peaks above the least, then the middles of the largest gaps.

    >>> budgets_between(100, [50, 400, 401, 1600], 3)
    [200, 400, 1600]
    """
    found = [least]
    for peak in sorted(peaks):
        if peak > 1.03 * found[-1]:
            found.append(peak)
    while 1 < len(found) <= count:
        low, high = max(pairwise(found), key=lambda pair: pair[1] / pair[0])
        found = sorted([*found, round((low * high) ** 0.5)])
    return found[1:][-count:]


def reversible_net(plain: nn.Module, x: Tensor, args: argparse.Namespace) -> Any:
    """The model made reversible, with compiled couplings."""
    net = revcompile.reversify(copy.deepcopy(plain), x[:2], policy="same_parameters", check="off")
    net.compile(backend=args.backend)
    return net.train()


def reversible(
    plain: nn.Module, x: Tensor, y: Tensor, args: argparse.Namespace, peaks: Sequence[int]
) -> Iterator[Variant]:
    """One net with several budgets."""
    net = reversible_net(plain, x, args)
    least = Variant("reversify, least", "least", net, x, y, "least")
    yield least
    if "default" in args.only:
        yield Variant("reversify", "default", net, x, y)
    if "ours" in args.only and "peak" in least.row:
        everything = Variant("all", "ours", net, x, y, 2**60)
        everything.attempt(everything.start)
        high = max(peaks, default=everything.row.get("peak", 0))
        reach = [*peaks, min(everything.row.get("peak", high), high)]
        low = least.row["peak"]
        for budget in budgets_between(low, [p for p in reach if p <= high], args.points):
            yield Variant(f"reversify in {size(budget)}", "ours", net, x, y, budget)


def measured(name: str, args: argparse.Namespace) -> Iterator[list[Row]]:
    """The rows of a model, after each variant that was started, and at the end with times."""
    plain, x, y = model_of(name, args, **({} if name == "gpt" else {"drop_path_rate": 0.0}))
    variants: list[Variant] = []

    def rows() -> list[Row]:
        batch = {"model": name, "batch": len(x), "by": args.by}
        about = ({"variant": v.name, "kind": v.kind, "budget": v.budget} for v in variants)
        return [batch | one | v.row for one, v in zip(about, variants, strict=True)]

    def peaks() -> list[int]:
        return [v.row["peak"] for v in variants if "peak" in v.row]

    for variant in baselines(plain, x, y, args):
        variants.append(variant)
        variant.attempt(variant.start)
        clean()
        yield rows()
    if any(kind in args.only for kind in KINDS[3:]):
        try:
            for variant in reversible(plain, x, y, args, peaks()):
                variants.append(variant)
                variant.attempt(variant.start)
                clean()
                yield rows()
        except Exception as error:
            print(f"{name}: reversify failed with {type(error).__name__}: {error}")
    working = {v.name: v for v in variants if "failed" not in v.row}

    def prepare(turn: str) -> None:
        variant = working[turn]
        if variant.ours:
            variant.net.memory_budget = variant.budget
            variant.guarded()

    if not working:
        return
    steps = {turn: variant.guarded for turn, variant in working.items()}
    seconds = interleave(steps, args.rounds, 0, x.device, prepare)
    of = seconds.get("plain")
    for turn, variant in working.items():
        if "failed" not in variant.row:
            variant.row |= {"step": median(seconds[turn]) * 1e3, "seconds": seconds[turn]}
            if of is not None:
                ratios = [a / b for a, b in zip(seconds[turn], of, strict=True)]
                variant.row["time / plain"] = median(ratios)
    yield rows()


def size(count: float) -> str:
    """Bytes, with two digits after the point."""
    return f"{count / GIB:.2f} GiB" if count > GIB / 10 else mib(count)


def clean() -> None:
    """Free what the last variant has left."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# -- gradients with dropout ------------------------------------------------------------------------


def with_dropout(net: nn.Module, p: float) -> nn.Module:
    """The model with dropout after its attention and MLPs; `p` may be 0."""
    if isinstance(net, GPT):
        for block in net.blocks:
            block.attention.proj = nn.Sequential(block.attention.proj, nn.Dropout(p))
            block.mlp.append(nn.Dropout(p))
    else:
        for block in net.modules():
            if hasattr(block, "mlp") and hasattr(block, "attn"):
                block.attn.proj_drop, block.mlp.drop2 = nn.Dropout(p), nn.Dropout(p)
    if not any(isinstance(module, nn.Dropout) and module.p == p for module in net.modules()):
        raise SystemExit(f"no dropout in {type(net).__name__}; use --models vit swin gpt")
    return net


def gradients(variant: Variant) -> tuple[float, list[Tensor]]:
    """Loss and gradients from a fixed seed."""
    variant.net.zero_grad()
    torch.manual_seed(0)
    loss = variant.forward()
    loss.backward()
    found = [p.grad.clone() for p in variant.net.parameters() if p.grad is not None]
    variant.net.zero_grad()
    return loss.item(), found


def compared(name: str, args: argparse.Namespace) -> Iterator[Row]:
    """How far gradients under a budget are from those without."""
    for p in (args.dropout, 0.0):
        plain, x, y = model_of(name, args, **({} if name == "gpt" else {"drop_path_rate": 0.0}))
        with_dropout(plain, p)
        variants: list[tuple[str, Variant]] = []
        net = reversible_net(plain, x, args)
        ours = Variant("reversify", "least", net, x, y, "least")
        ours.start()
        everything = Variant("reversify", "ours", net, x, y, 2**60)
        everything.start()
        low, high = ours.row["peak"], everything.row["peak"]
        middle = [round(low * (high / low) ** share) for share in (1 / 3, 2 / 3)]
        variants = [("reversify, least", ours), ("reversify, least, again", ours)]
        for budget in (None, *middle, 2**60):
            known = {None: "", 2**60: ", all kept"}
            title = known[budget] if budget in known else f" in {size(budget)}"
            variants.append((f"reversify{title}", Variant("", "ours", net, x, y, budget)))
        for fraction in (1.0, 0.5):
            part = copy.deepcopy(plain).train()
            compile_blocks(part, within(fraction, args.backend))
            variant = Variant("", "budgets", part, x, y)
            variants += [(f"torch {fraction:g}", variant), (f"torch {fraction:g}, again", variant)]
        reference: dict[bool, tuple[float, list[Tensor]]] = {}
        for title, variant in variants:
            row: Row = {"model": name, "batch": len(x), "dropout": p, "variant": title}
            try:
                if variant.ours:
                    net.memory_budget = variant.budget
                gradients(variant)  # compiled, planned
                loss, found = gradients(variant)
                of, theirs = reference.setdefault(variant.ours, (loss, found))
                pairs = list(zip(found, theirs, strict=True))
                off = sum((a - b).double().square().sum() for a, b in pairs) ** 0.5
                norm = sum(b.double().square().sum() for b in theirs) ** 0.5
                row |= {
                    "loss difference": loss - of,
                    "gradient difference": float(off / norm),
                    "same bits": all(torch.equal(a, b) for a, b in pairs),
                }
            except Exception as error:
                row["failed"] = f"{type(error).__name__}: {error}"
            yield row
        del variants, reference, net, ours, everything
        clean()


# -- tables and pictures ---------------------------------------------------------------------------


def cells_of(row: Row) -> list[str]:
    """A row of the table."""
    peak, budget, ratio = row.get("peak"), row.get("budget"), row.get("time / plain")
    return [
        row["variant"],
        f"{row['step']:.1f} ms" if "step" in row else "",
        f"{ratio:.3f}" if ratio else "",
        size(peak) if peak else "",
        f"{peak / budget:.3f}" if peak and isinstance(budget, int) else "",
    ]


COLUMNS = ["variant", "step", "time / plain", "peak", "peak / budget"]
GRADIENTS = ["variant", "dropout", "loss difference", "gradient difference", "same bits"]


def verdicts(rows: Sequence[Row]) -> Iterator[str]:
    """Whether reversify is as fast as others in their memory, reaches less, and keeps budgets."""
    ours = [row for row in rows if row["kind"] in KINDS[3:] and "step" in row]
    others = [row for row in rows if row["kind"] in KINDS[1:3] and "step" in row]
    for other in others:
        fitting = [row for row in ours if row["peak"] <= WITHIN * other["peak"]]
        if not fitting:
            yield f"in the {size(other['peak'])} of {other['variant']}: MISSES, nothing fits"
            continue
        best = min(fitting, key=lambda row: row["step"])
        times = best["step"] / other["step"]
        yield (
            f"in the {size(other['peak'])} of {other['variant']}: {best['variant']} takes "
            f"{times:.3f} of its time ({'meets' if times <= SLOWER else 'MISSES'} the bar of "
            f"{SLOWER:g})"
        )
    if ours and others:
        low, theirs = (min(row["peak"] for row in some) for some in (ours, others))
        word = "meets" if low < theirs else "MISSES"
        yield f"least peak {size(low)}, of the others {size(theirs)} ({word} the bar)"
    shares = [row["peak"] / row["budget"] for row in ours if isinstance(row["budget"], int)]
    if shares:
        word = "meets" if max(shares) <= WITHIN else "MISSES"
        yield f"largest peak / budget {max(shares):.3f} ({word} the bar of {WITHIN})"


def panel_of(name: str, rows: Sequence[Row]) -> Panel | None:
    """A model's panel of the picture."""
    timed = [row for row in rows if "time / plain" in row]
    place = {row["variant"]: (float(row["peak"]), row["time / plain"]) for row in timed}
    curve = sorted(place[row["variant"]] for row in timed if row["kind"] in KINDS[3:])
    if not curve:
        return None
    labelled = [row["variant"] for row in timed if row["kind"] != "ours"]
    rivals = [row["variant"] for row in timed if row["kind"] == "budgets"]
    title = f"{TITLES[name]}, batch {timed[0]['batch']}"
    return Panel({label: place[label] for label in labelled}, curve, title, rivals)


def report(rows: Sequence[Row], args: argparse.Namespace, as_markdown: bool = False) -> None:
    """Print the tables; write the picture if one is wanted."""
    panels = []
    for name in dict.fromkeys(row["model"] for row in rows):
        for kind in ("time", "gradients"):
            of_kind = [row for row in rows if ("kind" in row) == (kind == "time")]
            some = [row for row in of_kind if row["model"] == name]
            if not some:
                continue
            columns = COLUMNS if kind == "time" else GRADIENTS
            cells = [
                cells_of(row) if kind == "time" else [shown(row.get(c, "")) for c in columns]
                for row in some
            ]
            small = "a small one of the kind of " * args.tiny
            title = f"{small}{TITLES[name]}, batch {some[0]['batch']}, bf16"
            if as_markdown:
                print(f"\n{title}\n\n{markdown(columns, cells)}")
            else:
                show(title, columns, cells)
            for row in some:
                if "failed" in row:
                    print(f"{row['variant']} has failed: {row['failed']}")
            if kind == "time":
                print("", *verdicts(some), "", sep="\n")
                panels.append(panel_of(name, some))
    drawn = [panel for panel in panels if panel is not None]
    if args.plot is not None and drawn:
        about = "forward and backward in bfloat16, compiled; peak of activations of a step"
        picture = frontier_svg("Time over memory on one device", about, *drawn, time="time / plain")
        args.plot.write_text(picture, encoding="utf-8")


def shown(value: Any) -> str:
    return f"{value:.1e}" if isinstance(value, float) and value not in (0.0, 0.1) else str(value)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command-line options."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--models", nargs="+", choices=(*TIMM, "gpt"), default=["vit", "gpt"])
    add("--batch", type=int, default=256, help="images; the GPT takes 8 sequences at most")
    add("--only", nargs="+", choices=KINDS, default=KINDS, help="these variants")
    add("--fractions", nargs="+", type=float, default=[0.1, 0.2, 0.3, 0.5, 0.7], help="of torch")
    add("--points", type=int, default=8, help="budgets of reversify")
    add("--by", choices=("blocks", "model"), default="blocks", help="what is compiled at once")
    add("--rounds", type=int, default=5)
    add("--device", default="cuda")
    add("--backend", default="inductor", help="of torch.compile")
    add("--tiny", action="store_true", help="small models of the same kinds")
    add("--dropout", type=float, help="compare gradients with this dropout")
    add("--plot", type=Path, metavar="FILE.svg", help="draw time over memory")
    add(
        "--table", action="store_true", help="print the file of --json as Markdown; measure nothing"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    args = parse_args(argv)
    before = json.loads(args.json.read_text())["rows"] if args.json and args.json.exists() else []
    if args.table:
        report(before, args, as_markdown=True)
        return
    # One entry for each block structure and variant.
    torch._dynamo.config.recompile_limit = 256
    torch._dynamo.config.accumulated_recompile_limit = 1024
    mine = "kind" if args.dropout is None else "dropout"
    rows = [row for row in before if row["model"] not in args.models or mine not in row]
    if args.dropout is not None:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    for name in args.models:
        torch.manual_seed(0)
        torch._dynamo.reset()
        found: list[Row] = []
        if args.dropout is not None:
            for row in compared(name, args):
                found.append(row)
                save(args, rows + found)
        else:
            for found in measured(name, args):
                save(args, rows + found)
        report(found, argparse.Namespace(plot=None, tiny=args.tiny))
        rows += found
        clean()
    report(rows, args) if args.plot else None


if __name__ == "__main__":
    main()
