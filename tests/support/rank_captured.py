"""What a rank does in the tests of captured steps on ranks."""

import dataclasses
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from distributed_worker import Run, batches, fed, final, trainer_of

from revcompile.errors import InputError, NonFiniteError

Found = dict[str, Any]


def undisturbed(run: Run, **options: Any) -> Found:
    """Training; after each step, was it captured?"""
    net, trainer = trainer_of(run, **options)
    losses, captured = [], []
    for batch in batches(run):
        losses.append(fed(trainer, batch).loss)
        captured.append(trainer._runner.is_active)
    trainer.flush()
    return {"losses": losses, "captured": captured, "state": final(net, trainer)}


def disturbed(run: Run, folder: str, **options: Any) -> Found:
    """Bad micro-batches, an odd one, an evaluation, a checkpoint; a rank that may not capture."""
    net, trainer = trainer_of(run, **options)
    data = batches(dataclasses.replace(run, steps=24))
    odd, bad = data.pop(), (torch.full_like(data[0][0], torch.nan), data[0][1])
    captured: list[bool] = []
    failed: list[Any] = []

    def watched(call: Callable[..., Any], *arguments: Any) -> None:
        try:
            call(*arguments)
        except NonFiniteError as error:
            failed.append((error.stage, error.microbatch))
        except InputError as error:
            failed.append(type(error).__name__)

    def step(batch: Any) -> None:
        watched(fed, trainer, batch)
        captured.append(trainer._runner.is_active)

    for batch in [*data[:6], bad, *data[6:8], odd, *data[8:13]]:
        step(batch)
    trainer.save(folder)
    evaluated = trainer.evaluate(data[:2]).loss
    for batch in data[13:16]:
        step(batch)
    trainer.load(folder)
    runner: Any = trainer._runner
    if trainer.rank == 1:
        hooks, runner._hooks = runner._hooks, [True]  # as if there were hooks, since a flush
    for batch in [*data[13:17], bad, *data[17:20]]:
        step(batch)
    if trainer.rank == 1:
        runner._hooks = hooks
    for batch in data[20:22]:
        step(batch)
    step((data[0][0].to_sparse(), data[0][1]))  # no convolution takes it, nor do captured steps
    watched(trainer.flush)  # a GPU may tell of bad ones some steps later
    told = {"failed": failed, "captured": captured, "evaluated": evaluated}
    return {**told, "state": final(net, trainer)}


def copied(run: Run, **options: Any) -> Found:
    """Copies of the pipeline, each with its own data; some of it is bad in one or in all."""
    net, trainer = trainer_of(run, **options)
    captured = []
    for number, (x, y) in enumerate(batches(run)[:-1]):
        is_bad = number == 8 or (number == 10 and trainer.replica == 1)
        with suppress(NonFiniteError):
            fed(trainer, (x * torch.nan if is_bad else x + trainer.replica, y))
        captured.append(trainer._runner.is_active)
    with suppress(NonFiniteError):  # a GPU may tell of it some steps later
        trainer.flush()
    return {"captured": captured, "state": final(net, trainer)}
