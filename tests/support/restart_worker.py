"""What one rank does in the tests of restarts: train, save, write down every step, and perhaps die.

The same function trains in one process: that run is what the ranks' steps are compared with.
"""

import atexit
import hashlib
import json
import os
import random
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from distributed_worker import ONE_GPU, Run, batches, fed, launched, trainer_of
from torch import distributed
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from revcompile.runtime.checkpoint.tree import encode_tree
from revcompile.runtime.distributed.rank_weights import using_stages
from revcompile.runtime.stage.tensors import detach_tree
from revcompile.runtime.trainer.trainer import Trainer

Note = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class End:
    """How a rank's life ends, and at which step."""

    rank: int
    step: int
    signal: int = signal.SIGKILL
    after: float | None = None
    """Seconds after this step, or the first one after it, has begun; else in its update."""


@dataclass(frozen=True)
class Course:
    """A training with checkpoints after some of its steps."""

    run: Run
    saves: tuple[int, ...]
    end: End | None = None
    backend: str = "eager"


def train(course: Course, folder: Path, note: Note) -> None:
    """Go on from the newest checkpoint, if there is one, to the end, and save once more."""
    data, unseen = batches(course.run), held_out(course.run)
    _, trainer = trainer_of(course.run, lr_schedule=schedule, timeout=60.0, backend=course.backend)
    torch.manual_seed(1 + trainer.replica)
    random.seed(1)
    if (folder / "latest").exists():
        trainer.load(folder)
    note({"from": trainer.microbatches_seen, "evaluated": trainer.evaluate(unseen).loss})
    share = data[trainer.replica :: trainer.replicas]
    rest = list(enumerate(share))[trainer.microbatches_seen :]
    signals: list[int] = []
    if distributed.is_initialized():
        signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
    for step, (x, y) in rest:
        doom(course.end, step)
        order = torch.randperm(len(y)).roll(random.randrange(3))  # as a loader draws
        loss = fed(trainer, (x[order], y[order])).loss
        known = loss if trainer.is_last else None
        note({"step": step, "loss": known, "digests": digests(trainer)})
        if step + 1 in course.saves:
            trainer.save(folder, drain=True)
        if step % 10 == 9 and on_any_rank(bool(signals)):  # as docs/guides/checkpoints.md has it
            trainer.save(folder, drain=True)
            raise SystemExit(128 + signal.SIGTERM)
    trainer.save(folder, drain=True)
    note({"evaluated": trainer.evaluate(unseen).loss, "digests": digests(trainer)})


def on_any_rank(flag: bool) -> bool:
    if not distributed.is_initialized():
        return flag
    flags = [False] * distributed.get_world_size()
    distributed.all_gather_object(flags, flag)
    return any(flags)


def held_out(run: Run) -> list[Any]:
    """What is evaluated."""
    return batches(replace(run, steps=3), seed=6)


def schedule(optimizer: Any) -> lr_scheduler.LRScheduler:
    return lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=40)


def doom(end: End | None, step: int) -> None:
    """See to it that this rank ends in this step, or shortly after, if it is the one."""
    if end is None or step < end.step or str(end.rank) != os.environ.get("RANK"):
        return
    if end.after is not None:
        threading.Timer(end.after, os.kill, (os.getpid(), end.signal)).start()
    elif step == end.step:
        register_optimizer_step_pre_hook(lambda *_: os.kill(os.getpid(), end.signal))


def digests(trainer: Trainer) -> dict[str, str]:
    """For each stage that is here: parameters, buffers, gradients and its optimizer's state."""
    state, found = trainer.model.state_dict(), {}
    users = using_stages(trainer.model, trainer._programs)
    for executor in trainer._executors:
        own = {n: state[n] for n, used in users.items() if used[0] == executor.index and n in state}
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


def undisturbed(course: Course, folder: Path) -> list[dict[str, Any]]:
    """In this process: what was noted."""
    # As on the ranks: products rounded to TF32 differ by more than the losses may.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
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


def on_ranks(course: Course, ranks: int, folder: Path) -> list[Ended]:
    """Train on so many ranks."""
    files = [folder.with_suffix(f".{rank}") for rank in range(ranks)]
    for file in files:
        file.unlink(missing_ok=True)
    options = {"course": course, "place": folder, "files": files, "device": course.run.device}
    # What has used CUDA cannot be forked.
    start = "spawn" if course.run.device == "cuda" else "forkserver"
    _, codes = launched(folder.parent, ranks, live, start=start, env=ONE_GPU, **options)
    return [Ended(code, noted(file)) for code, file in zip(codes, files, strict=True)]


def live(rank: int, options: dict[str, Any]) -> None:
    """Train as a rank, with notes in a file."""
    notes = options["files"][rank].open("a", buffering=1)

    def note(line: dict[str, Any]) -> None:
        notes.write(json.dumps(line) + "\n")

    try:
        train(options["course"], options["place"], note)
    except Exception as error:
        note({"error": f"{type(error).__name__}: {error}"})
        raise SystemExit(1) from error
    finally:
        atexit._run_exitfuncs()  # as at the end of a script


def noted(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]
