"""Does delay hurt? Trainings on CIFAR-10, several side by side on one GPU.

    python -m benchmarks run learning orders --data data --out out/orders --jobs 8
    python -m benchmarks run learning orders --out out/orders --show

The first command trains whatever of the table has no result yet; stopped (or out of `--minutes`)
and given again it goes on from the last checkpoints. `results.json` in the folder holds all results
so far: copied to another machine, training goes on there with what is missing. The second command
prints the results and draws the curves.

Tables: orders (two orders of PETRA, and delay-aware momentum, against backprop, by accumulation),
cosine (the same with another schedule), momentum (with a shorter one), ablation (PETRA's Table 4),
helps (what else to do about delay), transformer, muon (the same with
matrices by Muon), weights (RevNet-18 at k = 1 by the weights of backward), resnet50 (18 stages).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from benchmarks.harness import show
from benchmarks.learning.cifar import load
from benchmarks.learning.drift import MAX_DRIFT, add_drift_option
from benchmarks.learning.experiments import MUON, PLAIN, TABLES, Experiment
from benchmarks.learning.pictures import draw_curves
from benchmarks.learning.results import gather
from benchmarks.learning.run import run_to_line
from benchmarks.learning.workers import add_options, train
from benchmarks.registry import Benchmark, Row


def main(options: argparse.Namespace) -> Iterator[Row]:
    """Train what is missing, or show what is there."""
    rows = [
        replace(row, backend=options.backend, max_drift=limit)
        for row in TABLES[options.table](options.seeds, options.epochs)
        for limit in (options.max_drift if _is_limited(row) else [MAX_DRIFT])
    ]
    experiments = [row for row in rows if any(part in row.name for part in options.only)]
    if not options.show:
        known = gather(options.out)
        missing = [experiment for experiment in experiments if experiment.name not in known]
        data = load(options.data).cut(options.samples or 10**9)
        train(
            run_to_line,
            missing,
            data,
            options.device,
            options.out,
            options.jobs,
            60 * options.minutes,
        )
    report(experiments, options)
    known = gather(options.out)
    yield from (known[experiment.name] for experiment in experiments if experiment.name in known)


def _is_limited(row: Experiment) -> bool:
    return row.optimizer == MUON and row.method not in ("backprop", PLAIN)


def report(experiments: Sequence[Experiment], options: argparse.Namespace) -> None:
    """Accuracies by setting, mean and deviation over seeds; curves."""
    known = gather(options.out)
    by_setting: dict[str, list[Any]] = {}
    for experiment in sorted(experiments, key=lambda experiment: experiment.accumulate):
        if experiment.name in known:
            by_setting.setdefault(experiment.setting, []).append(known[experiment.name])
    if not by_setting:
        epochs = sorted({result["experiment"]["epochs"] for result in known.values()})
        raise SystemExit(
            f"{options.out} has no results of {options.table!r} with {options.epochs} epochs"
            + (f"; there are some with --epochs {' or '.join(map(str, epochs))}" if epochs else "")
        )
    rows = []
    for setting, results in by_setting.items():
        last = [100 * result["log"][-1]["test_accuracy"] for result in results]
        best = [100 * max(line["test_accuracy"] for line in r["log"]) for r in results]
        seconds = fmean(sum(line["seconds"] for line in r["log"]) for r in results)
        spread = f"± {pstdev(last):.2f}" if len(last) > 1 else ""
        rows.append(
            (
                setting,
                len(last),
                f"{fmean(last):.2f} {spread}",
                f"{fmean(best):.2f}",
                f"{seconds:.0f}",
            )
        )
    show(
        f"{options.table}: CIFAR-10, {options.epochs} epochs",
        ("setting", "seeds", "test accuracy, %", "best epoch, %", "seconds"),
        rows,
    )
    draw_curves(by_setting, options.out / "curves.svg")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Its options."""
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--data", type=Path, help="folder with CIFAR-10", default=Path("data"))
    add_options(parser, seeds=3, jobs=8, stop="stop and save after")
    add_drift_option(parser)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument(
        "--samples", type=int, help="train on the first N images only, to try it out"
    )
    parser.add_argument("--backend", default="auto", help="all train alike; inductor is fastest")
    parser.add_argument("--show", action="store_true", help="train nothing")


BENCHMARK = Benchmark(
    "learning", arguments, main, smallest=None, needs="CIFAR-10 in a folder, and some minutes"
)
