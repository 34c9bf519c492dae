"""Optimizers for delayed gradients: momentum that looks as far ahead as the gradients are late.

Momentum is a feedback loop: parameters, gradient, mean of gradients, parameters. Where the loss has
curvature h, SGD with Nesterov momentum 0.9 and learning rate r is stable as long as
r h / (1 - 0.9) is below 13.6. If gradients are t updates late that bound falls to 0.8 for t = 2 and
to 0.14 for t = 9 (without Nesterov's step, as in Adam, from 38 to 0.5 and 0.13): training is slow,
or fails, because it oscillates, not because late gradients are wrong.

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

import math
from collections.abc import Iterable
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from revcompile.optim.closures import loss_of
from revcompile.optim.late import LateOptimizer, wide
from revcompile.optim.settings import check_settings, two_betas

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


def look_ahead(delay: float) -> float:
    """How many updates to look ahead.

    >>> [look_ahead(delay) for delay in (0, 1, 4)]
    [1.0, 2.25, 6.0]
    """
    return 1 + LOOK_AHEAD_PER_DELAY * delay


class _DelayAware(LateOptimizer):
    """The running mean of gradients, and the look-ahead from it."""

    _means: ClassVar[tuple[str, ...]] = ("mean",)
    """Names of the running means of each parameter, the first of gradients; in float32 at least."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in every optimizer; a group's own settings are checked too."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        check_settings({name: group[name] for name in _CHECKED if name in group})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = loss_of(closure)
        for group in self.param_groups:
            for params in self._batches(group):
                dtype = self.state[params[0]][self._means[0]].dtype
                self._update(group, params, [_dense_gradient(p).to(dtype) for p in params])
        return loss

    def _update(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        raise NotImplementedError

    def _batches(self, group: dict[str, Any]) -> Iterable[list[Tensor]]:
        """Parameters with a gradient, in lists of one device, dtype and number of updates.

        Counters on a device are not read: there all parameters of a group are updated together.
        """
        batches: dict[Any, list[Tensor]] = {}
        for p in (p for p in group["params"] if p.grad is not None):
            state = self.state[p]
            if "step" not in state:
                device = p.device if group["capturable"] else "cpu"
                state["step"] = torch.zeros((), device=device)
                state.update({name: torch.zeros_like(p, dtype=wide(p)) for name in self._means})
            number = None if group["capturable"] else state["step"].item()
            batches.setdefault((p.device, p.dtype, number), []).append(p)
        return batches.values()

    def _count(self, group: dict[str, Any], params: list[Tensor]) -> _Number:
        """Count this update; returns its number, from 1 on."""
        steps: list[Tensor] = [self.state[p]["step"] for p in params]
        torch._foreach_add_(steps, 1)
        return steps[0].double() if group["capturable"] else steps[0].item()

    def _look_ahead(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        step: _Number,
        weight: _Number = 1.0,
    ) -> tuple[Tensor, ...]:
        """Update the means; returns the look-ahead from them, each divided by its `weight`."""
        means = [self.state[p][self._means[0]] for p in params]
        rate = 1 / self._horizon(group, step)
        torch._foreach_mul_(means, 1 - rate)
        torch._foreach_add_(means, torch._foreach_mul(grads, rate))
        latest = _minimum(look_ahead(self.delay) * rate, 1.0)
        ahead = torch._foreach_mul(means, (1 - latest) / weight)
        torch._foreach_add_(ahead, torch._foreach_mul(grads, latest))
        return ahead

    def _horizon(self, group: dict[str, Any], step: _Number) -> _Number:
        """The averaging horizon, which grows with the number of gradients up to its final value."""
        first = averaging_horizon(0, group["momentum"])
        return _minimum(first + (step - 1), averaging_horizon(self.delay, group["momentum"]))

    def _bias_correction(self, group: dict[str, Any], step: _Number) -> _Number:
        """The weight of all gradients in the mean; the rest is that of the zero it began with."""
        first, final = (averaging_horizon(delay, group["momentum"]) for delay in (0, self.delay))
        if first <= 1:  # the first mean is the first gradient
            return 1.0
        growing = _minimum(step, math.ceil(final - first))
        of_zero = (first - 1) / (first - 1 + growing) * (1 - 1 / final) ** (step - growing)
        return 1 - of_zero


class DelayAwareSGD(_DelayAware):
    """SGD with momentum for delayed gradients; at delay 0 `SGD(..., nesterov=True)`.

    `lr`, `momentum` and `weight_decay` mean the same as there: the effective step, by which a
    gradient moves its parameter in total, is `lr / (1 - momentum)` whatever the delay.

    Args:
        params: parameters or parameter groups.
        lr: the learning rate.
        momentum: as of SGD without delay; the averaging horizon follows from it and the delay.
        weight_decay: L2 penalty.
        capturable: keep the update counters on the device, so that a CUDA graph can capture `step`.

    >>> weight = torch.nn.Parameter(torch.tensor([1.0]))
    >>> optimizer = DelayAwareSGD([weight], lr=0.1)
    >>> weight.grad = torch.tensor([1.0])
    >>> optimizer.step()
    >>> round(weight.item(), 3)
    0.81
    """

    _means = ("momentum_buffer",)

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

    def _update(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        if group["weight_decay"]:
            grads = list(torch._foreach_add(grads, params, alpha=group["weight_decay"]))
        # As in SGD the mean is of effective steps, so that momentum may change during training.
        effective = list(torch._foreach_mul(grads, 1 / (1 - group["momentum"])))
        steps = self._look_ahead(group, params, effective, self._count(group, params))
        torch._foreach_mul_(steps, -group["lr"])
        torch._foreach_add_(params, steps)


class DelayAwareAdamW(_DelayAware):
    """AdamW for delayed gradients; at delay 0 with Nesterov's step, as in NAdam.

    Args:
        params: parameters or parameter groups, which may have `betas` of their own.
        lr: the learning rate.
        betas: of the means of gradients (without delay) and of their squares.
        eps: added to the root of the mean square.
        weight_decay: decoupled, as of AdamW.
        capturable: keep the update counters on the device, so that a CUDA graph can capture `step`.

    >>> weight = torch.nn.Parameter(torch.tensor([1.0]))
    >>> optimizer = DelayAwareAdamW([weight], lr=0.1, weight_decay=0)
    >>> weight.grad = torch.tensor([3.0])
    >>> optimizer.step()
    >>> round(weight.item(), 3)
    0.9
    """

    _means = ("mean", "square")

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
        momentum, beta = two_betas(betas)
        settings = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        settings |= {"beta": beta, "eps": eps}
        check_settings(settings)
        super().__init__(params, settings | {"capturable": capturable})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """A group may have `betas` of its own."""
        if "betas" in param_group:
            momentum, beta = two_betas(param_group["betas"])
            rest = {key: value for key, value in param_group.items() if key != "betas"}
            param_group = rest | {"momentum": momentum, "beta": beta}
        super().add_param_group(param_group)

    def _update(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        step, beta = self._count(group, params), group["beta"]
        weight = self._bias_correction(group, step)
        steps = self._look_ahead(group, params, grads, step, weight)
        squares = [self.state[p]["square"] for p in params]
        torch._foreach_mul_(squares, beta)
        torch._foreach_addcmul_(squares, grads, grads, 1 - beta)
        scales = torch._foreach_div(squares, 1 - beta**step)
        torch._foreach_sqrt_(scales)
        torch._foreach_add_(scales, group["eps"])
        torch._foreach_div_(steps, scales)
        torch._foreach_mul_(steps, -group["lr"])
        if group["weight_decay"]:
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(params, steps)


def _minimum(a: _Number, b: float) -> _Number:
    return a.clamp(max=b) if isinstance(a, Tensor) else min(a, b)


def _dense_gradient(p: Tensor) -> Tensor:
    grad = p.grad
    assert grad is not None
    if grad.is_sparse or grad.is_complex():
        raise RuntimeError("sparse and complex gradients are not supported; use torch.optim.SGD")
    return grad


_CHECKED: Final = ("lr", "momentum", "weight_decay", "beta", "eps")
