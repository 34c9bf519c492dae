"""AdamW for late gradients: error feedback moves the weights ahead by the delay of a stage."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from revcompile.optim.error_feedback import apply_with_feedback
from revcompile.optim.late import LateOptimizer, check_settings, wide, wide_gradient


class DelayAwareAdamW(LateOptimizer):
    """AdamW with error feedback (`ErrorFeedback`) for the delay of a stage; at delay 0 AdamW.

    Args:
        params: parameters or parameter groups.
        lr: the learning rate.
        betas: decay rates of the running means of gradients and of their squares.
        eps: added to the root of the mean square.
        weight_decay: decoupled, times the learning rate.
        capturable: keep counters on the device, as CUDA graphs need.

    >>> weight = torch.nn.Parameter(torch.tensor([1.0]))
    >>> optimizer = DelayAwareAdamW([weight], lr=0.1, weight_decay=0)
    >>> weight.grad = torch.tensor([3.0])
    >>> optimizer.step()
    >>> round(weight.item(), 3)
    0.9
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        capturable: bool = False,
    ) -> None:
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        check_settings(settings)
        super().__init__(params, settings | {"feedback": 1.0, "capturable": capturable})

    def _update(self, group: dict[str, Any]) -> None:
        params = [p for p in group["params"] if p.grad is not None and p.numel()]
        if params:
            updates = self._updates(group, params, [wide_gradient(p) for p in params])
            apply_with_feedback(params, updates, self.state, group["feedback"] * self.delay)

    def _updates(
        self, group: Mapping[str, Any], params: list[Tensor], grads: list[Tensor]
    ) -> list[Tensor]:
        """What to subtract from the parameters."""
        for p in params:
            if "exp_avg" not in self.state[p]:
                device = p.device if group["capturable"] else "cpu"
                self.state[p]["step"] = torch.zeros((), dtype=torch.float32, device=device)
                for name in ("exp_avg", "exp_avg_sq"):
                    self.state[p][name] = torch.zeros_like(p, dtype=wide(p))
        beta1, beta2 = group["betas"]
        means, squares, steps = (
            [self.state[p][name] for p in params] for name in ("exp_avg", "exp_avg_sq", "step")
        )
        torch._foreach_add_(steps, 1)
        torch._foreach_lerp_(means, grads, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
        # In double precision: 1 - beta ** step loses half its digits otherwise.
        sqrt: Any = torch.sqrt if group["capturable"] else math.sqrt
        counts = [step.double() if group["capturable"] else step.item() for step in steps]
        corrections1: Any = [1 - beta1**count for count in counts]
        corrections2: Any = [sqrt(1 - beta2**count) for count in counts]
        denominators = torch._foreach_sqrt(squares)
        torch._foreach_div_(denominators, corrections2)
        torch._foreach_add_(denominators, group["eps"])
        updates = list(torch._foreach_div(means, denominators))
        torch._foreach_div_(updates, corrections1)
        torch._foreach_mul_(updates, group["lr"])
        return with_decay(updates, group, params)


def with_decay(
    updates: list[Tensor], group: Mapping[str, Any], params: list[Tensor]
) -> list[Tensor]:
    """Add decoupled weight decay to updates, in place."""
    if group["weight_decay"]:
        decayed = torch._foreach_mul(params, group["lr"] * group["weight_decay"])
        torch._foreach_add_(updates, decayed)
    return updates
