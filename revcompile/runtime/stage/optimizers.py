"""Builds the optimizers of stages with the user's functions, and checks what these return."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adam,
    Adamax,
    AdamW,
    Muon,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from revcompile.errors import InputError
from revcompile.optim import DelayAwareMuon, DelayAwareSGD
from revcompile.optim.combined import CombinedOptimizer, elementary

FUSED: Final = (SGD, Adam, AdamW)
"""Optimizers whose fused kernels read a flag `found_inf`."""
_OURS: Final = (DelayAwareSGD, DelayAwareMuon)
_CAPTURABLE: Final = (NAdam, RAdam, Adamax, RMSprop, Adadelta, ASGD, Rprop, Muon, *_OURS)
"""Optimizers whose capturable steps do not wait for the device, but read no flag."""

OptimizerFactory = Callable[[Any], Optimizer | Sequence[Optimizer]]
"""Makes an optimizer, or several, from a list of parameters or of parameter groups."""
ScheduleFactory = Callable[[Any], LRScheduler]
"""Makes the learning-rate schedule of an optimizer, which is stepped at every update."""
EXAMPLES: Final = {
    "param_groups": "lambda named: [{'params': [p for _, p in named], 'weight_decay': 0.0}]",
    "lr_schedule": "lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 1000)",
}
"""Examples of arguments that are functions, for error messages."""
_GROUPS_ADVICE: Final = (
    f"return a list of dicts that hold every parameter once, e.g. {EXAMPLES['param_groups']}"
)
_EMPTY_ADVICE: Final = (
    "it chose none of this stage's parameters for that optimizer; where there are none, leave the "
    "optimizer out of the list"
)
ParamGroups = Callable[[list[tuple[str, nn.Parameter]]], Iterable[Mapping[str, Any]]]
"""Makes torch's parameter groups from a stage's named parameters."""


def build_optimizer(
    where: str,
    parameters: Mapping[str, nn.Parameter],
    factory: OptimizerFactory,
    groups: ParamGroups | None,
) -> Optimizer:
    """The optimizer of some parameters; `where` says whose they are."""
    advice = "write e.g. optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)"
    if isinstance(factory, Optimizer) or not callable(factory):
        raise InputError(
            "optimizer: expected a function from a list of parameters to an optimizer (every "
            f"stage builds its own), got {kind_of(factory)}; {advice}"
        )
    named = list(parameters.items())
    given: Any = [p for _, p in named]
    hint = (
        "it was given parameters; net.trainer(optimizer, loss) takes the function that makes an "
        "optimizer first"
    )
    if groups is not None:
        given = _grouped(where, groups, named)
        hint = f"it was given what param_groups= returned: {_GROUPS_ADVICE}"
    with _explaining(where, "optimizer", "the factory", hint, _EMPTY_ADVICE if given else hint):
        returned = factory(given)
    optimizer = _combined(where, returned, advice)
    for part in elementary(optimizer):
        closure = inspect.signature(part.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise InputError(
                f"optimizer, {where}: {kind_of(part)} computes the loss several times an "
                f"update, which a pipeline cannot; use another one, {advice}"
            )
        if isinstance(part, torch.optim.SparseAdam):
            raise InputError(
                f"optimizer, {where}: SparseAdam takes sparse gradients alone, but a stage "
                f"accumulates dense ones; use another one, {advice}"
            )
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    own = {id(p): name for name, p in named}
    if held != own.keys():
        missing = [name for i, name in own.items() if i not in held]
        what = f"it lacks {missing[0]}" if missing else "it holds others, too"
        if len(missing) == len(own):
            what = "it holds none of them: those of another model, or of the original"
        raise InputError(
            f"optimizer, {where}: the optimizer must hold exactly the stage's "
            f"{len(own)} parameters, but {what}; pass on all that the factory is given"
            + ("" if groups is None else ", and let param_groups= return every parameter once")
        )
    return optimizer


def _combined(where: str, returned: Any, advice: str) -> Optimizer:
    """What the factory returned as one optimizer."""
    several: list[Optimizer] = list(returned) if isinstance(returned, list | tuple) else [returned]
    for optimizer in several:
        if not isinstance(optimizer, Optimizer):
            raise InputError(
                f"optimizer, {where}: expected a torch.optim.Optimizer from the factory, "
                f"or a list of them, got {kind_of(optimizer)}; {advice}"
            )
    if not several:
        raise InputError(f"optimizer, {where}: the factory returned no optimizer; {advice}")
    try:
        return several[0] if len(several) == 1 else CombinedOptimizer(several)
    except ValueError as error:
        raise InputError(
            f"optimizer, {where}: its {len(several)} optimizers cannot be combined: "
            f"{error}; give every parameter to one of them"
        ) from error


def _grouped(
    where: str, groups: ParamGroups, named: list[tuple[str, nn.Parameter]]
) -> list[dict[str, Any]]:
    hint = f"it is given a stage's [(name, parameter), ...]; {_GROUPS_ADVICE}"
    with _explaining(where, "param_groups", "it", hint):
        returned = groups(named)
    as_list = list(returned) if isinstance(returned, Iterable) else None
    if as_list is None or not all(isinstance(group, Mapping) for group in as_list):
        raise InputError(
            f"param_groups, {where}: expected parameter groups, got {kind_of(returned)}; "
            f"{_GROUPS_ADVICE}"
        )
    for group in as_list:
        if "params" not in group:
            keys = ", ".join(map(repr, group)) or "nothing"
            raise InputError(
                f"param_groups, {where}: a group has no 'params', but {keys}; {_GROUPS_ADVICE}"
            )
    return [dict(group) for group in as_list]


def build_schedule(where: str, optimizer: Optimizer, factory: ScheduleFactory) -> LRScheduler:
    """The learning-rate schedule of an optimizer."""
    with _explaining(where, "lr_schedule", "it", "it is given the stage's optimizer"):
        schedule = factory(optimizer)
    if isinstance(schedule, ReduceLROnPlateau):
        raise InputError(
            f"lr_schedule, {where}: ReduceLROnPlateau needs a metric at every step, but "
            "schedules are stepped at every update; use one that counts updates"
        )
    if not hasattr(schedule, "step"):
        raise InputError(
            f"lr_schedule, {where}: expected a function from an optimizer to a "
            f"torch.optim.lr_scheduler, got {kind_of(schedule)} from it; write e.g. "
            f"lr_schedule={EXAMPLES['lr_schedule']}"
        )
    # Parameter groups are compared: it may be the schedule of one of the stage's optimizers.
    own = {id(group) for group in optimizer.param_groups}
    scheduled = getattr(getattr(schedule, "optimizer", None), "param_groups", ())
    if not all(id(group) in own for group in scheduled):
        raise InputError(
            f"lr_schedule, {where}: it returned the schedule of another optimizer; make "
            "one of the optimizer that it is given"
        )
    return schedule


@contextmanager
def _explaining(
    where: str, argument: str, who: str, hint: str, if_empty: str | None = None
) -> Iterator[None]:
    """Around a call of a user's function: turn its errors into an `InputError`.

    `if_empty` is the hint for an optimizer that got no parameters.
    """
    try:
        yield
    except Exception as error:
        if if_empty is not None and "empty parameter list" in str(error):
            hint = if_empty
        raise InputError(
            f"{argument}, {where}: {who} raised {type(error).__name__}: {error}; {hint}"
        ) from error


def why_not_capturable_optimizer(optimizer: Optimizer) -> str | None:
    """Why an optimizer's step cannot be captured; None if it can.

    >>> why_not_capturable_optimizer(torch.optim.NAdam([torch.zeros(2)]))
    >>> why_not_capturable_optimizer(torch.optim.Adagrad([torch.zeros(2)]))  # doctest: +ELLIPSIS
    'Adagrad has no step that can be captured; use SGD, Adam, AdamW, NAdam, ...
    """
    for part in elementary(optimizer):
        name = type(part).__name__
        if type(part) not in (*FUSED, *_CAPTURABLE):
            known = [kind.__name__ for kind in (*FUSED, *_CAPTURABLE)]
            return (
                f"{name} has no step that can be captured; use {', '.join(known[:-1])} or "
                f"{known[-1]} of torch.optim or revcompile.optim themselves"
            )
        for group in part.param_groups:
            if group.get("differentiable"):
                return f"{name}(differentiable=True) cannot be captured; leave it out"
            if any(not p.is_floating_point() for p in group["params"]):
                return f"{name} has parameters that are not floating-point numbers"
    return None


def kind_of(value: Any) -> str:
    return "None" if value is None else f"{type(value).__module__}.{type(value).__qualname__}"
