"""Scaling the loss, so that small gradients survive float16, while micro-batches are in flight.

The last stage multiplies a micro-batch's loss with the scale of that moment, and the number travels
back with the gradients: every stage divides its parameters' gradients by it before it gathers them.
So what is gathered is right whatever has happened to the scale between two micro-batches of one
update, or while they were in flight.

A micro-batch whose gradient overflows at a stage is left out there and, as a void message, at the
stages before it; the stages behind have used theirs already. The last stage hears of it by the
forward messages: each carries the least scale that has overflowed at the stages it comes from, as
far as these had not told before. A stage's actions have a fixed order, so this depends on no
timing and takes no message of its own. One incident is many reports: all the micro-batches in
flight had the same scale. The last stage heeds those whose scale is not above its present one, and
is below all of them from then on; the others are of an incident it has dealt with.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

import torch
from torch import Tensor

from revcompile.errors import InputError
from revcompile.schedule import Method, Order

__all__ = ["LossScale", "Scaling", "loss_scale_of", "scaling_of", "unscaled"]

LOWEST: Final = 2.0**-16
"""What overflows at this scale does so at any: it is an error."""
_HIGHEST: Final = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class LossScale:
    """How the loss is scaled: the settings of torch.amp.GradScaler, with its defaults.

    Without `dynamic` the scale stays as it is, and a gradient that is not finite is an error.

    >>> LossScale(init_scale=1024.0).growth_interval
    2000
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    """Updates of the last stage without an overflow, after which the scale grows."""
    dynamic: bool = True

    def __post_init__(self) -> None:
        problems = [
            (not LOWEST < self.init_scale < _HIGHEST, f"init_scale={self.init_scale}", "2**16"),
            (not self.growth_factor > 1, f"growth_factor={self.growth_factor}", "2.0"),
            (not 0 < self.backoff_factor < 1, f"backoff_factor={self.backoff_factor}", "0.5"),
            (self.growth_interval < 1, f"growth_interval={self.growth_interval}", "2000"),
        ]
        for is_wrong, got, usual in problems:
            if is_wrong:
                raise InputError(f"LossScale: {got} cannot work; torch's is {usual}")


def loss_scale_of(
    given: LossScale | float | Literal["dynamic"] | None, autocast: torch.dtype | None
) -> LossScale | None:
    """What `loss_scale=` means; None: the loss is not scaled.

    >>> loss_scale_of(None, torch.float16) == loss_scale_of("dynamic", None) == LossScale()
    True
    >>> loss_scale_of(None, torch.bfloat16)
    >>> loss_scale_of(256.0, None).dynamic
    False
    """
    if given is None:
        return LossScale() if autocast is torch.float16 else None
    if isinstance(given, LossScale):
        return given
    if given == "dynamic":
        return LossScale()
    if isinstance(given, int | float) and not isinstance(given, bool):
        return LossScale(init_scale=float(given), dynamic=False)
    raise InputError(
        f'loss_scale={given!r}; use "dynamic", a number, a LossScale(...), or None: dynamic with '
        "autocast=torch.float16, none otherwise"
    )


@dataclass
class Scaling:
    """One stage's part in it: what has overflowed; at the last stage, the scale itself."""

    how: LossScale
    scale: float
    """What the next loss is multiplied with."""
    good: int = 0
    """Updates since the scale has changed, or something has overflowed."""
    overflow: float = math.inf
    """The least scale that has overflowed, of what is still to be told."""
    skipped: int = 0
    """Micro-batches whose gradient overflowed at this stage."""

    def overflowed(self, scale: float | None) -> bool:
        """A gradient of a loss scaled so is not finite: is it so because of the scale?"""
        if scale is None or not self.how.dynamic or scale <= LOWEST:
            return False
        self.skipped += 1
        self.report_overflow(scale)
        return True

    def report_overflow(self, scale: float | None) -> None:
        """Gradients have overflowed at this scale, here or at a stage before; None: they have not.

        The stage keeps the least scale until its next message forward passes it on.
        """
        if scale is not None:
            self.overflow = min(self.overflow, scale)

    def take_overflow(self) -> float | None:
        """The least scale reported since the last call; None without a report."""
        overflow, self.overflow = self.overflow, math.inf
        return None if math.isinf(overflow) else overflow

    def next_scale(self) -> float:
        """At the last stage: the scale of the next loss, lowered if an overflow was reported."""
        overflow = self.take_overflow()
        if overflow is not None and overflow <= self.scale:
            self.scale, self.good = max(overflow * self.how.backoff_factor, LOWEST), 0
        return self.scale

    def updated(self) -> None:
        """The last stage's parameters have been updated."""
        self.good += 1
        if self.how.dynamic and self.good == self.how.growth_interval:
            grown = self.scale * self.how.growth_factor
            self.scale, self.good = grown if grown < _HIGHEST else self.scale, 0

    # -- checkpoints --------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "how"}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Continue from a state; start anew without one, or if the scale is fixed."""
        start = Scaling(self.how, self.how.init_scale).state_dict()
        for name, value in (start | dict(state or {}) if self.how.dynamic else start).items():
            setattr(self, name, value)


def scaling_of(how: LossScale | None, method: Method) -> Scaling | None:
    """A stage's part in scaling at the beginning; None: the loss is not scaled."""
    if how is None:
        return None
    if method.order is Order.SYNTHETIC:
        raise InputError(
            f"loss_scale: {method.name!r} predicts gradients, which nobody has scaled; use "
            "autocast=torch.bfloat16, or another method"
        )
    return Scaling(how, how.init_scale)


def unscaled(gradients: Mapping[str, Tensor | None], scale: float) -> dict[str, Tensor | None]:
    """Gradients of the loss itself, as tensors of their own.

    >>> unscaled({"w": torch.tensor([8.0]), "b": None}, 4.0)
    {'w': tensor([2.]), 'b': None}
    """
    there = {name: gradient for name, gradient in gradients.items() if gradient is not None}
    if not there:
        return dict(gradients)
    divided = torch._foreach_div(list(there.values()), scale)
    return {**gradients, **dict(zip(there, divided, strict=True))}
