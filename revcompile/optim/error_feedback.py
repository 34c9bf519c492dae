"""Error feedback: the weights an optimizer would reach, moved on by the delay of their gradients.

In a pipeline without flushes a gradient arrives t updates after the forward pass it belongs to. Let
y be the weights of the optimizer, and u_n its n-th update: y_n = y_{n-1} - u_n. If the weights in
use are w_n = y_n - t u_n, forward passes compute with about the weights that y will have reached
when the gradient arrives, and the gradient fits them. Written as an update of w alone:

    w_n = w_{n-1} - u_n - t (u_n - u_{n-1}),        u_0 = 0

No second copy of the weights is needed, only the last update.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from revcompile.optim.late import LateOptimizer, check_settings, loss_of

PREVIOUS = "previous_update"
"""The key of the last update in a parameter's optimizer state."""


def apply_with_feedback(
    params: list[Tensor],
    updates: list[Tensor],
    state: MutableMapping[Any, dict[str, Any]],
    feedback: float,
) -> None:
    """Subtract updates from parameters, with error feedback; keeps `updates` for the next call."""
    if not feedback:
        torch._foreach_sub_(params, updates)
        return
    for p, update in zip(params, updates, strict=True):
        if PREVIOUS not in state[p]:
            state[p][PREVIOUS] = torch.zeros_like(update)
    previous = [state[p][PREVIOUS] for p in params]
    torch._foreach_lerp_(previous, updates, 1 + feedback)  # u + c (u - previous)
    torch._foreach_sub_(params, previous)
    torch._foreach_copy_(previous, updates)


class ErrorFeedback(LateOptimizer):
    """Any torch optimizer, with error feedback proportional to the delay of its gradients.

    A trainer sets `delay` (in updates) for each stage's optimizer. Without delay this is the
    wrapped optimizer. Learning-rate schedules, parameter groups and state are those of the wrapped
    optimizer; the last update is kept beside it, a copy of the size of the parameters.

    Args:
        optimizer: the optimizer to wrap.
        feedback: error feedback for each update of delay.

    >>> weight = torch.nn.Parameter(torch.tensor([1.0]))
    >>> optimizer = ErrorFeedback(torch.optim.SGD([weight], lr=0.1))
    >>> optimizer.delay = 2
    >>> for _ in range(2):
    ...     weight.grad = torch.tensor([1.0])
    ...     optimizer.step()
    ...     print(round(weight.item(), 3))
    0.7
    0.6
    """

    copied = (*LateOptimizer.copied, "optimizer", "feedback")

    def __init__(self, optimizer: Optimizer, feedback: float = 1.0) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"ErrorFeedback: expected a torch.optim.Optimizer, got {type(optimizer).__name__}; "
                "write e.g. ErrorFeedback(torch.optim.AdamW(params, lr=1e-3))"
            )
        check_settings({"feedback": feedback})
        super().__init__(optimizer.param_groups, dict(optimizer.defaults))
        self.optimizer, self.feedback = optimizer, feedback
        # One list of groups and one state: schedules, checkpoints and users see the wrapped ones.
        self.param_groups = optimizer.param_groups
        self.state = optimizer.state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of the wrapped optimizer, with error feedback."""
        loss = loss_of(closure)
        feedback = self.feedback * self.delay
        if isinstance(self.optimizer, LateOptimizer):
            # It must only limit how far matrices move in the delay, not compensate for it again.
            self.optimizer.predicted_delay = self.delay or self.predicted_delay
        if not feedback:
            self.optimizer.step()
            return loss
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        before = [p.detach().clone() for p in params]
        self.optimizer.step()
        updates = torch._foreach_sub(before, params)
        torch._foreach_copy_(params, before)
        apply_with_feedback(params, list(updates), self.state, feedback)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the wrapped optimizer does."""
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to the wrapped optimizer."""
        wrapped = getattr(self, "optimizer", None)
        if wrapped is None:  # while `Optimizer.__init__` runs
            Optimizer.add_param_group(self, param_group)
        else:
            wrapped.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state dict, which contains the last updates, too."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of the wrapped optimizer, with or without last updates."""
        self.optimizer.load_state_dict(state_dict)
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state
