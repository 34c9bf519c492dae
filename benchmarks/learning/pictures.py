"""Curves of trainings, and of gradients through training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

Log = Sequence[Mapping[str, Any]]


def draw_curves(found: Mapping[str, Sequence[Mapping[str, Any]]], file: Path) -> None:
    """Test error by epoch, the mean over seeds, a line a setting; the end is what matters."""
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    for setting, results in found.items():
        logs = [result["log"] for result in results]
        means = [
            100 - 100 * fmean(line["test_accuracy"] for line in lines)
            for lines in zip(*logs, strict=False)
        ]
        at = [line["epoch"] for line in logs[0]][: len(means)]
        axes.plot(at, means, label=setting.partition("-")[2], **_style(results[0]["experiment"]))
    axes.set(xlabel="epoch", ylabel="test error, %", yscale="log")
    axes.yaxis.set_major_locator(LogLocator(10, (1, 2, 3, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.legend(frameon=False, fontsize="small", ncols=2)
    _plain(axes)
    figure.savefig(file)


def _style(experiment: Mapping[str, Any]) -> dict[str, Any]:
    """Colour by accumulation; dashes: backprop, dots: the paper's order, crosses: with a lead."""
    kind = ":" if experiment["order"] == "paper" else "-"
    if experiment["method"] in ("backprop", "reversible_backprop", "plain"):
        kind = "--"
    shade = math.log2(experiment["accumulate"]) / 3
    colour = "0.5" if experiment["method"] == "plain" else _colour(0.9 * (1 - min(shade, 1)))
    marker = "x" if experiment["optimizer"].startswith("lead") else ""
    return {"linestyle": kind, "color": colour, "marker": marker, "lw": 1.5}


def draw_gradients(log: Log, file: Path) -> None:
    """PETRA's Figure 5: cosine similarity and norm ratio by epoch, a line a stage."""
    lines = [line for line in log if line.get("gradients")]
    pairs = {
        "method_vs_delayed": "PETRA vs delayed",
        "method_vs_end_to_end": "PETRA vs end-to-end",
        "delayed_vs_end_to_end": "delayed vs end-to-end",
    }
    figure = Figure(figsize=(11, 6), layout="constrained")
    grid = figure.subplots(2, len(pairs), sharex=True, sharey="row")
    stages = len(lines[0]["gradients"])
    for column, (pair, title) in enumerate(pairs.items()):
        for row, (measure, label) in enumerate(
            (("cosine", "cosine similarity"), ("norm_ratio", "norm ratio"))
        ):
            axes = grid[row][column]
            for stage in range(stages):
                values = [line["gradients"][stage][f"{pair}.{measure}"] for line in lines]
                shade = 0.15 + 0.7 * stage / max(1, stages - 1)
                axes.plot(
                    [line["epoch"] for line in lines], values, color=_colour(shade), label=stage
                )
            axes.axhline(1, color="0.6", lw=0.8, zorder=0)
            if row == 0:
                axes.set_title(title, fontsize="medium")
            else:
                axes.set_xlabel("epoch")
            if column == 0:
                axes.set_ylabel(label)
            _plain(axes)
    grid[0][0].legend(title="stage", frameon=False, fontsize="x-small", ncols=2)
    figure.savefig(file)


def _colour(shade: float) -> Any:
    return colormaps["viridis"](shade)


def _plain(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)


def draw_stability(delays: Sequence[int], found: Mapping[str, Sequence[float]], file: Path) -> None:
    """The largest stable curvature by delay, a line a kind of momentum."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for index, (kind, values) in enumerate(found.items()):
        colour = _colour(0.9 * index / max(1, len(found) - 1))
        axes.plot(delays, values, marker="o", ms=4, color=colour, label=kind)
    axes.set(xlabel="delay in updates", ylabel="largest stable curvature", yscale="log")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.legend(frameon=False, fontsize="small")
    _plain(axes)
    figure.savefig(file)
