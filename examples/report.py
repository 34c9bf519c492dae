"""What a training run shows and leaves behind: a progress bar, a log, a picture of its curves."""

import csv
from collections.abc import Mapping
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

FIELDS = ("epoch", "train_loss", "test_loss", "test_accuracy", "images_per_second")
Log = list[dict[str, float]]
"""A row for each epoch."""


def progress_bar(shown: bool) -> Progress:
    """Epoch, bar, steps, remaining time; nothing on ranks that show nothing."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeRemainingColumn(elapsed_when_finished=True), disable=not shown)


def write_log(folder: Path, log: Log) -> None:
    """Write `log.csv`, and `curves.svg` where there is matplotlib."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "log.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        writer.writerows(log)
    draw_curves({"": log}, folder / "curves.svg")


def read_log(folder: Path) -> Log:
    """The epochs of a run, from its folder; none before the first."""
    if not (folder / "log.csv").exists():
        return []
    with (folder / "log.csv").open() as lines:
        return [{k: float(v) for k, v in row.items()} for row in csv.DictReader(lines)]


def draw_curves(runs: Mapping[str, Log], file: Path) -> None:
    """Loss and test accuracy by epoch, a colour for each run."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    losses, accuracies = figure.subplots(1, 2)
    for number, (name, log) in enumerate(runs.items()):
        columns = {key: [row[key] for row in log] for key in FIELDS}
        at, style = columns["epoch"], {"color": f"C{number}", "marker": "o", "ms": 3}
        losses.plot(at, columns["train_loss"], **style, label=f"{name} train".strip())
        losses.plot(at, columns["test_loss"], **style, ls="--", label=f"{name} test".strip())
        accuracies.plot(at, [100 * share for share in columns["test_accuracy"]], **style)
    losses.set(xlabel="epoch", ylabel="loss")
    losses.legend(frameon=False, fontsize="small")
    accuracies.set(xlabel="epoch", ylabel="test accuracy, %")
    for axes in (losses, accuracies):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    figure.savefig(file)
