"""Several optimizers of different parameters, used as one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from revcompile.optim.error_feedback import ErrorFeedback
from revcompile.optim.late import LateOptimizer, load_precise, loss_of


class CombinedOptimizer(Optimizer):
    """Steps several optimizers, each with its own parameters.

    Its parameter groups are those of all, in their order, and its state holds theirs: schedules
    and checkpoints treat it as one optimizer. A trainer makes one where `optimizer=` returns a
    list; it can also be wrapped in an `ErrorFeedback`.

    Args:
        optimizers: the optimizers; no parameter may be in two of them.

    >>> matrix, bias = torch.nn.Parameter(torch.eye(2)), torch.nn.Parameter(torch.zeros(2))
    >>> both = CombinedOptimizer([torch.optim.Muon([matrix], lr=0.02), torch.optim.AdamW([bias])])
    >>> [group["lr"] for group in both.param_groups]
    [0.02, 0.001]
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        if not optimizers:
            raise ValueError("CombinedOptimizer: no optimizers; give a list of one or more")
        first, *others = (optimizer.defaults for optimizer in optimizers)
        common = {k: v for k, v in first.items() if all(k in other for other in others)}
        # The groups themselves, not copies: whoever sets a learning rate sets it for both.
        super().__init__([group for o in optimizers for group in o.param_groups], common)
        self.optimizers = list(optimizers)
        for optimizer in optimizers:
            self.state.update(optimizer.state)
        self._share()

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"optimizers": self.optimizers}

    def _share(self) -> None:
        """Let the optimizers use this one's groups and state."""
        groups = iter(self.param_groups)
        for optimizer in self.optimizers:
            optimizer.param_groups = [next(groups) for _ in optimizer.param_groups]
            optimizer.state = self.state
            if isinstance(optimizer, ErrorFeedback | CombinedOptimizer):
                optimizer._share()

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
            raise ValueError("CombinedOptimizer: add parameter groups before combining optimizers")
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, for all optimizers."""
        super().load_state_dict(state_dict)
        self._share()
        late = [part for part in elementary(self) if isinstance(part, LateOptimizer)]
        groups = [group for part in late for group in part.param_groups]
        load_precise(self, state_dict, [p for group in groups for p in group["params"]])


def members(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizers of a `CombinedOptimizer`; else a list of the optimizer itself."""
    return optimizer.optimizers if isinstance(optimizer, CombinedOptimizer) else [optimizer]


def elementary(optimizer: Optimizer) -> Iterator[Optimizer]:
    """The optimizers that compute updates, inside of combinations and wrappers."""
    if isinstance(optimizer, CombinedOptimizer):
        for member in optimizer.optimizers:
            yield from elementary(member)
    elif isinstance(optimizer, ErrorFeedback):
        yield from elementary(optimizer.optimizer)
    else:
        yield optimizer
