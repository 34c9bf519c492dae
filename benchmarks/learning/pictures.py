"""Curves of trainings, and of gradients through training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure

Log = Sequence[Mapping[str, Any]]


def draw_curves(found: Mapping[str, Sequence[Mapping[str, Any]]], file: Path) -> None:
    """Test accuracy by epoch, the mean over seeds, a line a setting."""
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    for setting, results in found.items():
        logs = [result["log"] for result in results]
        at = [line["epoch"] for line in logs[0]]
        means = [
            100 * fmean(line["test_accuracy"] for line in lines)
            for lines in zip(*logs, strict=False)
        ]
        style = ":" if "paper" in setting else "--" if "backprop" in setting else "-"
        axes.plot(at[: len(means)], means, style, label=setting)
    axes.set(xlabel="epoch", ylabel="test accuracy, %")
    axes.legend(frameon=False, fontsize="x-small", loc="lower right")
    _plain(axes)
    figure.savefig(file)


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
    from matplotlib import colormaps

    return colormaps["viridis"](shade)


def _plain(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
