"""What is in flight, in static buffers: allocated, loaded from the executors, and moved back.

`enter` moves what is in flight from the executors that perform single actions into the buffers, and
`leave` moves it back. All else (filling and draining the pipeline, batches of other shapes,
checkpoints) goes on action by action and knows nothing of this.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from revcompile.runtime.executor.captured.boundary import Boundary, StepInputs
from revcompile.runtime.executor.captured.found_inf import NonFiniteReports, RunningStatistics
from revcompile.runtime.executor.captured.fusion import FusedOps
from revcompile.runtime.executor.captured.graphs import CaptureUnsupported, EagerReplay
from revcompile.runtime.executor.captured.in_flight import (
    InFlightState,
    empty_on,
    flagged,
    in_flight,
    missing_memory,
    tied_routes,
)
from revcompile.runtime.executor.captured.optimizers import FixedSettings
from revcompile.runtime.executor.captured.ring_buffers import (
    RingBuffer,
    WeightStash,
    updates_since_forward,
)
from revcompile.runtime.executor.captured.stages import CapturedStageExecutor
from revcompile.runtime.executor.captured.static_buffers import (
    StaticBuffers,
    copy_all,
    payload,
)
from revcompile.runtime.executor.captured.static_transport import StaticTransport
from revcompile.runtime.executor.captured.streams import StepStreams
from revcompile.runtime.executor.scheduler import LocalScheduler
from revcompile.runtime.executor.stage_executor import StageExecutor
from revcompile.runtime.executor.transport import Average, Message, MessageKind, Route, Transport
from revcompile.runtime.stage.buffer_pool import BufferPool
from revcompile.runtime.stage.loss_head import LossHead
from revcompile.schedule import Order, Schedule, delay, window


class StaticState:
    """The stages of one process, with everything in flight in static buffers.

    Args:
        executors: Those that perform the stages action by action; the stages follow each other.
        replay: Calls steps, or captures and replays them.
        check_finite: Leave micro-batches out whose gradient is not finite.
        fused: If given, the stages' programs are run with their fusion regions compiled.
        averages: By stage, if there are replicas of it: the mean of its gradients over them.
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
        averages: Mapping[int, Average] | None = None,
    ) -> None:
        self._eager_executors = list(executors)
        self._replay = replay
        self._is_fused = fused is not None
        method, count = schedule.method, schedule.stages
        self._stages = [executor.index for executor in executors]
        self._boundary = Boundary(self._stages, count, schedule.ties)
        self._is_last = not self._boundary.has_next
        self._averages = averages or {}
        is_alone = not (self._boundary.is_split or self._averages)
        self._has_flags = check_finite or not is_alone
        self._accumulate = schedule.accumulate
        self._delays = [delay(method, count, j, schedule.accumulate) for j in range(count)]
        self._windows = [window(method, count, j, schedule.accumulate) for j in range(count)]
        self._is_continuous = method.order is Order.CONTINUOUS
        self._waiting_counts = {
            stage: self._windows[stage] - self._windows[stage + 1] for stage in self._stages[:-1]
        }
        """How many messages of the next stage wait for each between two steps."""
        counts = [count for count in self._waiting_counts.values() if count]
        hands_on = self._is_continuous and set(self._waiting_counts.values()) == {1}
        # A message's static buffer depends on its micro-batch: after so many steps all buffers are
        # the same again, and so is the kind of step.
        # Messages to other ranks have two, so that a step need not wait until the last are sent.
        is_even = hands_on or self._boundary.is_split
        self._period = math.lcm(2 if is_even else 1, *counts)
        device = executors[0].stage._device()
        # Stages that share parameters exchange them in the order of one stream.
        uses_streams = self._is_continuous and device.type == "cuda" and not schedule.ties
        self._streams = StepStreams(device, count - 1) if uses_streams else None
        self._transport = StaticTransport(count, hands_on, self._boundary.take)
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
                has_flags=self._has_flags,
                fused=fused,
                streams=self._streams,
                average=self._averages.get(executor.index),
            )
            for executor in executors
        ]
        self._by_stage = dict(zip(self._stages, self.executors, strict=True))
        self._scheduler = LocalScheduler(self.executors)
        self._statistics = RunningStatistics([e.stage.statistics() for e in self.executors])
        # Messages of steps that the device has not come to yet take memory: few on several ranks.
        advice = loss_head.overflow_advice
        self._reports = NonFiniteReports(self._stages, 8 if is_alone else 2, advice)
        self._results = BufferPool()
        self.is_active = False
        """Is what is in flight here, and not with the executors that perform single actions?"""
        self._reset()

    def _reset(self) -> None:
        self._inputs: StaticBuffers | None = None
        self._rings: dict[int, RingBuffer] = {}
        for executor in self.executors:
            executor.ring = executor.stash = executor.stashed = None
        self._gradients: dict[int, StaticBuffers] = {}
        self._result: StaticBuffers | None = None
        self._boundary.clear()
        self._flags = self._current_flags()
        self._counts = torch.stack([executor.count for executor in self.executors])
        self._settings: FixedSettings | None = None
        self._transport.clear()

    def _current_flags(self) -> Tensor:
        """Of each stage's last backward pass, and that of the message from the next rank."""
        flags = [executor.flag for executor in self.executors]
        if self._boundary.flag is not None:
            flags.append(self._boundary.flag)
        elif self._boundary.has_next:
            flags.append(torch.zeros_like(flags[0]))
        return torch.cat(flags)

    # -- entering and leaving -----------------------------------------------------------------

    def enter(
        self, schedule: Schedule, transport: Transport, batch: StepInputs, alike: int
    ) -> bool:
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
        flag = self._flags[:1]
        state = InFlightState.of(
            self._eager_executors, transport, flag if self._has_flags else None
        )
        if state is None or not self._has_steady_ages(schedule):
            return False
        expected = self._boundary.expected(transport, flag)
        if expected.void:
            return False
        fits = self._matches(state, batch) and self._boundary.matches(batch, expected)
        is_new = not fits or self.is_outdated
        if is_new:
            self.clear()
            # The last stage's update may run beside another one: two snapshots at a time.
            sizes = sorted(executor.updater.snapshot_bytes for executor in self.executors)
            if why := missing_memory(state, sum(sizes[-2:]), self._flags.device):
                raise CaptureUnsupported(why)
            self._allocate(state, batch)
            self._boundary.allocate(batch, expected, self._by_stage, flag)
        self._load(state, schedule, is_new)
        for route, messages in state.messages.items():
            for _ in messages:
                transport.receive(*route)
        return True

    def _is_full(self, schedule: Schedule, alike: int) -> bool:
        in_flight_counts = [len(microbatches) + 1 for microbatches in schedule.outstanding]
        if in_flight_counts != self._windows or alike < max(in_flight_counts) - 1:
            return False
        # One that was left out in its forward pass is not in flight; if all since the last update
        # were left out, there are no gradients.
        return all(
            len(executor.stage.in_flight) + 1 == self._windows[executor.index]
            and (executor.contributed > 0 or not schedule.accumulated[executor.index])
            for executor in self._eager_executors
        )

    def _has_steady_ages(self, schedule: Schedule) -> bool:
        """Are stashed weights as old as they will be from here on? Not right after a start."""
        for executor in self._eager_executors:
            if executor.stage.is_stashing or executor.stage.rewound is not None:
                for microbatch, age in executor.stage.ages().items():
                    if age != self._age(
                        microbatch, schedule.injected, schedule.accumulated, executor.index
                    ):
                        return False
        return True

    def _age(self, microbatch: int, entering: int, accumulated: Sequence[int], stage: int) -> int:
        return updates_since_forward(microbatch, entering, accumulated[stage], self._accumulate)

    def _matches(self, state: InFlightState, batch: StepInputs) -> bool:
        if self._inputs is None or not self._inputs.matches(batch.local):
            return False
        return all(slot.matches(values) for slot, values in self._slots(state)) and all(
            self._transport.matches(route, message)
            for route, messages in state.messages.items()
            for message in messages
        )

    def _slots(self, state: InFlightState) -> list[tuple[StaticBuffers, Any]]:
        """Activations in flight, each with the slot it belongs into."""
        return [
            (self._rings[stage].slot(microbatch), activations)
            for stage, by_microbatch in state.activations.items()
            for microbatch, activations in by_microbatch.items()
        ]

    def _allocate(self, state: InFlightState, batch: StepInputs) -> None:
        self._inputs = StaticBuffers(empty_on(self._flags.device, batch.local.value))
        counts = [self._windows[stage] for stage in state.activations]
        self._slot_counts = torch.tensor(counts, device=self._flags.device)
        self._ends = torch.zeros(2, len(counts), dtype=torch.int64, device=self._flags.device)
        """For each ring: the slots of the newest and of the oldest micro-batch of the next step."""
        for position, (stage, by_microbatch) in enumerate(state.activations.items()):
            ends = self._ends[:, position : position + 1]
            like = next(iter(by_microbatch.values()))
            ring = self._rings[stage] = RingBuffer(like, counts[position], *ends)
            self._by_stage[stage].ring = ring
            # At once: memory for all stages need never be there twice.
            for microbatch in by_microbatch:
                ring.slot(microbatch).copy_(by_microbatch[microbatch])
                by_microbatch[microbatch] = ring.slot(microbatch).value
            del like
            self._by_stage[stage].stage.in_flight.clear()
        for route, messages in state.messages.items():
            _, target, kind = route
            if kind is MessageKind.DY:
                self._transport.open(route, messages[0], self._waiting_counts[target])
        self._open_tied_routes()
        for executor in self.executors:
            if executor.stage.is_stashing and (count := self._delays[executor.index]):
                executor.stash = WeightStash(executor.stage.parameters, count)

    def _open_tied_routes(self) -> None:
        for source, target, kind in tied_routes(self.executors):
            route, holder = (source, target, kind), self._by_stage[max(source, target)]
            if kind is MessageKind.TIED_WEIGHT:
                names = holder.tied_owners[source]
                values = {name: holder.stage.parameters[name].detach() for name in names}
                self._transport.open(route, Message(0, values), 1)
                continue
            late = self._windows[target] - self._windows[source]
            if late:  # else they are sent and received in one step
                like = flagged(
                    holder.tied_gradients(target, {}), self._flags[:1] if self._has_flags else None
                )
                ends = torch.zeros(2, 1, dtype=torch.int64, device=self._flags.device)
                slots = 1 + math.ceil(late / self._accumulate)
                self._transport.rings[route] = RingBuffer(payload(like), slots, *ends)

    def _load(self, state: InFlightState, schedule: Schedule, is_new: bool) -> None:
        entering = schedule.injected
        copies = self._slots(state)
        for route, messages in state.messages.items():
            copies += [self._transport.load(route, message, is_new) for message in messages]
        for executor in self._eager_executors:
            if gradients := executor.stage.gradients:
                copies.append((self._gradient_buffers(executor.index, gradients), gradients))
        copy_all(copies)
        if self._rings:
            newest = torch.tensor([[entering], [entering + 1]], device=self._ends.device)
            torch.remainder(newest, self._slot_counts, out=self._ends)
        for (source, target, _), ring in self._transport.rings.items():
            ring.newest.fill_(schedule.updates[source] % ring.count)
            ring.oldest.fill_(schedule.updates[target] % ring.count)
        for stage, by_age in state.stashed.items():
            for age, weights in by_age.items():
                if (stash := self._by_stage[stage].stash) is not None:
                    stash[age] = weights
        contributed = [float(executor.contributed) for executor in self._eager_executors]
        self._counts.copy_(torch.tensor(contributed))
        for eager, captured in zip(self._eager_executors, self.executors, strict=True):
            eager.stage.in_flight.clear()
            eager.stage.gradients, eager.contributed = {}, 0
            captured.updater.enter()
            if captured.scaling is not None:
                captured.scaling.load(eager.scaling)
        self._settings = FixedSettings(executor.updater for executor in self.executors)
        self.is_active = True

    def _gradient_buffers(self, stage: int, gradients: Mapping[str, Tensor]) -> StaticBuffers:
        if stage not in self._gradients or not self._gradients[stage].matches(dict(gradients)):
            self._gradients[stage] = StaticBuffers(dict(gradients))
        return self._gradients[stage]

    def leave(self, schedule: Schedule, transport: Transport) -> None:
        """Move what is in flight back to the executors; waits for the device."""
        if not self.is_active:
            return
        counts = self._counts.tolist()
        for eager, captured, count in zip(
            self._eager_executors, self.executors, counts, strict=True
        ):
            captured.updater.leave()
            if captured.scaling is not None:
                captured.scaling.store(eager.scaling)
            stage, index = eager.stage, eager.index
            # Micro-batches of one age share a copy; those of age 0 have the latest weights.
            weights: dict[int, Any] = {0: None}
            for microbatch in schedule.outstanding[index]:
                activations = self._rings[index].slot(microbatch).value
                age = self._age(microbatch, schedule.injected, schedule.accumulated, index)
                if age not in weights and captured.stash is not None:
                    weights[age] = captured.stash.clone(age)
                stage.in_flight[microbatch] = in_flight(stage, activations, weights.get(age), age)
            if accumulated := schedule.accumulated[index]:
                eager.contributed = int(count) if self._has_flags else accumulated
                stage.gradients = dict(self._gradients[index].value) if eager.contributed else {}
        for route in self._transport.routes:
            indices = self._waiting_indices(schedule, route)
            for message in self._transport.waiting(route, indices):
                transport.send(*route, message.resolved())
        self.is_active = False

    def _waiting_indices(self, schedule: Schedule, route: Route) -> Sequence[int]:
        """The micro-batches, or updates, whose messages wait at the end of a route."""
        source, target, kind = route
        updates = schedule.updates
        match kind:
            case MessageKind.TIED_GRAD:
                return range(updates[target], updates[source])
            case MessageKind.TIED_WEIGHT:  # received at the beginning of the next step
                return () if schedule.accumulated[source] else (updates[source] - 1,)
        return schedule.outstanding[target][: self._waiting_counts[target]]

    def clear(self) -> None:
        """Free all buffers and captured steps: shapes, or the trainer's tensors, have changed."""
        self.is_active = False
        for executor in self.executors:
            executor.updater.leave()
        self._replay.clear()
        self._reset()

    def accepts(self, batch: StepInputs) -> bool:
        """Can the next step be run here?"""
        matches = self._inputs is not None and self._inputs.matches(batch.local)
        return self.is_active and matches and self._boundary.matches(batch) and not self.is_outdated

    @property
    def is_outdated(self) -> bool:
        """Have optimizer settings other than learning rates changed since `enter`?"""
        return self._settings is not None and self._settings.have_changed()
