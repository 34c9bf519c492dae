"""Optimizers inside a recorded round: settings on the device, updates that a flag can stop.

Fused kernels read the flag themselves. Other optimizers take their capturable step, which nothing
stops; if the flag says so, everything it has touched is put back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

from revcompile.optim.delay_aware import DelayAwareAdamW, DelayAwareSGD
from revcompile.runtime.executor.captured.found_inf import noted, put_back
from revcompile.runtime.stage.update import COUNTERS, Updater, counts_on_device

__all__ = ["CapturedUpdater", "optimizer_problem"]

_FUSED: Final = (SGD, Adam, AdamW)
"""Their kernels read a flag that stops them."""
_OURS: Final = (DelayAwareSGD, DelayAwareAdamW)
_CAPTURABLE: Final = (NAdam, RAdam, Adamax, RMSprop, Adadelta, ASGD, Rprop, *_OURS)
"""Their steps wait for no device, but cannot be stopped."""


def optimizer_problem(optimizer: Optimizer) -> str | None:
    """Why an optimizer cannot be recorded; None if it can.

    >>> optimizer_problem(torch.optim.NAdam([torch.zeros(2)], lr=0.1))
    >>> optimizer_problem(torch.optim.Adagrad([torch.zeros(2)], lr=0.1))  # doctest: +ELLIPSIS
    'Adagrad has no step that can be recorded; use SGD, Adam, AdamW, NAdam, ...
    """
    name = type(optimizer).__name__
    if type(optimizer) not in (*_FUSED, *_CAPTURABLE):
        known = [kind.__name__ for kind in (*_FUSED, *_CAPTURABLE)]
        return (
            f"{name} has no step that can be recorded; use {', '.join(known[:-1])} or {known[-1]} "
            "of torch.optim or revcompile.optim.delay_aware themselves"
        )
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            return f"{name}(differentiable=True) cannot be recorded; leave it out"
        if any(not p.is_floating_point() for p in group["params"]):
            return f"{name} has parameters that are not floating-point numbers"
    return None


class CapturedUpdater(Updater):
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
        device = first.device if first is not None else None
        self._on_device = first is not None and first.is_cuda
        self._is_fused = type(self.optimizer) in _FUSED
        # Fused kernels take single precision. Elsewhere numbers that are computed in double
        # precision on the CPU are so on the device too: 1 - beta ** step loses half its digits.
        dtype = torch.float32 if self._is_fused else torch.float64
        self._rates = [torch.zeros((), dtype=dtype, device=device) for _ in groups]
        self._filled: list[float | None] = [None for _ in groups]
        self._counts = torch.zeros(len(self.parameters), len(COUNTERS), dtype=dtype, device=device)
        """Where each parameter's counters are while rounds are recorded."""
        self._own: dict[tuple[int, int], Tensor] = {}
        """The optimizer's own counters, by their places."""

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

    @property
    def set_aside(self) -> int:
        """Bytes of what an update copies to be able to put it back."""
        if self.optimizer is None or self._is_fused:
            return 0
        return sum(t.numel() * t.element_size() for t in self._touched(self.parameters))

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
        if not self._is_fused:
            self._apply_or_put_back(gradients, scale)
        elif self._on_device:
            with self._recordable():
                self._update(gradients, scale)
        elif self.bad is None or not bool(self.bad):
            self._update(gradients, scale)

    def _apply_or_put_back(self, gradients: Mapping[str, Tensor], scale: Tensor | None) -> None:
        touched = self._touched(gradients) if self.bad is not None else []
        before = noted(touched)
        with self._recordable() if self._on_device else nullcontext():
            self._update(gradients, scale)
        if self.bad is not None:
            put_back(touched, before, self.bad)

    def _touched(self, names: Iterable[str]) -> list[Tensor]:
        """What an update with gradients of these parameters writes to."""
        assert self.optimizer is not None
        chosen = [self.parameters[name] for name in names if name in self.parameters]
        found: list[Tensor] = [self._counts, *chosen]
        for parameter in chosen:
            values = self.optimizer.state.get(parameter, {}).values()
            found += [v for v in values if isinstance(v, Tensor) and v._base is not self._counts]
        return found

    def advance(self) -> None:
        """After a round with an update: the schedule goes on."""
        if self.lr_schedule is not None:
            self.lr_schedule.step()

    @contextmanager
    def _recordable(self) -> Iterator[None]:
        """The optimizer's groups as the step that is recorded takes them."""
        assert self.optimizer is not None
        before = [dict(group) for group in self.optimizer.param_groups]
        forced = {"fused": self._is_fused, "foreach": not self._is_fused, "capturable": True}
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
        """Updates are counted on the device from here on, always at the same place."""
        self._filled = [None for _ in self._filled]
        if self.optimizer is None or not self._on_device:
            return
        places = {id(p): place for place, p in enumerate(self.parameters.values())}
        for group in self.optimizer.param_groups:
            if counts_on_device(group):
                continue
            for parameter in group["params"]:
                state = self.optimizer.state.get(parameter, {})
                for kind, key in enumerate(COUNTERS):
                    if isinstance(state.get(key), Tensor):
                        place = places[id(parameter)], kind
                        self._own[place] = state[key]
                        state[key] = self._counts[place].copy_(state[key])

    def leave(self) -> None:
        """Updates are counted where the optimizer itself counts them."""
        if not self._own or self.optimizer is None:
            return
        counts, parameters = self._counts.tolist(), list(self.parameters.values())
        for (place, kind), own in self._own.items():
            state = self.optimizer.state[parameters[place]]
            state[COUNTERS[kind]] = own.fill_(counts[place][kind])
        self._own.clear()
