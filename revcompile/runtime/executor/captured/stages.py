"""One stage of a captured step: an executor that never waits for the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from revcompile.ir.precision_rewrites import taking_stored
from revcompile.ir.python_code import compile_graph
from revcompile.runtime.executor.captured.found_inf import found_inf, zero_if
from revcompile.runtime.executor.captured.fusion import FusedOps, fuse, write_results
from revcompile.runtime.executor.captured.optimizers import CapturedUpdater
from revcompile.runtime.executor.captured.static_transport import StaticTransport
from revcompile.runtime.executor.captured.streams import StepStreams
from revcompile.runtime.executor.stage_executor import StageExecutor
from revcompile.runtime.executor.transport import Average, Message, MessageKind
from revcompile.runtime.stage.loss_head import LossHead
from revcompile.runtime.stage.loss_scale import OVERFLOW, Scaling, unscaled
from revcompile.runtime.stage.stage import Programs, Stage
from revcompile.schedule import Action, Op, Order


class CapturedStageExecutor(StageExecutor):
    """An executor for which a bad micro-batch is a flag on the device, and not an error.

    A micro-batch whose gradient is not finite still goes back to the first stage, with its flag. On
    the way no stage applies its gradient, or keeps the running statistics it has changed.

    Args:
        executor: The one that performs the same stage action by action.
        has_flags: Micro-batches have flags; other ranks may have set them.
        fused: If given, the stage's programs are run with their fusion regions compiled.
        streams: If given, actions run side by side on these.
        average: If given, gradients are averaged over replicas between backward pass and update.
    """

    updater: CapturedUpdater
    transport: StaticTransport

    def __init__(
        self,
        executor: StageExecutor,
        transport: StaticTransport,
        loss_head: LossHead | None,
        *,
        accumulate: int,
        has_flags: bool,
        fused: FusedOps | None = None,
        streams: StepStreams | None = None,
        average: Average | None = None,
    ) -> None:
        stage, device = executor.stage, executor.stage._device()
        super().__init__(
            stage,
            executor.updater,
            transport,
            loss_head=loss_head,
            clip_grad_norm=executor.clip_grad_norm,
            scaling=executor.scaling,
            tied_owners=executor.tied_owners,
            tied_replicas=executor.tied_replicas,
            delay=executor.delay,
            synchronous=executor.synchronous,
        )
        self.accumulate, self.check_finite = accumulate, stage.check_finite
        self.has_flags = has_flags
        self.average = average
        self.is_reduced = False
        """Is the average of the update that has begun known?"""
        self._is_counted = accumulate > 1 or average is not None
        """Do updates divide by the number of micro-batches?"""
        is_continuous = stage.program.method.order is Order.CONTINUOUS
        self._shares_norm = executor.clip_grad_norm is not None and not is_continuous
        """Do other stages clip their gradients by the norm of this one's, too?"""
        self._streams = streams
        self._buffers: Sequence[Mapping[str, Tensor | None]] = ({}, {})
        """Where a backward pass may write values and gradients for the stage before."""
        self._programs: Programs | None = None
        self._handed_on: dict[int, str] = {}
        """Which of the kept values they send to the stage before, and under which names."""
        if fused is not None:
            self._programs, self._handed_on = _fused_programs(stage, fused, self._buffer)
        self.flag = torch.zeros(1, device=device)
        """`found_inf` of the last backward pass."""
        self.restored = self.flag
        """Set if running statistics have to be as they were before it."""
        self.count = torch.zeros((), device=device)
        """Micro-batches in the accumulated gradient: bad ones are left out."""
        self._slots = stage.slots
        self.age = 0
        """How many updates there were since the forward pass of this step's backward pass."""

    def prepare_stage(self, captured: bool) -> None:
        """Let the stage compute as captured steps need it, or as it did before."""
        self.stage.run_with(self._programs if captured else None)
        self.stage.slots = 0 if captured else self._slots

    def perform(self, action: Action) -> bool:
        """Do it, on the stream it belongs to."""
        with self._stream_of(action):
            done = super().perform(action)
        if self._streams is not None and action.op in (Op.FORWARD, Op.SEND_Y):
            self._streams.after_forward(self.index)
        return done

    def _stream_of(self, action: Action) -> AbstractContextManager[None]:
        if self._streams is None:
            return nullcontext()
        match action.op:
            case Op.BACKWARD:
                return self._streams.backward(self.index)
            case Op.SEND_DX:
                return self._streams.send(self.index)
            case Op.UPDATE:
                read = (self.flag, self.count, *self.stage.gradients.values())
                return self._streams.update(self.index, read)
        return nullcontext()

    def _run_or_skip(self, microbatch: int, inputs: Mapping[str, Any]) -> None:
        self._run(microbatch, inputs)  # flags tell if it is to be left out
        if self.stage.ring is not None:
            self.stage.ring.push(self.stage.in_flight.pop(microbatch).kept)

    def _buffer(self, kind: int, name: str) -> Tensor | None:
        return self._buffers[kind].get(name)

    def _differentiate(self, message: Message) -> Message:
        if self._streams is None or self._streams.is_in_order(self.index):
            route = self.index, self.index - 1, MessageKind.DY
            self._buffers = self.transport.buffers(route, message.index)
        if self.stage.ring is not None:
            named = self._handed_on.items()
            to = {place: at for place, name in named if (at := self._buffer(0, name)) is not None}
            self.stage.hold(message.index, self.stage.ring.pop(to), self.age)
        values, input_gradients, gradients = self.stage.differentiate(
            message.index, message.values, message.gradients
        )
        flag = None
        if self.has_flags:
            before = self._flag_before(message)
            looked_at: list[Tensor | None] = []
            if self.check_finite:
                looked_at += gradients.values()
            if self.check_finite and self.scaling is not None:
                looked_at += input_gradients.values()
            flag = restored = found_inf([g for g in looked_at if g is not None], before)
            if self.scaling is not None:
                flag = self.scaling.overflowed(flag, before, message.scale)
                # The forward pass of what overflowed here was right: it moves running statistics.
                restored = torch.where(flag == OVERFLOW, before, flag)
            self.flag, self.restored = flag, restored
            if self._is_counted or self._shares_norm:
                gradients = zero_if(flag, gradients)
            if self._is_counted:
                self.count = self.count + (flag == 0).reshape(())
        if message.scale is not None:
            gradients = unscaled(gradients, message.scale)
        self.stage.accumulate(gradients, input_gradients)
        return Message(message.index, values, input_gradients, scale=message.scale, found_inf=flag)

    def _flag_before(self, message: Message) -> Tensor:
        """The flag from the stage after this one; at the last stage, that of the loss."""
        if message.found_inf is not None:
            return message.found_inf
        assert self.loss_head is not None
        if not self.check_finite:
            return torch.zeros_like(self.flag)
        loss = self.loss_head.losses[message.index]
        return (~torch.isfinite(loss)).float().reshape(1)

    def _update(self, action: Action) -> bool:
        if self._mean_gradients() is None:
            return False
        if self.stage.weights.stash is not None:
            self.stage.weights.stash.shift()
        done = super()._update(action)
        if done:
            self.stage.cast_weights.refresh()
        return done

    def _apply(self, gradients: Mapping[str, Tensor], scale: Tensor | None) -> None:
        self.updater.apply_captured(gradients, scale)

    def _count_update(self, scaling: Scaling) -> None:
        scaling.updated(self.updater.found_inf)

    def _number(self, value: Tensor) -> Tensor:
        return value  # stays on the device

    def begin_average(self) -> None:
        """After all backward passes of a step: hand gradients over to be averaged."""
        assert self.average is not None
        self._sums = self.stage.take_gradients()
        self.average.fill(self._sums, self.count)

    def tied_gradients(self, owner: int, gradients: dict[str, Tensor]) -> Message:
        message = super().tied_gradients(owner, gradients)
        return replace(message, found_inf=self.updater.found_inf)

    def _gradients_of(self, message: Message) -> Mapping[str, Tensor | None]:
        return message.gradients  # a flag tells if the update is left out

    def _mean_gradients(self) -> dict[str, Tensor] | None:
        if self.gradients is not None:
            return self.gradients
        if self.average is not None and not self.is_reduced:
            return None
        if self._sums is None:
            self._sums = self.stage.take_gradients()
        if self.average is not None:
            self.count = self.average.read(self._sums).to(self.count.dtype)
        elif self.accumulate > 1 and self._sums:
            count = self.count.clamp(min=1) if self.has_flags else float(self.accumulate)
            torch._foreach_div_(list(self._sums.values()), count)
        self.updater.found_inf = None
        if self.has_flags:
            is_empty = self.count == 0 if self._is_counted else self.flag != 0
            self.updater.found_inf = is_empty.float().reshape(1)
        self.gradients, self._sums = self._sums, None
        self.count = torch.zeros_like(self.count)
        return self.gradients


def _fused_programs(
    stage: Stage, fused: FusedOps, buffer: Callable[[int, str], Tensor | None]
) -> tuple[Programs, dict[int, str]]:
    """A stage's programs, compiled, and the names of kept values that backward returns as they are.

    Args:
        buffer: See `write_results`.
    """
    program, stored = stage.program, stage.activations
    backward = taking_stored(program, stored.low)
    is_read_so = stored.are_read_in(stage.autocast)
    forward, backward = fuse(program.forward, backward, stage.root, fused, is_read_so)
    write_results(backward, (program.sends_back, program.inputs_with_grad), buffer)
    _, *kept = backward.find_nodes(op="placeholder")[: 1 + len(program.kept)]
    (output,) = backward.find_nodes(op="output")
    returned = zip(output.args[0][0], program.sends_back, strict=True)
    handed_on = {kept.index(node): name for node, name in returned if node in kept}
    name = f"stage {program.index}, compiled"
    programs = (
        compile_graph(forward, f"{name}, forward"),
        compile_graph(backward, f"{name}, backward"),
    )
    return programs, handed_on
