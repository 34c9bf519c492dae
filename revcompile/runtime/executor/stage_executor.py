"""Performing actions: one stage's list in its own order, several stages in turn.

There is one dispatcher. It knows actions, messages and stages; where messages come from is the
transport's business.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from revcompile.errors import NonFiniteError, VerificationError
from revcompile.ir.program import StageProgram
from revcompile.runtime.executor.fingerprints import Fingerprint
from revcompile.runtime.executor.trace import Recorder
from revcompile.runtime.executor.transport import Message, MessageKind, Transport
from revcompile.runtime.reversible.replay import BufferSnapshot
from revcompile.runtime.stage.gradient_predictor import GradientPredictor
from revcompile.runtime.stage.loss_scale import Scaling
from revcompile.runtime.stage.stage import Stage
from revcompile.runtime.stage.tensors import all_finite
from revcompile.runtime.stage.update import Updater
from revcompile.schedule import Action, Op, Order

__all__ = ["LocalScheduler", "StageExecutor", "put_back"]

_BEFORE_BACKWARD: Final = (Op.RECV_TIED_WEIGHT, Op.RECV_X, Op.FORWARD, Op.SEND_Y)

Objective = Callable[[int, Mapping[str, Any], float | None], dict[str, Tensor | None]]
"""From a micro-batch, the last stage's outputs and a scale to the gradients of these."""


_DOES: Final = {
    Op.RECV_X: "_receive_x",
    Op.FORWARD: "_forward",
    Op.SEND_Y: "_send_y",
    Op.RECV_DY: "_receive_dy",
    Op.BACKWARD: "_backward",
    Op.SEND_DX: "_send_dx",
    Op.UPDATE: "_update",
    Op.TRAIN: "_train",
    Op.SEND_TIED_GRAD: "_send_tied_grad",
    Op.RECV_TIED_GRAD: "_receive_tied_grad",
    Op.SEND_TIED_WEIGHT: "_send_tied_weight",
    Op.RECV_TIED_WEIGHT: "_receive_tied_weight",
}
"""The method of an executor that performs each kind of action."""


class StageExecutor:
    """One stage, its optimizer and its mail."""

    def __init__(
        self,
        stage: Stage,
        updater: Updater,
        transport: Transport,
        *,
        objective: Objective | None = None,
        gradient_predictor: GradientPredictor | None = None,
        clip_grad_norm: float | None = None,
        held: Mapping[int, tuple[str, ...]] | None = None,
        owned: Mapping[int, tuple[str, ...]] | None = None,
        guarded: bool = False,
        scaling: Scaling | None = None,
    ) -> None:
        self.stage, self.updater, self.transport = stage, updater, transport
        self.objective, self.gradient_predictor, self.scaling = (
            objective,
            gradient_predictor,
            scaling,
        )
        self.clip_grad_norm = clip_grad_norm
        self.held, self.owned = held or {}, owned or {}
        self.guarded = guarded
        """Does a forward pass that fails lose its micro-batch, instead of raising at once?"""
        self.inputs: dict[int, Mapping[str, Any] | None] = {}
        self.outputs: dict[int, Mapping[str, Any] | None] = {}
        """None: the micro-batch was lost."""
        self.incoming: dict[int, Message] = {}
        self.outgoing: dict[int, Message] = {}
        self.gradients: dict[str, Tensor] | None = None
        self._sums: dict[str, Tensor] | None = None
        self.contributed = 0
        self.failures: list[NonFiniteError] = []
        self.refused: list[Exception] = []
        """Why micro-batches were lost in forward passes here."""
        self.fingerprints: dict[int, Fingerprint] = {}
        """Of micro-batches on their way through a pipeline of several ranks."""
        self.check_data: Callable[[int, Fingerprint], None] | None = None
        """Raises where the target given here is not that of the micro-batch's inputs."""
        self.measured: set[int] = set()
        self.observer: Recorder | None = None
        """Who notes when actions begin and end, if anybody."""
        self._bookmark: tuple[int, Sequence[BufferSnapshot]] = (-1, ())

    @property
    def program(self) -> StageProgram:
        """What the stage runs."""
        return self.stage.program

    @property
    def index(self) -> int:
        """The stage's number."""
        return self.stage.program.index

    def perform(self, action: Action) -> bool:
        """Do it; False if it has to wait for somebody."""
        observer = self.observer
        if observer is not None:
            observer.begins(self.index, action)
        done: bool = getattr(self, _DOES[action.op])(action)
        if observer is not None:
            observer.ends(self.index, action, done)
        return done

    def forget(self, microbatch: int) -> None:
        """Undo the forward pass of a micro-batch."""
        self.stage.drop(microbatch)
        for mail in (self.inputs, self.outputs, self.incoming, self.outgoing):
            mail.pop(microbatch, None)
        self.fingerprints.pop(microbatch, None)

    # -- forward ------------------------------------------------------------------------------

    def _receive_x(self, action: Action) -> bool:
        message = self._receive(self.index - 1, MessageKind.X, action)
        if message is None:
            return False
        self.inputs[action.index] = None if message.void else message.values
        if message.fingerprint is not None and not message.void:
            self.fingerprints[action.index] = message.fingerprint
            if self.check_data is not None:
                self.check_data(action.index, self.fingerprints.pop(action.index))
        if self.scaling is not None:
            self.scaling.record_overflow(message.scale)
        return True

    def _forward(self, action: Action) -> bool:
        inputs = self.inputs.pop(action.index)
        if inputs is None:
            self._lose(action.index)
        elif self.guarded:
            self._try(action.index, inputs)
        else:
            self._run(action.index, inputs)
        return True

    def _run(self, microbatch: int, inputs: Mapping[str, Any]) -> None:
        measure = microbatch in self.measured
        outputs = self.stage.forward(microbatch, inputs, measure=measure)
        if self.objective is not None:
            scale = None if self.scaling is None else self.scaling.next_scale()
            gradients = self.objective(microbatch, outputs, scale)
            self.incoming[microbatch] = Message(microbatch, {}, gradients, scale=scale)
        else:
            self.outputs[microbatch] = outputs

    def _try(self, microbatch: int, inputs: Mapping[str, Any]) -> None:
        """Run it; if that fails everything here is as before, and the micro-batch is lost."""
        before = self.stage.snapshot()
        self._bookmark = (microbatch, before)
        try:
            self._run(microbatch, inputs)
            if before and self.objective is None:
                _check_finite(self.stage, microbatch, self.outputs[microbatch] or {})
        except Exception as error:
            self._lose(microbatch)
            self.refused.append(error)

    def _lose(self, microbatch: int) -> None:
        self._undo(microbatch)
        if self.objective is not None:
            self.incoming[microbatch] = Message(microbatch, void=True)
        else:
            self.outputs[microbatch] = None

    def _undo(self, microbatch: int) -> None:
        """Forget a lost micro-batch; statistics go back unless others have moved them since."""
        self.stage.drop(microbatch)
        latest, before = self._bookmark
        if latest == microbatch:
            put_back(before)

    def _send_y(self, action: Action) -> bool:
        keep = self.gradient_predictor is not None
        outputs = self.outputs[action.index] if keep else self.outputs.pop(action.index)
        lost, heard = (
            outputs is None,
            None if self.scaling is None else self.scaling.take_overflow(),
        )
        data = self.fingerprints.pop(action.index, None)
        message = Message(action.index, outputs or {}, void=lost, scale=heard, fingerprint=data)
        self._send(self.index + 1, MessageKind.X, message)
        return True

    # -- backward -----------------------------------------------------------------------------

    def _receive_dy(self, action: Action) -> bool:
        message = self._receive(self.index + 1, MessageKind.DY, action)
        if message is None:
            return False
        self.incoming[action.index] = message
        return True

    def _backward(self, action: Action) -> bool:
        if self.gradient_predictor is not None:
            outputs = self.outputs[action.index]
            message = Message(action.index, void=outputs is None)
            if outputs is not None:
                message = Message(action.index, {}, self.gradient_predictor.predict(outputs))
        else:
            message = self.incoming.pop(action.index)
        back = self._differentiate(message)
        if self.index > 0:
            self.outgoing[action.index] = back
        return True

    def _differentiate(self, message: Message) -> Message:
        """What goes back; a micro-batch that is lost here or was lost before goes back void."""
        index, scale = message.index, message.scale
        if message.void:
            if scale is None:
                self._undo(index)
            else:  # only its gradient is missing: what its forward pass moved stays
                self.stage.drop(index)
            return message
        try:
            values, gradients = self.stage.backward(index, message.values, message.gradients, scale)
        except NonFiniteError as error:
            if self.scaling is not None and self.scaling.overflowed(scale):
                return Message(index, void=True, scale=scale)
            self.failures.append(error)
            return Message(index, void=True)
        self.contributed += 1
        return Message(index, values, gradients, scale=scale)

    def _send_dx(self, action: Action) -> bool:
        self._send(self.index - 1, MessageKind.DY, self.outgoing.pop(action.index))
        return True

    def _train(self, action: Action) -> bool:
        assert self.gradient_predictor is not None
        message, outputs = self.incoming.pop(action.index), self.outputs.pop(action.index)
        if not message.void and outputs is not None:
            self.gradient_predictor.train(outputs, message.gradients)
        return True

    # -- update -------------------------------------------------------------------------------

    def _update(self, action: Action) -> bool:
        gradients = self._mean_gradients()
        if gradients is None:
            return False
        scale: Tensor | None = None
        if self.clip_grad_norm is not None:
            squared = _squared_norm(gradients, self.stage)
            if self.program.method.order is not Order.CONTINUOUS:
                # All stages update with the same micro-batches: clip the norm over all of them.
                total = self.transport.share(self.index, action.index, squared)
                if total is None:
                    return False
                squared = total
            limit = self.clip_grad_norm / (squared.sqrt() + 1e-6)
            scale = limit.clamp(max=1.0)
        self.updater.apply(gradients, scale)
        if self.scaling is not None and self.objective is not None and self.contributed:
            self.scaling.updated()
        self.gradients, self.contributed = None, 0
        self.stage.updated()
        return True

    def _mean_gradients(self) -> dict[str, Tensor] | None:
        """Once per update: the mean of what was gathered; None while other copies are missing."""
        if self.gradients is None:
            if self._sums is None:
                self._sums = self.stage.take_gradients()
            found = self.transport.mean(self.index, self._sums, self.contributed)
            if found is not None:
                self.gradients, self._sums = found, None
        return self.gradients

    # -- tied parameters ----------------------------------------------------------------------

    def _send_tied_grad(self, action: Action) -> bool:
        assert action.peer is not None
        gradients = self._mean_gradients()
        if gradients is None:
            return False
        names = self.held[action.peer]
        sent = {name: gradients.pop(name) for name in names if name in gradients}
        self._send(action.peer, MessageKind.TIED_GRAD, Message(action.index, {}, sent))
        return True

    def _receive_tied_grad(self, action: Action) -> bool:
        assert action.peer is not None
        gradients = self._mean_gradients()
        if gradients is None:
            return False
        message = self._receive(action.peer, MessageKind.TIED_GRAD, action)
        if message is None:
            return False
        for name, gradient in message.gradients.items():
            if gradient is not None:
                mine = gradients.get(name)
                gradients[name] = gradient if mine is None else mine + gradient
        return True

    def _send_tied_weight(self, action: Action) -> bool:
        assert action.peer is not None
        values = {
            name: self.stage.parameters[name].detach().clone() for name in self.owned[action.peer]
        }
        self._send(action.peer, MessageKind.TIED_WEIGHT, Message(action.index, values))
        return True

    def _receive_tied_weight(self, action: Action) -> bool:
        assert action.peer is not None
        message = self._receive(action.peer, MessageKind.TIED_WEIGHT, action)
        if message is None:
            return False
        with torch.no_grad():
            for name, value in message.values.items():
                self.stage.parameters[name].copy_(value)
        self.stage.updated()
        return True

    # -- mail ---------------------------------------------------------------------------------

    def _send(self, target: int, channel: MessageKind, message: Message) -> None:
        self.transport.send(self.index, target, channel, message)

    def _receive(self, source: int, channel: MessageKind, action: Action) -> Message | None:
        message = self.transport.receive(source, self.index, channel)
        if message is not None and message.index != action.index:
            raise VerificationError(
                f"stage {self.index}: expected {channel.value} of {action.index} from stage "
                f"{source}, got that of {message.index}"
            )
        return message


def _squared_norm(gradients: Mapping[str, Tensor], stage: Stage) -> Tensor:
    if not gradients:
        return torch.zeros((), device=stage._device())
    norms = torch._foreach_norm(list(gradients.values()))
    return torch.stack(norms).square().sum()


def put_back(snapshot: Sequence[BufferSnapshot]) -> None:
    """Buffers as they were, as quietly as batch norm writes them: graphs are in flight."""
    for saved in snapshot:
        saved.buffer.data.copy_(saved.copy)
        saved.module._buffers[saved.name] = saved.buffer


def _check_finite(stage: Stage, microbatch: int, outputs: Mapping[str, Any]) -> None:
    """Statistics have moved in this pass: what cannot be trained on must not stay in them."""
    floats = [
        value
        for value in outputs.values()
        if isinstance(value, Tensor)
        and (value.is_floating_point() or value.is_complex())
        and value.numel()
    ]
    if stage.check_finite and floats and not all(all_finite(floats)):
        raise NonFiniteError(
            f"stage {stage.program.index}, micro-batch {microbatch}: what it computes is not "
            "finite. The micro-batch was left out; look at its data, or lower the learning rate",
            stage=stage.program.index,
            microbatch=microbatch,
        )


class LocalScheduler:
    """Several stages in one process, each at its own place in its list."""

    def __init__(self, executors: Sequence[StageExecutor]) -> None:
        self.executors = list(executors)

    def own(self, lists: Sequence[Sequence[Action]]) -> list[deque[Action]]:
        """What its stages have to do, from the lists of all stages."""
        return [deque(lists[executor.index]) for executor in self.executors]

    def forward(self, lists: Sequence[Sequence[Action]]) -> list[deque[Action]]:
        """The forward part of a round, first stage to last; returns what is left to do."""
        rest = self.own(lists)
        for executor, actions in zip(self.executors, rest, strict=True):
            while actions and actions[0].op in _BEFORE_BACKWARD:
                if executor.perform(actions[0]):
                    actions.popleft()
                else:
                    executor.transport.wait(f"stage {executor.index} at {actions[0]}")
        return rest

    def finish(self, rest: Sequence[deque[Action]], ahead: bool = False) -> None:
        """Everything else, last stage to first, until all is done.

        `ahead`: first stage to last. What a stage sends back then finds its reader done with
        what was sent before.
        """
        waiting = list(zip(self.executors, rest, strict=True))
        while waiting:
            moved = False
            for executor, actions in waiting if ahead else reversed(waiting):
                while actions and executor.perform(actions[0]):
                    actions.popleft()
                    moved = True
            waiting = [(executor, actions) for executor, actions in waiting if actions]
            if waiting and not moved:
                listed = "; ".join(f"stage {a.index} at {actions[0]}" for a, actions in waiting)
                waiting[0][0].transport.wait(listed)
