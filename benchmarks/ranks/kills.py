"""Kill ranks at random moments, again and again: nothing may hang, break or be left behind.

    python -m benchmarks run kills --trials 100 --ranks 2 4 --jobs 2 --json kills.json

A trial draws a method, how many micro-batches an update gathers, a moment (while the ranks find
each other, in a step, in a save) and one or two ranks, which get SIGKILL then. Half of the trials
are plain processes that nobody looks after: the others must stop by themselves within the trainer's
timeout and name a dead rank and their last micro-batch; then the same ranks are started again. The
other half run under `torchrun --max-restarts=3` and must come back by themselves. Every step of
every rank, before and after, is compared with a run in one process that nobody disturbed: the loss,
and digests of each stage's parameters, buffers, gradients and optimizer state.
"""

from __future__ import annotations

import argparse
import enum
import os
import random
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from rich.progress import track

import revcompile
from benchmarks.harness import show
from benchmarks.ranks.victim import (
    EVERY,
    STEPS,
    TIMEOUT,
    Plain,
    RankProcess,
    Run,
    Torchrun,
    checkpoints,
    train,
)
from benchmarks.registry import Benchmark, Row
from revcompile.runtime.checkpoint import load_training

METHODS: Final = ("petra", "1f1b", "gpipe", "delayed", "pipedream", "ddg", "dni", "backprop")
SLACK: Final = 30.0
"""Seconds beyond the trainer's timeout, for error messages and a busy machine."""
PATIENCE: Final = 180.0
"""Seconds for a whole run, restarts included."""


class Moment(enum.Enum):
    """When ranks are killed."""

    START = "start"
    STEP = "step"
    SAVE = "save"


@dataclass(frozen=True)
class Trial:
    """Whom to kill, when, and in what training."""

    seed: int
    ranks: int
    run: Run
    moment: Moment
    under_torchrun: bool
    victims: tuple[int, ...]
    """In this order."""

    @classmethod
    def draw(cls, seed: int, ranks: Sequence[int]) -> Trial:
        """From a seed."""
        dice = random.Random(seed)
        count = dice.choice(ranks)
        return cls(
            seed,
            count,
            Run(dice.choice(METHODS), dice.choice((1, 3))),
            dice.choice((Moment.START, Moment.STEP, Moment.STEP, Moment.SAVE)),
            dice.random() < 0.5,
            tuple(dice.sample(range(count), 2 if count > 2 and dice.random() < 0.25 else 1)),
        )


@dataclass
class Outcome:
    """What a trial showed."""

    trial: Trial
    killed: bool = False
    hung: bool = False
    orphans: int = 0
    corrupted: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)
    """Steps that differ from the undisturbed run."""
    unnamed: list[str] = field(default_factory=list)
    """Survivors that did not say who is gone and how far they had come."""
    failed: str = ""
    """What kept the run from its end."""
    stopped_after: float | None = None
    """Seconds from the first kill to the last survivor's end."""
    compared: int = 0
    """Steps of stages after the resume that were compared."""
    named: int = 0
    """Survivors that had trained and said both."""

    @property
    def problems(self) -> list[str]:
        """All that went wrong, in words."""
        problems = ["hung past the timeout"] if self.hung else []
        problems += [f"{self.orphans} processes left behind"] if self.orphans else []
        problems += [f"differs: {', '.join(self.differing[:3])}"] if self.differing else []
        problems += [f"named no dead rank: {message}" for message in self.unnamed]
        return [*problems, *self.corrupted, *filter(None, [self.failed])]


# -- one trial ------------------------------------------------------------------------------------


def attempt(trial: Trial, expected: Mapping[int, Mapping[str, Any]]) -> Outcome:
    """Start, kill, look at what is left, start again, compare."""
    outcome = Outcome(trial)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        kind = Torchrun if trial.under_torchrun else Plain
        launched = kind(trial.run, trial.ranks, folder)
        dead, survivors, since = kill_at_moment(folder, trial)
        outcome.killed = bool(dead)
        if not until(lambda: not any(s.is_running for s in survivors), TIMEOUT + SLACK):
            outcome.hung = True
        outcome.stopped_after = time.monotonic() - since
        code = launched.wait(PATIENCE if not outcome.hung else 0.0)
        outcome.hung |= code is None
        left = end_leftovers(folder)
        outcome.orphans = 0 if outcome.hung else left
        if not trial.under_torchrun and code:
            outcome.corrupted += corrupted(folder)
            for survivor in survivors:
                check_message(survivor, dead, outcome)
            code = Plain(trial.run, trial.ranks, folder).wait(PATIENCE)
            outcome.orphans += end_leftovers(folder)
        outcome.corrupted += corrupted(folder)
        if code != 0:
            outcome.failed = f"ended with {code}: {last_output(folder)}"
        compare(RankProcess.all(folder), expected, outcome)
        kept_all([*dead, *survivors], RankProcess.all(folder), outcome)
    return outcome


def kill_at_moment(
    folder: Path, trial: Trial
) -> tuple[list[RankProcess], list[RankProcess], float]:
    """Wait for the moment and kill; returns who was, who was not, and when."""
    dice = random.Random(trial.seed + 1)
    first = trial.victims[0]

    def by_rank() -> dict[int, RankProcess]:
        return {process.rank: process for process in RankProcess.all(folder)}

    def noted(count: int) -> bool:
        return first in by_rank() and len(by_rank()[first].steps) >= count

    if trial.moment is Moment.START:
        until(lambda: first in by_rank(), 60)
        time.sleep(dice.uniform(0.0, 1.5))
    elif trial.moment is Moment.STEP:
        step = dice.randrange(1, STEPS)
        until(lambda: noted(step), 90)
        time.sleep(dice.uniform(0.0, 0.03))
    else:
        saves = dice.randrange(1, STEPS // EVERY)
        until(lambda: noted(saves * EVERY), 90)
        until((checkpoints(folder) / "saving.tmp").exists, 5)
        time.sleep(dice.uniform(0.0, 0.4))
    running = {process.rank: process for process in RankProcess.all(folder) if process.is_running}
    dead = [running.pop(rank) for rank in trial.victims if rank in running]
    since = time.monotonic()
    for process in dead:
        with suppress(ProcessLookupError):  # it may have ended because of another's end
            os.kill(process.pid, signal.SIGKILL)
        time.sleep(dice.uniform(0.0, 0.2) if process is not dead[-1] else 0.0)
    return dead, list(running.values()), since


def until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait until the condition holds; False if it does not in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.002)
    return True


def end_leftovers(folder: Path) -> int:
    """End ranks that are still there shortly after their launcher; how many there were."""
    until(lambda: not any(process.is_running for process in RankProcess.all(folder)), 5)
    left = [process for process in RankProcess.all(folder) if process.is_running]
    for process in left:
        os.kill(process.pid, signal.SIGKILL)
    return len(left)


# -- what came of it ------------------------------------------------------------------------------


def corrupted(folder: Path) -> list[str]:
    """Why checkpoints do not load, one reason for each that does not."""
    problems = []
    saved = checkpoints(folder)
    for place in saved.glob("step_*[0-9]"):
        try:
            load_training(place)
        except revcompile.RevcompileError as error:
            problems.append(str(error))
    return problems


def check_message(survivor: RankProcess, dead: Sequence[RankProcess], outcome: Outcome) -> None:
    """Did a survivor say who is gone, and how far it had come itself?"""
    steps = survivor.steps
    if not steps or any("done" in line for line in survivor.lines):
        return
    gone = "|".join(str(process.rank) for process in dead)
    rank, output = survivor.rank, survivor.output
    named = re.search(rf"rank ({gone}) \([^)]*\) is gone", output)
    last = re.search(rf"micro-batch here \(rank {rank} \([^)]*\)\): (-?\d+)", output)
    noted = min(steps[-1]["step"], STEPS - 1)
    if named and last and int(last[1]) in (noted, noted + 1):  # it notes a step after the step
        outcome.named += 1
    else:
        outcome.unnamed.append(f"rank {rank}, after step {noted}: {output[-500:]}")


def compare(
    processes: Sequence[RankProcess], expected: Mapping[int, Mapping[str, Any]], outcome: Outcome
) -> None:
    """Every step that any rank noted with the undisturbed run's; and are all there?"""
    missing = {rank: set(expected) for rank in range(outcome.trial.ranks)}
    for process in processes:
        for line in process.steps:
            missing[process.rank].discard(line["step"])
            if unlike(line, expected[line["step"]]):
                outcome.differing.append(f"rank {process.rank}, step {line['step']}")
        if process.began:
            outcome.compared += sum(len(line["digests"]) for line in process.steps)
    for rank, steps in missing.items() if not outcome.failed else ():
        outcome.differing += [f"rank {rank}, step {step}: missing" for step in sorted(steps)]


def kept_all(
    before: Sequence[RankProcess], processes: Sequence[RankProcess], outcome: Outcome
) -> None:
    """What any rank knew to be saved was not lost."""
    saved = max((line.get("saved", 0) for process in before for line in process.lines), default=0)
    old = {process.pid for process in before}
    for process in processes:
        if process.pid not in old and process.began is not None and process.began < saved:
            outcome.differing.append(f"step {saved} was saved, but went on from {process.began}")


def unlike(line: Mapping[str, Any], expected: Mapping[str, Any]) -> bool:
    """Does a rank's step differ? It knows only its stages, and not always the loss."""
    is_known = line["loss"] is not None
    other = any(expected["digests"][stage] != digest for stage, digest in line["digests"].items())
    return other or (is_known and line["loss"] != expected["loss"])


def last_output(folder: Path) -> str:
    """The end of what the processes printed."""
    outputs = [
        f"rank {process.rank}: {process.output[-400:]}" for process in RankProcess.all(folder)
    ]
    log = folder / "log"
    return "\n".join([*outputs, log.read_text()[-600:] if log.exists() else ""])


# -- all of them ----------------------------------------------------------------------------------


def undisturbed(run: Run) -> dict[int, dict[str, Any]]:
    """The same training in one process, step by step."""
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        train(run, Path(place), lines.append)
    return {line["step"]: line for line in lines if "step" in line}


def summary(outcomes: Sequence[Outcome]) -> Iterator[tuple[object, ...]]:
    """A row for each kind of trial, and one for all."""
    kinds = [(torchrun, moment) for torchrun in (False, True) for moment in Moment]
    for torchrun, moment in kinds:
        name = f"{'torchrun' if torchrun else 'plain'}, {moment.value}"
        of_kind = [
            o for o in outcomes if (o.trial.under_torchrun, o.trial.moment) == (torchrun, moment)
        ]
        yield name, *counts(of_kind)
    yield "all", *counts(outcomes)


def counts(outcomes: Sequence[Outcome]) -> tuple[object, ...]:
    """The figures of some trials, as in `COLUMNS`."""
    times = [o.stopped_after for o in outcomes if o.stopped_after is not None]
    return (
        len(outcomes),
        sum(o.killed for o in outcomes),
        sum(o.hung for o in outcomes),
        sum(len(o.corrupted) for o in outcomes),
        sum(o.orphans for o in outcomes),
        sum(len(o.differing) for o in outcomes),
        sum(o.compared for o in outcomes),
        f"{sum(len(o.unnamed) for o in outcomes)} / {sum(o.named for o in outcomes)}",
        sum(bool(o.failed) for o in outcomes),
        f"{max(times):.1f} s" if times else "",
    )


COLUMNS: Final = (
    "trials",
    "count",
    "killed",
    "hung",
    "corrupted",
    "orphans",
    "steps off",
    "compared",
    "silent / named",
    "failed",
    "longest stop",
)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Its options."""
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)


def main(options: argparse.Namespace) -> Iterator[Row]:
    """Run the trials, some at a time."""
    torch.set_num_threads(1)
    trials = [Trial.draw(options.seed + i, options.ranks) for i in range(options.trials)]
    runs = dict.fromkeys(trial.run for trial in trials)
    expected = {run: undisturbed(run) for run in track(runs, "undisturbed")}
    outcomes: list[Outcome] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        trying = [pool.submit(attempt, trial, expected[trial.run]) for trial in trials]
        for trial in track(as_completed(trying), "killing", total=len(trials)):
            outcomes.append(trial.result())
            yield {**asdict(outcomes[-1]), "failed": outcomes[-1].problems}
    show("Kills", COLUMNS, list(summary(outcomes)))
    for outcome in outcomes:
        for problem in outcome.problems:
            print(f"{outcome.trial}:\n    {problem}")


BENCHMARK = Benchmark("kills", arguments, main, smallest=("--trials", "1"))
