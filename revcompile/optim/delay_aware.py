"""Optimizers for gradients that come late: momentum that looks as far ahead as they lag behind.

Momentum is a loop: parameters, gradient, mean of gradients, parameters. Where the loss is curved by
h, SGD with Nesterov momentum 0.9 and a learning rate of r is stable as long as r h / (1 - 0.9) is
below 13.6. If gradients come t updates late that number falls to 0.8 for t = 2 and to 0.14 for
t = 9 (without Nesterov's step, as in Adam, from 38 to 0.5 and 0.13): training is slow, or fails,
because it swings, not because late gradients are wrong.

Two numbers put that right. Let m be a running mean of the gradients g over `memory` updates, g the
last one included. The step goes along m + (g - m) lead / memory: about where the mean will be in
`lead` updates, if gradients stay as they are. Nesterov's is lead 1. With

    memory = (1 + t**2) / (1 - momentum)        lead = 1 + 1.25 t

that number is about 5 whatever the delay, and at delay 0 this is Nesterov momentum itself.
(As a filter this is quasi-hyperbolic momentum, Ma and Yarats, 2019; what is new is its choice.)
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, ClassVar, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["DelayAwareAdamW", "DelayAwareSGD", "averaging_horizon", "look_ahead"]

AHEAD: Final = 1.25
"""How many updates further to look ahead for each update of delay."""

_Number = float | Tensor
"""On the CPU a number; on a device, where a step may be recorded, a tensor without dimensions."""


def averaging_horizon(delay: float, momentum: float = 0.9) -> float:
    """Over how many updates to average gradients that come so many updates late.

    >>> [round(averaging_horizon(delay)) for delay in (0, 1, 2.25, 9)]
    [10, 20, 61, 820]
    """
    return (1 + delay**2) / (1 - momentum)


def look_ahead(delay: float) -> float:
    """How many updates to look ahead.

    >>> [look_ahead(delay) for delay in (0, 1, 4)]
    [1.0, 2.25, 6.0]
    """
    return 1 + AHEAD * delay


class _Lead(Optimizer):
    """What both share: the mean, and where it will be."""

    delay: float = 0.0
    """How many updates late gradients are, on average. A trainer says so to each stage's."""
    _means: ClassVar[tuple[str, ...]] = ("mean",)
    """What is averaged over updates, of each parameter: in float32 at least."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in every optimizer; settings of a group are checked like those of all."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        _check(**{name: group[name] for name in _CHECKED if name in group})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update of all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for alike in self._alike(group):
                wide = self.state[alike[0]][self._means[0]].dtype
                self._update(group, alike, [_dense(p).to(wide) for p in alike])
        return loss

    def _update(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        raise NotImplementedError

    def _alike(self, group: dict[str, Any]) -> Iterable[list[Tensor]]:
        """Parameters with a gradient; lists of one device, type and number of updates each.

        Numbers that are on a device are not looked at: there a group has its updates together.
        """
        found: dict[Any, list[Tensor]] = {}
        for p in (p for p in group["params"] if p.grad is not None):
            state = self.state[p]
            if "step" not in state:
                where = p.device if group["capturable"] else "cpu"
                state["step"] = torch.zeros((), device=where)
                wide = torch.promote_types(p.dtype, torch.float32)
                state.update({name: torch.zeros_like(p, dtype=wide) for name in self._means})
            number = None if group["capturable"] else state["step"].item()
            found.setdefault((p.device, p.dtype, number), []).append(p)
        return found.values()

    def _counted(self, group: dict[str, Any], params: list[Tensor]) -> _Number:
        """The number of this update."""
        steps: list[Tensor] = [self.state[p]["step"] for p in params]
        torch._foreach_add_(steps, 1)
        return steps[0].double() if group["capturable"] else steps[0].item()

    def _led(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        step: _Number,
        share: _Number = 1.0,
    ) -> tuple[Tensor, ...]:
        """Move the means; where they, divided by `share`, will be."""
        means = [self.state[p][self._means[0]] for p in params]
        rate = 1 / self._memory(group, step)
        torch._foreach_mul_(means, 1 - rate)
        torch._foreach_add_(means, torch._foreach_mul(grads, rate))
        fresh = _least(look_ahead(self.delay) * rate, 1.0)
        led = torch._foreach_mul(means, (1 - fresh) / share)
        torch._foreach_add_(led, torch._foreach_mul(grads, fresh))
        return led

    def _memory(self, group: dict[str, Any], step: _Number) -> _Number:
        """It grows with the number of gradients there are, up to what the delay asks for."""
        least = averaging_horizon(0, group["momentum"])
        return _least(least + (step - 1), averaging_horizon(self.delay, group["momentum"]))

    def _share(self, group: dict[str, Any], step: _Number) -> _Number:
        """Of the mean: how much of it is gradients, and not the zero it began with."""
        least, most = (averaging_horizon(delay, group["momentum"]) for delay in (0, self.delay))
        if least <= 1:  # the first gradient is all there is of the first mean
            return 1.0
        growing = _least(step, math.ceil(most - least))
        left = (least - 1) / (least - 1 + growing) * (1 - 1 / most) ** (step - growing)
        return 1 - left


class DelayAwareSGD(_Lead):
    """SGD with momentum for late gradients; at delay 0 `SGD(..., nesterov=True)`.

    `lr`, `momentum` and `weight_decay` mean what they mean there: how far a gradient moves its
    parameter in the end is `lr / (1 - momentum)`, whatever the delay.

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
        _check(lr=lr, momentum=momentum, weight_decay=weight_decay)
        settings = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, settings | {"capturable": capturable})

    def _update(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        if group["weight_decay"]:
            grads = list(torch._foreach_add(grads, params, alpha=group["weight_decay"]))
        # As in SGD: what is kept is how far to go, so that momentum may change on the way.
        reaching = list(torch._foreach_mul(grads, 1 / (1 - group["momentum"])))
        steps = self._led(group, params, reaching, self._counted(group, params))
        torch._foreach_mul_(steps, -group["lr"])
        torch._foreach_add_(params, steps)


class DelayAwareAdamW(_Lead):
    """AdamW for late gradients; at delay 0 with Nesterov's step, as in NAdam.

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
        momentum, beta = betas
        _check(lr=lr, momentum=momentum, weight_decay=weight_decay, beta=beta, eps=eps)
        settings = {"lr": lr, "momentum": momentum, "beta": beta, "eps": eps}
        super().__init__(
            params, settings | {"weight_decay": weight_decay, "capturable": capturable}
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """A group may have `betas` of its own."""
        if "betas" in param_group:
            momentum, beta = param_group["betas"]
            rest = {key: value for key, value in param_group.items() if key != "betas"}
            param_group = rest | {"momentum": momentum, "beta": beta}
        super().add_param_group(param_group)

    def _update(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        step, beta = self._counted(group, params), group["beta"]
        steps = self._led(group, params, grads, step, self._share(group, step))
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


def _least(a: _Number, b: float) -> _Number:
    return a.clamp(max=b) if isinstance(a, Tensor) else min(a, b)


def _dense(p: Tensor) -> Tensor:
    grad = p.grad
    assert grad is not None
    if grad.is_sparse or grad.is_complex():
        raise RuntimeError("gradients that are sparse or complex have no lead; use torch.optim.SGD")
    return grad


_CHECKED: Final = ("lr", "momentum", "weight_decay", "beta", "eps")


def _check(**settings: float) -> None:
    for name, value in settings.items():
        most = 1.0 if name in ("momentum", "beta") else float("inf")
        if not 0.0 <= value < most:
            limit = f"from 0 to below {most:g}" if most == 1.0 else "0 or more"
            raise ValueError(f"{name}={value}: expected a number {limit}")
