"""What a rank does in the tests of checkpoints with micro-batches in flight."""

from __future__ import annotations

from typing import Any

from distributed_worker import Run, batches, fed, final, trainer_of

Found = dict[str, Any]


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


def data_of(run: Run, trainer: Any) -> list[Any]:
    return batches(run)[trainer.replica :: trainer.replicas]


def several(rank: int, options: dict[str, Any]) -> list[Found]:
    """One after the other: name of a function here, a run, a folder."""
    return [
        globals()[name](run, folder, **options.get("trainer", {}))
        for name, run, folder in options["steps"]
    ]


def step(name: str, run: Run, folder: Any) -> tuple[str, Run, str]:
    return name, run, str(folder)
