"""Optimizers inside a captured step: settings on the device, updates that a flag can undo.

Fused kernels read the flag `found_inf` and do nothing if it is set. Other optimizers take their
capturable step in any case; if the flag is set, all that it has written is restored from copies.

Some optimizers read the learning rate on the host, but their updates are proportional to it: they
take a step with rate 1, which is then scaled by the rate on the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from operator import itemgetter
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
    Muon,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)
from torch.utils.hooks import RemovableHandle

from revcompile.optim import DelayAwareAdamW, DelayAwareMuon, DelayAwareSGD
from revcompile.optim.combined import elementary, members
from revcompile.runtime.executor.captured.found_inf import restore_if
from revcompile.runtime.stage.static_buffers import StaticBuffers
from revcompile.runtime.stage.update import COUNTERS, Updater, counts_on_device

_FUSED: Final = (SGD, Adam, AdamW)
"""Their kernels read `found_inf`."""
_OURS: Final = (DelayAwareSGD, DelayAwareAdamW, DelayAwareMuon)
_CAPTURABLE: Final = (NAdam, RAdam, Adamax, RMSprop, Adadelta, ASGD, Rprop, Muon, *_OURS)
"""Their steps do not wait for the device, but know no `found_inf`."""
_NOT_FIXED: Final = frozenset(("params", "lr", "initial_lr"))
_PROPORTIONAL: Final = (SGD, Muon)
"""They read the learning rate on the host (SGD unless it is fused); updates are proportional."""


def why_not_capturable_optimizer(optimizer: Optimizer) -> str | None:
    """Why an optimizer's step cannot be captured; None if it can.

    >>> why_not_capturable_optimizer(torch.optim.NAdam([torch.zeros(2)]))
    >>> why_not_capturable_optimizer(torch.optim.Adagrad([torch.zeros(2)]))  # doctest: +ELLIPSIS
    'Adagrad has no step that can be captured; use SGD, Adam, AdamW, NAdam, ...
    """
    for part in elementary(optimizer):
        name = type(part).__name__
        if type(part) not in (*_FUSED, *_CAPTURABLE):
            known = [kind.__name__ for kind in (*_FUSED, *_CAPTURABLE)]
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


class CapturedUpdater(Updater):
    """Another updater's optimizer, as captured steps use it, and those between them.

    Learning rates are tensors on the device, so that they may change between steps; the learning
    rate schedule goes on when `advance` is called. On the CPU the optimizer's own step is taken.
    On a GPU that would compute in another precision (learning rates, powers of betas), so that a
    training would depend on which of its updates were captured: after a restart the first are not.
    """

    def __init__(self, updater: Updater) -> None:
        self.where, self.parameters = updater.where, updater.parameters
        self.optimizer, self.lr_schedule = updater.optimizer, updater.lr_schedule
        self.has_updated, self.is_predicted = updater.has_updated, updater.is_predicted
        self.found_inf: Tensor | None = None
        """A flag; if it is set, `apply_captured` changes nothing."""
        groups = self._groups
        first = next(iter(self.parameters.values()), None)
        device = first.device if first is not None else None
        self._on_device = first is not None and first.is_cuda
        # An optimizer that does nothing is still followed by what a wrapper around it does.
        self._is_fused = all(type(member) in _FUSED for member in self._members)
        # Fused kernels take single precision. The other optimizers compute with Python floats on
        # the CPU, so they get double precision here: 1 - beta ** step would lose half its digits.
        dtype = torch.float32 if self._is_fused else torch.float64
        self._rates = [torch.zeros((), dtype=dtype, device=device) for _ in groups]
        self._rates_on_host: list[float | None] = [None for _ in groups]
        self._counts = torch.zeros(len(self.parameters), len(COUNTERS), dtype=dtype, device=device)
        """The counters of each parameter (of its updates, say) from the second update on."""

    @property
    def _members(self) -> list[Optimizer]:
        return members(self.optimizer) if self.optimizer is not None else []

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups if self.optimizer is not None else []

    @property
    def started(self) -> bool:
        """Has there been an update? The first one allocates the optimizer's state."""
        if self.optimizer is None or self.optimizer.state:
            return True
        if any(getattr(member, "delay", 0.0) for member in self._members):
            return False
        return all(
            type(part) is SGD and not any(group["momentum"] for group in part.param_groups)
            for part in elementary(self.optimizer)
        )

    @property
    def snapshot_bytes(self) -> int:
        """Bytes that an update copies to be able to restore them."""
        if self.optimizer is None or self._is_fused:
            return 0
        return sum(t.numel() * t.element_size() for t in self._written(self.parameters))

    @property
    def state_tensors(self) -> list[Tensor]:
        """What the optimizer keeps of each parameter."""
        states = self.optimizer.state.values() if self.optimizer is not None else ()
        return [value for state in states for value in state.values() if isinstance(value, Tensor)]

    def prepare(self) -> None:
        """Before a step: copy learning rates that have changed to the device."""
        for index, group in enumerate(self._groups):
            rate = float(group["lr"])
            if rate != self._rates_on_host[index]:
                self._rates[index].fill_(rate)
                self._rates_on_host[index] = rate

    def apply(self, gradients: Mapping[str, Tensor], scale: Tensor | None = None) -> None:
        """Action by action: the very step that is captured, but for the first one.

        That one allocates the optimizer's state, as the optimizer does by itself.
        """
        is_captured_alike = self._on_device and self.optimizer is not None and self.started
        if is_captured_alike:
            self.count_on_device()
            self.prepare()
        with self._capturable() if is_captured_alike else nullcontext():
            self._update(gradients, scale)
        self.advance()

    def apply_captured(self, gradients: Mapping[str, Tensor], scale: Tensor | None = None) -> None:
        """One update, unless `found_inf` is set; does not wait for a GPU."""
        if self.optimizer is None or not gradients:
            return
        if not self._is_fused:
            self._apply_or_restore(gradients, scale)
        elif self._on_device:
            with self._capturable():
                self._update(gradients, scale)
        elif self.found_inf is None or not bool(self.found_inf):
            self._update(gradients, scale)

    def _apply_or_restore(self, gradients: Mapping[str, Tensor], scale: Tensor | None) -> None:
        written = self._written(gradients) if self.found_inf is not None else []
        snapshot = StaticBuffers(written)
        snapshot.copy_(written)
        with self._capturable() if self._on_device else nullcontext():
            self._update(gradients, scale)
        if self.found_inf is not None:
            restore_if(self.found_inf, written, snapshot.tensors)

    def _written(self, names: Iterable[str]) -> list[Tensor]:
        """What an update with gradients of these parameters writes to."""
        assert self.optimizer is not None
        parameters = [self.parameters[name] for name in names if name in self.parameters]
        written: list[Tensor] = [self._counts, *parameters]
        for parameter in parameters:
            values = self.optimizer.state.get(parameter, {}).values()
            written += [v for v in values if isinstance(v, Tensor) and v._base is not self._counts]
        return written

    @contextmanager
    def _capturable(self) -> Iterator[None]:
        """The optimizer's settings as its capturable step takes them."""
        assert self.optimizer is not None
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

    # -- where updates are counted ------------------------------------------------------------

    def count_on_device(self) -> None:
        """Have the optimizer count its updates in a static buffer, also where it was loaded."""
        if self.optimizer is None or not self._on_device:
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

    def count_on_host(self) -> None:
        """Steps will not be captured: update as the optimizer does by itself from here on."""
        self._on_device = False
        for state in self.optimizer.state.values() if self.optimizer is not None else ():
            for key in COUNTERS:
                if isinstance(own := state.get(key), Tensor) and own._base is self._counts:
                    state[key] = own.float().cpu()


class FixedSettings:
    """What captured steps hold fixed of optimizers.

    All settings but learning rates, and the dictionaries of their state, which `load_state_dict`
    replaces.
    """

    def __init__(self, updaters: Iterable[CapturedUpdater]) -> None:
        self._optimizers = [u.optimizer for u in updaters if u.optimizer is not None]
        self._members = [member for o in self._optimizers for member in members(o)]
        self._states = [member.state for member in self._members]
        names = [[n for n in group if n not in _NOT_FIXED] for group in self._groups()]
        # One call reads all settings of a group: they are compared before every step.
        self._read = [itemgetter(*fixed) if fixed else len for fixed in names]
        self._before = self._now()

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    def _now(self) -> tuple[list[Any], ...]:
        groups = [
            (len(group) - ("initial_lr" in group), read(group))
            for read, group in zip(self._read, self._groups(), strict=True)
        ]
        delays = [(getattr(m, "delay", 0), getattr(m, "predicted_delay", 0)) for m in self._members]
        return groups, delays

    def have_changed(self) -> bool:
        pairs = zip(self._members, self._states, strict=True)
        try:
            return any(m.state is not s for m, s in pairs) or self._now() != self._before
        except (KeyError, ValueError):  # other settings, or another number of groups
            return True


def _scale_updates(optimizer: Optimizer) -> Iterator[RemovableHandle]:
    """Have each step taken with a learning rate of 1, and its update scaled on the device."""
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
