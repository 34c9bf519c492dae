"""Curves of trainings, and of gradients through training."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

Log = Sequence[Mapping[str, Any]]


def draw_curves(settings: Mapping[str, Sequence[Mapping[str, Any]]], file: Path) -> None:
    """Training loss and test error by epoch: a column an accumulation factor, a colour a kind.

    Lines are means over seeds, with all seeds within the band around them.
    """
    factors = sorted({results[0]["experiment"]["accumulate"] for results in settings.values()})
    kinds = _kinds(settings)
    shades = {kind: index for index, kind in enumerate(dict.fromkeys(kinds.values()))}
    figure = Figure(figsize=(1.5 + 2.6 * max(2, len(factors)), 6.5), layout="constrained")
    grid = figure.subplots(2, len(factors), sharex=True, sharey="row", squeeze=False)
    for setting, results in settings.items():
        experiment, kind = results[0]["experiment"], kinds[setting]
        dashes = "--" if experiment["method"] in _WITHOUT_DELAY else "-"
        colour = colormaps["tab10"](shades[kind] % 10)
        column = factors.index(experiment["accumulate"])
        for axes, measure in zip(grid[:, column], _MEASURES.values(), strict=True):
            seeds = [[measure(line) for line in result["log"]] for result in results]
            values = list(zip(*seeds, strict=False))
            at = range(1, len(values) + 1)
            axes.plot(at, [fmean(v) for v in values], ls=dashes, color=colour, label=kind, lw=1.5)
            low, high = [min(v) for v in values], [max(v) for v in values]
            axes.fill_between(at, low, high, color=colour, alpha=0.2, lw=0)
    for row, name in zip(grid, _MEASURES, strict=True):
        row[0].set(ylabel=name, yscale="log")
        row[0].yaxis.set_major_locator(LogLocator(10, (1, 2, 5)))
        row[0].yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        row[0].yaxis.set_minor_formatter(NullFormatter())
        for axes in row:
            _plain(axes)
    for axes, factor in zip(grid[0], factors, strict=True):
        axes.set_title(f"k = {factor}", fontsize="medium")
    for axes in grid[-1]:
        axes.set_xlabel("epoch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    lines = {line.get_label(): line for axes in grid[0] for line in axes.lines}
    figure.legend(
        lines.values(),
        lines.keys(),
        loc="outside lower center",
        ncols=max(2, len(factors)),
        frameon=False,
    )
    figure.savefig(file)


_WITHOUT_DELAY: Final = ("backprop", "reversible_backprop", "plain")

_MEASURES: Final[Mapping[str, Callable[[Mapping[str, Any]], float]]] = {
    "training loss": lambda line: line["train_loss"],
    "test error, %": lambda line: 100 - 100 * line["test_accuracy"],
}


def _kinds(settings: Iterable[str]) -> dict[str, str]:
    """The part of a setting's name in which it differs from others, accumulation left out."""
    parts = {setting: setting.split("-") for setting in settings}
    shared = set.intersection(*map(set, parts.values())) if len(parts) > 1 else set()
    return {
        setting: "-".join(p for p in own if p not in shared and not re.fullmatch(r"k\d+", p))
        or setting
        for setting, own in parts.items()
    }


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


def draw_stability(
    delays: Sequence[int], largest: Mapping[str, Sequence[float]], file: Path
) -> None:
    """The largest stable curvature by delay, a line a kind of momentum."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for index, (kind, values) in enumerate(largest.items()):
        colour = _colour(0.9 * index / max(1, len(largest) - 1))
        axes.plot(delays, values, marker="o", ms=4, color=colour, label=kind)
    axes.set(xlabel="delay in updates", ylabel="largest stable curvature", yscale="log")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.legend(frameon=False, fontsize="small")
    _plain(axes)
    figure.savefig(file)
