"""Gradients as optimizers are given them."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor


def dense(gradient: Tensor) -> Tensor:
    """A copy of a gradient, whatever its layout."""
    return (gradient.to_dense() if gradient.is_sparse else gradient).detach().clone()


def standing_still(parameters: Any) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=0.0)


class Recorded:
    """An optimizer factory that writes down, for each of its optimizers, every gradient."""

    def __init__(self, make: Callable[[Any], torch.optim.Optimizer] = standing_still) -> None:
        self.make = make
        self.steps: list[list[dict[int, Tensor]]] = []

    def __call__(self, parameters: Any) -> torch.optim.Optimizer:
        given = list(parameters)
        optimizer = self.make(given)
        mine: list[dict[int, Tensor]] = []
        self.steps.append(mine)

        def write(*_: Any) -> None:
            mine.append({id(p): dense(p.grad) for p in given if p.grad is not None})

        optimizer.register_step_pre_hook(write)
        return optimizer

    def gradients(self, names: Mapping[int, str]) -> list[dict[str, Tensor]]:
        """Update by update, the gradients of all stages."""
        stages = [steps for steps in self.steps if steps and steps[0].keys() <= names.keys()]
        return [
            {names[i]: gradient for step in steps for i, gradient in step.items()}
            for steps in zip(*stages, strict=True)
        ]


def with_gradients(
    net: Any,
    data: Iterable[tuple[Any, Any]],
    loss: Any,
    make: Any = standing_still,
    **settings: Any,
) -> tuple[Any, list[dict[str, Tensor]]]:
    """A staged model's trainer after all of the data, and the gradients of all updates."""
    record = Recorded(make)
    trainer = net.trainer(record, loss, **settings)
    for inputs, target in data:
        trainer.step(inputs, target)
    trainer.flush()
    return trainer, record.gradients({id(p): name for name, p in trainer.named_parameters()})
