"""Activation memory of plain, checkpointed and reversible training, by depth or for a timm model.

    python -m benchmarks.memory                                # two stacks, 2 to 32 blocks, CPU
    python -m benchmarks.memory --device cuda --picture memory.svg
    python -m benchmarks.memory --device cuda --model vit_large_patch16_224 --batch 64

Parameters, their gradients and the batch exist before a step begins and do not count. The bars: a
block adds less than 5 % of the memory that it adds to the plain model, and a large model takes at
least 5 times less memory than when trained plainly.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from matplotlib.figure import Figure
from torch import nn

import revcompile
from benchmarks.figures import save_figure
from benchmarks.harness import Row, mib, parser_of, save, show
from tests.support.measuring import Memory, slope, step_memory
from tests.support.stacks import KINDS, Sizes, batch_of

SLOPE_BAR = 0.05
MODEL_BAR = 5.0

CPU = {"transformer": Sizes(0, 64, 64, 16), "conv": Sizes(0, 16, 32, 8)}
CUDA = {"transformer": Sizes(0, 768, 196, 64), "conv": Sizes(0, 128, 56, 64)}


def against_depth(
    kind: str,
    sizes: Sizes,
    depths: Sequence[int],
    device: torch.device,
    dtype: str,
    **options: Any,
) -> dict[str, list[Memory]]:
    """The memory of one stack at every depth, by way to train. `options` go to `reversify`."""
    x, y = batch_of(kind, sizes, device)
    memory: dict[str, list[Memory]] = {"plain": [], "checkpointing": [], "reversify": []}
    for depth in depths:
        plain = KINDS[kind](depth, sizes.width).to(device)
        net = revcompile.reversify(plain, x[:2], check="off", **options)
        memory["plain"].append(step_memory(plain, x, y, device, dtype))
        plain.checkpointed = True
        memory["checkpointing"].append(step_memory(plain, x, y, device, dtype))
        memory["reversify"].append(step_memory(net, x, y, device, dtype))
    return memory


def slope_share(depths: Sequence[int], memory: dict[str, list[Memory]], of: str) -> float:
    """Memory per block of the reversible stack, as a share of that of the plain stack."""
    grown = {name: slope(depths, [getattr(m, of) for m in all_]) for name, all_ in memory.items()}
    return grown["reversify"] / grown["plain"]


def report_depths(
    kind: str, sizes: Sizes, depths: Sequence[int], memory: dict[str, list[Memory]]
) -> dict[str, float]:
    """Print one stack's table; returns its `slope_share` of held and of peak memory."""
    what = "tokens" if kind == "transformer" else "pixels"
    side = f"{sizes.side}" if kind == "transformer" else f"{sizes.side}x{sizes.side}"
    rows: list[list[object]] = []
    for index, depth in enumerate(depths):
        peaks = [memory[name][index].peak for name in memory]
        held = [memory[name][index].held for name in ("plain", "reversify")]
        rows.append([depth, *map(mib, (*held, *peaks)), f"{peaks[0] / peaks[-1]:.1f}x"])
    shares = {of: slope_share(depths, memory, of) for of in ("held", "peak")}
    grown = [slope(depths, [m.held for m in memory[name]]) for name in ("plain", "reversify")]
    grown += [slope(depths, [m.peak for m in measured]) for measured in memory.values()]
    rows.append(["per block", *map(mib, grown), ""])
    columns = ("blocks", "held: plain", "held: reversify", *(f"peak: {n}" for n in memory), "less")
    show(f"{kind}: width {sizes.width}, {side} {what}, batch {sizes.batch}", columns, rows)
    verdict = "meets" if shares["peak"] < SLOPE_BAR else "MISSES"
    print(
        f"slope against plain: held {shares['held']:.2%}, peak {shares['peak']:.2%} "
        f"({verdict} the bar of {SLOPE_BAR:.0%})\n"
    )
    return shares


def of_model(
    name: str, batch: int, device: torch.device, dtype: str, **options: Any
) -> dict[str, Memory]:
    """The memory of one timm model: plain, with its own checkpointing, and reversible."""

    def plain() -> nn.Module:
        model: nn.Module = timm.create_model(name)
        return model

    def checkpointed() -> nn.Module:
        model = plain()
        model.set_grad_checkpointing(True)  # type: ignore[operator]
        return model

    def reversible() -> nn.Module:
        return revcompile.reversify(plain(), check="off", **options)

    makers: dict[str, Callable[[], nn.Module]] = {"plain": plain, "reversify": reversible}
    model = plain()
    if hasattr(model, "set_grad_checkpointing"):
        makers["checkpoint"] = checkpointed
    size = tuple(getattr(model, "pretrained_cfg", {}).get("input_size", (3, 224, 224)))
    x, y = torch.randn(batch, *size, device=device), torch.zeros(batch, device=device).long()
    memory: dict[str, Memory] = {}
    for variant, make in makers.items():
        net = make().to(device)
        memory[variant] = step_memory(net, x, y, device, dtype)
        del net
        gc.collect()
    return memory


def report_model(title: str, memory: dict[str, Memory]) -> float:
    """Print one model's table; returns plain memory divided by the memory of `reversify`."""
    plain = memory["plain"].peak
    rows = [[n, mib(m.held), mib(m.peak), f"{plain / m.peak:.2f}x"] for n, m in memory.items()]
    show(title, ("training", "held", "peak", "less than plain"), rows)
    less = plain / memory["reversify"].peak
    verdict = "meets" if less >= MODEL_BAR else "MISSES"
    print(f"{less:.2f} times less activation memory ({verdict} the bar of {MODEL_BAR:.0f})\n")
    return less


LINES = {"plain": "#b0574f", "checkpointing": "#8a6d1f", "reversify": "#2f6f8f"}


def draw(rows: Sequence[Mapping[str, Any]], target: Path) -> None:
    """One panel per stack: the peak of each way to train against depth."""
    figure = Figure(figsize=(8.4, 3.1), layout="constrained")
    panels = figure.subplots(1, len(rows), squeeze=False)
    for panel, row in zip(panels[0], rows, strict=True):
        depths = row["depths"]
        for name, colour in LINES.items():
            gibibytes = [memory.peak / 2**30 for memory in row["memory"][name]]
            label = f"{name}: {gibibytes[-1]:.1f} GiB"
            panel.plot(depths, gibibytes, "o-", color=colour, lw=2, ms=4, label=label)
        panel.set_title({"conv": "convolutions"}.get(row["kind"], row["kind"]), loc="left")
        panel.set(xlabel="depth, in blocks", xticks=depths)
        panel.set_ylim(bottom=0)
        panel.legend(title=f"at {depths[-1]} blocks", frameon=False, loc="upper left")
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", alpha=0.25)
    panels[0][0].set_ylabel("peak activation memory, GiB")
    save_figure(figure, target)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command-line options."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--device", default="cpu")
    add("--dtype", choices=("fp32", "bf16"), default="fp32", help="bf16: autocast")
    add("--policy", default="paper", help="how revcompile rewires the model")
    add("--tolerance", type=float, help="of the reconstruction; see reversify")
    add("--kind", choices=tuple(KINDS), action="append", help="one stack only")
    add("--depths", type=int, nargs="+", default=[2, 4, 8, 16, 32])
    add("--model", help="a timm model instead of the stacks")
    add("--batch", type=int, help="another batch size")
    add("--picture", type=Path, metavar="FILE", help="draw memory against depth as an SVG file")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    args = parse_args(argv)
    device = torch.device(args.device)
    options = {"policy": args.policy, "tolerance": args.tolerance}
    torch.manual_seed(0)
    rows: list[Row] = []
    if args.model:
        batch = args.batch or 64
        model = of_model(args.model, batch, device, args.dtype, **options)
        less = report_model(f"{args.model}, batch {batch}, {args.dtype}, {device}", model)
        rows.append({"model": args.model, "batch": batch, "memory": model, "times_less": less})
        save(args, rows)
        return
    for kind in args.kind or KINDS:
        sizes = (CUDA if device.type == "cuda" else CPU)[kind]
        if args.batch:
            sizes = Sizes(0, sizes.width, sizes.side, args.batch)
        stack = against_depth(kind, sizes, args.depths, device, args.dtype, **options)
        shares = report_depths(kind, sizes, args.depths, stack)
        row = {"kind": kind, "depths": args.depths, "memory": stack, "slope_shares": shares}
        rows.append(row)
        save(args, rows)
    if args.picture:
        draw(rows, args.picture)


if __name__ == "__main__":
    main()
