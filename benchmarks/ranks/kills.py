"""Kill ranks at random moments, again and again: nothing may hang, break or be left behind.

    python -m benchmarks run kills --kills 100 --ranks 2 4 --json kills.json
    python -m benchmarks run kills --kills 200 --backend cudagraphs --processes 14

A trial draws a training (method, micro-batches an update gathers) and a few kills: a moment (while
the ranks find each other, in a step, in a save, while a checkpoint is read) and one or two ranks,
which get SIGKILL then. Half of the trials are plain processes that nobody looks after: the others
must stop by themselves within the trainer's timeout and name a dead rank and their last
micro-batch; then the same ranks are started again. The other half run under torchrun (some by its
command, most by its agent with processes that have imported everything) and must come back by
themselves. Every step of every rank, before and after, is compared with a run in one process that
nobody disturbed: the loss, and digests of each stage's parameters, buffers, gradients and
optimizer state; of captured steps on a GPU numbers, which may differ by 1e-6.
"""

from __future__ import annotations

import argparse
import enum
import functools
import math
import os
import random
import re
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
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
    Agent,
    Plain,
    RankProcess,
    Run,
    Torchrun,
    checkpoints,
    hide_gpus,
    server,
    train,
    use_gpu,
)
from benchmarks.registry import Benchmark, Row
from revcompile.runtime.checkpoint.folder import Checkpoint

METHODS: Final = ("petra", "1f1b", "gpipe", "delayed", "pipedream", "ddg", "dni", "backprop")
CAPTURED: Final = ("petra", "delayed", "pipedream")
"""Those whose steps can run over static buffers."""
LAUNCHERS: Final = {"plain": Plain, "agent": Agent, "torchrun": Torchrun}
PHASES: Final = ("start-up", "restore", "step", "save", "end")
KILLS: Final = 8
"""Of one training."""
TOLERANCE: Final = 1e-6
"""On a GPU, of losses and the numbers beside them."""
SLACK: Final = 30.0
"""Seconds beyond the trainer's timeout, for error messages and a busy machine."""
PATIENCE: Final = 180.0
"""Seconds for a whole run, restarts included."""


class Moment(enum.Enum):
    """When ranks are killed."""

    START = "start-up"
    STEP = "step"
    SAVE = "save"
    RESTORE = "restore"


@dataclass(frozen=True)
class Kill:
    """Whom to kill, in this order, and when."""

    moment: Moment
    victims: tuple[int, ...]


@dataclass(frozen=True)
class Trial:
    """A training, and its kills."""

    seed: int
    ranks: int
    run: Run
    launcher: str
    kills: tuple[Kill, ...]

    @classmethod
    def draw(
        cls, seed: int, ranks: Sequence[int], backend: str = "eager", timeout: float = 30.0
    ) -> Trial:
        """From a seed."""
        dice = random.Random(seed)
        count = dice.choice(ranks)
        methods = METHODS if backend == "eager" else CAPTURED
        run = Run(dice.choice(methods), dice.choice((1, 3)), backend, timeout)
        # torchrun itself imports everything again for each rank.
        launcher = dice.choices(list(LAUNCHERS), (8, 7, int(run.device == "cpu")))[0]

        def victims() -> tuple[int, ...]:
            return tuple(dice.sample(range(count), 2 if count > 2 and dice.random() < 0.25 else 1))

        moments = dice.choices(list(Moment), (2, 3, 3, 3), k=KILLS)
        return cls(seed, count, run, launcher, tuple(Kill(m, victims()) for m in moments))


@dataclass
class Outcome:
    """What a trial showed."""

    trial: Trial
    killed: list[str] = field(default_factory=list)
    """What the first rank of each kill was doing."""
    hung: bool = False
    orphans: int = 0
    corrupted: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)
    """Steps that differ from the undisturbed run."""
    unnamed: list[str] = field(default_factory=list)
    """Survivors that did not say who is gone and how far they had come."""
    failed: str = ""
    """What kept the run from its end."""
    stopped_after: float = 0.0
    """The longest time from a kill to the last survivor's end, in seconds."""
    compared: int = 0
    """Steps of stages after the resume that were compared."""
    deviation: float = 0.0
    """The largest difference there; 0 where digests are compared."""
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


def attempt(trial: Trial, expected: Mapping[int, Mapping[str, Any]], deadline: float) -> Outcome:
    """Start; kill, look at what is left, go on; compare. No kill begins after the deadline."""
    outcome = Outcome(trial)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        begin = functools.partial(LAUNCHERS[trial.launcher], trial.run, trial.ranks, folder)
        launched: Plain | Agent | Torchrun = begin(restarts=len(trial.kills))
        lives: list[list[RankProcess]] = []
        for number, kill in enumerate(trial.kills):
            if time.monotonic() > deadline:
                break
            earlier = {process.pid for life in lives for process in life}
            dice = random.Random(f"{trial.seed} {number}")
            came, dead, survivors, since = kill_at_moment(folder, kill, earlier, dice)
            if not dead:  # the training had ended
                outcome.hung |= not came
                break
            outcome.killed.append(dead[0].phase)
            lives.append([*dead, *survivors])
            limit = trial.run.timeout + SLACK
            stopped = until(lambda: not any(s.is_running for s in survivors), limit)  # noqa: B023
            outcome.stopped_after = max(outcome.stopped_after, time.monotonic() - since)
            if not stopped:
                outcome.hung = True
                break
            if isinstance(launched, Plain):
                outcome.hung |= launched.wait(PATIENCE) is None
                outcome.orphans += end_leftovers(folder)
                outcome.corrupted += corrupted(folder)
                for survivor in survivors:
                    check_message(survivor, dead, outcome)
                launched = begin()
        code = launched.wait(PATIENCE if not outcome.hung else 0.0)
        outcome.hung |= code is None
        left = end_leftovers(folder)
        outcome.orphans += 0 if outcome.hung else left
        outcome.corrupted += corrupted(folder)
        if code != 0:
            outcome.failed = f"ended with {code}: {last_output(folder)}"
        compare(RankProcess.all(folder), expected, outcome)
        kept_all(lives, RankProcess.all(folder), outcome)
    return outcome


def kill_at_moment(
    folder: Path, kill: Kill, earlier: Container[int], dice: random.Random
) -> tuple[bool, list[RankProcess], list[RankProcess], float]:
    """Wait for the moment and kill; returns whether it came, who was killed, who was not, and when.

    Args:
        folder: of the trial.
        kill: the ranks, and the moment of the first of them.
        earlier: process ids of the ranks before the last restart.
        dice: where in the moment.
    """

    def present() -> dict[int, RankProcess]:
        new = [p for p in RankProcess.all(folder) if p.pid not in earlier]
        return {p.rank: p for p in new if p.is_running or p.phase == "end"}

    def seen(*entries: str, times: int = 1) -> bool:
        """Has the first victim noted such lines so many times, or is it done?"""
        victim = present().get(kill.victims[0])
        lines = victim.lines if victim else []
        count = sum(not line.keys().isdisjoint(entries) for line in lines)
        return count >= times or any("done" in line for line in lines)

    waits = {
        Moment.START: (lambda: kill.victims[0] in present(), 0.8),
        Moment.STEP: (functools.partial(seen, "step", times=dice.randint(1, EVERY + 2)), 0.03),
        Moment.SAVE: (functools.partial(seen, "saving"), 0.3),
        Moment.RESTORE: (functools.partial(seen, "loading", "from"), 0.1),
    }
    condition, longest = waits[kill.moment]
    came = until(condition, PATIENCE)
    time.sleep(dice.uniform(0.0, longest))
    running = {rank: process for rank, process in present().items() if process.is_running}
    dead = [running.pop(rank) for rank in kill.victims if rank in running]
    since = time.monotonic()
    for process in dead:
        with suppress(ProcessLookupError):  # it may have ended because of another's end
            os.kill(process.pid, signal.SIGKILL)
        time.sleep(dice.uniform(0.0, 0.2) if process is not dead[-1] else 0.0)
    return came, dead, list(running.values()), since


def until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait until the condition holds; False if it does not in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
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
            checkpoint = Checkpoint(place)
            checkpoint.read(checkpoint.trees())
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
    limit = TOLERANCE if outcome.trial.run.device == "cuda" else 0.0
    missing = {rank: set(expected) for rank in range(outcome.trial.ranks)}
    for process in processes:
        for line in process.steps:
            missing[process.rank].discard(line["step"])
            off = difference(line, expected[line["step"]])
            outcome.deviation = max(outcome.deviation, off)
            if off > limit:
                outcome.differing.append(f"rank {process.rank}, step {line['step']}")
        if process.began:
            outcome.compared += sum(len(line["digests"]) for line in process.steps)
    for rank, steps in missing.items() if not outcome.failed else ():
        outcome.differing += [f"rank {rank}, step {step}: missing" for step in sorted(steps)]


def kept_all(
    lives: Sequence[Sequence[RankProcess]], processes: Sequence[RankProcess], outcome: Outcome
) -> None:
    """What any rank knew to be saved was not lost."""
    rest = {process.pid: process for process in processes}
    saved = 0
    for life in [*lives, None]:
        for process in rest.values() if life is None else life:
            if process.began is not None and process.began < saved:
                outcome.differing.append(f"{saved} was saved, but went on from {process.began}")
        for process in life or ():
            saved = max([saved, *(line.get("saved", 0) for line in process.lines)])
            rest.pop(process.pid, None)


def difference(line: Mapping[str, Any], expected: Mapping[str, Any]) -> float:
    """How far a rank's step is off. It knows only its stages, and not always the loss."""
    pairs = [(expected["digests"][stage], digest) for stage, digest in line["digests"].items()]
    if line["loss"] is not None:
        pairs.append((expected["loss"], line["loss"]))
    return max((_distance(*pair) for pair in pairs), default=0.0)


def _distance(expected: Any, found: Any) -> float:
    """The largest one of numbers; infinite if digests differ."""
    if expected == found:
        return 0.0
    if isinstance(expected, list):
        return max(map(_distance, expected, found))
    return math.inf if isinstance(expected, str) else abs(found - expected)


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
        if run.device == "cuda":
            use_gpu()
        train(run, Path(place), lines.append)
    return {line["step"]: line for line in lines if "step" in line}


def by_phase(outcomes: Sequence[Outcome]) -> Iterator[tuple[object, ...]]:
    """Kills of each launcher, by what the rank was doing, and how many trials and ranks."""
    for launcher in LAUNCHERS:
        of_it = [o for o in outcomes if o.trial.launcher == launcher]
        done = [[o.killed.count(phase) for phase in PHASES] for o in of_it]
        columns = [sum(column) for column in zip(*done, strict=True)] or [0] * len(PHASES)
        yield launcher, len(of_it), *columns, sum(len(o.killed) for o in of_it)


def summary(outcomes: Sequence[Outcome]) -> Iterator[tuple[object, ...]]:
    """A row for each number of ranks, and one for all, as in `COLUMNS`."""
    for ranks in sorted({o.trial.ranks for o in outcomes}):
        yield f"{ranks} ranks", *counts([o for o in outcomes if o.trial.ranks == ranks])
    yield "all", *counts(outcomes)


def counts(outcomes: Sequence[Outcome]) -> tuple[object, ...]:
    """The figures of some trials."""
    return (
        sum(len(o.killed) for o in outcomes),
        sum(o.hung for o in outcomes),
        sum(len(o.corrupted) for o in outcomes),
        sum(o.orphans for o in outcomes),
        sum(len(o.differing) for o in outcomes),
        sum(o.compared for o in outcomes),
        f"{max((o.deviation for o in outcomes), default=0.0):.0e}",
        f"{sum(len(o.unnamed) for o in outcomes)} / {sum(o.named for o in outcomes)}",
        sum(bool(o.failed) for o in outcomes),
        f"{max((o.stopped_after for o in outcomes), default=0.0):.1f} s",
    )


COLUMNS: Final = (
    "trials",
    "kills",
    "hung",
    "corrupted",
    "orphans",
    "steps off",
    "compared",
    "furthest off",
    "silent / named",
    "failed",
    "longest stop",
)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Its options."""
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--processes", type=int, default=4, help="ranks that run at a time")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin nothing after these")
    parser.add_argument("--timeout", type=float, default=30.0, help="of the trainer, in seconds")
    parser.add_argument("--backend", default="eager", choices=("eager", "static", "cudagraphs"))
    parser.add_argument("--seed", type=int, default=0)


def main(options: argparse.Namespace) -> Iterator[Row]:
    """Run the trials, some at a time."""
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # of all that is started here
    if options.backend == "cudagraphs":
        hide_gpus()
    deadline = time.monotonic() + options.seconds
    count = -(-options.kills // KILLS)
    choices = options.ranks, options.backend, options.timeout
    trials = [Trial.draw(options.seed + i, *choices) for i in range(count)]
    runs = list(dict.fromkeys(trial.run for trial in trials))
    outcomes: list[Outcome] = []
    with ProcessPoolExecutor(options.processes, server()) as pool:
        expected = dict(zip(runs, pool.map(undisturbed, runs), strict=True))
    room, door = threading.Semaphore(max(options.processes, *options.ranks)), threading.Lock()

    def run(trial: Trial) -> Outcome | None:
        with door:
            for _ in range(trial.ranks):
                room.acquire()
        try:
            if time.monotonic() > deadline:
                return None
            return attempt(trial, expected[trial.run], deadline)
        finally:
            room.release(trial.ranks)

    with ThreadPoolExecutor(options.processes) as threads:
        trying = [threads.submit(run, trial) for trial in trials]
        for trial in track(as_completed(trying), "killing", total=len(trials)):
            outcome = trial.result()
            if outcome is not None:
                outcomes.append(outcome)
                yield {**asdict(outcome), "failed": outcome.problems}
    columns = ("ranks by", "trials", *PHASES, "all")
    show("Kills, by what the rank was doing", columns, list(by_phase(outcomes)))
    show("Kills", COLUMNS, list(summary(outcomes)))
    for outcome in outcomes:
        for problem in outcome.problems:
            print(f"{outcome.trial}:\n    {problem}")


BENCHMARK = Benchmark("kills", arguments, main, smallest=("--kills", "1"))
