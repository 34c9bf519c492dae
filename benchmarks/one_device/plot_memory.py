"""Draw activation memory against depth, from a file of `memory --json`.

python -m benchmarks run memory --device cuda --json out/memory.json
python -m benchmarks run plot_memory out/memory.json docs/memory.svg
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.record import read
from benchmarks.registry import Benchmark, Row
from revcompile.inspect.drawing.figures import save_figure

LINES = {"plain": "#b0574f", "checkpointing": "#8a6d1f", "reversify": "#2f6f8f"}


def draw(rows: list[dict[str, Any]], target: Path) -> None:
    """One panel a stack: what training holds at its peak, by each means that was measured."""
    stacks = {row["kind"]: row for row in rows}
    figure = Figure(figsize=(8.4, 3.1), layout="constrained")
    panels = figure.subplots(1, len(stacks), squeeze=False)
    for panel, (kind, stack) in zip(panels[0], stacks.items(), strict=True):
        depths = stack["depths"]
        for name, colour in LINES.items():
            if name not in stack["memory"]:
                continue
            gigabytes = [entry["peak"] / 2**30 for entry in stack["memory"][name]]
            label = f"{name}: {gigabytes[-1]:.1f} GiB"
            panel.plot(depths, gigabytes, "o-", color=colour, lw=2, ms=4, label=label)
        panel.set_title({"conv": "convolutions"}.get(kind, kind), loc="left")
        panel.set_xlabel("depth, in blocks")
        panel.set_xticks(depths)
        panel.set_ylim(bottom=0)
        panel.legend(title=f"at {depths[-1]} blocks", frameon=False, loc="upper left")
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", alpha=0.25)
    panels[0][0].set_ylabel("peak activation memory, GiB")
    save_figure(figure, target)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Its options."""
    parser.add_argument("figures", type=Path, help="what `memory --json` wrote")
    parser.add_argument("picture", type=Path, help="an SVG file")


def main(args: argparse.Namespace) -> Iterator[Row]:
    """Read and draw."""
    rows = read(args.figures)["rows"]
    draw(rows, args.picture)
    yield {"picture": str(args.picture), "stacks": [row["kind"] for row in rows]}


BENCHMARK = Benchmark(
    "plot_memory", arguments, main, smallest=None, needs="a file of `memory --json`"
)
