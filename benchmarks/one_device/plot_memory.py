"""Draw activation memory against depth from the figures `memory.py --json` wrote.

python -m benchmarks.memory --device cuda --json out/memory.json
python -m benchmarks.one_device.plot_memory out/memory.json docs/memory.svg
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot

PLAIN, OURS = "#b0574f", "#2f6f8f"


def draw(figures: dict[str, Any], target: Path) -> None:
    """One panel a stack: what training holds at its peak, plain and reversible."""
    stacks = figures["result"]
    pyplot.rcParams.update({"font.size": 10, "svg.fonttype": "none", "font.family": "sans-serif"})
    figure, panels = pyplot.subplots(1, len(stacks), figsize=(8.4, 3.1), layout="constrained")
    for panel, (kind, found) in zip(panels, stacks.items(), strict=True):
        depths = found["depths"]
        for name, colour in (("plain", PLAIN), ("reversify", OURS)):
            gigabytes = [entry["peak"] / 2**30 for entry in found["memory"][name]]
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
    panels[0].set_ylabel("peak activation memory, GiB")
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
