"""Steps of a full pipeline, which are called, or captured and replayed.

Once the pipeline is full, every step performs the same actions. Whatever outlives a step is in
static buffers from the first micro-batch on, in captured steps and in steps run action by action:

    entering micro-batch --> inputs ---+          +--> result: loss and output
    activations (`Stage.ring`) --------+          +--> activations of the entering micro-batch
    messages (`Transport.slots`) ------+-- step --+--> messages for the next step
    gradients (`Stage.sums`) ----------+          +--> gradients, counts, flags
    stashed weights, optimizer states -+          +--> the same, updated

So a step of one kind may follow a step of the other. The host's bookkeeping (which micro-batches
are in flight) changes in the same way in every step, and is done after it: a replay runs no Python.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from revcompile.ir.coupling_ops import mix
from revcompile.ir.snapshot import Kind, TreeSnapshot
from revcompile.kernels.repeatable import CUDNN_BENCHMARK
from revcompile.runtime.executor.boundary import Boundary, StepInputs
from revcompile.runtime.executor.executor import StageExecutor
from revcompile.runtime.executor.flags import NonFiniteReports, RunningStatistics, steps_at_once
from revcompile.runtime.executor.graphs import (
    CaptureUnsupported,
    EagerReplay,
    Pass,
    Section,
    SlotNumbers,
    missing_memory,
)
from revcompile.runtime.executor.messages import Average, Message, MessageKind
from revcompile.runtime.executor.scheduler import LocalScheduler
from revcompile.runtime.executor.streams import StepStreams, large_stages
from revcompile.runtime.stage.loss import LossHead
from revcompile.runtime.stage.settings import Fuse
from revcompile.runtime.stage.slots import StaticBuffers, empty_on, free_cached, move, when_copied
from revcompile.runtime.stage.update import FixedSettings
from revcompile.schedule import Action, Order, Schedule


class CapturedSteps:
    """Runs captured steps of one process's stages, which are consecutive.

    Args:
        replay: Calls steps, or captures and replays them.
        reports: Receives the flags of steps.
        fuse: If given, captured steps run the programs that this pass returns.
    """

    is_active = False
    """Whether the last step was run by this object."""
    is_replaying = False
    """Whether the last step run by this object was a replay."""
    _is_in_slots = True
    """Whether everything in flight is in slots after the last step."""
    is_fused = False
    """Whether programs are fused for the present settings of layers."""

    def __init__(
        self,
        executors: Sequence[StageExecutor],
        loss_head: LossHead,
        schedule: Schedule,
        replay: EagerReplay,
        reports: NonFiniteReports,
        *,
        fuse: Fuse | None = None,
    ) -> None:
        self.executors, self._loss_head, self._replay = list(executors), loss_head, replay
        self._transport = executors[0].transport
        self._reports, self._fuse = reports, fuse
        self._by_stage = {executor.index: executor for executor in executors}
        self._stages = list(self._by_stage)
        self._boundary = Boundary(self._transport, self._stages, schedule.ties)
        self._held_ties = [tie for tie in schedule.ties if tie.holder in self._stages]
        self._windows = schedule.windows
        self._is_continuous = schedule.method.order is Order.CONTINUOUS
        waiting = [
            slots.count
            for (_, _, kind), slots in self._transport.slots.items()
            if kind is MessageKind.DY
        ]
        # A message's slot depends on its micro-batch. After this many steps all slots are the same
        # again, and so is the kind of step. Messages to other ranks have two buffers: a step need
        # not wait until the messages of the step before are sent.
        self._period = math.lcm(2 if len(self._stages) < schedule.stages else 1, *waiting)
        device = self._device = executors[0].stage.device
        self._streams: StepStreams | None = None
        self._scheduler = LocalScheduler(self.executors)
        # Where graphs are kept in flight, statistics move in forward: `StageExecutor` handles them.
        self._statistics = RunningStatistics(
            [list if e.program.keeps_graphs_in_flight else e.stage.statistics for e in executors]
        )
        flags = len(self._stages) + self._boundary.has_next
        self._flag_rows = torch.zeros(
            (steps_at_once(device), flags), dtype=torch.float32, device=device
        )
        """The flags of the latest steps, one row per step, until the host copies them."""
        self._numbers = SlotNumbers(executors, self._transport, device)
        self._schedule = schedule
        self._ends = ExitStack()
        """Ends a captured step, whose sections are captured one after the other."""
        self.clear()

    def clear(self) -> None:
        """Free all captured steps: shapes or the trainer's tensors have changed, or one failed."""
        self.leave()
        self._replay.clear()
        self._numbers.clear()
        self._boundary.clear()
        self._inputs: StaticBuffers | None = None
        self._result: StaticBuffers | None = None
        """The last step's loss and output."""
        self._fixed: tuple[FixedSettings, TreeSnapshot] | None = None

    # -- whether the next step can be one of these ----------------------------------------------

    def is_ready(self, schedule: Schedule, batch: StepInputs, alike: int) -> bool:
        """Whether a captured step can follow: the pipeline is full, all in slots and of one form.

        Args:
            batch: The micro-batch of the step to come.
            alike: How many of the latest micro-batches had its form. Slots of this process do not
                show that: messages of another form may still be on other ranks.

        Raises:
            CaptureUnsupported: There is not enough memory.
        """
        self._is_in_slots = self._is_full(schedule, alike) and self._follow_slots()
        if not self._is_in_slots:
            return False
        if not all(executor.updater.has_started for executor in self.executors):
            return False
        expected = self._boundary.expected(self._flag_rows[0, :1])
        if expected.void:
            return False
        if not self.accepts(batch, expected):
            self.clear()
            self._allocate(batch, expected)
            self.hold_fixed()
        for executor in self.executors:
            executor.updater.count_on_device()
        return True

    def accepts(self, batch: StepInputs, expected: Message | None = None) -> bool:
        """Whether captured steps can take this micro-batch, and this message of the next rank."""
        if self._inputs is None or not self._is_in_slots:
            return False
        return self._inputs.matches(batch.local) and self._boundary.matches(batch, expected)

    def _is_full(self, schedule: Schedule, alike: int) -> bool:
        in_flight_counts = [len(microbatches) + 1 for microbatches in schedule.outstanding]
        # One of this form must have run action by action, where a failing forward can be undone.
        if in_flight_counts != self._windows or alike < max(1, max(in_flight_counts) - 1):
            return False
        # After a drain, the first step of a full pipeline receives no tied weights from the first
        # stage, which has not updated since. No other step is like it: it is not worth capturing.
        for tie in schedule.ties:
            waits = schedule.waiting_tied(tie.owner, tie.holder)
            if not (schedule.accumulated[tie.owner] or waits):
                return False
        # A micro-batch that was left out in its forward pass is not in flight. If all since the
        # last update were left out, there are no gradients.
        stages = {executor.index: executor.stage for executor in self.executors}
        return all(
            len(stage.in_flight) + 1 == self._windows[index]
            and (stage.gradients or not (stage.sums and schedule.accumulated[index]))
            for index, stage in stages.items()
        )

    def _follow_slots(self) -> bool:
        """Whether everything in flight is in slots, and all slots are allocated.

        If not even the latest value is in a slot, slots are freed: the next one decides their form.
        """
        is_there = True
        for stage in (executor.stage for executor in self.executors):
            held = list(stage.in_flight.values())
            if stage.saves_elsewhere:
                raise CaptureUnsupported(
                    f"stage {stage.program.index} keeps graphs that save more than tensors, as "
                    "attention with dropout does; leave out memory_budget="
                )
            is_there &= stage.is_in_slots
            if held and held[-1].ring is None:
                stage.ring = None
                self.clear()
        for route, slots in self._transport.slots.items():
            waiting = self._transport.queues.get(route) or ()
            # A route has no slots before its first message, but a captured step needs them. A void
            # message was reported already, and a captured step would report it again.
            is_there &= bool(slots.slots)
            is_there &= all(message.is_in_slot and not message.void for message in waiting)
            if waiting and not (waiting[-1].is_in_slot or waiting[-1].void):
                slots.clear()
                self.clear()
        return is_there

    def _allocate(self, batch: StepInputs, expected: Message) -> None:
        # Stages update one after the other: there is one snapshot at a time.
        largest = max(executor.updater.snapshot_bytes for executor in self.executors)
        if why := missing_memory([batch.local.value, expected.payload], largest, self._device):
            raise CaptureUnsupported(why)
        free_cached(self._device)
        for executor in self.executors:
            move(executor.updater.state_tensors)
            move(executor.stage.cast_weights.copies.values())
            if self._fuse is not None and not self.is_fused:
                executor.stage.fuse(self._fuse)
        self.is_fused = True
        self._numbers.follow_rings()
        self._inputs = StaticBuffers(empty_on(self._device, batch.local.value))
        # No side streams with tied parameters: one stream keeps the order of their exchange.
        if self._is_continuous and self._device.type == "cuda" and not self._schedule.ties:
            self._streams = StepStreams(self._device, self._schedule.stages - 1)
            # Autograd differentiates a kept graph on the stream of its forward pass.
            kept = {e.index for e in self.executors if e.program.keeps_graphs_in_flight}
            self._streams.staying |= kept
            if 0 in self._by_stage:
                first = self.executors[0].program.inputs[0].type, batch.local.leaves[0]
                self._streams.staying |= large_stages([e.program for e in self.executors], *first)
        for executor in self.executors:
            executor.streams = self._streams
        self._boundary.allocate(batch, expected, self._by_stage, self._flag_rows[0, :1])

    def hold_fixed(self) -> None:
        """Record what captured steps hold fixed; `is_outdated` compares with this record."""
        watched = [each for executor in self.executors for each in executor.stage.watched]
        settings = FixedSettings(executor.updater for executor in self.executors)
        self._fixed = settings, TreeSnapshot(watched, (Kind.MEMORY,))

    @property
    def is_outdated(self) -> bool:
        """Whether something has changed that captured steps hold fixed."""
        if self._fixed is None:
            return False
        settings, memory = self._fixed
        return settings.have_changed() or memory.first_change() is not None

    def leave(self) -> None:
        """Prepare for a step run action by action: submit flags, and queue the waiting messages."""
        self._ends.close()  # open if a step has failed between two sections
        self._reports.submit(self._flag_rows)
        if self.is_active:
            self._note_messages()
        self.is_active = False

    # -- one step -------------------------------------------------------------------------------

    def step(self, schedule: Schedule, batch: StepInputs) -> None:
        """Run the step in which a micro-batch enters. The loss head gets its loss and output.

        Raises:
            CaptureUnsupported: The step cannot be captured; nothing has changed.
        """
        assert self._inputs is not None
        self._schedule = schedule
        entering, accumulated = schedule.injected, schedule.accumulated
        due = {stage: entering - self._windows[stage] + 1 for stage in self._stages}
        boundary = self._boundary
        before_forward = boundary.before_forward(schedule)
        before_backward = boundary.before_backward(schedule, due[boundary.last])
        received = [len(schedule.waiting_tied(tie.owner, tie.holder)) for tie in self._held_ties]
        ages = [executor.stage.age(due[stage]) for stage, executor in self._by_stage.items()]
        kind = (accumulated, entering % self._period, *received, *ages)
        self.is_replaying = self._replay.is_captured(kind)
        averages = {
            stage: average
            for stage, average in self._transport.averages.items()
            if schedule.is_updating(stage)
        }
        boundary.buffer_key = entering % self._period
        for executor in self.executors:  # the host may have written to weights and rates
            executor.stage.cast_weights.refresh_if_changed()
            executor.updater.follow_rates()
        planned = self._replay.plan(
            kind,
            lambda: self._sections(schedule, due, averages),
            lambda: self._random_keys(entering, due),
        )
        self._numbers.set(schedule, due, entering % len(self._flag_rows))
        boundary.wait_sent()
        self._inputs.copy_(batch.local)
        copied = when_copied(batch.local.leaves, self._device)
        boundary.receive(before_forward)
        planned[0]()
        if boundary.has_next:
            boundary.send(boundary.y, entering)
            boundary.receive(before_backward)
            planned[1]()
        if boundary.has_previous:
            boundary.send(boundary.dx, due[boundary.first])
        if averages:
            for average in averages.values():
                average.reduce()
            planned[-1]()
        boundary.send_tied(schedule)
        self._note(schedule, due, dict(zip(self._held_ties, received, strict=True)))
        self._report(entering, due)
        self.is_active = True
        # In a step that was called, kept values may depend on the data and not fit their slots.
        self._is_in_slots = self.is_replaying or all(e.stage.is_in_slots for e in self.executors)
        if copied is not None:
            copied.synchronize()

    def _note(
        self, schedule: Schedule, due: Mapping[int, int], received: Mapping[Any, int]
    ) -> None:
        """Do the host's bookkeeping for a step that was called or replayed."""
        entering = schedule.injected
        has_updated = {stage: schedule.is_updating(stage) for stage in self._stages}
        if self._is_continuous:
            schedule.advance()
        else:
            schedule.inject()
        for stage, executor in self._by_stage.items():
            tied = sum(count for tie, count in received.items() if tie.holder == stage)
            executor.stepped(entering, due[stage], tied, has_updated[stage])

    def _note_messages(self) -> None:
        """Queue the messages that wait in slots after a step; replays do not need the queues."""
        for (source, target, kind), slots in self._transport.slots.items():
            waiting = self._schedule.waiting_tied(source, target)
            if kind is MessageKind.DY:
                waiting = self._schedule.outstanding[target][: slots.count]
            messages = deque(slots.at(index).message(index) for index in waiting)
            self._transport.queues[source, target, kind] = messages

    def _report(self, entering: int, due: dict[int, int]) -> None:
        """Hand flags over to the reports, and the loss and the output to the loss head."""
        if self._boundary.has_next:
            due[self._boundary.last + 1] = due[self._boundary.last]
        self._reports.stepped(self._flag_rows, entering % len(self._flag_rows), due)
        if self._result is not None:
            self._loss_head.latest = self._result.cloned()

    # -- what is captured -----------------------------------------------------------------------

    def _sections(
        self,
        schedule: Schedule,
        due: Mapping[int, int],
        averages: Mapping[int, Average],
    ) -> list[Section]:
        """The parts of a step between messages to and from other ranks.

        Args:
            averages: By stage, the averages over replicas for stages that update in this step.
        """
        entering = schedule.injected
        rest: list[deque[Action]] = []

        def forward() -> None:
            self._begin()
            assert self._inputs is not None
            if (values := self._inputs.value) is not None:
                self.executors[0].inputs[entering] = values
            self._statistics.snapshot()
            # A step that turns out not to be capturable must not advance the schedule.
            rest[:] = self._scheduler.forward(schedule.copy().inject())

        def backward() -> None:
            if self._streams is not None and self._boundary.has_next:
                self._streams.after_all_forward(self._stages)
            self._scheduler.finish(rest, may_stop=bool(averages))
            if self._streams is not None:
                self._streams.join()
            self._statistics.restore_if(torch.cat([e.updates.flag for e in self.executors]))
            for stage in averages:
                self._by_stage[stage].updates.begin_mean()

        def update() -> None:
            for average in averages.values():
                average.is_reduced = True
            self._scheduler.finish(rest)

        def store() -> None:
            self._store_results()
            self._ends.close()

        parts: list[list[Section]] = [[forward], [backward]]
        if not self._boundary.has_next:
            parts = [[forward, backward]]
        if averages:
            parts.append([update])
        parts[-1].append(store)
        return [self._section(part) for part in parts]

    def _section(self, parts: Sequence[Section]) -> Section:
        def run() -> None:
            if self._fuse is not None:  # shapes are fixed: cuDNN may time its algorithms
                CUDNN_BENCHMARK.want(True)
            self._transport.captured = self._boundary
            try:
                for part in parts:
                    part()
            except BaseException:
                self._ends.close()
                raise
            finally:
                self._transport.captured = None
                if self._fuse is not None:
                    CUDNN_BENCHMARK.release(True)

        return run

    def _begin(self) -> None:
        """Have executors perform a captured step until `_ends` is closed."""
        if self.is_active:
            self._note_messages()
        queues, head = self._transport.queues, self._loss_head
        # Only the queues between stages here: threads may add messages to the others meanwhile.
        here = [route for route in queues if {*route[:2]} <= {*self._stages}]
        waiting = {route: deque(queues[route]) for route in here}
        self._numbers.begin_step()

        def end() -> None:
            self._numbers.end_step()
            queues.update(waiting)
            self._transport.clear_norms()
            head.latest = None

        self._ends.callback(end)
        for executor in self.executors:
            self._ends.callback(executor.begin_captured())
        if self._streams is not None:
            self._ends.callback(self._streams.clear)

    def _random_keys(self, entering: int, due: Mapping[int, int]) -> dict[Pass, int]:
        return {
            (executor.index, microbatch - entering): mix(executor.stage.seed, microbatch)
            for executor in self.executors
            for microbatch in (entering, due[executor.index])
        }

    def _store_results(self) -> None:
        """Copy flags, the loss and the output to static buffers that the host reads."""
        flags = [executor.updates.flag for executor in self.executors]
        if self._boundary.has_next:
            assert self._boundary.flag is not None
            flags.append(self._boundary.flag)
        self._flag_rows.index_copy_(0, self._numbers.row, torch.cat(flags).unsqueeze(0))
        if not self._boundary.has_next:
            head = self._loss_head
            assert head.latest is not None
            if self._result is None:
                self._result = StaticBuffers(head.latest)
            self._result.copy_(head.latest)
            head.add(head.latest[0])
