"""Checkpoints of a run of several ranks: every rank writes its own stages, all at once.

The pipeline is drained first, so a checkpoint holds parameters, optimizers, schedules and random
generators, and nothing in flight: it loads into any number of ranks and stages. A run that goes on
after saving and one that is resumed from it are equal to the bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torch import distributed

from revcompile.errors import InputError
from revcompile.runtime.checkpoint import load_training, save_training, set_generators
from revcompile.runtime.distributed.collect import gather_plain
from revcompile.runtime.distributed.weights import homes
from revcompile.runtime.shipping.names import located
from revcompile.runtime.state import load_trainer, referenced, share
from revcompile.steps import mix

if TYPE_CHECKING:
    from revcompile.runtime.distributed.trainer import DistributedTrainer

__all__ = ["load_together", "save_together"]


def save_together(trainer: DistributedTrainer, folder: str | Path, keep: int) -> Path:
    """Write a checkpoint: the first copy of the pipeline does, the others wait.

    Every rank calls it. If one cannot write its part, no checkpoint comes about, and all raise.
    """
    ranks, problem, place = trainer.ranks, None, ""

    def barrier() -> None:
        distributed.barrier(group=ranks.pipeline)

    if ranks.replica == 0:
        try:
            place = str(
                save_training(
                    folder,
                    share(trainer, _own(trainer), {}, referenced),
                    trainer.model,
                    ranks.stages,
                    keep=keep,
                    rank=ranks.rank,
                    world=ranks.layout.width,
                    barrier=barrier,
                )
            )
        except (InputError, OSError) as error:
            problem = f"{ranks.named(ranks.rank)}: {error}"
    with trainer.transport.together():
        found = gather_plain([problem, place], ranks.control)
    problems = [text for text, _ in found if text is not None]
    if problems:
        raise InputError(f"trainer.save: {problems[0]}")
    return Path(found[0][1])


def _own(trainer: DistributedTrainer) -> dict[str, object]:
    """The entries of the model's state dict that no other rank saves."""
    home = homes(trainer.model, trainer.programs)
    layout, place = trainer.ranks.layout, trainer.ranks.rank
    state = trainer.model.state_dict()
    # What no stage uses never changes: the first rank has it as well as any other.
    return {n: t for n, t in state.items() if layout.places[home.get(n, 0)] == place}


def load_together(trainer: DistributedTrainer, place: str | Path) -> None:
    """Go on from a checkpoint of any number of ranks.

    Every rank calls it; all of them raise or none.
    """
    ranks, problem = trainer.ranks, None
    try:
        checkpoint, state = load_training(place, trainer.device, ranks.stages)
        with located(f"trainer.load: {checkpoint.path}"):
            seed = state["seed"]
            load_trainer(trainer, state, mix(seed, ranks.replica) if ranks.replica else seed)
        if ranks.replica == 0:
            set_generators(state["rng"], ranks.rank, ranks.layout.width)
    except (InputError, OSError) as error:
        problem = str(error)
    with trainer.transport.together():
        problems = [text for text in gather_plain(problem, ranks.control) if text is not None]
    if problems:
        raise InputError(problems[0])
