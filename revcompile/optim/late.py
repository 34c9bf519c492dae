"""What optimizers for late gradients have in common."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, ClassVar, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from revcompile.errors import InputError


class LateOptimizer(Optimizer):
    """An optimizer that knows how late its gradients are; its state may be in higher precision.

    torch copies and pickles the state and the groups of an optimizer, but not its attributes, and
    converts a loaded state to the precision of the parameters. This class keeps them.
    """

    delay: float = 0.0
    """How many updates late gradients are, on average. A trainer sets it for each stage."""
    predicted_delay: float = 0.0
    """The delay, if weight prediction or `ErrorFeedback` compensates for it; then `delay` is 0."""
    copied: ClassVar[tuple[str, ...]] = ("delay", "predicted_delay")
    """Attributes that are copied and pickled."""

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {name: getattr(self, name) for name in self.copied}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in every optimizer; a group's own settings are checked too."""
        check_settings(param_group)
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of all parameters that have a gradient."""
        loss = loss_of(closure)
        for group in self.param_groups:
            self._update(group)
        return loss

    def _update(self, group: dict[str, Any]) -> None:
        raise NotImplementedError

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, in the precision of that state."""
        super().load_state_dict(state_dict)
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        own = chain.from_iterable(group["params"] for group in self.param_groups)
        for key, p in zip(saved, own, strict=True):
            entries = state_dict["state"].get(key, {}) if p.dtype != wide(p) else {}
            for name, value in entries.items():
                if isinstance(value, Tensor) and name != "step":
                    self.state[p][name] = value.to(p.device)


def wide(p: Tensor) -> torch.dtype:
    """The precision of a parameter's state: at least float32."""
    return torch.promote_types(p.dtype, torch.float32)


def wide_gradient(p: Tensor) -> Tensor:
    """The gradient of a parameter in the precision of its state."""
    grad = p.grad
    assert grad is not None
    if grad.is_sparse or grad.is_complex():
        raise RuntimeError("sparse and complex gradients are not supported; use torch.optim.SGD")
    return grad.to(wide(p))


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """The result of a closure that computes loss and gradients; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


_ANY: Final = ("lr", "adamw_lr", "weight_decay", "eps", "feedback")
_BELOW_ONE: Final = ("momentum", "betas[0]", "betas[1]")


def is_number(value: Any) -> bool:
    """Whether a value is a number or a tensor."""
    return isinstance(value, numbers.Real | Tensor) and not isinstance(value, bool)


def check_settings(settings: Mapping[str, Any]) -> None:
    """Refuse settings that are not numbers, or out of range; one-element tensors are numbers."""
    given = dict(settings)
    if "betas" in given:
        betas = given["betas"]
        if not isinstance(betas, tuple | list) or len(betas) != 2:
            raise InputError(f"betas={betas!r}: expected two numbers, e.g. (0.9, 0.999)")
        given |= {"betas[0]": betas[0], "betas[1]": betas[1]}
    for name in (name for name in (*_ANY, *_BELOW_ONE) if name in given):
        value, bound = given[name], 1.0 if name in _BELOW_ONE else math.inf
        if not is_number(value) or not 0.0 <= value < bound:
            limit = "from 0 to below 1" if bound == 1.0 else "of 0 or more"
            raise InputError(f"{name}={value!r}: expected a number {limit}")
