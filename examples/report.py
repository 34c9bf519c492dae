"""What a training run shows and leaves behind: a progress bar, a log, a picture of its curves."""

import csv
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from revcompile.inspect.drawing.figures import save_figure


@dataclass(frozen=True)
class Epoch:
    """A line of the log."""

    epoch: int
    train_loss: float
    train_accuracy: float
    test_loss: float
    test_accuracy: float
    images_per_second: float
    seconds: float


class Report:
    """Shows and logs a run on one rank; on the others (`shown=False`) it does nothing.

    `folder` gets `log.csv` (a line an epoch), `run.json` (options and result) and `curves.svg`.
    """

    def __init__(self, folder: Path, steps: int, options: Mapping[str, Any], shown: bool) -> None:
        self.folder, self.steps, self.options, self.shown = folder, steps, options, shown
        self.console = Console(quiet=not shown, force_jupyter=False)
        self.epochs: list[Epoch] = []
        self._started = time.perf_counter()

    @contextmanager
    def progress(self, done: int) -> Iterator[None]:
        """Show a progress bar that starts at `done` steps."""
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(elapsed_when_finished=True),
        )
        with Progress(*columns, console=self.console, disable=not self.shown) as self._progress:
            self._bar = self._progress.add_task(
                "training", total=self.steps, completed=done, status=""
            )
            yield

    def begin(self, epoch: int) -> None:
        """An epoch starts."""
        self._epoch, self._samples, self._seen = epoch, 0, torch.zeros(2)
        self._clock = self._drawn = time.perf_counter()
        self._progress.update(self._bar, description=f"epoch {epoch + 1}")

    def step(self, loss: Tensor | None, output: Tensor | None, target: Tensor) -> None:
        """A micro-batch has reached the last stage. Nothing waits for the device here."""
        self._samples += len(target)
        if loss is not None and output is not None:
            right = (output.argmax(1) == target.to(output.device, non_blocking=True)).sum()
            sums = torch.stack((loss.float() * len(target), right.float()))
            self._seen = self._seen.to(sums.device) + sums
        self._progress.advance(self._bar)
        if time.perf_counter() - self._drawn > 0.5:
            self._drawn = time.perf_counter()
            self._show(*self._means(), self._speed())

    def end(self, test_loss: float, test_accuracy: float, seconds: float) -> None:
        """An epoch is over and the model has been tested; `seconds` is how long training took."""
        if not self.shown:
            return
        loss, accuracy = self._means()
        speed = self._samples / max(seconds, 1e-9)
        self._show(loss, accuracy, speed)
        line = Epoch(
            self._epoch + 1,
            loss,
            accuracy,
            test_loss,
            test_accuracy,
            round(speed),
            round(seconds, 2),
        )
        self.epochs.append(line)
        self._write_log()
        self.console.print(
            f"epoch {line.epoch}: loss {loss:.3f}, accuracy {accuracy:.1%}; "
            f"test loss {test_loss:.3f}, test accuracy {test_accuracy:.1%}"
        )

    def go_on(self) -> None:
        """Continue the log of an earlier run."""
        if self.shown and (self.folder / "log.csv").exists():
            self.epochs = read_log(self.folder)

    def finish(self, what_next: Sequence[tuple[str, str]] = ()) -> None:
        """Write the result, draw the curves, and print what to try next: (why, command)."""
        if not (self.shown and self.epochs):
            return
        last = self.epochs[-1]
        seconds = time.perf_counter() - self._started
        result = {"options": dict(self.options), "result": asdict(last), "seconds": seconds}
        (self.folder / "run.json").write_text(json.dumps(result, indent=2, default=str) + "\n")
        drawn = draw_curves({"": self.epochs}, self.folder / "curves.svg")
        self.console.print(
            f"test accuracy {last.test_accuracy:.1%} after {seconds:.0f} s", style="bold"
        )
        files = ["model.safetensors", "log.csv", "run.json", *(["curves.svg"] if drawn else [])]
        self.console.print(f"saved in {self.folder}: {', '.join(files)}", soft_wrap=True)
        if what_next:
            self.console.print("what to try next:")
        for why, command in what_next:
            self.console.print(f"  {why}:\n    {command}", highlight=False, soft_wrap=True)

    def _show(self, loss: float, accuracy: float, speed: float) -> None:
        status = f"loss {loss:.3f}  accuracy {accuracy:5.1%}  {speed:,.0f} images/s"
        self._progress.update(self._bar, status=status)

    def _means(self) -> tuple[float, float]:
        loss, right = (self._seen / max(1, self._samples)).tolist()
        return loss, right

    def _speed(self) -> float:
        return self._samples / (time.perf_counter() - self._clock)

    def _write_log(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "log.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, [field.name for field in fields(Epoch)])
            writer.writeheader()
            writer.writerows(asdict(epoch) for epoch in self.epochs)


def read_log(folder: Path) -> list[Epoch]:
    """The epochs of a run, from its folder."""
    with (folder / "log.csv").open() as lines:
        rows = [{k: float(v) for k, v in row.items()} for row in csv.DictReader(lines)]
    return [Epoch(int(row.pop("epoch")), **row) for row in rows]


def draw_curves(runs: Mapping[str, list[Epoch]], file: Path) -> bool:
    """Loss and test accuracy by epoch, a colour a run; False where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        return False
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    losses, accuracies = figure.subplots(1, 2)
    for number, (name, epochs) in enumerate(runs.items()):
        at, colour = [epoch.epoch for epoch in epochs], f"C{number}"
        label = f"{name} " if name else ""
        dots = {"color": colour, "marker": "o", "ms": 3}
        losses.plot(at, [e.train_loss for e in epochs], **dots, label=f"{label}train")
        losses.plot(at, [e.test_loss for e in epochs], **dots, ls="--", label=f"{label}test")
        accuracies.plot(at, [100 * e.test_accuracy for e in epochs], **dots, label=name or None)
    losses.set(xlabel="epoch", ylabel="loss")
    losses.legend(frameon=False, fontsize="small")
    accuracies.set(xlabel="epoch", ylabel="test accuracy, %")
    if len(runs) > 1:
        accuracies.legend(frameon=False, fontsize="small")
    for axes in (losses, accuracies):
        axes.spines[["top", "right"]].set_visible(False)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.grid(alpha=0.3)
    save_figure(figure, file)
    return True
