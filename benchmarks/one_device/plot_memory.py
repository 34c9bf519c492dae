"""Draw activation memory against depth, from a file of `memory --json`.

python -m benchmarks run memory --device cuda --json out/memory.json
python -m benchmarks run plot_memory out/memory.json docs/memory.svg
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot

from benchmarks.record import read
from benchmarks.registry import Benchmark, Row

PLAIN, OURS = "#b0574f", "#2f6f8f"


def draw(rows: list[dict[str, Any]], target: Path) -> None:
    """One panel a stack: what training holds at its peak, plain and reversible."""
    stacks = {row["kind"]: row for row in rows}
    pyplot.rcParams.update({"font.size": 10, "svg.fonttype": "none", "font.family": "sans-serif"})
    figure, panels = pyplot.subplots(
        1, len(stacks), figsize=(8.4, 3.1), layout="constrained", squeeze=False
    )
    for panel, (kind, stack) in zip(panels[0], stacks.items(), strict=True):
        depths = stack["depths"]
        for name, colour in (("plain", PLAIN), ("reversify", OURS)):
            gigabytes = [entry["peak"] / 2**30 for entry in stack["memory"][name]]
            panel.plot(depths, gigabytes, marker="o", color=colour, linewidth=2, markersize=4)
            label = f"{name} {gigabytes[-1]:.1f} GiB"
            panel.annotate(
                label, (depths[-1], gigabytes[-1]), (-6, 7), textcoords="offset points",
                color=colour, ha="right",
            )  # fmt: skip
        panel.set_title(f"{kind} blocks", loc="left")
        panel.set_xlabel("depth")
        panel.set_xticks(depths)
        panel.set_ylim(bottom=0)
        panel.margins(y=0.15)
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", alpha=0.25)
    panels[0][0].set_ylabel("peak activation memory, GiB")
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, metadata={"Date": None})


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
