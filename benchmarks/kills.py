"""Kill a rank at a random moment, again and again: nothing may hang, break or be left behind.

    python -m benchmarks.kills --trials 100 --ranks 2 4 --jobs 2

A trial starts `torchrun` on a small model that saves every few steps, and kills a rank drawn at
random with SIGKILL at a random moment. Half of the trials leave no restarts: the launcher must end
within the timeout, without orphans, and every checkpoint there must be whole; then the same command
is given again and must finish. The other half allow restarts, and must finish by themselves. Either
way the final weights must equal those of a run that nobody disturbed, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import Tensor, nn

import revcompile
from benchmarks.harness import show
from revcompile.runtime.checkpoint import load_weights

STEPS, EVERY = 60, 7


class Net(nn.Module):
    """A few blocks with batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 5)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Dropout(0.1))
            for _ in range(6)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = self.stem(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x.mean((2, 3)))


def train(folder: Path, stages: int) -> None:
    """What every rank runs: go on from the last checkpoint, if there is one, to the last step."""
    torch.set_num_threads(1)
    (folder / "pids").mkdir(parents=True, exist_ok=True)
    (folder / "pids" / f"{os.getpid()}").write_text(os.environ["RANK"])
    torch.manual_seed(0)
    net = revcompile.petrafy(Net(), stages, torch.randn(2, 3, 8, 8), check="off")
    trainer = net.trainer(
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        nn.functional.cross_entropy,
        timeout=30.0,
    )
    saved = folder / "checkpoints"
    if saved.exists() and any(saved.glob("step_*")):
        trainer.load(saved)
    for step in range(trainer.schedule.injected, STEPS):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(8, 3, 8, 8, generator=generator)
        trainer.step(x, torch.randint(0, 5, (8,), generator=generator))
        time.sleep(0.01)
        if (step + 1) % EVERY == 0:
            trainer.save(saved)
    trainer.save(saved)
    (folder / f"done_{os.environ['RANK']}").touch()


@dataclass(frozen=True)
class Trial:
    """Where and when to strike."""

    ranks: int
    restarts: int
    seed: int


def launch(folder: Path, ranks: int, restarts: int) -> subprocess.Popen[bytes]:
    """Start the ranks, with an output of their own."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    command += ["--standalone", f"--max-restarts={restarts}", "--monitor-interval=0.2"]
    command += [__file__, "--train", str(folder), "--ranks", str(ranks)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    log = (folder / "log").open("ab")
    return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


def attempt(trial: Trial, timeout: float, expected: dict[str, Tensor] | None) -> str:
    """One trial; what went wrong, or nothing. Without `expected` nobody is killed."""
    draw = random.Random(trial.seed)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        process = launch(folder, trial.ranks, trial.restarts)
        if expected is not None:
            strike(folder, draw, process)
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            return "hung past the timeout"
        finally:
            left = orphans(folder)
        if left:
            return f"left {len(left)} processes behind"
        if code != 0 and expected is not None and trial.restarts == 0:
            problem = broken(folder)
            if problem:
                return problem
            code = launch(folder, trial.ranks, 0).wait(timeout)
        if code != 0:
            return f"ended with {code}: {(folder / 'log').read_text()[-600:]}"
        found = load_weights(folder / "checkpoints")
        if expected is None:
            torch.save(found, Path(tempfile.gettempdir()) / f"kills_{trial.ranks}.pt")
            return ""
        same = all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        return "" if same else "the final weights differ"


def strike(folder: Path, draw: random.Random, process: subprocess.Popen[bytes]) -> None:
    """Kill a rank, at any moment from its start to about its end."""
    deadline = time.monotonic() + 60
    while not list((folder / "pids").glob("*")) and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(draw.uniform(0.0, 6.0))
    pids = sorted(int(p.name) for p in (folder / "pids").glob("*"))
    alive = [pid for pid in pids if running(pid)]
    if alive and process.poll() is None:
        os.kill(draw.choice(alive), signal.SIGKILL)


def running(pid: int) -> bool:
    """Is a process there, and not only waiting to be buried?"""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def orphans(folder: Path) -> list[int]:
    """Ranks that are still there shortly after their launcher has ended."""
    deadline = time.monotonic() + 5
    while True:
        left = [int(p.name) for p in (folder / "pids").glob("*") if running(int(p.name))]
        if not left or time.monotonic() > deadline:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            return left
        time.sleep(0.1)


def broken(folder: Path) -> str:
    """Does the newest checkpoint, if there is one, load whole?"""
    saved = folder / "checkpoints"
    if not saved.exists() or not list(saved.glob("step_*")):
        return ""
    try:
        load_weights(saved)
    except revcompile.RevcompileError as error:
        return f"corrupted checkpoint: {error}"
    return ""


def main() -> None:
    """Run the trials, some at a time."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="a line for each trial is added here")
    options = parser.parse_args()
    if options.train:
        train(options.train, options.ranks[0])
        return
    expected: dict[int, Any] = {}
    for ranks in options.ranks:
        problem = attempt(Trial(ranks, 0, 0), options.timeout, None)
        if problem:
            raise SystemExit(f"the undisturbed run of {ranks} ranks failed: {problem}")
        file = Path(tempfile.gettempdir()) / f"kills_{ranks}.pt"
        expected[ranks] = torch.load(file, weights_only=True)
    trials = [
        Trial(options.ranks[i % len(options.ranks)], 3 * (i // len(options.ranks) % 2), seed)
        for i, seed in enumerate(range(options.seed, options.seed + options.trials))
    ]

    def one(trial: Trial) -> tuple[Trial, str, float]:
        start = time.monotonic()
        problem = attempt(trial, options.timeout, expected[trial.ranks])
        seconds = time.monotonic() - start
        if options.json:
            with options.json.open("a") as lines:
                lines.write(json.dumps([*vars(trial).values(), problem, round(seconds, 1)]) + "\n")
        return trial, problem, seconds

    with ThreadPoolExecutor(options.jobs) as pool:
        found = list(track(pool.map(one, trials), "killing", total=len(trials)))
    failed = [(t, problem) for t, problem, _ in found if problem]
    rows = [(t.ranks, t.restarts, t.seed, problem) for t, problem in failed]
    slowest = max(seconds for _, _, seconds in found)
    show(
        f"{len(found)} trials, {len(failed)} failed, slowest {slowest:.0f} s",
        ("ranks", "restarts", "seed", "problem"),
        rows,
    )
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
