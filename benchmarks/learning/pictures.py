"""Curves of trainings, and of gradients through training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from revcompile.inspect.drawing.figures import save_figure

Log = Sequence[Mapping[str, Any]]


def draw_curves(settings: Mapping[str, Sequence[Mapping[str, Any]]], file: Path) -> None:
    """Training loss and test error by epoch: a column an accumulation factor, a colour a kind.

    Lines are means over seeds, with all seeds within the band around them.
    """
    experiments = {setting: results[0]["experiment"] for setting, results in settings.items()}
    factors = _columns(experiments)
    kinds = _labels(experiments, "" if len(factors) > 1 else "accumulate")
    shades = {kind: index for index, kind in enumerate(dict.fromkeys(kinds.values()))}
    figure = Figure(figsize=(1.5 + 2.6 * max(2, len(factors)), 6.5), layout="constrained")
    grid = figure.subplots(2, len(factors), sharex=True, sharey="row", squeeze=False)
    for setting, results in settings.items():
        experiment, kind = results[0]["experiment"], kinds[setting]
        dashes = "--" if experiment["method"] in _WITHOUT_DELAY else "-"
        colour = colormaps["tab10"](shades[kind] % 10)
        column = factors.index(experiment["accumulate"]) if len(factors) > 1 else 0
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
    if len(factors) > 1:
        for axes, factor in zip(grid[0], factors, strict=True):
            axes.set_title(f"an update every {_micro_batches(factor)}", fontsize="medium")
    for axes in grid[-1]:
        axes.set_xlabel("epoch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    lines = {line.get_label(): line for axes in grid[0] for line in axes.lines}
    longest = max(map(len, lines))
    figure.legend(
        lines.values(),
        lines.keys(),
        loc="outside lower center",
        ncols=max(1, int(figure.get_figwidth() * 11 // (longest + 6))),
        frameon=False,
    )
    save_figure(figure, file)


_WITHOUT_DELAY: Final = ("backprop", "reversible_backprop", "plain")

_MEASURES: Final[Mapping[str, Callable[[Mapping[str, Any]], float]]] = {
    "training loss": lambda line: line["train_loss"],
    "test error, %": lambda line: 100 - 100 * line["test_accuracy"],
}


def _columns(experiments: Mapping[str, Mapping[str, Any]]) -> list[int]:
    """A column for each accumulation factor, if every one of them has something to compare."""
    counts = Counter(experiment["accumulate"] for experiment in experiments.values())
    return sorted(counts) if min(counts.values()) > 1 else [max(counts)]


def _labels(experiments: Mapping[str, Mapping[str, Any]], besides: str = "") -> dict[str, str]:
    """What a reader calls each setting: its method, and what differs between settings.

    >>> usual = {"order": None, "optimizer": "adamw", "stages": 8, "batch": 64}
    >>> _labels({"a": {"method": "petra", **usual}, "b": {"method": "backprop", **usual}})
    {'a': 'PETRA', 'b': 'backprop'}
    >>> _labels({"a": {"method": "petra", **usual}, "b": {"method": "petra", **usual, "stages": 4}})
    {'a': 'PETRA, 8 stages', 'b': 'PETRA, 4 stages'}
    """
    delayed = [e for e in experiments.values() if e["method"] not in _WITHOUT_DELAY]
    differing = []
    for name in (*_WORDS, besides):
        among = delayed if name in _OF_DELAY else list(experiments.values())
        if len({experiment.get(name) for experiment in among}) > 1:
            differing.append(name)
    labels = {}
    for setting, experiment in experiments.items():
        names = [n for n in differing if experiment in delayed or n not in _OF_DELAY]
        words = [_WORDS[name](experiment[name]) for name in names if name in _WORDS]
        if besides in names:
            words.append(f"k = {experiment[besides]}")
        method = _METHODS.get(experiment["method"], experiment["method"])
        labels[setting] = ", ".join([method, *filter(None, words)])
    return labels


def _micro_batches(count: int) -> str:
    return "micro-batch" if count == 1 else f"{count} micro-batches"


_METHODS: Final = {
    "petra": "PETRA",
    "petra_stashed": "PETRA with stashed weights",
    "reversible_backprop": "reversible backprop",
    "plain": "backprop, not rewired",
    "delayed": "inputs and weights kept",
    "dsp": "inputs kept",
    "params-buffer": "weights kept",
}
_OPTIMIZERS: Final = {
    "sgd": "SGD",
    "adamw": "AdamW",
    "nadam": "NAdam",
    "delay-aware-sgd": "DelayAwareSGD",
    "delay-aware-adamw": "DelayAwareAdamW",
}
_WORDS: Final[Mapping[str, Callable[[Any], str]]] = {
    "order": lambda order: {"1f1b": "1F1B order", "paper": "the paper's order"}.get(order, ""),
    "optimizer": lambda optimizer: _OPTIMIZERS.get(optimizer, optimizer),
    "stages": lambda stages: f"{stages} stages",
    "batch": lambda batch: f"batches of {batch}",
    "recipe": str,
}
"""How a field of an experiment is told."""
_OF_DELAY: Final = ("order", "stages", "batch", "recipe", "accumulate")
"""Fields that matter only where gradients are late."""


def _plain(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
