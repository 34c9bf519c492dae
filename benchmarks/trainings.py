"""Several trainings side by side, in separate processes, with results in a folder."""

from __future__ import annotations

import argparse
import json
import math
import queue
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import multiprocessing

Result = dict[str, Any]
Run = Callable[[Any, Any, Path, float], str]
"""Trains one experiment on data, with a folder for results, until a deadline; returns the result as
a line of text."""


class OutOfTime(Exception):
    """A training was not finished at its deadline; the message says how far it came."""


def add_options(parser: argparse.ArgumentParser, *, seeds: int, jobs: int) -> None:
    """The options that all tables of trainings have."""
    parser.add_argument("--out", type=Path, required=True, help="folder for results")
    parser.add_argument("--only", nargs="+", default=[""], help="rows with this in their name")
    parser.add_argument("--seeds", type=int, default=seeds)
    parser.add_argument("--jobs", type=int, default=jobs, help="trainings side by side")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after")
    parser.add_argument("--show", action="store_true", help="train nothing")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")


def train(
    run: Run,
    experiments: Sequence[Any],
    data: Any,
    device: str,
    out: Path,
    jobs: int,
    seconds: float,
) -> None:
    """Processes take experiments from one queue until it is empty or the time is over."""
    context: Any = multiprocessing.get_context("spawn")
    todo, messages = context.Queue(), context.Queue()
    for experiment in [*experiments, *[None] * jobs]:
        todo.put(experiment)
    arguments = (run, todo, messages, data, device, out, time.monotonic() + seconds)
    workers = [context.Process(target=work, args=arguments) for _ in range(jobs)]
    for worker in workers:
        worker.start()
    console = Console(force_jupyter=False)
    news = _news(messages, workers, len(experiments))
    for line in track(news, "trainings", total=len(experiments), console=console):
        console.print(line)
    for worker in workers:
        worker.join()


def _news(messages: Any, workers: Sequence[Any], count: int) -> Iterator[str]:
    """The workers' messages, as long as one of them runs."""
    while count:
        try:
            yield messages.get(timeout=1.0)
            count -= 1
        except queue.Empty:
            if not any(worker.is_alive() for worker in workers):
                yield f"all workers ended with {count} trainings to go"
                return


def work(
    run: Run, todo: Any, messages: Any, data: Any, device: str, out: Path, deadline: float
) -> None:
    """Run trainings in one process; a failed training does not end the others."""
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    data = data.to(torch.device(device))
    while (experiment := todo.get()) is not None:
        name = experiment.name
        if time.monotonic() > deadline:
            messages.put(f"{name}: no time left")
            continue
        try:
            messages.put(f"{name}: {run(experiment, data, out / name, deadline)}")
        except OutOfTime as cut:
            messages.put(f"{name}: out of time {cut}".rstrip())
        except Exception:
            messages.put(f"{name}: failed\n{traceback.format_exc()}")


def gather(out: Path) -> dict[str, Result]:
    """All results so far by name, of this machine and of others; writes them to `results.json`."""
    file = out / "results.json"
    results: dict[str, Result] = json.loads(file.read_text()) if file.exists() else {}
    for path in sorted(out.glob("*/result.json")):
        result = json.loads(path.read_text())
        results[result["name"]] = result
    out.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(results))
    return results
