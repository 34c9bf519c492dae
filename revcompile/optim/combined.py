"""Several optimizers of different parameters, used as one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from revcompile.optim.error_feedback import ErrorFeedback
from revcompile.optim.late import loss_of


class CombinedOptimizer(Optimizer):
    """What a trainer makes of the list of optimizers that `optimizer=` returns.

    Its parameter groups and its state are those of all, in their order: schedules and checkpoints
    treat it as one optimizer.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        first, *others = (optimizer.defaults for optimizer in optimizers)
        common = {k: v for k, v in first.items() if all(k in other for other in others)}
        # The groups themselves, not copies: whoever sets a learning rate sets it for both.
        super().__init__([group for o in optimizers for group in o.param_groups], common)
        self.optimizers = list(optimizers)
        for optimizer in optimizers:
            self.state.update(optimizer.state)
        self._share()

    def _share(self) -> None:
        """Let the optimizers use this one's groups and state."""
        groups = iter(self.param_groups)
        for optimizer in self.optimizers:
            own = [next(groups) for _ in optimizer.param_groups]
            for part in (optimizer, *_wrapped(optimizer)):
                part.param_groups, part.state = own, self.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step of each optimizer."""
        loss = loss_of(closure)
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse groups after construction: they would belong to none of the optimizers."""
        if hasattr(self, "optimizers"):
            raise ValueError("add parameter groups to the optimizers of the list, before training")
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, for all optimizers."""
        super().load_state_dict(state_dict)
        self._share()


def members(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizers of a `CombinedOptimizer`; else a list of the optimizer itself."""
    return optimizer.optimizers if isinstance(optimizer, CombinedOptimizer) else [optimizer]


def elementary(optimizer: Optimizer) -> Iterator[Optimizer]:
    """The optimizers that compute updates, inside of combinations and wrappers."""
    for member in members(optimizer):
        yield [member, *_wrapped(member)][-1]


def _wrapped(optimizer: Optimizer) -> Iterator[Optimizer]:
    """The optimizers inside an `ErrorFeedback`, from the outside in."""
    while isinstance(optimizer, ErrorFeedback):
        optimizer = optimizer.optimizer
        yield optimizer
