"""A stage's optimizer: any of torch's, built for the stage's own parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from revcompile.errors import InputError

__all__ = ["OptimizerFactory", "ParamGroups", "ScheduleFactory", "Updater"]

OptimizerFactory = Callable[[Any], Optimizer]
"""From a list of parameters (or of parameter groups) to an optimizer."""
ScheduleFactory = Callable[[Any], LRScheduler]
"""From an optimizer to its learning-rate schedule, which is stepped at every update."""
ParamGroups = Callable[[list[tuple[str, nn.Parameter]]], Iterable[Mapping[str, Any]]]
"""From a stage's named parameters to torch's parameter groups."""


class Updater:
    """Applies gathered gradients to the parameters of one stage (or of its synthesiser)."""

    def __init__(
        self,
        where: str,
        parameters: Mapping[str, Tensor],
        factory: OptimizerFactory,
        *,
        groups: ParamGroups | None = None,
        lr_schedule: ScheduleFactory | None = None,
    ) -> None:
        self.where = where
        self.parameters: dict[str, nn.Parameter] = {
            name: p  # type: ignore[misc]
            for name, p in parameters.items()
            if p.requires_grad
        }
        self.optimizer = self._build(factory, groups) if self.parameters else None
        self.lr_schedule = None
        if lr_schedule is not None and self.optimizer is not None:
            self.lr_schedule = lr_schedule(self.optimizer)
            if not hasattr(self.lr_schedule, "step"):
                raise InputError(
                    f"lr_schedule, {where}: expected a function from an optimizer to a "
                    f"torch.optim.lr_scheduler, got {_kind(self.lr_schedule)} from it; write e.g. "
                    "lr_schedule=lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 1000)"
                )

    def _build(self, factory: OptimizerFactory, groups: ParamGroups | None) -> Optimizer:
        advice = "write e.g. optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)"
        if isinstance(factory, Optimizer) or not callable(factory):
            raise InputError(
                "optimizer: expected a function from a list of parameters to an optimizer (every "
                f"stage builds its own), got {_kind(factory)}; {advice}"
            )
        named = list(self.parameters.items())
        given: Any = [p for _, p in named] if groups is None else [dict(g) for g in groups(named)]
        optimizer = factory(given)
        if not isinstance(optimizer, Optimizer):
            raise InputError(
                f"optimizer, {self.where}: expected a torch.optim.Optimizer from the factory, "
                f"got {_kind(optimizer)}; {advice}"
            )
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        own = {id(p): name for name, p in named}
        if held != own.keys():
            missing = [name for i, name in own.items() if i not in held]
            what = f"it lacks {missing[0]}" if missing else "it holds parameters of other places"
            raise InputError(
                f"optimizer, {self.where}: the optimizer must hold exactly the stage's "
                f"{len(own)} parameters, but {what}; pass on all that the factory is given"
                + ("" if groups is None else ", and let param_groups= return every parameter once")
            )
        return optimizer

    def apply(self, gradients: Mapping[str, Tensor], scale: Tensor | None = None) -> None:
        """One update with the gradients, times `scale`."""
        if self.optimizer is None:
            return
        for name, parameter in self.parameters.items():
            parameter.grad = gradients.get(name)
        there = [p.grad for p in self.parameters.values() if p.grad is not None]
        if there and scale is not None:
            torch._foreach_mul_(there, scale.to(there[0].device))
        if there:
            self.optimizer.step()
        for parameter in self.parameters.values():
            parameter.grad = None
        if self.lr_schedule is not None and there:
            self.lr_schedule.step()

    @property
    def lr(self) -> float | None:
        """The learning rate of the first parameter group."""
        if self.optimizer is None or "lr" not in self.optimizer.param_groups[0]:
            return None
        return float(self.optimizer.param_groups[0]["lr"])

    # -- checkpoints --------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Optimizer state by parameter name, the groups' settings, and the schedule's state."""
        if self.optimizer is None:
            return {"state": {}, "groups": [], "lr_schedule": None}
        names = {id(p): name for name, p in self.parameters.items()}
        state = {
            names[id(p)]: {k: _copy(v) for k, v in values.items()}
            for p, values in self.optimizer.state.items()
        }
        groups = [
            {k: _copy(v) for k, v in group.items() if k != "params"}
            | {"params": [names[id(p)] for p in group["params"]]}
            for group in self.optimizer.param_groups
        ]
        schedule = self.lr_schedule.state_dict() if self.lr_schedule is not None else None
        return {"state": state, "groups": groups, "lr_schedule": _plain(schedule)}

    def load(self, states: Mapping[str, Any], settings: Mapping[str, Any], schedule: Any) -> None:
        """Take over states and group settings by parameter name, whoever saved them."""
        if self.optimizer is None:
            return
        self.optimizer.state.clear()
        for name, parameter in self.parameters.items():
            if name in states:
                self.optimizer.state[parameter] = {
                    key: value.to(parameter.device, copy=True)
                    if isinstance(value, Tensor) and value.dim()
                    else _copy(value)
                    for key, value in states[name].items()
                }
        names = {id(p): name for name, p in self.parameters.items()}
        for group in self.optimizer.param_groups:
            found = settings.get(names[id(group["params"][0])])
            if found is not None:
                group.update({k: v for k, v in found.items() if k != "params"})
        if self.lr_schedule is not None and schedule is not None:
            self.lr_schedule.load_state_dict(schedule)


def _kind(value: Any) -> str:
    return "None" if value is None else f"{type(value).__module__}.{type(value).__qualname__}"


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _plain(value: Any) -> Any:
    """A schedule's state without what cannot be saved."""
    if value is None:
        return None
    kinds = (int, float, str, bool, list, type(None))
    return {key: entry for key, entry in value.items() if isinstance(entry, kinds)}
