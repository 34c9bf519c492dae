"""Performs the actions of a schedule: one stage's list in its order, several stages in turn.

What one stage does with micro-batch m, in a full pipeline; its backward pass is of an older one, d:

      from stage j-1                                         to stage j+1
    RECV_X m --> inputs --> FORWARD m --> outputs --------> SEND_Y m
                              | keeps activations of m
                              v
                         stage.in_flight
                              | takes those of d
                              v
    SEND_DX d <- outgoing <- BACKWARD d <-- incoming <------ RECV_DY d
                              | adds to the stage's gradients; after `accumulate` micro-batches:
                              v
                            UPDATE

An action that lacks a message is not performed, and tried again later. Where messages come from is
the transport's business.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from revcompile.errors import InputError, NonFiniteError, VerificationError
from revcompile.ir.program import StageProgram
from revcompile.runtime.executor.fingerprints import Fingerprint
from revcompile.runtime.executor.trace import Trace
from revcompile.runtime.executor.transport import Message, MessageKind, Transport
from revcompile.runtime.reversible.replay import BufferSnapshot
from revcompile.runtime.stage.gradient_predictor import GradientPredictor
from revcompile.runtime.stage.loss_head import LossHead
from revcompile.runtime.stage.loss_scale import Scaling
from revcompile.runtime.stage.stage import Stage
from revcompile.runtime.stage.tensors import TreeCopy, clone_tree, not_finite, storage
from revcompile.runtime.stage.update import Updater
from revcompile.schedule import Action, Order

_NO_SNAPSHOT: Final[tuple[int, Sequence[BufferSnapshot]]] = (-1, ())


class StageExecutor:
    """Performs the actions of one stage.

    Args:
        stage: Its numerics: forward, backward, gradients.
        updater: Its optimizer.
        transport: Carries its messages.
        loss_head: At the last stage: computes the loss, with whose gradient backward begins.
        gradient_predictor: Where the method predicts gradients instead of waiting for them.
        clip_grad_norm: The largest norm of the gradient.
        tied_owners: Of parameters shared with other stages, the names of those that other stages
            own and this one has replicas of, by owner.
        tied_replicas: The names of those that this stage owns, by the stage with the replicas.
        skip_on_error: A micro-batch whose forward pass fails is left out, whatever the error. If
            not set, only one that is not finite is; other errors are raised.
        scaling: Its part in scaling the loss.
        delay: By how many updates its gradients are late, on average.
        synchronous: So many updates at the start have no delay.
    """

    def __init__(
        self,
        stage: Stage,
        updater: Updater,
        transport: Transport,
        *,
        loss_head: LossHead | None = None,
        gradient_predictor: GradientPredictor | None = None,
        clip_grad_norm: float | None = None,
        tied_owners: Mapping[int, tuple[str, ...]] | None = None,
        tied_replicas: Mapping[int, tuple[str, ...]] | None = None,
        skip_on_error: bool = False,
        scaling: Scaling | None = None,
        delay: float = 0.0,
        synchronous: int = 0,
    ) -> None:
        self.delay, self.synchronous = delay, synchronous
        self.stage, self.updater, self.transport = stage, updater, transport
        self.loss_head = loss_head
        self.scaling = scaling
        self.gradient_predictor = gradient_predictor
        self.clip_grad_norm, self.skip_on_error = clip_grad_norm, skip_on_error
        self.tied_owners, self.tied_replicas = tied_owners or {}, tied_replicas or {}
        # Between two actions, by micro-batch. None: the micro-batch was lost.
        self.inputs: dict[int, Mapping[str, Any] | None] = {}
        self.outputs: dict[int, Mapping[str, Any] | None] = {}
        self.incoming: dict[int, Message] = {}
        self.outgoing: dict[int, Message] = {}
        self.fingerprints: dict[int, Fingerprint] = {}
        """Where the pipeline has several ranks."""
        self.gradients: dict[str, Tensor] | None = None
        """The mean gradient of an update that has begun."""
        self._sums: dict[str, Tensor] | None = None
        self.contributed = 0
        """How many micro-batches are in the accumulated gradient."""
        self.failures: list[NonFiniteError] = []
        """Of backward passes whose micro-batch was left out."""
        self.forward_errors: list[Exception] = []
        """Of forward passes whose micro-batch was left out."""
        self.check_data: Callable[[int, Fingerprint], None] | None = None
        """Raises if the target given here is not that of the micro-batch's inputs."""
        self.refusal: str | None = None
        """Why micro-batches cannot run here now; they are left out."""
        self.measured: set[int] = set()
        """Micro-batches whose reconstruction error is to be measured."""
        self.observer: Trace | None = None
        self._last_snapshot = _NO_SNAPSHOT
        """The latest micro-batch, and buffers as they were before its forward pass."""

    @property
    def program(self) -> StageProgram:
        return self.stage.program

    @property
    def index(self) -> int:
        """The stage's number."""
        return self.stage.program.index

    def perform(self, action: Action) -> bool:
        """Call the method named after the action's op; False if it has to wait for a message."""
        observer = self.observer
        if observer is not None:
            observer.begins(self.index, action)
        done: bool = getattr(self, f"_{action.op.name.lower()}")(action)
        if observer is not None:
            observer.ends(self.index, action, done)
        return done

    def forget(self, microbatch: int) -> None:
        """Drop everything of a micro-batch."""
        self.stage.drop(microbatch)
        for messages in self._messages():
            messages.pop(microbatch, None)

    def clear(self) -> None:
        """Drop all micro-batches, and the gradient accumulated so far."""
        self.stage.clear()
        for messages in self._messages():
            messages.clear()
        self.gradients, self._sums, self.contributed = None, None, 0
        self._last_snapshot = _NO_SNAPSHOT

    def _messages(self) -> tuple[dict[int, Any], ...]:
        return self.inputs, self.outputs, self.incoming, self.outgoing, self.fingerprints

    # -- forward ------------------------------------------------------------------------------

    def _recv_x(self, action: Action) -> bool:
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
            self._skip(action.index)
        else:
            self._run_or_skip(action.index, inputs)
        return True

    def _run(self, microbatch: int, inputs: Mapping[str, Any]) -> None:
        measure = microbatch in self.measured
        outputs = self.stage.forward(microbatch, inputs, measure=measure)
        if self.loss_head is not None:
            outputs = _apart(outputs, inputs)  # callers get them, and may write to them
            scale = None if self.scaling is None else self._number(self.scaling.next_scale())
            gradients = self.loss_head(microbatch, outputs, scale)
            self.incoming[microbatch] = Message(
                microbatch, {}, gradients, scale=scale, is_exact=True
            )
        else:
            self.outputs[microbatch] = outputs

    def _number(self, value: Tensor) -> Any:
        """A scale as it is sent; None if it is infinite."""
        number = float(value)
        return None if math.isinf(number) else number

    def _run_or_skip(self, microbatch: int, inputs: Mapping[str, Any]) -> None:
        """Run it; if that fails it is left out, and everything here is as before."""
        snapshot = self.stage.snapshot()
        self._last_snapshot = (microbatch, snapshot)
        try:
            if self.refusal is not None:
                raise InputError(self.refusal)
            self._run(microbatch, inputs)
            # It has moved running statistics: those of what is not finite must not stay.
            is_checked = snapshot and self.loss_head is None and self.stage.check_finite
            if is_checked and not_finite(self.outputs[microbatch] or {}):
                raise NonFiniteError(
                    f"stage {self.index}, micro-batch {microbatch}: what it computes is not finite."
                    " The micro-batch was left out; look at its data, or lower the learning rate",
                    stage=self.index,
                    microbatch=microbatch,
                )
        except Exception as error:
            if not (self.skip_on_error or isinstance(error, NonFiniteError)):
                raise
            self._skip(microbatch)
            self.forward_errors.append(error)

    def _skip(self, microbatch: int) -> None:
        """Have a message say that the micro-batch is lost, where its values would have been."""
        self.undo(microbatch)
        if self.loss_head is not None:
            self.incoming[microbatch] = Message(microbatch, void=True)
        else:
            self.outputs[microbatch] = None

    def undo(self, microbatch: int) -> None:
        """Drop a lost micro-batch; restore buffers unless later ones have changed them since."""
        self.stage.drop(microbatch)
        latest, snapshot = self._last_snapshot
        if latest == microbatch:
            restore(snapshot)
            self._last_snapshot = _NO_SNAPSHOT

    def _send_y(self, action: Action) -> bool:
        keep = self.gradient_predictor is not None
        outputs = self.outputs[action.index] if keep else self.outputs.pop(action.index)
        message = Message(
            action.index,
            outputs or {},
            void=outputs is None,
            scale=None if self.scaling is None else self._number(self.scaling.take_overflow()),
            fingerprint=self.fingerprints.pop(action.index, None),
        )
        self._send(self.index + 1, MessageKind.X, message)
        return True

    # -- backward -----------------------------------------------------------------------------

    def _recv_dy(self, action: Action) -> bool:
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
        """The message for the stage before; void if the micro-batch is lost here, or was before."""
        message = message.resolved()
        index, scale = message.index, message.scale
        if message.void:
            if scale is None:
                self.undo(index)
            else:  # its gradient has overflowed, its forward pass was right: buffers stay
                self.stage.drop(index)
            return message
        is_exact = message.is_exact and self.stage.rebuilds_exactly(index)
        snapshot = self.stage.late_snapshot()
        try:
            values, gradients = self.stage.backward(
                index, message.values, message.gradients, scale, is_exact
            )
        except NonFiniteError as error:
            if self.scaling is not None and self.scaling.is_overflow(scale):
                return Message(index, void=True, scale=scale)
            self.failures.append(error)
            self.undo(index)
            restore(snapshot)
            return Message(index, void=True)
        self.contributed += 1
        return Message(index, values, gradients, scale=scale, is_exact=is_exact)

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
            is_synchronous = action.index < self.synchronous
            if is_synchronous or self.program.method.order is not Order.CONTINUOUS:
                # All stages update with the same micro-batches: clip the norm over all of them.
                total = self.transport.sum_squared_norms(self.index, action.index, squared)
                if total is None:
                    return False
                squared = total
            scale = (self.clip_grad_norm / (squared.sqrt() + 1e-6)).clamp(max=1.0)
        self.set_delay(action.index)
        with self.stage.updating(self.updater.parameters):
            self._apply(gradients, scale)
        if self.scaling is not None and self.loss_head is not None:
            self._count_update(self.scaling)
        self.gradients, self.contributed = None, 0
        return True

    def _apply(self, gradients: Mapping[str, Tensor], scale: Tensor | None) -> None:
        self.updater.apply(gradients, scale)

    def set_delay(self, update: int) -> None:
        """Tell the optimizer and the prediction by how many updates the given one is late."""
        if self.synchronous:
            delay = 0.0 if update < self.synchronous else self.delay
            if self.stage.weights.predicted is not None:
                self.stage.weights.predicted.delay = delay
            self.updater.set_delay(delay)

    def _count_update(self, scaling: Scaling) -> None:
        if self.contributed:
            scaling.updated()

    def _mean_gradients(self) -> dict[str, Tensor] | None:
        """Once per update: the accumulated gradient's mean; None while other replicas compute."""
        if self.gradients is None:
            if self._sums is None:
                self._sums = self.stage.take_gradients()
            mean = self.transport.mean(self.index, self._sums, self.contributed)
            if mean is not None:
                (self.gradients, self.contributed), self._sums = mean, None
        return self.gradients

    # -- tied parameters ----------------------------------------------------------------------

    def _send_tied_grad(self, action: Action) -> bool:
        assert action.peer is not None
        gradients = self._mean_gradients()
        if gradients is None:
            return False
        message = self.tied_gradients(action.peer, gradients)
        self._send(action.peer, MessageKind.TIED_GRAD, replace(message, index=action.index))
        return True

    def tied_gradients(self, owner: int, gradients: dict[str, Tensor]) -> Message:
        """The message to the owner of tied parameters; their gradients are taken out."""
        names = self.tied_owners[owner]
        return Message(0, {}, {name: gradients.pop(name) for name in names if name in gradients})

    def _recv_tied_grad(self, action: Action) -> bool:
        assert action.peer is not None
        gradients = self._mean_gradients()
        if gradients is None:
            return False
        message = self._receive(action.peer, MessageKind.TIED_GRAD, action)
        if message is None:
            return False
        for name, gradient in self._gradients_of(message).items():
            if gradient is not None:
                own = gradients.get(name)
                gradients[name] = gradient if own is None else own + gradient
        return True

    def _gradients_of(self, message: Message) -> Mapping[str, Tensor | None]:
        """Those of a holder; none if the update is left out, as all micro-batches were here."""
        return message.resolved().gradients if self.contributed else {}

    def _send_tied_weight(self, action: Action) -> bool:
        assert action.peer is not None
        names = self.tied_replicas[action.peer]
        values = {name: self.stage.parameters[name].detach().clone() for name in names}
        self._send(action.peer, MessageKind.TIED_WEIGHT, Message(action.index, values))
        return True

    def _recv_tied_weight(self, action: Action) -> bool:
        assert action.peer is not None
        message = self._receive(action.peer, MessageKind.TIED_WEIGHT, action)
        if message is None:
            return False
        self.set_delay(action.index)
        with torch.no_grad(), self.stage.updating(message.values):
            for name, value in message.values.items():
                self.stage.parameters[name].copy_(value)
        return True

    # -- checkpoints --------------------------------------------------------------------------

    def reset(self, seed: int, weights: Mapping[str, Tensor]) -> None:
        """Forget everything in flight; copies of tied parameters take over `weights`."""
        self.clear()
        self.stage.reset(seed)
        self.failures, self.forward_errors = [], []
        if self.scaling is not None:
            self.scaling.load_state_dict(None)
        self._load_replicas(weights)

    def weights_loaded(self, weights: Mapping[str, Tensor]) -> None:
        """Parameters were written to, with nothing in flight."""
        self._load_replicas(weights)
        self.stage.weights.loaded()

    def state_dict(self, copy: TreeCopy) -> dict[str, Any]:
        """Everything of this stage but its parameters and optimizer, which are saved by name."""
        # As they are: updates of theirs that wait are saved as messages, and what predicted and
        # stashed weights make of an update depends on the values before it.
        replicas: dict[str, Any] = {name: self.stage.parameters[name] for name in self.replicas}
        state = {
            **self.stage.state_dict(copy),
            "contributed": self.contributed,
            "needs": self.program.needed_in_flight,
            "replicas": copy(replicas),
            "incoming": [message.state_dict(copy) for message in self.incoming.values()],
            "outputs": [
                [m, None if values is None else copy(dict(values))]
                for m, values in self.outputs.items()
            ],
            "scaling": None if self.scaling is None else self.scaling.state_dict(),
        }
        if self.gradient_predictor is not None:
            state["gradient_predictor"] = self.gradient_predictor.state_dict(copy)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of the same stage; `reset` first."""
        self.stage.load_state_dict(state)
        self.contributed = state["contributed"]
        self._load_replicas(state["replicas"])
        messages = map(Message.from_state_dict, state["incoming"])
        self.incoming = {message.index: message for message in messages}
        self.outputs = {m: clone_tree(values) for m, values in state["outputs"]}
        if self.scaling is not None:
            self.scaling.load_state_dict(state.get("scaling"))
        if self.gradient_predictor is not None:
            self.gradient_predictor.load_state_dict(state["gradient_predictor"])

    @property
    def replicas(self) -> list[str]:
        """Tied parameters that another stage owns and this one has a copy of."""
        return [name for names in self.tied_owners.values() for name in names]

    def _load_replicas(self, weights: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name in self.replicas:
                self.stage.parameters[name].copy_(weights[name])

    # -- messages -----------------------------------------------------------------------------

    def _send(self, target: int, kind: MessageKind, message: Message) -> None:
        self.transport.send((self.index, target, kind), message)

    def _receive(self, source: int, kind: MessageKind, action: Action) -> Message | None:
        message = self.transport.receive((source, self.index, kind))
        if message is not None and message.index != action.index:
            raise VerificationError(
                f"stage {self.index}: expected {kind.value} of {action.index} from stage "
                f"{source}, got that of {message.index}"
            )
        return message


def _apart(values: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Values with copies of those tensors that lie in the memory of others."""

    def memory(value: Any) -> int | None:
        is_strided = isinstance(value, Tensor) and value.layout is torch.strided
        return storage(value) if is_strided else None

    used = {*map(memory, others.values())} - {None}
    return {name: v.clone() if memory(v) in used else v for name, v in values.items()}


def _squared_norm(gradients: Mapping[str, Tensor], stage: Stage) -> Tensor:
    if not gradients:
        return torch.zeros((), device=stage._device())
    norms = torch._foreach_norm(list(gradients.values()))
    return torch.stack(norms).square().sum()


def restore(snapshot: Sequence[BufferSnapshot]) -> None:
    """Buffers as they were.

    Written to `.data`, as batch norm does: graphs in flight may have saved these buffers, and
    autograd would refuse to use them after a write that it sees.
    """
    for saved in snapshot:
        saved.buffer.data.copy_(saved.copy)
        saved.module._buffers[saved.name] = saved.buffer
