"""Loss scaling for float16, while micro-batches are in flight.

The last stage multiplies a micro-batch's loss by the scale of that moment, and the scale is sent
back with the gradients: every stage divides its parameters' gradients by it before it accumulates
them. So accumulated gradients are right whatever happened to the scale between two micro-batches of
one update, or while they were in flight.

    forward messages    carry the least scale that overflowed at the stages before, unless reported
    backward messages   carry the scale of the micro-batch's loss

A micro-batch whose gradient overflows at a stage is left out there and, as a void message, at the
stages before it; the later stages have used theirs already. The last stage learns of it by forward
messages. A stage's actions have a fixed order, so this depends on no timing and needs no message of
its own. One incident causes many reports, since all micro-batches in flight had the same scale: the
last stage reacts to reports whose scale is not above its present one, and then backs off below all
of them; the others belong to an incident it has reacted to.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import Tensor

from revcompile.errors import InputError
from revcompile.kernels.autocast import wide_dtype, widest_dtype
from revcompile.schedule import Method, Order

LOWEST: Final = 2.0**-16
"""An overflow at this scale is not the scale's fault: it is an error."""
_HIGHEST: Final = torch.finfo(torch.float32).max
OVERFLOW: Final = 2.0
"""The flag of a micro-batch whose gradient overflowed because of its loss scale."""
_CPU: Final = torch.device("cpu")
_NUMBERS: Final = ("scale", "good", "overflow", "skipped")


@dataclass(frozen=True)
class LossScale:
    """How the loss is scaled: the settings of torch.amp.GradScaler, with its defaults.

    Without `dynamic` the scale is constant, and a gradient that is not finite is an error.

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
    """The settings for a value of `loss_scale=`; None: the loss is not scaled.

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


class Scaling:
    """State of one stage: overflows to report; at the last stage, the scale itself.

    Numbers on the device: a captured step reads and changes them without waiting.

    >>> scaling = Scaling(LossScale(init_scale=8.0, growth_interval=1))
    >>> scaling.record_overflow(8.0)
    >>> float(scaling.next_scale())
    4.0
    >>> scaling.updated()
    >>> float(scaling.next_scale())
    8.0
    """

    def __init__(self, settings: LossScale, device: torch.device = _CPU) -> None:
        self.settings = settings
        self.values = torch.zeros(len(_NUMBERS), dtype=widest_dtype(device), device=device)
        self.scale, self._good, self._overflow, self.skipped = self.values.unbind()
        """Factor of the next loss; updates since it last changed; the least scale that has
        overflowed and was not reported yet; micro-batches whose gradient overflowed here."""
        self.load_state_dict(None)

    def overflowed(self, found: Tensor, before: Tensor, scale: Tensor) -> Tensor:
        """The flag of a micro-batch: OVERFLOW where the scale of its loss can be the cause.

        Args:
            found: Whether one of its gradients is not finite.
            before: Its flag from the stage after this one, which stays if it is set.
            scale: That of its loss.
        """
        is_due_to_scale = (before == 0) & (found != 0) & (scale > LOWEST) & self.settings.dynamic
        self.skipped.add_(is_due_to_scale.reshape(()))
        self.record_overflow(torch.where(is_due_to_scale.reshape(()), scale, math.inf))
        return torch.where(before != 0, before, torch.where(is_due_to_scale, OVERFLOW, found))

    def record_overflow(self, scale: float | Tensor | None) -> None:
        """A gradient overflowed at this scale, here or at a stage before; infinite: none did."""
        if scale is not None:
            self._overflow.clamp_(max=torch.as_tensor(scale).to(self._overflow))

    def take_overflow(self) -> Tensor:
        """The overflow to report to the next stage, once; infinite if there is none."""
        overflow = self._overflow.clone()
        self._overflow.fill_(math.inf)
        return overflow

    def next_scale(self) -> Tensor:
        """At the last stage: the scale of the loss about to be computed."""
        overflow = self.take_overflow()
        is_new = overflow <= self.scale
        lower = (overflow * self.settings.backoff_factor).clamp(min=LOWEST)
        torch.where(is_new, lower, self.scale, out=self.scale)
        self._good.mul_(~is_new)
        return self.scale.clone()

    def updated(self, found_inf: Tensor | None = None) -> None:
        """The last stage has updated, unless the flag is set."""
        self._good.add_(1 if found_inf is None else (found_inf == 0).reshape(()))
        grows = (self._good == self.settings.growth_interval) & self.settings.dynamic
        grown = self.scale * self.settings.growth_factor
        torch.where(grows & (grown < _HIGHEST), grown, self.scale, out=self.scale)
        self._good.mul_(~grows)

    # -- checkpoints --------------------------------------------------------------------------

    def state_dict(self) -> dict[str, float]:
        return dict(zip(_NUMBERS, self.values.tolist(), strict=True))

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Continue from a state; start anew without one, or if the scale is fixed."""
        numbers = dict(zip(_NUMBERS, (self.settings.init_scale, 0, math.inf, 0), strict=True))
        if self.settings.dynamic:
            numbers |= {name: (state or numbers)[name] for name in _NUMBERS}
        self.values.copy_(torch.tensor([float(n) for n in numbers.values()], dtype=torch.float64))


def scaling_of(settings: LossScale | None, method: Method, device: torch.device) -> Scaling | None:
    """The initial state of a stage; None: the loss is not scaled."""
    if settings is None:
        return None
    if method.order is Order.SYNTHETIC:
        raise InputError(
            f"loss_scale: {method.name!r} predicts gradients, which are not scaled; use "
            "autocast=torch.bfloat16, or another method"
        )
    return Scaling(settings, device)


def unscaled(gradients: Mapping[str, Tensor | None], scale: Tensor) -> dict[str, Tensor | None]:
    """Gradients of the unscaled loss, as new tensors.

    >>> unscaled({"w": torch.tensor([8.0]), "b": None}, torch.tensor(4.0))
    {'w': tensor([2.]), 'b': None}
    """
    result = dict(gradients)
    scaled = {name: gradient for name, gradient in gradients.items() if gradient is not None}
    for dtype in dict.fromkeys(gradient.dtype for gradient in scaled.values()):
        own = {name: gradient for name, gradient in scaled.items() if gradient.dtype == dtype}
        wide = wide_dtype(dtype)  # float16 cannot hold every scale
        divided = torch._foreach_div([g.to(wide) for g in own.values()], scale.to(wide))
        result |= zip(own, (each.to(dtype) for each in divided), strict=True)
    return result
