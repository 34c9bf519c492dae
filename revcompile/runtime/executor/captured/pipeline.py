"""Steps of a full pipeline over static buffers, so that they can be captured and replayed.

Once the pipeline is full every step performs the same actions. Whatever outlives a step then lies
in static buffers:

    entering micro-batch --> inputs ---+          +--> result: loss and output
    activations (ring buffers) --------+-- step --+--> activations of the entering micro-batch
    messages that wait for a stage ----+          +--> messages for the next step
    accumulated gradients -------------+          +--> accumulated gradients, flags, counts

`enter` moves what is in flight from the executors into the buffers, and `leave` moves it back. All
else (filling and draining the pipeline, batches of other shapes, checkpoints) goes on action by
action and knows nothing of this.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from revcompile.errors import NonFiniteError
from revcompile.ir.coupling_ops import mix
from revcompile.runtime.executor.captured.found_inf import NonFiniteReports
from revcompile.runtime.executor.captured.fusion import FusedOps
from revcompile.runtime.executor.captured.graphs import CaptureUnsupported, EagerReplay, Pass
from revcompile.runtime.executor.captured.in_flight import (
    InFlightState,
    empty_on,
    in_flight,
    missing_memory,
)
from revcompile.runtime.executor.captured.optimizers import FixedSettings
from revcompile.runtime.executor.captured.ring_buffers import (
    RingBuffer,
    RingBuffers,
    WeightStash,
    updates_since_forward,
)
from revcompile.runtime.executor.captured.stages import CapturedStageExecutor
from revcompile.runtime.executor.captured.static_buffers import (
    Flat,
    InPlaceMessages,
    Route,
    StaticBuffers,
    StaticTransport,
    clone_where_in,
    copy_all,
    payload,
    pooled_copy,
)
from revcompile.runtime.executor.captured.streams import CopyStream, StepStreams
from revcompile.runtime.executor.scheduler import LocalScheduler
from revcompile.runtime.executor.stage_executor import StageExecutor
from revcompile.runtime.executor.transport import InProcess, Message
from revcompile.runtime.stage.buffer_pool import BufferPool
from revcompile.runtime.stage.loss_head import LossHead
from revcompile.schedule import Order, Schedule, delay, window

__all__ = ["StaticPipeline", "StepResult"]


@dataclass(frozen=True)
class StepResult:
    """What a step returns; later steps do not overwrite it."""

    loss: Tensor
    output: Any


class StaticPipeline:
    """The stages of one trainer in one process, with everything in flight in static buffers.

    Args:
        executors: Those that perform the stages action by action.
        replay: Calls steps, or captures and replays them.
        check_finite: Leave micro-batches out whose gradient is not finite.
        fused: If given, the stages' programs are run with their fusion regions compiled.
    """

    def __init__(
        self,
        executors: Sequence[StageExecutor],
        loss_head: LossHead,
        schedule: Schedule,
        replay: EagerReplay,
        *,
        check_finite: bool = True,
        fused: FusedOps | None = None,
    ) -> None:
        self._eager_executors = list(executors)
        self._replay = replay
        self._check_finite, self._is_fused = check_finite, fused is not None
        method, count = schedule.method, schedule.stages
        self._accumulate = schedule.accumulate
        self._delays = [delay(method, count, j, schedule.accumulate) for j in range(count)]
        self._windows = [window(method, count, j, schedule.accumulate) for j in range(count)]
        self._is_continuous = method.order is Order.CONTINUOUS
        self._waiting_counts = [
            here - after for here, after in zip(self._windows, self._windows[1:], strict=False)
        ]
        """How many messages wait for each stage between two steps."""
        # Where at most one message waits for each stage, consecutive steps alternate: one leaves
        # its messages where they were computed, the other copies them to their static buffers.
        # Each reads what the other has left.
        self._alternates = self._is_continuous and set(self._waiting_counts) <= {1}
        # A message's static buffer depends on its micro-batch: after so many steps all buffers are
        # the same again, and so is the kind of step.
        self._period = math.lcm(1, *(n for n in self._waiting_counts if n))
        device = executors[0].stage._device()
        uses_streams = self._is_continuous and device.type == "cuda"
        self._streams = StepStreams(device, count - 1) if uses_streams else None
        self._copy_stream = CopyStream(device) if uses_streams and self._alternates else None
        self._transport = StaticTransport(count)
        self._loss_head = copy.copy(loss_head)
        self._loss_head.targets, self._loss_head.losses = {}, {}
        self._loss_head.outputs, self._loss_head.check_finite = {}, False
        self.executors = [
            CapturedStageExecutor(
                executor,
                self._transport,
                self._loss_head if executor.loss_head is not None else None,
                accumulate=schedule.accumulate,
                check_finite=check_finite,
                fused=fused,
                streams=self._streams,
            )
            for executor in executors
        ]
        self._scheduler = LocalScheduler(self.executors)
        self._reports = NonFiniteReports()
        self._results = BufferPool()
        self.is_active = False
        """Is what is in flight here, and not with the executors that perform single actions?"""
        self._reset()

    def _reset(self) -> None:
        self._inputs: StaticBuffers | None = None
        self._rings: dict[int, RingBuffer] = {}
        self._ring_buffers = RingBuffers(self._rings, self._copy_stream)
        self._fresh: dict[Hashable, dict[int, Flat]] = {}
        """By kind of step and stage: where it leaves activations of the entering micro-batch."""
        self._in_place: dict[Hashable, InPlaceMessages] = {}
        """By kind of step: its messages, if it leaves them where they were computed."""
        self._last_in_place: InPlaceMessages | None = None
        self._parity = 1
        """Of the next step: 0 if it leaves its messages where they were computed."""
        self._gradients: dict[int, StaticBuffers] = {}
        self._result: StaticBuffers | None = None
        self._flags = torch.cat([executor.flag for executor in self.executors])
        self._counts = torch.stack([executor.count for executor in self.executors])
        self._settings: FixedSettings | None = None
        self._transport.buffers.clear()

    # -- entering and leaving -----------------------------------------------------------------

    def enter(self, schedule: Schedule, transport: InProcess, batch: Flat, alike: int) -> bool:
        """Move what is in flight into the static buffers.

        Args:
            batch: The micro-batch of the step to come.
            alike: How many micro-batches of its shape have entered last.

        Returns:
            False, and nothing is moved, if the pipeline is not full of micro-batches alike.

        Raises:
            CaptureUnsupported: There is not enough memory; nothing is moved.
        """
        if not self._is_full(schedule, alike):
            return False
        if not all(executor.updater.started for executor in self.executors):
            return False
        flag = self._flags[:1] if self._check_finite else None
        state = InFlightState.of(self._eager_executors, transport, flag)
        if state is None or not self._has_steady_ages(schedule):
            return False
        if not self._matches(state, batch) or self.is_outdated:
            self.clear()
            # The last stage's update may run beside another one: two snapshots at a time.
            sizes = sorted(executor.updater.snapshot_bytes for executor in self.executors)
            if why := missing_memory(state, sum(sizes[-2:]), self._flags.device):
                raise CaptureUnsupported(why)
            self._allocate(state, batch)
        self._load(state)
        transport.queues.clear()
        return True

    def _is_full(self, schedule: Schedule, alike: int) -> bool:
        in_flight_counts = [len(microbatches) + 1 for microbatches in schedule.outstanding]
        return in_flight_counts == self._windows and alike >= max(in_flight_counts) - 1

    def _has_steady_ages(self, schedule: Schedule) -> bool:
        """Are stashed weights as old as they will be from here on? Not right after a start."""
        for executor in self._eager_executors:
            if executor.stage.is_stashing:
                for microbatch, age in executor.stage.ages().items():
                    if age != self._age(
                        microbatch, schedule.injected, schedule.accumulated, executor.index
                    ):
                        return False
        return True

    def _age(self, microbatch: int, entering: int, accumulated: Sequence[int], stage: int) -> int:
        return updates_since_forward(microbatch, entering, accumulated[stage], self._accumulate)

    def _matches(self, state: InFlightState, batch: Flat) -> bool:
        if self._inputs is None or not self._inputs.matches(batch):
            return False
        return all(buffers.matches(values) for buffers, values in self._copies(state))

    def _copies(self, state: InFlightState) -> list[tuple[StaticBuffers, Any]]:
        """Activations and messages in flight, each with the buffers it belongs into."""
        return [
            *(
                (self._rings[stage].slot(microbatch), activations)
                for stage, by_microbatch in state.activations.items()
                for microbatch, activations in by_microbatch.items()
            ),
            *(
                (self._transport.buffer(route, message.index), payload(message))
                for route, messages in state.messages.items()
                for message in messages
            ),
        ]

    def _allocate(self, state: InFlightState, batch: Flat) -> None:
        self._inputs = StaticBuffers(empty_on(self._flags.device, batch.value))
        read_slots = 1 if self._copy_stream is None else 2
        for stage, by_microbatch in state.activations.items():
            like = next(iter(by_microbatch.values()))
            self._rings[stage] = RingBuffer(like, self._windows[stage] - 1, read_slots)
        for route, messages in state.messages.items():
            _, target, _ = route
            self._transport.buffers[route] = [
                StaticBuffers(payload(messages[0])) for _ in range(self._waiting_counts[target])
            ]
        for executor in self.executors:
            if executor.stage.is_stashing and (count := self._delays[executor.index]):
                executor.stash = WeightStash(executor.stage.parameters, count)

    def _load(self, state: InFlightState) -> None:
        copies = self._copies(state)
        for executor in self._eager_executors:
            if gradients := executor.stage.gradients:
                copies.append((self._gradient_buffers(executor.index, gradients), gradients))
        copy_all(copies)
        for stage, by_age in state.stashed.items():
            for age, weights in by_age.items():
                if (stash := self.executors[stage].stash) is not None:
                    stash[age] = weights
        contributed = [float(executor.contributed) for executor in self._eager_executors]
        self._counts.copy_(torch.tensor(contributed))
        for eager, captured in zip(self._eager_executors, self.executors, strict=True):
            eager.stage.in_flight.clear()
            eager.stage.gradients, eager.contributed = {}, 0
            captured.updater.enter()
        self._settings = FixedSettings(executor.updater for executor in self.executors)
        self._last_in_place, self._parity = None, 0 if self._alternates else 1
        self.is_active = True

    def _gradient_buffers(self, stage: int, gradients: Mapping[str, Tensor]) -> StaticBuffers:
        if stage not in self._gradients or not self._gradients[stage].matches(dict(gradients)):
            self._gradients[stage] = StaticBuffers(dict(gradients))
        return self._gradients[stage]

    def leave(self, schedule: Schedule, transport: InProcess) -> None:
        """Move what is in flight back to the executors; waits for the device."""
        if not self.is_active:
            return
        self._ring_buffers.synchronize()
        counts = self._counts.tolist()
        for eager, captured in zip(self._eager_executors, self.executors, strict=True):
            captured.updater.leave()
            stage, index = eager.stage, eager.index
            # Micro-batches of one age share a copy; those of age 0 have the latest weights.
            weights: dict[int, Any] = {0: None}
            for microbatch in schedule.outstanding[index]:
                activations = self._rings[index].slot(microbatch).value
                age = self._age(microbatch, schedule.injected, schedule.accumulated, index)
                if age not in weights and captured.stash is not None:
                    weights[age] = captured.stash.clone(age)
                stage.in_flight[microbatch] = in_flight(activations, weights.get(age))
            if accumulated := schedule.accumulated[index]:
                eager.contributed = int(counts[index]) if self._check_finite else accumulated
                stage.gradients = dict(self._gradients[index].value) if eager.contributed else {}
        for route in self._transport.buffers:
            indices = self._waiting_indices(schedule.outstanding, route)
            for message in self._transport.waiting(route, indices, self._last_in_place):
                if message.found_inf is not None and bool(message.found_inf):
                    message = Message(message.index, void=True)
                transport.send(*route, replace(message, found_inf=None))
        self.is_active = False

    def _waiting_indices(self, outstanding: Sequence[Sequence[int]], route: Route) -> Sequence[int]:
        """The micro-batches whose messages wait at the end of a route."""
        _, target, _ = route
        return outstanding[target][: self._waiting_counts[target]]

    def clear(self) -> None:
        """Free all buffers and captured steps: shapes, or the trainer's tensors, have changed."""
        self.is_active = False
        self._ring_buffers.synchronize()
        for executor in self.executors:
            executor.updater.leave()
        self._replay.clear()
        self._reset()

    # -- steps --------------------------------------------------------------------------------

    def accepts(self, batch: Flat) -> bool:
        """Can the next step be run here?"""
        matches = self._inputs is not None and self._inputs.matches(batch)
        return self.is_active and matches and not self.is_outdated

    @property
    def is_outdated(self) -> bool:
        """Have optimizer settings other than learning rates changed since `enter`?"""
        return self._settings is not None and self._settings.have_changed()

    def step(self, schedule: Schedule, batch: Flat) -> StepResult:
        """The step in which a micro-batch enters.

        Raises:
            CaptureUnsupported: The step cannot be captured; nothing has changed.
        """
        assert self._inputs is not None
        entering, accumulated = schedule.injected, schedule.accumulated
        due = {j: entering - w + 1 for j, w in enumerate(self._windows)}
        kind = (accumulated, entering % self._period, self._parity)
        is_replay = self._replay.is_captured(kind)
        self._inputs.copy_(batch)
        self._ring_buffers.before_step(entering, self._parity)
        for executor in self.executors:
            executor.stage.cast_weights.refresh_if_changed()
            executor.updater.prepare()

        def perform() -> None:
            with self._cudnn_benchmark():
                self._load_executors(entering, due, schedule.outstanding, accumulated)
                # A step that turns out not to be capturable must not advance the schedule.
                rest = self._scheduler.forward(schedule.copy().inject())
                self._scheduler.finish(rest, first_to_last=self._is_continuous)
                if self._streams is not None:
                    self._streams.join()
                self._store_results(entering, kind)

        try:
            self._replay.run(kind, perform, lambda: self._random_keys(entering, due))
        except CaptureUnsupported:
            self._clear_executors()
            if self._streams is not None:
                self._streams.clear()
            raise
        schedule.inject()
        if not is_replay:
            for executor in self.executors:
                executor.stage.cast_weights.mark_fresh()
        self._ring_buffers.after_step(entering, self._parity, self._fresh[kind])
        if self._alternates:
            self._last_in_place, self._parity = self._in_place.get(kind), 1 - self._parity
        for executor, count in zip(self.executors, accumulated, strict=True):
            if count + 1 == self._accumulate:
                executor.updater.advance()
        if self._check_finite:
            self._reports.submit(self._flags, due)
        assert self._result is not None
        return StepResult(*pooled_copy(self._results, self._result))

    def failures(self, wait: bool = False) -> list[NonFiniteError]:
        """Bad micro-batches that have become known since the last call."""
        return self._reports.collect(wait)

    @contextmanager
    def _cudnn_benchmark(self) -> Iterator[None]:
        """Where programs are compiled, choose convolution algorithms by trial: shapes are fixed."""
        before = torch.backends.cudnn.benchmark
        torch.backends.cudnn.benchmark = before or self._is_fused
        try:
            yield
        finally:
            torch.backends.cudnn.benchmark = before

    def _random_keys(self, entering: int, due: Mapping[int, int]) -> dict[Pass, int]:
        return {
            (executor.index, microbatch - entering): mix(executor.stage.seed, microbatch)
            for executor in self.executors
            for microbatch in (entering, due[executor.index])
        }

    def _load_executors(
        self,
        entering: int,
        due: Mapping[int, int],
        outstanding: Sequence[Sequence[int]],
        accumulated: Sequence[int],
    ) -> None:
        """Put the static buffers where executors look for inputs, activations and messages.

        Args:
            entering: The micro-batch of the forward passes.
            due: By stage, that of its backward pass.
            outstanding: By stage, those in flight.
            accumulated: By stage, how many are in the accumulated gradient.
        """
        assert self._inputs is not None
        values, target = self._inputs.value
        self.executors[0].inputs[entering] = values
        self._loss_head.targets[entering] = target
        for index, executor in enumerate(self.executors):
            stage = executor.stage
            if index in self._rings:
                activations = self._rings[index].read_slot(self._parity).value
                age = self._age(due[index], entering, accumulated, index)
                weights = executor.stash[age] if executor.stash is not None else None
                stage.in_flight[due[index]] = in_flight(activations, weights)
            if accumulated[index]:
                stage.gradients = dict(self._gradients[index].value)
            executor.count = self._counts[index]
            executor.prepare_stage(captured=True)
        for route in self._transport.buffers:
            indices = self._waiting_indices(outstanding, route)
            messages = self._transport.waiting(route, indices, self._last_in_place)
            self._transport.queues[route] = deque(messages)
        self._transport.in_place = self._new_in_place() if self._parity == 0 else None

    def _new_in_place(self) -> InPlaceMessages:
        assert self._inputs is not None
        overwritten = [slot for ring in self._rings.values() for slot in ring.read_slots]
        overwritten.append(self._inputs)
        return InPlaceMessages(tensor for buffers in overwritten for tensor in buffers.tensors)

    def _store_results(self, entering: int, kind: Hashable) -> None:
        """Copy what outlives the step to static buffers, and clear the executors."""
        self._fresh[kind] = {}
        if self._transport.in_place is not None:
            self._in_place[kind] = self._transport.in_place
        # The copy stream may store activations while the next batch is copied to the inputs.
        overwritten = self._inputs.tensors if self._copy_stream is not None and self._inputs else ()
        for index in self._rings:
            activations = self.executors[index].stage.in_flight[entering].kept
            self._fresh[kind][index] = Flat.of(clone_where_in(overwritten, activations))
        for index, executor in enumerate(self.executors):
            if gradients := executor.stage.gradients:
                self._gradient_buffers(index, gradients).copy_(gradients)
        result = self._loss_head.losses[entering], self._loss_head.outputs[entering]
        if self._result is None:
            self._result = StaticBuffers(result)
        self._result.copy_(result)
        self._flags.copy_(torch.cat([executor.flag for executor in self.executors]))
        self._counts.copy_(torch.stack([executor.count for executor in self.executors]))
        self._clear_executors()

    def _clear_executors(self) -> None:
        loss_head = self._loss_head
        for queue in (loss_head.targets, loss_head.losses, loss_head.outputs):
            queue.clear()
        self._transport.queues.clear()
        for executor in self.executors:
            executor.clear()
            executor.prepare_stage(captured=False)
            executor.updater.found_inf = None
            executor.flag = self._flags[executor.index : executor.index + 1]
            executor.count = self._counts[executor.index]
