"""A stage's optimizer: its updates, action by action or in captured steps, and its state by name.

In captured steps fused kernels read the flag `found_inf` and do nothing if it is set. Other
optimizers take their capturable step in any case; if the flag is set, everything that the step has
written is restored from copies. Some optimizers read the learning rate on the host. Their updates
are proportional to it, so they take a step with rate 1, which the rate on the device then scales.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import SGD, Muon, Optimizer
from torch.utils.hooks import RemovableHandle

from revcompile.optim.combined import elementary, members
from revcompile.runtime.stage.optimizers import (
    FUSED,
    OptimizerFactory,
    ParamGroups,
    ScheduleFactory,
    build_optimizer,
    build_schedule,
    kind_of,
)
from revcompile.runtime.stage.slots import StaticBuffers
from revcompile.runtime.stage.tensors import TreeCopy, clone_tree, restore_if

COUNTERS: Final = ("step", "mu_product")
"""Counters in an optimizer's state: on the CPU, unless `counts_on_device`."""
_OF_SCHEDULES: Final = frozenset(
    ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr", "param_names")
)
"""Keys that schedules and parameter names add to parameter groups."""
_PROPORTIONAL: Final = (SGD, Muon)
"""They read the learning rate on the host (SGD unless fused); updates are proportional to it."""


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
        self.where = where
        self.parameters: dict[str, nn.Parameter] = {
            name: p  # type: ignore[misc]
            for name, p in parameters.items()
            if p.requires_grad
        }
        self._names = {id(p): name for name, p in self.parameters.items()}
        self.optimizer: Any = SGD([{"params": []}], lr=0.0)
        """For a stage without parameters: an optimizer that does nothing."""
        if self.parameters:
            self.optimizer = build_optimizer(where, self.parameters, factory, groups)
        # Predicted weights compensate for the delay already: optimizers must not do so again.
        name = "predicted_delay" if is_predicted else "delay"
        for member in members(self.optimizer):
            if hasattr(member, name):  # those of `revcompile.optim`
                setattr(member, name, delay)
        self.lr_schedule = None
        self.has_updated = False
        """Whether the optimizer has taken a step."""
        self.found_inf: Tensor | None = None
        """In a captured step: a flag; if it is set, the update changes nothing."""
        # Not if wrapped: after a fused kernel that does nothing, the wrapper still does its part.
        self._is_fused = all(type(member) in FUSED for member in members(self.optimizer))
        first = next(iter(self.parameters.values()), torch.empty(0))
        # Fused kernels take single precision. The other optimizers compute with Python floats on
        # the CPU, so they get double precision here: 1 - beta ** step would lose half its digits.
        dtype = torch.float32 if self._is_fused else torch.float64
        self._is_on_device = False
        rates = self.optimizer.param_groups
        self._rates = [torch.zeros((), dtype=dtype, device=first.device) for _ in rates]
        """Learning rates, on the device."""
        self._rates_on_host: list[float | None] = [None for _ in rates]
        shape = len(self.parameters), len(COUNTERS)
        self._counts = torch.zeros(shape, dtype=dtype, device=first.device)
        """Each parameter's `COUNTERS`, from the second update on."""
        if lr_schedule is not None and self.parameters:
            self.lr_schedule = build_schedule(where, self.optimizer, lr_schedule)

    def apply(self, gradients: Mapping[str, Tensor], factor: Tensor | None = None) -> None:
        """One update with the gradients times `factor`, unless `found_inf` is set.

        After `use_device` it takes the step of captured steps, captured or not. Only the first
        update takes the optimizer's own step, which allocates its state.
        """
        own = [gradients[name] for name in self.parameters if name in gradients]
        if not own:
            return
        if factor is not None:
            torch._foreach_mul_(own, factor.to(own[0]))
        flag, is_captured_alike = self.found_inf, self._is_on_device and self.has_started
        if flag is not None and not is_captured_alike and bool(flag):
            return
        is_restored = flag is not None and is_captured_alike and not self._is_fused
        written = self._written(gradients) if is_restored else []
        snapshot = StaticBuffers(written)
        snapshot.copy_(written)
        if is_captured_alike:
            self.count_on_device()
            self.follow_rates()
        with self._capturable() if is_captured_alike else nullcontext():
            self._step(gradients)
        if flag is not None:
            restore_if(flag, written, snapshot.tensors)

    def _step(self, gradients: Mapping[str, Tensor]) -> None:
        for name, parameter in self.parameters.items():
            parameter.grad = gradients.get(name)
        self.optimizer.step()
        self.has_updated = True
        for parameter in self.parameters.values():
            parameter.grad = None

    def advance(self) -> None:
        """Step the learning rate schedule after an update, even if the update was skipped.

        As with `torch.amp.GradScaler`; this also keeps the schedules of all stages together.
        """
        if self.lr_schedule is None:
            return
        # torch warns if the optimizer has not taken a step before
        with nullcontext() if self.has_updated else warnings.catch_warnings(action="ignore"):
            self.lr_schedule.step()

    @property
    def lr(self) -> float | None:
        """The learning rate of the first parameter group that has parameters."""
        groups = self.optimizer.param_groups
        lr = next((group.get("lr") for group in groups if group["params"]), None)
        return None if lr is None else float(lr)

    # -- captured steps -------------------------------------------------------------------------

    def use_device(self) -> None:
        """Update on a GPU as captured steps do, with learning rates and counters on the device.

        The optimizer's own step computes with these in another precision. Results would then
        depend on which updates are captured, and after a restart the first ones are not.
        """
        self._is_on_device = self._counts.is_cuda

    @property
    def has_started(self) -> bool:
        """Whether the optimizer's state is allocated, as by the first update, or not needed."""
        if self.optimizer.state:
            return True
        if any(getattr(member, "delay", 0.0) for member in members(self.optimizer)):
            return False
        return all(
            type(part) is SGD and not any(group["momentum"] for group in part.param_groups)
            for part in elementary(self.optimizer)
        )

    @property
    def snapshot_bytes(self) -> int:
        """Bytes that an update copies to be able to restore them."""
        if self._is_fused:
            return 0
        return sum(t.numel() * t.element_size() for t in self._written(self.parameters))

    @property
    def state_tensors(self) -> list[Tensor]:
        """The tensors of the optimizer's state."""
        states = self.optimizer.state.values()
        return [value for state in states for value in state.values() if isinstance(value, Tensor)]

    def follow_rates(self) -> None:
        """Copy learning rates that have changed to the device."""
        for index, group in enumerate(self.optimizer.param_groups):
            rate = float(group["lr"])
            if rate != self._rates_on_host[index]:
                self._rates[index].fill_(rate)
                self._rates_on_host[index] = rate

    def _written(self, names: Iterable[str]) -> list[Tensor]:
        """The tensors that an update with gradients of these parameters writes to."""
        parameters = [self.parameters[name] for name in names if name in self.parameters]
        written: list[Tensor] = [self._counts, *parameters]
        for parameter in parameters:
            values = self.optimizer.state.get(parameter, {}).values()
            written += [v for v in values if isinstance(v, Tensor) and v._base is not self._counts]
        return written

    @contextmanager
    def _capturable(self) -> Iterator[None]:
        """Inside, the optimizer has the settings of its capturable step."""
        before = [dict(group) for group in self.optimizer.param_groups]
        forced = {"fused": self._is_fused, "foreach": not self._is_fused, "capturable": True}
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group.update({k: v for k, v in forced.items() if k in group}, lr=rate)
        flag = self.found_inf.reshape(()) if self.found_inf is not None else None
        parts: list[Any] = list(elementary(self.optimizer))
        hooks: list[RemovableHandle] = []
        for part in parts:
            part._warned_capturable_if_run_uncaptured = True
            part.found_inf = flag if self._is_fused else None
            if type(part) in _PROPORTIONAL and not self._is_fused:
                hooks += _scale_updates(part)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for part in parts:
                del part.found_inf
            for group, settings in zip(self.optimizer.param_groups, before, strict=True):
                group.update(settings)

    def count_on_device(self) -> None:
        """Move the optimizer's counters to a static buffer, also after its state was loaded."""
        if not self._is_on_device:
            return
        rows = {id(p): row for row, p in enumerate(self.parameters.values())}
        for group in self.optimizer.param_groups:
            if counts_on_device(group):
                continue
            for parameter in group["params"]:
                state = self.optimizer.state.get(parameter, {})
                for column, key in enumerate(COUNTERS):
                    own = state.get(key)
                    if isinstance(own, Tensor) and own._base is not self._counts:
                        state[key] = self._counts[rows[id(parameter)], column].copy_(own)

    def stay_on_host(self) -> None:
        """Take the optimizer's own steps from now on, because steps will not be captured."""
        self._is_on_device = False
        for state in self.optimizer.state.values():
            for key in COUNTERS:
                if isinstance(own := state.get(key), Tensor) and own._base is self._counts:
                    state[key] = own.float().cpu()

    # -- checkpoints --------------------------------------------------------------------------

    def state_dict(self, copy: TreeCopy) -> dict[str, Any]:
        """Optimizer state by parameter name, the groups' settings, and the schedule's state."""
        names = self._names
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
        """Load states and group settings by parameter name; saved stages may be cut otherwise."""
        self.optimizer.state.clear()
        names = self._names
        for group in self.optimizer.param_groups:
            for saved in self._saved(group, settings)[:1]:
                group.update(clone_tree({k: v for k, v in saved.items() if k != "params"}))
            for parameter in group["params"]:
                if names[id(parameter)] in states:
                    self.optimizer.state[parameter] = {
                        key: _placed(key, value, parameter, group)
                        for key, value in states[names[id(parameter)]].items()
                    }
        if self.lr_schedule is not None and schedule is not None:
            self.lr_schedule.load_state_dict(copy.deepcopy(dict(schedule)))

    def misfits(self, settings: Mapping[str, Any], schedules: Sequence[Any]) -> Iterator[str]:
        """Why a state does not fit the parameter groups.

        Args:
            settings: The saved group of each parameter, by name.
            schedules: The states of learning rate schedules that must go on alike here.
        """
        groups: list[Mapping[str, Any]] = []
        parts = elementary(self.optimizer)
        pairs = ((optimizer, group) for optimizer in parts for group in optimizer.param_groups)
        for optimizer, group in pairs:
            first, *others = self._saved(group, settings) or [group]
            groups.append(first)
            missing, extra = group.keys() - first.keys(), first.keys() - group.keys()
            if keys := (missing - _OF_SCHEDULES) or (extra - _OF_SCHEDULES):
                what = f"has {'no ' if missing >= keys else ''}{min(keys)!r}"
                yield (
                    f"{self.where} has {kind_of(optimizer)}, but the state is of another optimizer "
                    f"(it {what})"
                )
                return
            different = (key for other in others for key in _differing(first, other))
            if (key := next(different, None)) is not None:
                yield (
                    f"{self.where} has a parameter group whose parameters were saved with "
                    f"different {key}; group parameters as they were when the state was saved"
                )
                return
        rates = [group["lr"] for group in groups]
        for state in schedules if self.lr_schedule is not None else ():
            if state is not None and repr(state.get("_last_lr", rates)) != repr(rates):
                yield (
                    f"{self.where} has parameter groups with the learning rates {rates}, but the "
                    f"state has a schedule for groups with {state['_last_lr']}; cut the model as "
                    "it was when the state was saved, or load the weights alone (net.load_weights)"
                )
                return

    def _saved(
        self, group: Mapping[str, Any], settings: Mapping[str, Any]
    ) -> list[Mapping[str, Any]]:
        """The saved groups of those of a group's parameters that were saved."""
        own = (self._names[id(p)] for p in group["params"])
        return [settings[n] for n in own if n in settings]


class FixedSettings:
    """The parts of optimizers that captured steps hold fixed.

    These are all settings except learning rates, and the dictionaries of their state, which
    `load_state_dict` replaces.
    """

    def __init__(self, updaters: Iterable[Updater]) -> None:
        self._optimizers = [updater.optimizer for updater in updaters]
        self._members = [member for o in self._optimizers for member in members(o)]
        self._states = [member.state for member in self._members]
        self._before = self._settings()

    def _settings(self) -> list[Any]:
        groups = (group for optimizer in self._optimizers for group in optimizer.param_groups)
        delays = ((getattr(m, "delay", 0), getattr(m, "predicted_delay", 0)) for m in self._members)
        return [*({k: v for k, v in group.items() if k != "lr"} for group in groups), *delays]

    def have_changed(self) -> bool:
        members = zip(self._members, self._states, strict=True)
        is_replaced = any(member.state is not state for member, state in members)
        return is_replaced or self._settings() != self._before


def _scale_updates(optimizer: Optimizer) -> Iterator[RemovableHandle]:
    """Make each step use a learning rate of 1, and scale its update on the device."""
    before: list[tuple[Tensor, Tensor, Tensor]] = []

    def begin(*_: Any) -> None:
        for group in optimizer.param_groups:
            changing = [p for p in group["params"] if p.grad is not None]
            before.extend((p, p.detach().clone(), group["lr"]) for p in changing)
            group["lr"] = 1.0

    @torch.no_grad()
    def scale(*_: Any) -> None:
        for parameter, old, rate in before:
            parameter.copy_(torch.lerp(old, parameter, rate.to(old.dtype)))
        before.clear()

    yield optimizer.register_step_pre_hook(begin)
    yield optimizer.register_step_post_hook(scale)


def _placed(key: str, value: Any, parameter: Tensor, group: Mapping[str, Any]) -> Any:
    """A copy of an entry of an optimizer's state, on the device and in the dtype it must have."""
    if not isinstance(value, Tensor):
        return clone_tree(value)
    if key not in COUNTERS:
        return value.to(parameter.device, copy=True)
    device = parameter.device if counts_on_device(group) else "cpu"
    return value.to(device, torch.float32 if group.get("fused") else value.dtype, copy=True)


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[str]:
    """The settings in which two parameter groups differ.

    >>> list(_differing({"lr": 0.1, "chunks": 1}, {"lr": 0.1, "chunks": 3}))
    ['chunks']
    """
    keys = () if one is other else sorted(one.keys() - {"params"})
    return (key for key in keys if repr(one[key]) != repr(other.get(key)))  # some are tensors


def counts_on_device(group: Mapping[str, Any]) -> bool:
    """Whether counters of a group's parameters are on their device, as capturable kernels need.

    >>> counts_on_device({"lr": 0.1, "capturable": False, "fused": True})
    True
    """
    return bool(group.get("capturable") or group.get("fused"))


def _plain(value: Any) -> Any:
    """A schedule's state without entries that cannot be saved (functions, counters)."""
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    if type(value) is not dict:
        return clone_tree(value)
    return {key: _plain(entry) for key, entry in value.items() if _is_plain(entry)}


def _is_plain(value: Any) -> bool:
    if type(value) is dict:
        return True
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    return isinstance(value, int | float | str | Tensor | None)
