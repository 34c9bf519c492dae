"""What one rank does in the tests of restarts: train, save, write down every step, and perhaps die.

The same function trains in one process: that run is what the ranks' steps are compared with.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import multiprocessing
import os
import random
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from distributed_worker import Run, batches, fed, free_port, trainer_of
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from examples.interrupts import until_stopped
from revcompile.runtime.checkpoint.tree import encode_tree
from revcompile.runtime.distributed.rank_weights import owning_stages
from revcompile.runtime.stage.tensors import detach_tree
from revcompile.runtime.trainer.trainer import Trainer

Note = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class End:
    """How a rank's life ends, and at which step."""

    rank: int
    step: int
    signal: int = signal.SIGKILL
    file: str | None = None
    """In the save after the step, when this file is touched; else in the middle of the step."""


@dataclass(frozen=True)
class Course:
    """A training with checkpoints after some of its steps."""

    run: Run
    saves: tuple[int, ...]
    end: End | None = None


TORCHRUN: Final = Course(Run(steps=12), saves=(5, 9), end=End(rank=1, step=7))
"""What torchrun starts."""


def train(course: Course, folder: Path, note: Note) -> None:
    """Go on from the newest checkpoint, if there is one, to the end, and save once more."""
    data, unseen = batches(course.run), held_out(course.run)
    _, trainer = trainer_of(course.run, lr_schedule=schedule, timeout=60.0, average_statistics=True)
    torch.manual_seed(1 + trainer.replica)
    random.seed(1)
    if folder.exists():
        trainer.load(folder)
    note({"from": trainer.microbatches_seen, "evaluated": trainer.evaluate(unseen).loss})
    share = data[trainer.replica :: trainer.replicas]
    rest = list(enumerate(share))[trainer.microbatches_seen :]
    for step, (x, y) in until_stopped(rest, lambda: trainer.save(folder, drain=True)):
        doom(course.end, step, folder)
        order = torch.randperm(len(y)).roll(random.randrange(3))  # as a loader draws
        loss = fed(trainer, (x[order], y[order])).loss
        known = loss if trainer.is_last else None
        note({"step": step, "loss": known, "digests": digests(trainer)})
        if step + 1 in course.saves:
            trainer.save(folder, drain=True)
    trainer.save(folder, drain=True)
    note({"evaluated": trainer.evaluate(unseen).loss, "digests": digests(trainer)})


def held_out(run: Run) -> list[Any]:
    """What is evaluated."""
    return batches(replace(run, steps=3), seed=6)


def schedule(optimizer: Any) -> lr_scheduler.LRScheduler:
    return lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=40)


def doom(end: End | None, step: int, folder: Path) -> None:
    """See to it that this rank ends, if it is the one and this is the step."""
    if end is None or step != end.step or str(end.rank) != os.environ.get("RANK"):
        return

    def strike(*_: Any) -> None:
        os.kill(os.getpid(), end.signal)

    if end.file is None:
        register_optimizer_step_pre_hook(strike)
    else:
        at_every_touch(folder, lambda name: strike() if name == end.file else None)


def digests(trainer: Trainer) -> dict[str, str]:
    """For each stage that is here: parameters, buffers, gradients and its optimizer's state."""
    state, found = trainer.model.state_dict(), {}
    owners = owning_stages(trainer.model, trainer._programs)
    for executor in trainer._executors:
        own = {n: state[n] for n, owner in owners.items() if owner == executor.index and n in state}
        updater = executor.updater.state_dict(detach_tree)
        settings = [updater["groups"], updater["lr_schedule"], trainer.microbatches_seen]
        gathered = executor.stage.gradients
        tree = {"model": own, "optimizer": updater["state"], "gradients": gathered}
        tensors = encode_tree(tree)[1]
        total = hashlib.sha256(json.dumps(settings).encode())
        for name in sorted(tensors):
            total.update(name.encode() + tensors[name].detach().cpu().numpy().tobytes())
        found[str(executor.index)] = total.hexdigest()[:16]
    return found


def at_every_touch(folder: Path, act: Callable[[str], None]) -> None:
    """From now on, before this process does anything to a file there, with the file's name."""

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        touches = event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")
        if touches and str(arguments[0]).startswith(str(folder)):
            act(Path(arguments[0]).name)

    sys.addaudithook(watch)


def undisturbed(course: Course, folder: Path) -> list[dict[str, Any]]:
    """In this process: what was noted."""
    lines: list[dict[str, Any]] = []
    train(replace(course, end=None), folder, lines.append)
    return lines


# -- ranks ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ended:
    """A rank that is over: its exit status and what it noted."""

    code: int | None
    lines: list[dict[str, Any]]

    @property
    def error(self) -> str:
        return "".join(line["error"] for line in self.lines if "error" in line)


def _server() -> Any:
    """The server that `distributed_worker` uses too: what it forks has imported everything."""
    roots = [str(path) for path in Path(__file__).resolve().parents[:3]]
    os.environ["PYTHONPATH"] = os.pathsep.join(roots)  # the server has no other
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["distributed_preload"])
    return context


def launch(course: Course, ranks: int, folder: Path) -> list[Ended]:
    """Train on so many ranks."""
    context = _server()
    files = [folder.with_suffix(f".{rank}") for rank in range(ranks)]
    shared, started = (ranks, free_port(), course, folder), []
    for rank, file in enumerate(files):
        file.unlink(missing_ok=True)
        started.append(context.Process(target=rank_main, args=(rank, file, *shared)))
        started[-1].start()
    for process in started:
        process.join(100)  # more than the trainer's timeout
        process.kill()
        process.join()
    return [Ended(p.exitcode, noted(file)) for p, file in zip(started, files, strict=True)]


def rank_main(rank: int, file: Path, ranks: int, port: int, course: Course, folder: Path) -> None:
    os.environ |= {"RANK": f"{rank}", "WORLD_SIZE": f"{ranks}", "LOCAL_RANK": f"{rank}"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
    try:
        live(course, folder, file)
    finally:
        atexit._run_exitfuncs()  # as at the end of a script


def live(course: Course, folder: Path, file: Path) -> None:
    """Train as a rank, with notes in a file."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    notes = file.open("a", buffering=1)

    def note(line: dict[str, Any]) -> None:
        notes.write(json.dumps(line) + "\n")

    try:
        train(course, folder, note)
    except Exception as error:
        note({"error": f"{type(error).__name__}: {error}"})
        raise SystemExit(1) from error


def noted(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def under_torchrun(ranks: int, folder: Path) -> None:
    """What torchrun's command does, with ranks from the server: started again once if one dies."""
    _server()
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=folder.name,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=1,
        monitor_interval=0.1,
        start_method="forkserver",
    )
    elastic_launch(config, attempt)(folder)


def attempt(folder: Path) -> None:
    """The first one ends, the second goes on."""
    number = os.environ["TORCHELASTIC_RESTART_COUNT"]
    course = TORCHRUN if number == "0" else replace(TORCHRUN, end=None)
    try:
        live(course, folder, folder.with_suffix(f".{os.environ['RANK']}.{number}"))
    finally:
        atexit._run_exitfuncs()  # as at the end of a script
