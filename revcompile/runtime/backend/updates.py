"""Optimizers inside a recorded round: settings on the device, updates that a flag can stop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from revcompile.runtime.update import Updater

__all__ = ["RecordedUpdater", "unfit"]

_KNOWN: Final = (SGD, Adam, AdamW)


def unfit(optimizer: Optimizer) -> str | None:
    """Why an optimizer cannot be recorded; None if it can.

    >>> unfit(torch.optim.SGD([torch.zeros(2)], lr=0.1))
    >>> unfit(torch.optim.RMSprop([torch.zeros(2)], lr=0.1))
    'RMSprop has no fused kernel that a flag can stop; use SGD, Adam or AdamW'
    """
    name = type(optimizer).__name__
    if type(optimizer) not in _KNOWN:
        return f"{name} has no fused kernel that a flag can stop; use SGD, Adam or AdamW"
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            return f"{name}(differentiable=True) cannot be recorded; leave it out"
        if any(not p.is_floating_point() for p in group["params"]):
            return f"{name} has parameters that are not floating-point numbers"
    return None


class RecordedUpdater(Updater):
    """Another updater's optimizer, as a recorded round uses it.

    Learning rates are read from the device, so that they may change between rounds; the schedule
    goes on when `advance` is called. On the CPU the optimizer's own step is taken.
    """

    def __init__(self, updater: Updater) -> None:
        self.where, self.parameters = updater.where, updater.parameters
        self.optimizer, self.lr_schedule = updater.optimizer, updater.lr_schedule
        self.bad: Tensor | None = None
        """1: the update is to be left out."""
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        first = next(iter(self.parameters.values()), None)
        self._on_device = first is not None and first.is_cuda
        self._rates = [
            torch.zeros((), dtype=torch.float32, device=first.device if first is not None else None)
            for _ in groups
        ]
        self._filled: list[float | None] = [None for _ in groups]
        self._steps: dict[Tensor, Tensor] = {}
        self._own_steps: dict[Tensor, Tensor] = {}

    @property
    def started(self) -> bool:
        """Has there been an update? The first one makes the optimizer's state."""
        if self.optimizer is None:
            return True
        stateless = all(
            type(self.optimizer) is SGD and not group["momentum"]
            for group in self.optimizer.param_groups
        )
        return stateless or bool(self.optimizer.state)

    def settings(self) -> tuple[Any, ...]:
        """What a recording holds fixed: everything but the learning rate."""
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        return tuple(
            tuple((k, v) for k, v in group.items() if k not in ("params", "lr", "initial_lr"))
            for group in groups
        )

    def prepare(self) -> None:
        """Before a round: learning rates as they are now."""
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        for index, group in enumerate(groups):
            rate = float(group["lr"])
            if rate != self._filled[index]:
                self._rates[index].fill_(rate)
                self._filled[index] = rate

    def apply(self, gradients: Mapping[str, Tensor], scale: Tensor | None = None) -> None:
        """One update, unless `bad`; waits for no device."""
        if self.optimizer is None or not gradients:
            return
        if self._on_device:
            with self._fused():
                self._update(gradients, scale)
        elif self.bad is None or not bool(self.bad):
            self._update(gradients, scale)

    def advance(self) -> None:
        """After a round with an update: the schedule goes on."""
        if self.lr_schedule is not None:
            self.lr_schedule.step()

    @contextmanager
    def _fused(self) -> Iterator[None]:
        """The optimizer's groups as its fused kernel takes them."""
        assert self.optimizer is not None
        before = [dict(group) for group in self.optimizer.param_groups]
        forced = {"fused": True, "foreach": False, "capturable": True}
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group.update({k: v for k, v in forced.items() if k in group}, lr=rate)
        optimizer: Any = self.optimizer
        optimizer._warned_capturable_if_run_uncaptured = True
        optimizer.found_inf = None if self.bad is None else self.bad.reshape(())
        try:
            yield
        finally:
            del optimizer.found_inf
            for group, settings in zip(self.optimizer.param_groups, before, strict=True):
                group.update(settings)

    # -- coming and going ---------------------------------------------------------------------

    def enter(self) -> None:
        """Steps are counted on the device from here on, always at the same place."""
        self._filled = [None for _ in self._filled]
        if self.optimizer is None or not self._on_device:
            return
        for parameter, state in self.optimizer.state.items():
            step = state.get("step")
            if isinstance(step, Tensor) and step.device != parameter.device:
                if parameter not in self._steps:
                    self._steps[parameter] = step.to(parameter.device, torch.float32)
                self._steps[parameter].copy_(step)
                state["step"], self._own_steps[parameter] = self._steps[parameter], step

    def leave(self) -> None:
        """Steps are counted where the optimizer itself counts them."""
        if self._own_steps and self.optimizer is not None:
            counts = torch.stack([self._steps[p] for p in self._own_steps]).tolist()
            for (parameter, step), count in zip(self._own_steps.items(), counts, strict=True):
                self.optimizer.state[parameter]["step"] = step.fill_(count)
            self._own_steps.clear()
