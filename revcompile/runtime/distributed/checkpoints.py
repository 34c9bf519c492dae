"""Checkpoints of a run of several ranks: every rank writes its own stages, all at once.

A checkpoint holds this very moment: parameters, optimizers, schedules, random generators, and the
micro-batches in flight, each stage's and each message's. Saving changes nothing in the training,
and a run that is resumed from it is equal to the bit, on any number of ranks with the same stages.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed

from revcompile.errors import InputError
from revcompile.runtime.checkpoint import load_training, save_training, set_generators
from revcompile.runtime.checkpoint.codec import located
from revcompile.runtime.checkpoint.state import check_fits, load_trainer, referenced, share
from revcompile.runtime.distributed.collectives import gather_plain
from revcompile.runtime.distributed.weight_owners import homes
from revcompile.schedule import window

if TYPE_CHECKING:
    from revcompile.runtime.distributed.trainer import DistributedTrainer

__all__ = ["SignalConsensus", "load_together", "save_together"]


def save_together(
    trainer: DistributedTrainer, folder: str | Path, keep: int
) -> tuple[Path, str | None]:
    """Write a checkpoint: every rank its part, all at once. Its place, or why there is none.

    Every rank calls it. If one cannot write its part, no checkpoint comes about, and all are told.
    """
    ranks, problem, place = trainer.ranks, None, ""
    trainer.transport.all_arrived()

    def barrier() -> None:
        # Over gloo, with the trainer's timeout: who waits for a rank that is gone says its name.
        with trainer.transport.together():
            distributed.barrier(group=ranks.control)

    try:
        saved = save_training(
            folder,
            _share(trainer),
            trainer.model,
            ranks.stages,
            keep=keep,
            replica=ranks.replica,
            rank=ranks.rank,
            world=ranks.layout.world,
            barrier=barrier,
        )
        place = str(saved)
    except (InputError, OSError) as error:
        problem = f"{ranks.named(ranks.rank)}: {error}"
    with trainer.transport.together():
        found = gather_plain([problem, place], ranks.control)
    problems = [text for text, _ in found if text is not None]
    return Path(found[0][1]), problems[0] if problems else None


def _share(trainer: DistributedTrainer) -> dict[str, Any]:
    """What this rank alone has to save.

    Copies of the pipeline have the same parameters and optimizers, but each its own micro-batches,
    statistics and random generators.
    """
    found = share(trainer, _own(trainer), trainer.transport.queues, referenced)
    if trainer.ranks.replica:
        parameters = dict(trainer.model.named_parameters(remove_duplicate=False))
        own = {name: t for name, t in found["model"].items() if name not in parameters}
        found |= {"model": own, "optimizer": {}, "groups": []}
    return found


def _own(trainer: DistributedTrainer) -> dict[str, object]:
    """The entries of the model's state dict that no other rank saves."""
    home = homes(trainer.model, trainer.programs)
    layout, place = trainer.ranks.layout, trainer.ranks.rank
    state = trainer.model.state_dict()
    # What no stage uses never changes: the first rank has it as well as any other.
    return {n: t for n, t in state.items() if layout.places[home.get(n, 0)] == place % layout.width}


def load_together(trainer: DistributedTrainer, place: str | Path) -> str | None:
    """Go on from a checkpoint of any number of ranks; why none of them does, otherwise.

    Every rank calls it. Nothing is changed anywhere unless it fits everywhere.
    """
    ranks, problem = trainer.ranks, None
    try:
        checkpoint, state = load_training(place, trainer.device, ranks.stages, ranks.replica)
        with located(f"trainer.load: {checkpoint.path}"):
            check_fits(trainer, state)
    except (InputError, OSError) as error:
        problem = str(error)
    with trainer.transport.together():
        problems = [text for text in gather_plain(problem, ranks.control) if text is not None]
    if problems:
        return str(problems[0])
    trainer.transport.all_arrived()  # and is forgotten
    load_trainer(trainer, state)
    set_generators(state["rng"], ranks.rank, ranks.layout.world)
    trainer.transport.completed = trainer.schedule.injected - 1
    trainer.everyone(None)  # nobody sends anything before all have forgotten what was in flight
    return None


class SignalConsensus:
    """Has any rank got a signal? Asked at every step, answered some steps later.

    An answer at once would hold every rank until the last one has finished the step, and nothing
    would be in the pipeline but one micro-batch. All ranks hear of a signal after the same step.
    """

    def __init__(self, trainer: DistributedTrainer) -> None:
        method, stages = trainer.schedule.method, trainer.schedule.stages
        # By then the last stage has been through the step anyway.
        self._lag = max(stages, window(method, stages, 0, trainer.schedule.accumulate))
        self._trainer = trainer
        self._open: deque[tuple[Tensor, Any]] = deque()

    def ask(self, wanted: bool) -> bool:
        """This rank's vote on this step; returns what all said some steps ago."""
        vote = torch.tensor([int(wanted)])
        with self._trainer.transport.together():
            work = distributed.all_reduce(
                vote, distributed.ReduceOp.MAX, group=self._trainer.ranks.control, async_op=True
            )
        self._open.append((vote, work))
        return len(self._open) > self._lag and self._heard()

    def settle(self) -> bool:
        """What all said since."""
        return any(self._heard() for _ in range(len(self._open)))

    def _heard(self) -> bool:
        vote, work = self._open.popleft()
        with self._trainer.transport.together():
            work.wait()
        return bool(vote)
