"""What a rank does in the tests of checkpoints with micro-batches in flight."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distributed_worker import Run, batches, fed, final, trainer_of

from revcompile.errors import InputError

Found = dict[str, Any]


def refusal(call: Callable[[str], Any], folder: str) -> str:
    """What an InputError of the call says; nothing if it is taken."""
    try:
        call(folder)
    except InputError as error:
        return str(error)
    return ""


def saving(run: Run, folder: str, **options: Any) -> Found:
    """Train, and save after the fifth step; losses and weights at the end."""
    net, trainer = trainer_of(run, **options)
    losses = []
    for number, batch in enumerate(data_of(run, trainer)):
        losses.append(fed(trainer, batch).loss)
        if number == 4:
            trainer.save(folder)
    trainer.flush()
    return {"losses": losses, "state": final(net, trainer)}


def resuming(run: Run, folder: str, **options: Any) -> Found:
    """Go on after the fifth step, with something else in flight before that."""
    net, trainer = trainer_of(run, off=1.0, **options)
    for batch in batches(run, seed=9)[:3]:
        fed(trainer, batch)
    trainer.load(folder)
    losses = [fed(trainer, batch).loss for batch in data_of(run, trainer)[5:]]
    trainer.flush()
    return {"losses": losses, "state": final(net, trainer)}


def resuming_apart(run: Run, folder: str, **options: Any) -> Found:
    """`resuming`, with a folder for each rank."""
    return resuming(run, str(Path(folder, os.environ["RANK"])), **options)


def data_of(run: Run, trainer: Any) -> list[Any]:
    return batches(run)[trainer.replica :: trainer.replicas]


def refusing(run: Run, folder: str, **options: Any) -> Found:
    """Load where it does not fit: what is said; training goes on as if nothing had been."""
    net, trainer = trainer_of(run, **options)
    data, said = batches(run), ""
    for number, batch in enumerate(data):
        if number == 4:
            said = refusal(trainer.load, folder)
        fed(trainer, batch)
    trainer.flush()
    return {"said": said, "state": final(net, trainer)}


def graphs(run: Run, folder: str, **options: Any) -> Found:
    """Save what cannot be saved in flight, then drained."""
    net, trainer = trainer_of(run, **options)
    said = ""
    for number, batch in enumerate(batches(run)):
        fed(trainer, batch)
        if number == 4:
            said = refusal(trainer.save, folder)
            trainer.save(folder, drain=True)
    trainer.flush()
    return {"said": said, "state": final(net, trainer)}


def unwritable(run: Run, folder: str, **options: Any) -> Found:
    """A folder that no rank can write to: all raise, and training goes on."""
    net, trainer = trainer_of(run, **options)
    said = ""
    for number, batch in enumerate(batches(run)):
        fed(trainer, batch)
        if number == 4:
            said = refusal(trainer.save, "/dev/null/nowhere")
    trainer.flush()
    return {"said": said, "state": final(net, trainer)}


def several(rank: int, options: dict[str, Any]) -> list[Found]:
    """One after the other: name of a function here, a run, a folder."""
    return [
        globals()[name](Run(**run), folder, **options.get("trainer", {}))
        for name, run, folder in options["steps"]
    ]


def step(name: str, run: Run, folder: Any) -> tuple[str, dict[str, Any], str]:
    return name, dataclasses.asdict(run), str(folder)
