"""Updates of a stage, with the mean of the gradients that backward passes have accumulated.

Parameters that several stages share are owned by the first of them. The others send it their
gradients before it updates, and get the new weights after that.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from revcompile.runtime.executor.messages import Average, Message, MessageKind, Transport
from revcompile.runtime.stage.settings import Task
from revcompile.runtime.stage.stage import Stage
from revcompile.runtime.stage.update import Updater
from revcompile.schedule import Action, Order


class StageUpdates:
    """Performs the actions of one stage that concern its updates.

    Args:
        task: Has the optimizer, and the parameters that stages share.
    """

    is_captured = False
    """Whether a captured step is being performed."""
    gradients: dict[str, Tensor] | None = None
    """The mean gradient of an update that has begun."""
    _sums: dict[str, Tensor] | None = None
    """The sums from which the mean is computed, until then."""

    def __init__(self, task: Task, stage: Stage, transport: Transport) -> None:
        settings, self.index = task.settings, stage.program.index
        self.stage, self.transport = stage, transport
        ties = task.partition.ties.items()
        ends = [(tie.owner, tie.holder, names) for tie, names in ties]
        self.tied = {b if a == self.index else a: n for a, b, n in ends if self.index in (a, b)}
        """Names of the parameters that this stage shares with another one, by the other stage."""
        self.copied = task.copied(self.index)
        self.updater = Updater(
            f"stage {self.index}",
            {name: p for name, p in stage.parameters.items() if name not in self.copied},
            task.optimizer,
            groups=settings.param_groups,
            lr_schedule=settings.lr_schedule,
            delay=task.delay(self.index),
            is_predicted=stage.weights.predicted is not None,
        )
        self._clip_grad_norm = settings.clip_grad_norm
        self._accumulation_steps = settings.accumulation_steps
        self._is_continuous = stage.program.method.order is Order.CONTINUOUS
        self.count = torch.zeros((), dtype=torch.float32, device=stage.device)
        """How many micro-batches are in the accumulated gradient: bad ones are left out."""
        self.flag = torch.zeros(1, dtype=torch.float32, device=stage.device)
        """Whether the last backward pass was of a bad micro-batch (`Message.found_inf`)."""

    def clear(self) -> None:
        """Drop an update that has begun, and the count of micro-batches."""
        self.gradients, self._sums = None, None
        self.count.zero_()

    def end_captured(self) -> None:
        self.gradients, self._sums = None, None
        self.is_captured = False
        self.updater.found_inf = None
        if self.average is not None:
            self.average.is_reduced = False

    @property
    def average(self) -> Average | None:
        """Averages gradients over replicas; None without replicas."""
        return self.transport.averages.get(self.index)

    @property
    def is_counted(self) -> bool:
        """Whether captured updates divide by the number of micro-batches."""
        return self._accumulation_steps > 1 or self.average is not None

    @property
    def shares_norm(self) -> bool:
        """Whether other stages' clipping depends on the norm of this stage's gradient."""
        return self._clip_grad_norm is not None and not self._is_continuous

    def update(self, action: Action) -> bool:
        gradients = self._take_mean()
        if gradients is None:
            return False
        factor: Tensor | None = None
        if self._clip_grad_norm is not None:
            squared = torch.zeros((), dtype=torch.float32, device=self.stage.device)
            if gradients:
                norms = torch._foreach_norm(list(gradients.values()))
                squared = torch.stack(norms).square().sum()
            if not self._is_continuous:
                # All stages update with the same micro-batches: clip by the norm over all stages.
                total = self.transport.sum_squared_norms(self.index, action.index, squared)
                if total is None:
                    return False
                squared = total
            factor = (self._clip_grad_norm / (squared.sqrt() + 1e-6)).clamp(max=1.0)
        with self.stage.updating(self.updater.parameters):
            self.updater.apply(gradients, factor)
        if not self.is_captured:
            self.updater.advance()
        self.gradients = None
        return True

    def begin_mean(self) -> None:
        """Take the accumulated gradient; captured, with replicas: after all backward passes."""
        self._sums, self.stage.gradients = self.stage.gradients, {}
        if self.average is not None:
            self.average.fill(self._sums, self.count)

    def _take_mean(self) -> dict[str, Tensor] | None:
        """The mean of the accumulated gradient, once per update; None until replicas are done."""
        average = self.average
        if self.gradients is not None:
            return self.gradients
        if self._sums is None:
            if average is not None and self.is_captured:
                return None
            self.begin_mean()
            if average is not None:
                average.start()
        if average is not None and not average.is_reduced:
            return None
        assert self._sums is not None
        self.gradients, self._sums = self._sums, None
        if average is not None:
            count = average.read(self.gradients, adds=not self.is_captured)
        else:
            count = self.count
            if self._accumulation_steps > 1 and self.gradients:
                torch._foreach_div_(list(self.gradients.values()), count.clamp(min=1))
        is_empty = self.flag != 0 if self.is_captured and not self.is_counted else count == 0
        flag = is_empty.float().reshape(1)
        self.updater.found_inf = flag if self.is_captured or bool(flag) else None
        if self.is_counted or not self.is_captured:
            self.count.zero_()
        return self.gradients

    # -- tied parameters ----------------------------------------------------------------------

    def send_tied_grad(self, action: Action) -> bool:
        assert action.peer is not None
        gradients = self._take_mean()
        if gradients is None:
            return False
        names = [name for name in self.tied[action.peer] if name in gradients]
        taken = {name: gradients.pop(name) for name in names}
        if self.stage.sums is not None:  # later micro-batches are summed in the same memory
            taken = {name: gradient.clone() for name, gradient in taken.items()}
        message = Message(action.index, {}, taken, found_inf=self.updater.found_inf)
        self.transport.send((self.index, action.peer, MessageKind.TIED_GRAD), message)
        return True

    def recv_tied_grad(self, action: Action) -> bool:
        assert action.peer is not None
        gradients = self._take_mean()
        if gradients is None:
            return False
        route = action.peer, self.index, MessageKind.TIED_GRAD
        message = self.transport.receive(route, action.index)
        if message is None:
            return False
        if not self.is_captured:
            message = message.resolved()
        for name, gradient in message.gradients.items():
            if gradient is not None:
                own = gradients.get(name)
                gradients[name] = gradient if own is None else own + gradient
        return True

    def send_tied_weight(self, action: Action) -> bool:
        assert action.peer is not None
        names = self.tied[action.peer]
        values = {name: self.stage.parameters[name].detach().clone() for name in names}
        route = self.index, action.peer, MessageKind.TIED_WEIGHT
        self.transport.send(route, Message(action.index, values))
        return True

    def recv_tied_weight(self, action: Action) -> bool:
        assert action.peer is not None
        route = action.peer, self.index, MessageKind.TIED_WEIGHT
        message = self.transport.receive(route, action.index)
        if message is None:
            return False
        with torch.no_grad(), self.stage.updating(message.values):
            for name, value in message.values.items():
                self.stage.parameters[name].copy_(value)
        return True

    def load_copied(self, weights: Mapping[str, Tensor]) -> None:
        """Write those of these weights to the copies of tied parameters that it has copies of."""
        with torch.no_grad():
            for name in weights.keys() & self.copied:
                self.stage.parameters[name].copy_(weights[name])
