"""Performs the actions of one stage; `LocalScheduler` decides when each of them runs.

A step of one stage in a full pipeline: forward of micro-batch m, backward of an older one, d:

      from stage j-1                                         to stage j+1
    RECV_X m --> inputs --> FORWARD m --> outputs --------> SEND_Y m
                              | keeps activations of m
                              v
                         stage.in_flight
                              | takes those of d
                              v
    SEND_DX d <- outgoing <- BACKWARD d <-- incoming <------ RECV_DY d
                              | adds to the stage's gradients; after `accumulation_steps`:
                              v
                            UPDATE

An action whose message has not arrived is tried again later. The transport delivers the messages.

Actions are performed one by one, or as parts of a captured step (`is_captured`). A captured step
cannot branch, and must not wait for the device. There, a flag on the device marks a bad
micro-batch and masks what it would change. Outside captured steps the host reads the flag at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from revcompile.errors import NonFiniteError
from revcompile.ir.program import StageProgram
from revcompile.runtime.executor.flags import RunningStatistics
from revcompile.runtime.executor.messages import TARGET, Message, MessageKind, Transport
from revcompile.runtime.executor.streams import StepStreams
from revcompile.runtime.executor.trace import Trace
from revcompile.runtime.executor.updates import StageUpdates
from revcompile.runtime.reversible.replay import BufferSnapshot, restore_buffers
from revcompile.runtime.stage.gradient_predictor import GradientPredictor
from revcompile.runtime.stage.loss import LossHead
from revcompile.runtime.stage.settings import Task
from revcompile.runtime.stage.stage import Backward, Stage
from revcompile.runtime.stage.tensors import (
    TreeCopy,
    clone_tree,
    found_inf,
    non_finite_error,
    not_finite,
    storage,
    zero_if,
)
from revcompile.schedule import Action, Op, Order


class StageExecutor:
    """Performs the actions of one stage.

    Args:
        task: Contains the stage's program and settings.
        index: The stage's number.
        loss_head: Computes the loss and its gradient; only the last stage uses it.
        seed: Seed of the stage's random numbers.
    """

    streams: StepStreams | None = None
    """CUDA streams on which actions of captured steps run concurrently."""
    observer: Trace | None = None
    _latest: tuple[dict[str, Tensor | None], Mapping[str, Tensor | None]] | None = None
    """Parameter gradients that are not accumulated yet, and input gradients of the same pass."""
    _last_forward: tuple[int, Sequence[BufferSnapshot]] | None = None
    """The latest micro-batch, and copies of buffers from before its forward pass."""

    def __init__(
        self,
        task: Task,
        index: int,
        device: torch.device,
        transport: Transport,
        loss_head: LossHead,
        seed: int,
    ) -> None:
        program, self.transport = task.programs[index], transport
        self.stage = stage = Stage(task, index, device, seed)
        self.updates = updates = StageUpdates(task, stage, transport)
        self.updater = updates.updater
        self.loss_head = loss_head if program.is_last else None
        self.gradient_predictor: GradientPredictor | None = None
        """Set if the method predicts output gradients instead of waiting for them."""
        if program.method.order is Order.SYNTHETIC and not program.is_last:
            outputs, factory = program.outputs, task.optimizer
            self.gradient_predictor = GradientPredictor(index, outputs, factory, device)
        # Values that wait between two actions, by micro-batch. None: the micro-batch was lost.
        self.inputs: dict[int, Mapping[str, Any] | None] = {}
        self.outputs: dict[int, Mapping[str, Any] | None] = {}
        self.incoming: dict[int, Message] = {}
        self.outgoing: dict[int, Message] = {}
        self.failures: list[NonFiniteError] = []
        """Errors of backward passes whose micro-batch was left out."""
        self.forward_errors: list[Exception] = []
        """Errors of forward passes whose micro-batch was left out."""
        self._statistics = RunningStatistics([stage.statistics])

    @property
    def program(self) -> StageProgram:
        return self.stage.program

    @property
    def index(self) -> int:
        """The stage's number."""
        return self.stage.program.index

    def perform(self, action: Action) -> bool:
        """Call the method named after the action's op; False if the action has to wait."""
        observer = self.observer
        if observer is not None:
            observer.begins(self.index, action)
        name = action.op.name.lower()
        method = getattr(self, f"_{name}", None) or getattr(self.updates, name)
        if self.streams is None or not self.is_captured:
            done: bool = method(action)
        else:
            with self._stream_of(action, self.streams):
                done = method(action)
            if action.op in (Op.FORWARD, Op.SEND_Y):
                self.streams.after_forward(self.index)
        if observer is not None:
            observer.ends(self.index, action, done)
        return done

    def _stream_of(self, action: Action, streams: StepStreams) -> AbstractContextManager[None]:
        match action.op:
            case Op.BACKWARD:
                return streams.backward(self.index)
            case Op.SEND_DX:
                return streams.send(self.index)
            case Op.UPDATE:
                read = self.updates.flag, *self.stage.gradients.values()
                return streams.update(self.index, read)
        return nullcontext()

    @property
    def is_captured(self) -> bool:
        """Whether a captured step is being performed."""
        return self.updates.is_captured

    def begin_captured(self) -> Callable[[], None]:
        """Perform actions of a captured step from now on, until the returned function is called.

        That function also undoes the host's bookkeeping: `stepped` does it, for replays too.
        """
        stage, messages = self.stage, self._messages()
        kept = [dict(each) for each in messages]
        before = dict(stage.in_flight), dict(stage.gradients), stage.weights.noted()
        self.updates.is_captured = True
        stage.runs_fused = True

        def end() -> None:
            for each, was in zip(messages, kept, strict=True):
                each.clear()
                each.update(was)
            stage.in_flight, stage.gradients, noted = before
            stage.weights.note(noted)
            self.updates.end_captured()
            stage.runs_fused = False

        return end

    def stepped(self, entered: int, left: int, tied: int, has_updated: bool) -> None:
        """Do the host's bookkeeping for a captured step; see `Stage.stepped`."""
        self.stage.stepped(entered, left, tied, has_updated)
        self._last_forward = None
        if has_updated:
            self.updater.advance()

    def clear(self) -> None:
        """Drop all micro-batches, and the gradient accumulated so far."""
        self.stage.clear()
        for messages in self._messages():
            messages.clear()
        self.updates.clear()
        self._latest = self._last_forward = None

    def _messages(self) -> tuple[dict[int, Any], ...]:
        return self.inputs, self.outputs, self.incoming, self.outgoing

    # -- forward ------------------------------------------------------------------------------

    def _recv_x(self, action: Action) -> bool:
        message = self._receive(self.index - 1, MessageKind.X, action)
        if message is None:
            return False
        self.inputs[action.index] = None if message.void else message.values
        return True

    def _forward(self, action: Action) -> bool:
        inputs = self.inputs.pop(action.index)
        if inputs is None:
            self._skip(action.index)
        else:
            self._run_or_skip(action.index, inputs)
        return True

    def _run(self, microbatch: int, inputs: Mapping[str, Any]) -> None:
        outputs = self.stage.forward(microbatch, inputs)
        if self.loss_head is not None:
            outputs = _apart(outputs, inputs)  # callers get the outputs, and may write to them
            target, samples = inputs[TARGET]
            gradients = self.loss_head(
                microbatch, outputs, target, samples, waits=not self.is_captured
            )
            self.incoming[microbatch] = Message(microbatch, {}, gradients, is_exact=True)
        else:
            self.outputs[microbatch] = {**outputs, TARGET: inputs[TARGET]}

    def _run_or_skip(self, microbatch: int, inputs: Mapping[str, Any]) -> None:
        """Run a micro-batch; if it fails, leave it out and restore the stage's state."""
        if self.is_captured:
            self._run_captured(microbatch, inputs)
            return
        buffers = self.stage.stateful.snapshot()
        self._last_forward = microbatch, buffers
        has_statistics = self.stage.moves_statistics_early and bool(self.stage.statistics())
        if has_statistics:
            self._statistics.snapshot()
        try:
            self._run(microbatch, inputs)
            # The forward pass has moved buffers; undo that if its outputs are not finite.
            moves = has_statistics or buffers
            if moves and self.loss_head is None and not_finite(self.outputs[microbatch] or {}):
                raise NonFiniteError(
                    f"stage {self.index}, micro-batch {microbatch}: what it computes is not finite."
                    " The micro-batch was left out; look at its data, or lower the learning rate",
                    stage=self.index,
                    microbatch=microbatch,
                )
        except Exception as error:
            self._skip(microbatch)
            self.forward_errors.append(error)

    def _run_captured(self, microbatch: int, inputs: Mapping[str, Any]) -> None:
        """Run a micro-batch; keep statistics that a kept graph moved if outputs are finite."""
        has_moved = self.program.keeps_graphs_in_flight and bool(self.stage.statistics())
        if has_moved:
            self._statistics.snapshot()
        self._run(microbatch, inputs)
        if has_moved:
            values = (self.outputs[microbatch] or {}).values()
            floats = [x for x in values if isinstance(x, Tensor) and x.is_floating_point()]
            is_bad = found_inf(floats, torch.zeros_like(self.updates.flag))
            self._statistics.restore_if(is_bad)

    def _skip(self, microbatch: int) -> None:
        """Drop a lost micro-batch; a void message takes the place of its values."""
        self.undo(microbatch)
        if self.loss_head is not None:
            self.incoming[microbatch] = Message(microbatch, void=True)
        else:
            self.outputs[microbatch] = None

    def undo(self, microbatch: int) -> None:
        """Drop a lost micro-batch; restore buffers unless a later micro-batch has run since."""
        self.stage.in_flight.pop(microbatch, None)
        if self._last_forward is not None and self._last_forward[0] == microbatch:
            if self.stage.moves_statistics_early:
                self._restore_statistics()
            restore_buffers(self._last_forward[1])
            self._last_forward = None

    def _restore_statistics(self) -> None:
        self._statistics.restore_if(torch.ones_like(self.updates.flag))

    def _send_y(self, action: Action) -> bool:
        outputs = self.outputs.pop(action.index)
        message = Message(
            action.index,
            outputs or {},
            void=outputs is None,
        )
        if self.gradient_predictor is not None:  # which learns from them when gradients arrive
            own = outputs and {n: value for n, value in outputs.items() if n != TARGET}
            self.outputs[action.index] = own
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
        if self.index == 0 or self.is_captured:
            self._add()
        return True

    def _add(self) -> None:
        """Accumulate the latest parameter gradients; eager steps send input gradients first."""
        if self._latest is not None:
            self.stage.accumulate(*self._latest)
            self._latest = None

    def _differentiate(self, message: Message) -> Message:
        """Differentiate a micro-batch; returns its backward message, void if it is lost."""
        is_captured, stage, index = self.is_captured, self.stage, message.index
        message = message if is_captured else message.resolved()
        if message.void and not is_captured:
            self.undo(index)
            return message
        is_exact = not is_captured and message.is_exact and stage.rebuilds_exactly(index)
        if not (is_captured or self.stage.moves_statistics_early):
            self._statistics.snapshot()
        passed = stage.differentiate(index, message.values, message.gradients, is_exact)
        gradients, flag = passed.gradients, self._found_inf(message, passed)
        if not is_captured:
            if bool(flag):
                return self._left_out(index, passed)
            stage.finish(passed, is_exact)
        elif self.updates.is_counted or self.updates.shares_norm:
            gradients = zero_if(flag, gradients)
        self._latest = gradients, passed.input_gradients
        if self.updates.is_counted or not is_captured:
            self.updates.count.add_((flag == 0).reshape(()))
        values, of_inputs = passed.values, passed.input_gradients
        known = flag if is_captured else None
        return Message(index, values, of_inputs, found_inf=known, is_exact=is_exact)

    def _found_inf(self, message: Message, passed: Backward) -> Tensor:
        """The `found_inf` flag of a micro-batch."""
        before = message.found_inf
        if before is None:
            before = torch.zeros_like(self.updates.flag)
            if self.is_captured and self.loss_head is not None:
                assert self.loss_head.latest is not None
                before = (~torch.isfinite(self.loss_head.latest[0])).float().reshape(1)
        # Input gradients are not checked, which saves a pass over memory: if one is not finite, the
        # stage before finds that in the gradients of its parameters.
        own = [gradient for gradient in passed.gradients.values() if gradient is not None]
        flag = self.updates.flag = found_inf(own, before)
        return flag

    def _left_out(self, microbatch: int, passed: Backward) -> Message:
        """Leave out a micro-batch whose gradient is not finite; returns its void message."""
        self.undo(microbatch)
        if not self.stage.moves_statistics_early:
            self._restore_statistics()
        error = non_finite_error(self.index, microbatch, passed.gradients)
        self.failures.append(error)
        return Message(microbatch, void=True)

    def _send_dx(self, action: Action) -> bool:
        self._send(self.index - 1, MessageKind.DY, self.outgoing.pop(action.index))
        self._add()
        return True

    def _train(self, action: Action) -> bool:
        assert self.gradient_predictor is not None
        message, outputs = self.incoming.pop(action.index), self.outputs.pop(action.index)
        if not message.void and outputs is not None:
            self.gradient_predictor.train(outputs, message.gradients)
        return True

    # -- checkpoints --------------------------------------------------------------------------

    def reset(self, seed: int, weights: Mapping[str, Tensor]) -> None:
        """Drop everything in flight; write `weights` to copies of tied parameters."""
        self.clear()
        self.stage.reset(seed)
        self.failures, self.forward_errors = [], []
        self.updates.load_copied(weights)

    def state_dict(self, copy: TreeCopy) -> dict[str, Any]:
        """This stage's state without its parameters and optimizer, which are saved by name."""
        # Copies of tied parameters are saved with their present values: updates that they have not
        # received are saved as messages, and predicted and stashed weights need the values before.
        copied: dict[str, Any] = {n: self.stage.parameters[n] for n in self.updates.copied}
        state = {
            **self.stage.state_dict(copy),
            "contributed": int(self.updates.count),
            "needs": self.program.needed_in_flight,
            "replicas": copy(copied),
            "incoming": [message.state_dict(copy) for message in self.incoming.values()],
            "outputs": [
                [m, None if values is None else copy(dict(values))]
                for m, values in self.outputs.items()
            ],
        }
        if self.gradient_predictor is not None:
            state["gradient_predictor"] = self.gradient_predictor.state_dict(copy)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of the same stage; `reset` first."""
        self.stage.load_state_dict(state)
        self.updates.count.fill_(state["contributed"])
        self.updates.load_copied(state["replicas"])
        messages = map(Message.from_state_dict, state["incoming"])
        self.incoming = {message.index: message for message in messages}
        self.outputs = {m: clone_tree(values) for m, values in state["outputs"]}
        if self.gradient_predictor is not None:
            self.gradient_predictor.load_state_dict(state["gradient_predictor"])

    # -- messages -----------------------------------------------------------------------------

    def _send(self, target: int, kind: MessageKind, message: Message) -> None:
        self.transport.send((self.index, target, kind), message)

    def _receive(self, source: int, kind: MessageKind, action: Action) -> Message | None:
        return self.transport.receive((source, self.index, kind), action.index)


def _apart(values: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """`values`, with copies of the tensors that share memory with `others`."""

    def memory(value: Any) -> int | None:
        is_strided = isinstance(value, Tensor) and value.layout is torch.strided
        return storage(value) if is_strided else None

    used = {*map(memory, others.values())} - {None}
    return {name: v.clone() if memory(v) in used else v for name, v in values.items()}
