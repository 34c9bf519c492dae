"""SGD for late gradients: momentum that looks as far ahead as the gradients are late.

Momentum is a feedback loop: parameters, gradient, mean of gradients, parameters. Where the loss has
curvature h, SGD with Nesterov momentum 0.9 and learning rate r is stable as long as
r h / (1 - 0.9) is below 13.6. If gradients are t updates late that bound falls to 0.8 for t = 2 and
to 0.14 for t = 9 (without Nesterov's step from 38 to 0.5 and 0.13): training is slow, or fails,
because it oscillates, not because late gradients are wrong.

Two numbers correct that. Let m be the running mean of the gradients g over the averaging horizon,
with the latest g included. The update goes along

    m + (g - m) look_ahead / horizon

which is about where the mean will be in `look_ahead` updates if gradients stay the same. Nesterov's
look-ahead is 1. With

    horizon = (1 + t**2) / (1 - momentum)        look_ahead = 1 + 1.25 t

the bound is about 5 whatever the delay, and at delay 0 this is Nesterov momentum itself. (As a
filter this is quasi-hyperbolic momentum, Ma and Yarats, 2019; the choice of its numbers is new.)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import Tensor

from revcompile.optim.late import LateOptimizer, check_settings, wide, wide_gradient

LOOK_AHEAD_PER_DELAY: Final = 1.25
"""Updates to look further ahead for each update of delay."""

_Number = float | Tensor
"""A number; with `capturable`, where the step may be captured, a scalar tensor on the device."""


def averaging_horizon(delay: float, momentum: float = 0.9) -> float:
    """Updates over which to average gradients that are `delay` updates late.

    >>> [round(averaging_horizon(delay)) for delay in (0, 1, 2.25, 9)]
    [10, 20, 61, 820]
    """
    return (1 + delay**2) / (1 - momentum)


class DelayAwareSGD(LateOptimizer):
    """SGD with momentum for delayed gradients; at delay 0 `SGD(..., nesterov=True)`.

    `lr`, `momentum` and `weight_decay` mean the same as there: the effective step, by which a
    gradient moves its parameter in total, is `lr / (1 - momentum)` whatever the delay.

    Args:
        params: parameters or parameter groups.
        lr: the learning rate.
        momentum: as in SGD without delay; the averaging horizon follows from it and the delay.
        weight_decay: L2 penalty.
        capturable: keep the update counters on the device, as CUDA graphs need.

    >>> weight = torch.nn.Parameter(torch.tensor([1.0]))
    >>> optimizer = DelayAwareSGD([weight], lr=0.1)
    >>> weight.grad = torch.tensor([1.0])
    >>> optimizer.step()
    >>> round(weight.item(), 3)
    0.81
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        capturable: bool = False,
    ) -> None:
        settings = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        check_settings(settings)
        super().__init__(params, settings | {"capturable": capturable})

    def _update(self, group: dict[str, Any]) -> None:
        for params in self._batches(group):
            self._update_batch(group, params)

    def _batches(self, group: dict[str, Any]) -> Iterable[list[Tensor]]:
        """Parameters with a gradient, in lists of one device, dtype and number of updates.

        With `capturable`, counters are on the device and are not read: then all parameters of one
        device and dtype are updated together.
        """
        batches: dict[Any, list[Tensor]] = {}
        for p in (p for p in group["params"] if p.grad is not None):
            state = self.state[p]
            if "step" not in state:
                device = p.device if group["capturable"] else "cpu"
                state["step"] = torch.zeros((), dtype=torch.float32, device=device)
                # At least float32: a mean over 820 updates moves by less than bfloat16 resolves.
                state["momentum_buffer"] = torch.zeros_like(p, dtype=wide(p))
            number = None if group["capturable"] else state["step"].item()
            batches.setdefault((p.device, p.dtype, number), []).append(p)
        return batches.values()

    def _update_batch(self, group: dict[str, Any], params: list[Tensor]) -> None:
        grads = [wide_gradient(p) for p in params]
        if group["weight_decay"]:
            grads = list(torch._foreach_add(grads, params, alpha=group["weight_decay"]))
        # As in SGD, effective steps are averaged: momentum may change during training.
        effective = torch._foreach_mul(grads, 1 / (1 - group["momentum"]))
        means = [self.state[p]["momentum_buffer"] for p in params]
        rate = 1 / self._horizon(group, [self.state[p]["step"] for p in params])
        torch._foreach_mul_(means, 1 - rate)
        torch._foreach_add_(means, torch._foreach_mul(effective, rate))
        latest = _minimum((1 + LOOK_AHEAD_PER_DELAY * self.delay) * rate, 1.0)
        steps = torch._foreach_mul(means, 1 - latest)
        torch._foreach_add_(steps, torch._foreach_mul(effective, latest))
        torch._foreach_mul_(steps, -group["lr"])
        torch._foreach_add_(params, steps)

    def _horizon(self, group: dict[str, Any], counters: list[Tensor]) -> _Number:
        """Count this update; the averaging horizon grows with the updates up to its final value."""
        torch._foreach_add_(counters, 1)
        step = counters[0].double() if group["capturable"] else counters[0].item()
        first, final = (averaging_horizon(delay, group["momentum"]) for delay in (0, self.delay))
        return _minimum(first + (step - 1), final)


def _minimum(a: _Number, b: float) -> _Number:
    return a.clamp(max=b) if isinstance(a, Tensor) else min(a, b)
