"""A stage's optimizer: any of torch's, built for the stage's own parameters."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from revcompile.errors import InputError
from revcompile.optim.combined import CombinedOptimizer, completed, elementary, members
from revcompile.runtime.stage.tensors import TreeCopy, clone_tree

COUNTERS: Final = ("step", "mu_product")
"""Entries of an optimizer's state that are on the CPU whatever the parameter's device."""
_BY_GROUP: Final = ("max_lrs", "base_momentums", "max_momentums")
"""Attributes of schedules with a value for each parameter group."""
_OF_SCHEDULES: Final = frozenset(
    ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr", "param_names")
)
"""Keys that schedules and parameter names add to parameter groups."""

OptimizerFactory = Callable[[Any], Optimizer | Sequence[Optimizer]]
"""Makes an optimizer, or several, from a list of parameters or of parameter groups."""
ScheduleFactory = Callable[[Any], LRScheduler]
"""Makes the learning-rate schedule of an optimizer, which is stepped at every update."""
ParamGroups = Callable[[list[tuple[str, nn.Parameter]]], Iterable[Mapping[str, Any]]]
"""Makes torch's parameter groups from a stage's named parameters."""


class Updater:
    """Applies accumulated gradients to the parameters of a stage, or of its gradient predictor."""

    def __init__(
        self,
        where: str,
        parameters: Mapping[str, Tensor],
        factory: OptimizerFactory,
        *,
        groups: ParamGroups | None = None,
        lr_schedule: ScheduleFactory | None = None,
        delay: float = 0.0,
        is_predicted: bool = False,
    ) -> None:
        self.where, self.is_predicted = where, is_predicted
        self.parameters: dict[str, nn.Parameter] = {
            name: p  # type: ignore[misc]
            for name, p in parameters.items()
            if p.requires_grad
        }
        self.optimizer = self._build(factory, groups) if self.parameters else None
        self.set_delay(delay)
        self.lr_schedule = None
        self.has_updated = False
        """Has the optimizer taken a step?"""
        if lr_schedule is not None and self.optimizer is not None:
            with self._explaining("lr_schedule", "it", "it is given the stage's optimizer"):
                self.lr_schedule = lr_schedule(self.optimizer)
            self._check_schedule()

    @contextmanager
    def _explaining(self, argument: str, who: str, hint: str) -> Iterator[None]:
        """Around a function of the user's."""
        try:
            yield
        except Exception as error:
            raise InputError(
                f"{argument}, {self.where}: {who} raised {type(error).__name__}: {error}; {hint}"
            ) from error

    def set_delay(self, delay: float) -> None:
        """Tell optimizers that want to know by how many updates gradients are late.

        Predicted weights compensate for the delay: an optimizer must not do so once more.
        """
        name = "predicted_delay" if self.is_predicted else "delay"
        for member in members(self.optimizer) if self.optimizer is not None else ():
            if hasattr(member, name):  # as ours have
                setattr(member, name, delay)

    def _check_schedule(self) -> None:
        schedule = self.lr_schedule
        if isinstance(schedule, ReduceLROnPlateau):
            raise InputError(
                f"lr_schedule, {self.where}: ReduceLROnPlateau needs a metric at every step, but "
                "schedules are stepped at every update; use one that counts updates"
            )
        if not hasattr(schedule, "step"):
            raise InputError(
                f"lr_schedule, {self.where}: expected a function from an optimizer to a "
                f"torch.optim.lr_scheduler, got {_kind(schedule)} from it; write e.g. "
                "lr_schedule=lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 1000)"
            )
        # By parameter groups: it may be the schedule of one of several optimizers of the stage.
        own = {id(group) for group in getattr(self.optimizer, "param_groups", ())}
        scheduled = getattr(getattr(schedule, "optimizer", None), "param_groups", ())
        if not all(id(group) in own for group in scheduled):
            raise InputError(
                f"lr_schedule, {self.where}: it returned the schedule of another optimizer; make "
                "one of the optimizer that it is given"
            )

    def _build(self, factory: OptimizerFactory, groups: ParamGroups | None) -> Optimizer:
        advice = "write e.g. optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)"
        if isinstance(factory, Optimizer) or not callable(factory):
            raise InputError(
                "optimizer: expected a function from a list of parameters to an optimizer (every "
                f"stage builds its own), got {_kind(factory)}; {advice}"
            )
        named = list(self.parameters.items())
        given: Any = [p for _, p in named]
        if groups is not None:
            given = self._grouped(groups, named)
        what = "parameters" if groups is None else "what param_groups= returned"
        with self._explaining("optimizer", "the factory", f"it was given {what}"):
            returned = factory(given)
        optimizer = self._combined(returned, advice)
        for part in elementary(optimizer):
            self._check_optimizer(part, advice)
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

    def _combined(self, returned: Any, advice: str) -> Optimizer:
        """What the factory returned as one optimizer."""
        several: list[Any] = list(returned) if isinstance(returned, list | tuple) else [returned]
        for optimizer in several:
            if not isinstance(optimizer, Optimizer):
                raise InputError(
                    f"optimizer, {self.where}: expected a torch.optim.Optimizer from the factory, "
                    f"or a list of them, got {_kind(optimizer)}; {advice}"
                )
        if not several:
            raise InputError(
                f"optimizer, {self.where}: the factory returned no optimizer; {advice}"
            )
        try:
            optimizer = several[0] if len(several) == 1 else CombinedOptimizer(several)
        except ValueError as error:
            raise InputError(
                f"optimizer, {self.where}: its {len(several)} optimizers cannot be combined: "
                f"{error}; give every parameter to one of them"
            ) from error
        assert isinstance(optimizer, Optimizer)
        return optimizer

    def _check_optimizer(self, optimizer: Optimizer, advice: str) -> None:
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise InputError(
                f"optimizer, {self.where}: {_kind(optimizer)} computes the loss several times an "
                f"update, which a pipeline cannot; use another one, {advice}"
            )
        if isinstance(optimizer, torch.optim.SparseAdam):
            raise InputError(
                f"optimizer, {self.where}: SparseAdam takes sparse gradients alone, but a stage "
                f"accumulates dense ones; use another one, {advice}"
            )

    def _grouped(
        self, groups: ParamGroups, named: list[tuple[str, nn.Parameter]]
    ) -> list[dict[str, Any]]:
        advice = (
            "return a list of dicts, e.g. lambda named: [{'params': [p for _, p in named], "
            "'weight_decay': 0.0}]"
        )
        hint = f"it is given a stage's [(name, parameter), ...]; {advice}"
        with self._explaining("param_groups", "it", hint):
            returned = groups(named)
        as_list = list(returned) if isinstance(returned, Iterable) else None
        if as_list is None or not all(isinstance(group, Mapping) for group in as_list):
            raise InputError(
                f"param_groups, {self.where}: expected parameter groups, got {_kind(returned)}; "
                f"{advice}"
            )
        return [dict(group) for group in as_list]

    def apply(self, gradients: Mapping[str, Tensor], scale: Tensor | None = None) -> None:
        """One update with the gradients times `scale`, and a step of the schedule."""
        self._update(gradients, scale)
        self.advance()

    def advance(self) -> None:
        """After an update: the learning rate schedule goes on, whether it was left out or not.

        As with `torch.amp.GradScaler`; and so the schedules of all stages stay together.
        """
        if self.lr_schedule is None:
            return
        # torch warns if the optimizer has not taken a step before
        with nullcontext() if self.has_updated else warnings.catch_warnings(action="ignore"):
            self.lr_schedule.step()

    def _update(self, gradients: Mapping[str, Tensor], scale: Tensor | None) -> None:
        """Step the optimizer, unless there is nothing to update."""
        own = [gradients[name] for name in self.parameters if name in gradients]
        if self.optimizer is None or not own:
            return
        if scale is not None:
            torch._foreach_mul_(own, scale.to(own[0]))
        for name, parameter in self.parameters.items():
            parameter.grad = gradients.get(name)
        self.optimizer.step()
        self.has_updated = True
        for parameter in self.parameters.values():
            parameter.grad = None

    @property
    def lr(self) -> float | None:
        """The learning rate of the first parameter group that has parameters."""
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        lr = next((group.get("lr") for group in groups if group["params"]), None)
        return None if lr is None else float(lr)

    # -- checkpoints --------------------------------------------------------------------------

    def state_dict(self, copy: TreeCopy | None = None) -> dict[str, Any]:
        """Optimizer state by parameter name, the groups' settings, and the schedule's state."""
        copy = copy or clone_tree
        if self.optimizer is None:
            return {"state": {}, "groups": [], "lr_schedule": None}
        names = {id(p): name for name, p in self.parameters.items()}
        state = {
            names[id(p)]: {k: copy(v) for k, v in values.items()}
            for p, values in self.optimizer.state.items()
        }
        groups = [
            {k: copy(v) for k, v in group.items() if k != "params"}
            | {"params": [names[id(p)] for p in group["params"]]}
            for group in self.optimizer.param_groups
        ]
        schedule = self.lr_schedule.state_dict() if self.lr_schedule is not None else None
        return {"state": state, "groups": groups, "lr_schedule": _plain(schedule)}

    def load_state_dict(
        self, states: Mapping[str, Any], settings: Mapping[str, Any], schedule: Any
    ) -> None:
        """Load states and group settings by parameter name, from stages cut in any way."""
        if self.optimizer is None:
            return
        self.optimizer.state.clear()
        names = {id(p): name for name, p in self.parameters.items()}
        for group in self.optimizer.param_groups:
            group.update(self._saved_settings(group, settings))
            for parameter in group["params"]:
                if names[id(parameter)] in states:
                    self.optimizer.state[parameter] = {
                        key: _placed(key, value, parameter, group)
                        for key, value in states[names[id(parameter)]].items()
                    }
        if self.lr_schedule is not None and schedule is not None:
            self.lr_schedule.load_state_dict(_fitted(schedule, self.lr_schedule))

    def misfits(self, settings: Mapping[str, Any]) -> Iterator[str]:
        """Why saved groups do not fit: they lack a setting, have another, or do not agree."""
        for optimizer in elementary(self.optimizer) if self.optimizer is not None else ():
            for group in optimizer.param_groups:
                saved = self._all_saved(group, settings)
                for entry in saved:
                    missing = optimizer.defaults.keys() - entry.keys()
                    extra = entry.keys() - group.keys() - _OF_SCHEDULES
                    if missing or extra:
                        what = f"has no {min(missing)!r}" if missing else f"has {min(extra)!r}"
                        yield (
                            f"{self.where} has {_kind(optimizer)}, but the state is of another "
                            f"optimizer (it {what})"
                        )
                        return
                if found := _contradiction(saved):
                    key, one, other = found
                    yield (
                        f"{self.where} has a parameter group whose parameters were saved with "
                        f"{key}={one!r} and with {key}={other!r}; group parameters as they were "
                        "when the state was saved"
                    )
                    return

    def _saved_settings(
        self, group: Mapping[str, Any], settings: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The settings with which the group's parameters were saved.

        If they were in several groups, by another cut into stages: those of the group whose initial
        learning rate is that of this one.
        """
        saved = self._all_saved(group, settings)
        same_lr = [entry for entry in saved if _initial_lr(entry) == _initial_lr(group)]
        chosen: Mapping[str, Any] = next(iter(same_lr or saved), {})
        return {key: clone_tree(value) for key, value in chosen.items() if key != "params"}

    def _all_saved(
        self, group: Mapping[str, Any], settings: Mapping[str, Any]
    ) -> list[Mapping[str, Any]]:
        """The settings of each of the group's parameters that was saved."""
        assert self.optimizer is not None
        names = {id(p): name for name, p in self.parameters.items()}
        own = (names[id(p)] for p in group["params"])
        return [completed(self.optimizer, group, settings[n]) for n in own if n in settings]


def _placed(key: str, value: Any, parameter: Tensor, group: Mapping[str, Any]) -> Any:
    """A copy of an entry of an optimizer's state, where and as the optimizer wants it."""
    if not isinstance(value, Tensor):
        return clone_tree(value)
    if key not in COUNTERS:
        return value.to(parameter.device, copy=True)
    device = parameter.device if counts_on_device(group) else "cpu"
    return value.to(device, torch.float32 if group.get("fused") else value.dtype, copy=True)


def _contradiction(saved: Sequence[Mapping[str, Any]]) -> tuple[str, Any, Any] | None:
    """A setting that differs between those with which parameters of one group were saved.

    Learning rates may differ: `_saved_settings` chooses by them.

    >>> _contradiction([{"lr": 0.1, "chunks": 1}, {"lr": 0.1, "chunks": 3}])
    ('chunks', 1, 3)
    """
    for other in saved[1:]:
        for key in sorted(saved[0].keys() - _OF_SCHEDULES - {"params", "lr"}):
            one, two = saved[0][key], other.get(key)
            if repr(one) != repr(two):  # some are tensors
                return key, one, two
    return None


def _initial_lr(group: Mapping[str, Any]) -> Any:
    return group.get("initial_lr", group.get("lr"))


def counts_on_device(group: Mapping[str, Any]) -> bool:
    """Are the counters of a group's parameters on their device, as capturable kernels need them?

    >>> counts_on_device({"lr": 0.1, "capturable": False, "fused": True})
    True
    """
    return bool(group.get("capturable") or group.get("fused"))


def _kind(value: Any) -> str:
    return "None" if value is None else f"{type(value).__module__}.{type(value).__qualname__}"


def _plain(value: Any) -> Any:
    """A schedule's state without entries that cannot be saved (functions, counters)."""
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    if type(value) is not dict:
        return clone_tree(value)
    return {key: _plain(entry) for key, entry in value.items() if _is_plain(entry)}


def _fitted(state: Mapping[str, Any], schedule: Any) -> dict[str, Any]:
    """A saved schedule's state for this one, which may have other parameter groups."""
    groups = schedule.optimizer.param_groups
    own = {name: copy.copy(getattr(schedule, name, None)) for name in _BY_GROUP}
    own["base_lrs"] = list(map(_initial_lr, groups))
    if len(state.get("_last_lr", groups)) != len(groups):
        own |= {"_last_lr": [group["lr"] for group in groups], "lr_lambdas": [None] * len(groups)}
    fitted = {**copy.deepcopy(dict(state)), **{k: v for k, v in own.items() if k in state}}
    if "_schedulers" in fitted:
        pairs = zip(state["_schedulers"], schedule._schedulers, strict=True)
        fitted["_schedulers"] = [_fitted(inner, own) for inner, own in pairs]
    return fitted


def _is_plain(value: Any) -> bool:
    if type(value) is dict:
        return True
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    return isinstance(value, int | float | str | Tensor | None)
