"""Looking at a model in the middle of training, which goes on as if nobody had."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from revcompile.errors import InputError, RevcompileError
from revcompile.ir.module_tree import device_of_model
from revcompile.runtime.stage.loss_head import LossHead, described
from revcompile.runtime.trainer.inputs import InputBinder, batch_pair, called_with
from revcompile.runtime.trainer.metrics import Means

__all__ = ["evaluate_batch", "evaluating", "iterated"]


def iterated(loader: Any) -> Iterable[Any]:
    """A loader, if it is one."""
    if not isinstance(loader, Iterable):
        raise InputError(
            f"trainer.evaluate: expected a loader of batches (inputs, target), got {loader!r}"
        )
    return loader


def evaluate_batch(
    number: int,
    batch: Any,
    model: nn.Module,
    intake: InputBinder,
    loss_head: LossHead,
    means: Means,
) -> None:
    """Run the model on one batch; loss and metrics go to `means`."""
    where = f"evaluation, batch {number}"
    inputs, target = intake.moved(batch_pair(batch), where)
    samples = intake.samples(intake.bound(inputs, where))
    args, kwargs = called_with(inputs)
    try:
        output = model(*args, **kwargs)
    except RevcompileError:
        raise
    except Exception as error:
        raise InputError(
            f"{where}: the model failed on it: {type(error).__name__}: {error}\n"
            f"  inputs: {described(inputs)}"
        ) from error
    means.add(loss_head.evaluate(output, target, where), output, target, samples)


@contextmanager
def evaluating(model: nn.Module, autocast: torch.dtype | None) -> Iterator[None]:
    """Eval mode, no gradients; modes and random generators are put back afterwards."""
    modes = {module: module.training for module in model.modules()}
    device = device_of_model(model)
    model.eval()
    try:
        with (
            torch.random.fork_rng([device] if device.type == "cuda" else []),
            torch.no_grad(),
            torch.autocast(device.type, autocast, enabled=autocast is not None),
        ):
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
