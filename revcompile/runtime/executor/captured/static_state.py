"""The static buffers of captured steps, and how such steps begin and end.

Kept inputs and stashed weights lie in static buffers of their stages from the first micro-batch on,
whoever runs it. `enter` takes over the numbers (of slots, of micro-batches in a gradient) and the
messages that wait; `leave` hands them back. All else (filling and draining the pipeline, batches of
other shapes, checkpoints) goes on action by action and knows nothing of this.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from revcompile.ir.snapshot import Kind, TreeSnapshot
from revcompile.runtime.executor.captured.boundary import Boundary, StepInputs
from revcompile.runtime.executor.captured.found_inf import NonFiniteReports, RunningStatistics
from revcompile.runtime.executor.captured.fusion import FusedOps
from revcompile.runtime.executor.captured.graphs import CaptureUnsupported, EagerReplay
from revcompile.runtime.executor.captured.optimizers import FixedSettings
from revcompile.runtime.executor.captured.stages import CapturedStageExecutor
from revcompile.runtime.executor.captured.static_transport import StaticTransport
from revcompile.runtime.executor.captured.streams import StepStreams, largest_tensor
from revcompile.runtime.executor.scheduler import LocalScheduler
from revcompile.runtime.executor.stage_executor import StageExecutor
from revcompile.runtime.executor.transport import Message, MessageKind, Route, Transport
from revcompile.runtime.reversible.overlap import SMALL
from revcompile.runtime.stage.loss_head import LossHead
from revcompile.runtime.stage.static_buffers import (
    RingBuffer,
    StaticBuffers,
    empty_on,
    free_cached,
    move,
)
from revcompile.runtime.stage.tensors import clone_tree
from revcompile.schedule import Order, Schedule, window
from revcompile.units import format_size

Messages = dict[Route, list[Message]]


class StaticState:
    """The stages of one process, with everything in flight in static buffers.

    Args:
        executors: Those that perform the stages action by action; the stages follow each other.
        replay: Calls steps, or captures and replays them.
        fused: If given, the stages' programs are run with their fusion regions compiled.
    """

    def __init__(
        self,
        executors: Sequence[StageExecutor],
        loss_head: LossHead,
        schedule: Schedule,
        replay: EagerReplay,
        *,
        fused: FusedOps | None = None,
    ) -> None:
        self._eager_executors = list(executors)
        self._replay = replay
        self._is_fused = fused is not None
        method, count = schedule.method, schedule.stages
        self._stages = [executor.index for executor in executors]
        self._boundary = Boundary(self._stages, count, schedule.ties)
        self._is_last = not self._boundary.has_next
        self._held_ties = [tie for tie in schedule.ties if tie.holder in self._stages]
        averages = executors[0].transport.averages
        is_alone = not (self._boundary.is_split or averages)
        self._has_flags = executors[0].stage.check_finite or not is_alone
        self._accumulate = schedule.accumulate
        self._windows = [window(method, count, j, schedule.accumulate) for j in range(count)]
        self._is_continuous = method.order is Order.CONTINUOUS
        self._waiting_counts = {
            stage: self._windows[stage] - self._windows[stage + 1] for stage in self._stages[:-1]
        }
        """How many messages of the next stage wait for each between two steps."""
        counts = [count for count in self._waiting_counts.values() if count]
        # A message's static buffer depends on its micro-batch: after so many steps all buffers are
        # the same again, and so is the kind of step.
        # Messages to other ranks have two, so that a step need not wait until the last are sent.
        self._period = math.lcm(2 if self._boundary.is_split else 1, *counts)
        device = executors[0].stage._device()
        self._ring_stages = [executor.stage for executor in executors if executor.stage.slots]
        self._row_count = _steps_at_once(device)
        counts = [*(stage.slots for stage in self._ring_stages), self._row_count]
        self._slot_counts = torch.tensor(counts, dtype=torch.int64, device=device)
        self._ends = torch.zeros(2, len(counts), dtype=torch.int64, device=device)
        """For each ring: the slots of the newest and of the oldest micro-batch of the next step.
        The last ring is that of flags that the host has not seen."""
        # Stages that share parameters exchange them in the order of one stream.
        uses_streams = self._is_continuous and device.type == "cuda" and not schedule.ties
        self._streams = StepStreams(device, count - 1) if uses_streams else None
        self._transport = StaticTransport(count, self._boundary.take)
        self._trainers_head, self._loss_head = loss_head, copy.copy(loss_head)
        self._loss_head.targets, self._loss_head.losses = {}, {}
        self._loss_head.outputs, self._loss_head.check_finite = {}, False
        self.executors = [
            CapturedStageExecutor(
                executor,
                self._transport,
                self._loss_head if executor.loss_head is not None else None,
                accumulate=schedule.accumulate,
                has_flags=self._has_flags,
                fused=fused,
                streams=self._streams,
                average=averages.get(executor.index),
            )
            for executor in executors
        ]
        self._by_stage = dict(zip(self._stages, self.executors, strict=True))
        self._scheduler = LocalScheduler(self.executors)
        self._cast_weights = [w for e in executors for w in e.stage.cast_weights.weights]
        self._versions: list[int] | None = None
        """Of these, in the last step."""
        self._statistics = RunningStatistics([e.stage.statistics() for e in self.executors])
        self._reports = NonFiniteReports(self._stages, loss_head.overflow_advice)
        self.is_replaying = False
        self.is_active = False
        """Is what is in flight here, and not with the executors that perform single actions?"""
        self._reset()

    def _reset(self) -> None:
        self._inputs: StaticBuffers | None = None
        self._gradients: dict[int, StaticBuffers] = {}
        self._loss: StaticBuffers | None = None
        """The last step's loss and its scale. Apart from the output: whoever collects losses would
        keep all outputs, too."""
        self._output: StaticBuffers | None = None
        self._boundary.clear()
        self._flags = torch.cat(self._current_flags())
        self._flag_rows = self._flags.new_zeros(self._row_count, len(self._flags))
        """Those of the last steps."""
        self._counts = torch.stack([executor.count for executor in self.executors])
        self._settings: FixedSettings | None = None
        self._memory: TreeSnapshot | None = None
        self._transport.clear()

    def _current_flags(self) -> list[Tensor]:
        """Of each stage's last backward pass, and that of the message from the next rank."""
        flags = [executor.flag for executor in self.executors]
        if self._boundary.flag is not None:
            flags.append(self._boundary.flag)
        elif self._boundary.has_next:
            flags.append(torch.zeros_like(flags[0]))
        return flags

    # -- entering and leaving -----------------------------------------------------------------

    def enter(
        self, schedule: Schedule, transport: Transport, batch: StepInputs, alike: int
    ) -> bool:
        """Take over what is in flight.

        Args:
            batch: The micro-batch of the step to come.
            alike: How many micro-batches of its shape have entered last.

        Returns:
            False, and nothing has changed, if the pipeline is not full of micro-batches alike.

        Raises:
            CaptureUnsupported: There is not enough memory; nothing has changed.
        """
        if not self._is_full(schedule, alike):
            return False
        if not all(executor.updater.started for executor in self.executors):
            return False
        if not self._is_in_slots() or not self._has_steady_ages(schedule):
            return False
        flag = self._flags[:1]
        messages = self._waiting_messages(transport, flag if self._has_flags else None)
        if messages is None:
            return False
        expected = self._boundary.expected(transport, flag)
        if expected.void:
            return False
        fits = self._matches(messages, batch) and self._boundary.matches(batch, expected)
        if not fits:
            self.clear()
            # Updates follow each other: one snapshot at a time.
            largest = max(executor.updater.snapshot_bytes for executor in self.executors)
            if why := missing_memory(messages, largest, self._flags.device):
                raise CaptureUnsupported(why)
            free_cached(self._flags.device)
            for executor in self.executors:
                move(executor.updater.state_tensors)
                move(executor.stage.cast_weights.copies)
            self._allocate(messages, batch)
            if self._streams is not None and 0 in self._by_stage:
                self._streams.staying |= self._large_stages(batch)
            self._boundary.allocate(batch, expected, self._by_stage, flag)
        self._load(messages, schedule)
        if not fits:
            self.hold_fixed()
        for route, queue in messages.items():
            for _ in queue:
                transport.receive(route)
        return True

    def _waiting_messages(self, transport: Transport, flag: Tensor | None) -> Messages | None:
        """Those that wait for stages here; None if a captured step cannot work with one.

        Args:
            flag: If given, messages get flags `found_inf` like this one, which are not set.
        """
        waiting: Messages = {}
        for stage in self._stages[:-1]:
            route = stage + 1, stage, MessageKind.DY
            for message in transport.queued(stage, MessageKind.DY):
                if message.void:
                    return None
                if message.scale is not None:
                    scale = torch.tensor(message.scale, dtype=torch.float64)
                    message = replace(message, scale=scale.to(self._flags.device))
                waiting.setdefault(route, []).append(message.flagged(flag))
        for route in self._boundary.tied_here:
            waiting[route] = [
                message.flagged(flag) if route[2] is MessageKind.TIED_GRAD else message
                for message in transport.queues.get(route, ())
            ]
        return waiting

    def _is_in_slots(self) -> bool:
        """Does all that stages store of micro-batches in flight lie in their slots?

        If not even values of the latest do, new slots are made for values of its form.
        """
        found = True
        for stage in (executor.stage for executor in self._eager_executors):
            in_slots = [stage.is_in_slot(microbatch) for microbatch in stage.in_flight]
            if in_slots and not in_slots[-1]:
                self.clear()
                stage.ring = None
            others = any(held.buffers or held.original for held in stage.in_flight.values())
            found = found and all(in_slots) and not others
        return found

    def _is_full(self, schedule: Schedule, alike: int) -> bool:
        in_flight_counts = [len(microbatches) + 1 for microbatches in schedule.outstanding]
        # One alike must have run action by action: where that fails, a step can be undone.
        if in_flight_counts != self._windows or alike < max(1, max(in_flight_counts) - 1):
            return False
        # The first step of a full pipeline after a drain receives no tied weights of the first
        # stage, which has not updated since: the only step of its kind, not worth capturing.
        for tie in schedule.ties:
            waits = schedule.waiting_tied(tie.owner, tie.holder)
            if not (schedule.accumulated[tie.owner] or waits):
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
        return all(
            held.used
            == executor.stage.weights.of_age(self._age(schedule, microbatch, executor.index))
            for executor in self._eager_executors
            if executor.stage.weights.has_past
            for microbatch, held in executor.stage.in_flight.items()
        )

    def _age(self, schedule: Schedule, microbatch: int, stage: int) -> int:
        """A stage's updates since its forward pass of a micro-batch, in a full pipeline."""
        newest_updated = schedule.injected - 1 - schedule.accumulated[stage]
        return max(0, (newest_updated - microbatch) // self._accumulate + 1)

    def _matches(self, messages: Messages, batch: StepInputs) -> bool:
        if self._inputs is None or not self._inputs.matches(batch.local):
            return False
        return all(
            self._transport.matches(route, message)
            for route, queue in messages.items()
            for message in queue
        )

    def _allocate(self, messages: Messages, batch: StepInputs) -> None:
        self._inputs = StaticBuffers(empty_on(self._flags.device, batch.local.value))
        for route, queue in messages.items():
            _, target, kind = route
            if kind is MessageKind.DY:
                self._transport.open(route, queue[0], self._waiting_counts[target])
        self._open_tied_routes(messages)

    def _large_stages(self, batch: StepInputs) -> set[int]:
        """Stages with tensors so large that each of their kernels fills the GPU."""
        kind, value = self.executors[0].program.inputs[0].type, batch.local.leaves[0]
        dim = None if kind is None else kind.batch_dim
        if dim is None or not isinstance(value, Tensor) or value.ndim <= dim:
            return set()
        samples = value.shape[dim]
        return {
            executor.index
            for executor in self.executors
            if largest_tensor(executor.program.forward, samples) > SMALL
        }

    def _open_tied_routes(self, messages: Messages) -> None:
        for source, target, kind in self._boundary.tied_here:
            route, holder = (source, target, kind), self._by_stage[max(source, target)]
            if kind is MessageKind.TIED_WEIGHT:
                names = holder.tied_owners[source]
                values = {name: holder.stage.parameters[name].detach() for name in names}
                self._transport.open(route, Message(0, values), 1)
                continue
            late = self._windows[target] - self._windows[source]
            if late:  # else they are sent and received in one step
                # The holder is ahead of the owner: it has sent gradients, or accumulated some.
                flag = self._flags[:1] if self._has_flags else None
                own = holder.tied_gradients(target, dict(holder.stage.gradients)).flagged(flag)
                like = next(iter(messages[route]), own)
                ends = torch.zeros(2, 1, dtype=torch.int64, device=self._flags.device)
                slots = 1 + math.ceil(late / self._accumulate)
                self._transport.rings[route] = RingBuffer(like.payload, slots, *ends)

    def _load(self, messages: Messages, schedule: Schedule) -> None:
        for route, queue in messages.items():
            for message in queue:
                self._transport.load(route, message)
        for executor in self._eager_executors:
            if gradients := executor.stage.gradients:
                self._gradient_buffers(executor.index, gradients).copy_(gradients)
        for position, stage in enumerate(self._ring_stages):
            assert stage.ring is not None
            stage.ring.newest, stage.ring.oldest = self._ends[:, position : position + 1]
        newest = [[schedule.injected], [schedule.injected + 1]]
        self._ends.copy_(torch.tensor(newest, device=self._ends.device) % self._slot_counts)
        for (source, target, _), ring in self._transport.rings.items():
            ring.newest.fill_(schedule.updates[source] % ring.count)
            ring.oldest.fill_(schedule.updates[target] % ring.count)
        contributed = [float(executor.contributed) for executor in self._eager_executors]
        self._counts.copy_(torch.tensor(contributed))
        for eager, captured in zip(self._eager_executors, self.executors, strict=True):
            eager.stage.in_flight.clear()
            eager.stage.gradients, eager.contributed = {}, 0
            captured.updater.count_on_device()
        self._versions = None
        self.is_active = True

    def hold_fixed(self) -> None:
        """Let `is_outdated` tell what changes from now on of what captured steps hold fixed."""
        watched = [each for executor in self.executors for each in executor.stage.watched]
        self._memory = TreeSnapshot(watched, (Kind.MEMORY,))
        self._settings = FixedSettings([executor.updater for executor in self.executors])

    def _gradient_buffers(self, stage: int, gradients: Mapping[str, Tensor]) -> StaticBuffers:
        if stage not in self._gradients or not self._gradients[stage].matches(dict(gradients)):
            self._gradients[stage] = StaticBuffers(dict(gradients))
        return self._gradients[stage]

    def leave(self, schedule: Schedule, transport: Transport) -> None:
        """Hand what is in flight back to the executors; waits for the device."""
        if not self.is_active:
            return
        counts = self._counts.tolist()
        for eager, count in zip(self._eager_executors, counts, strict=True):
            stage, index = eager.stage, eager.index
            for microbatch in schedule.outstanding[index]:
                assert stage.ring is not None
                age = self._age(schedule, microbatch, index)
                stage.hold(microbatch, stage.ring.value(microbatch), age)
            if accumulated := schedule.accumulated[index]:
                eager.contributed = int(count) if self._has_flags else accumulated
                stage.gradients = dict(self._gradients[index].value) if eager.contributed else {}
        for route in self._transport.routes:
            indices = self._waiting_indices(schedule, route)
            for message in self._transport.waiting(route, indices):
                # Copies: stages pass parts of what they receive on, and the buffers are used again.
                values, gradients = clone_tree((message.values, message.gradients))
                message = replace(message, values=values, gradients=gradients)
                transport.send(route, message.resolved())
        self._reports.submit(self._flag_rows)
        self.is_active = False

    def _waiting_indices(self, schedule: Schedule, route: Route) -> Sequence[int]:
        """The micro-batches, or updates, whose messages wait at the end of a route."""
        source, target, kind = route
        if kind is not MessageKind.DY:
            return schedule.waiting_tied(source, target)
        return schedule.outstanding[target][: self._waiting_counts[target]]

    def clear(self) -> None:
        """Free all buffers and captured steps: shapes, or the trainer's tensors, have changed."""
        self.is_active = False
        self._replay.clear()
        self._reset()

    def accepts(self, batch: StepInputs) -> bool:
        """Can the next step be run here, as far as its micro-batch goes?"""
        matches = self._inputs is not None and self._inputs.matches(batch.local)
        return self.is_active and matches and self._boundary.matches(batch)

    @property
    def is_outdated(self) -> bool:
        """Has something changed that captured steps hold fixed?"""
        if self._settings is None or self._memory is None:
            return False
        return self._settings.have_changed() or self._memory.first_change() is not None


def _steps_at_once(device: torch.device) -> int:
    """Of how many steps the host reads the flags by one copy.

    On a GPU to copy them, and to wait for the copy, takes it about as long as to launch a step.
    """
    return 4 if device.type == "cuda" else 1


def missing_memory(messages: Messages, snapshots: int, device: torch.device) -> str | None:
    """Why captured steps would not fit into the device's memory; None if they do.

    They need copies of messages that wait, and twice what one step allocates for itself: in the
    ordinary pool during the warm-up, and in the pool of the graphs.

    Args:
        snapshots: Bytes that updates copy to be able to restore them.
    """
    if device.type != "cuda":
        return None
    allocated = torch.cuda.memory_allocated(device)
    transient = torch.cuda.max_memory_allocated(device) - allocated
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - allocated
    payloads = [message.payload for queue in messages.values() for message in queue]
    tensors = (leaf for leaf in pytree.tree_leaves(payloads) if isinstance(leaf, Tensor))
    copies = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    need = copies + 2 * (transient + snapshots)
    if need <= free:
        return None
    return f"they need about {format_size(need)} more, but {format_size(free)} are free"
