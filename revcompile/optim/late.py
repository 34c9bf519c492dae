"""What optimizers for late gradients have in common."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer


class LateOptimizer(Optimizer):
    """An optimizer that is told how late its gradients are; its state may be of more precision.

    torch copies and pickles the state and the groups of an optimizer, but none of its attributes,
    and converts a state that is loaded to the precision of the parameters.
    """

    delay: float = 0.0
    """How many updates late gradients are, on average. A trainer sets it for each stage."""
    predicted_delay: float = 0.0
    """The same where the trainer predicts weights, which compensates the delay; `delay` is 0."""
    copied: ClassVar[tuple[str, ...]] = ("delay", "predicted_delay")
    """Attributes that copies and pickles have, too."""

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {name: getattr(self, name) for name in self.copied}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, in the precision of that state."""
        super().load_state_dict(state_dict)
        load_precise(self, state_dict, chain.from_iterable(g["params"] for g in self.param_groups))


def load_precise(
    optimizer: Optimizer, state_dict: Mapping[str, Any], params: Iterable[Tensor]
) -> None:
    """Load the state of some parameters once more, in the precision in which it was saved."""
    low = {id(p) for p in params if p.dtype != wide(p)}
    saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    own = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for key, p in zip(saved, own, strict=True):
        for name, value in state_dict["state"].get(key, {}).items() if id(p) in low else ():
            if isinstance(value, Tensor) and name != "step":
                optimizer.state[p][name] = value.to(p.device)


def wide(p: Tensor) -> torch.dtype:
    """In which precision a parameter's state is kept: float32 at least."""
    return torch.promote_types(p.dtype, torch.float32)
