"""Steps of a full pipeline over static buffers, so that they can be captured and replayed.

Once the pipeline is full every step performs the same actions. Whatever outlives a step then lies
in static buffers:

    entering micro-batch --> inputs ---+          +--> result: loss and output
    activations (ring buffers) --------+-- step --+--> activations of the entering micro-batch
    messages that wait for a stage ----+          +--> messages for the next step
    accumulated gradients -------------+          +--> accumulated gradients, flags, counts

How they are filled when captured steps begin, and what becomes of them, is in `static_state`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from revcompile.errors import NonFiniteError
from revcompile.ir.coupling_ops import mix
from revcompile.kernels.repeatable import CUDNN_BENCHMARK
from revcompile.runtime.executor.captured.boundary import StepInputs
from revcompile.runtime.executor.captured.graphs import (
    CaptureUnsupported,
    Pass,
    Section,
)
from revcompile.runtime.executor.captured.stages import CapturedStageExecutor
from revcompile.runtime.executor.captured.static_state import StaticState
from revcompile.runtime.executor.fingerprints import Fingerprint
from revcompile.runtime.executor.transport import Route, Transport
from revcompile.runtime.stage.static_buffers import StaticBuffers, when_copied
from revcompile.runtime.stage.tensors import clone_tree
from revcompile.runtime.stage.weights import version
from revcompile.schedule import Action, Schedule


class StaticPipeline(StaticState):
    """Steps of the stages of one process; see `StaticState` for the arguments."""

    def step(
        self,
        schedule: Schedule,
        transport: Transport,
        batch: StepInputs,
        fingerprint: Fingerprint | None = None,
    ) -> None:
        """The step in which a micro-batch enters. The loss head gets its loss and output.

        Args:
            batch: What it is given.
            fingerprint: Of its data, for the next rank.

        Raises:
            CaptureUnsupported: The step cannot be captured; nothing has changed.
        """
        assert self._inputs is not None
        entering, accumulated = schedule.injected, schedule.accumulated
        due = {stage: entering - self._windows[stage] + 1 for stage in self._stages}
        before_forward = self._boundary.before_forward(schedule)
        before_backward = self._boundary.before_backward(schedule, due[self._boundary.last])
        received = [bool(schedule.waiting_tied(tie.owner, tie.holder)) for tie in self._held_ties]
        kind = (accumulated, entering % self._period, *received)
        is_replay = self.is_replaying = self._replay.is_captured(kind)
        updating = [
            executor
            for stage, executor in self._by_stage.items()
            if executor.average and schedule.is_updating(stage)
        ]
        self._boundary.buffer_key = entering % self._period
        self._follow_host()
        try:
            planned = self._replay.plan(
                kind,
                lambda: self._sections(schedule, due, before_forward, before_backward, updating),
                lambda: self._random_keys(entering, due),
            )
        except CaptureUnsupported:
            self._clear_executors()
            if self._streams is not None:
                self._streams.clear()
            raise
        self._boundary.wait_sent()
        self._inputs.copy_(batch.local)
        copied = when_copied(batch.local.leaves, self._flags.device)
        self._boundary.receive(transport, before_forward, batch)
        planned[0]()
        if self._boundary.has_next:
            self._boundary.send_y(transport, entering, fingerprint)
            self._boundary.receive(transport, before_backward)
            planned[1]()
        self._boundary.send_dx(transport, due[self._boundary.first])
        if updating:
            for executor in updating:
                assert executor.average is not None
                executor.average.reduce()
            planned[-1]()
        self._boundary.send_tied(transport, schedule)
        if self._is_continuous:
            schedule.advance()
        else:
            schedule.inject()
        if not is_replay:
            for executor in self.executors:
                executor.stage.cast_weights.mark_fresh()
        for stage, executor in self._by_stage.items():
            if accumulated[stage] + 1 == self._accumulate:
                executor.updater.advance()
        if self._has_flags:
            if self._boundary.has_next:
                due[self._boundary.last + 1] = due[self._boundary.last]
            self._reports.stepped(self._flag_rows, entering % len(self._flag_rows), due)
        if self._loss is not None and self._output is not None:
            head = self._trainers_head
            head.losses[entering], head.scale = clone_tree(self._loss.value)
            head.outputs[entering] = clone_tree(self._output.value)
        if copied is not None:
            copied.synchronize()

    def _follow_host(self) -> None:
        """Copy weights and learning rates again that were written to since the last step."""
        versions = list(map(version, self._cast_weights))
        if versions != self._versions:
            self._versions = versions
            for executor in self.executors:
                executor.stage.cast_weights.refresh_if_changed()
        for executor in self.executors:
            executor.updater.prepare()

    def _sections(
        self,
        schedule: Schedule,
        due: Mapping[int, int],
        before_forward: Mapping[Route, int],
        before_backward: Mapping[Route, int],
        updating: Sequence[CapturedStageExecutor],
    ) -> list[Section]:
        """The parts of a step between messages to and from other ranks.

        Args:
            schedule: Before the step.
            due: By stage, the micro-batch of its backward pass.
            before_forward: The messages that forward passes need, and their numbers.
            before_backward: Those that backward passes and updates need.
            updating: Those that average their gradients with their replicas before they update.
        """
        entering = schedule.injected
        rest: list[deque[Action]] = []

        def forward() -> None:
            with self._cudnn_benchmark():
                self._load_inputs(schedule)
                self._transport.queues |= self._boundary.queues(before_forward)
                if self._has_flags:
                    self._statistics.snapshot()
                # A step that turns out not to be capturable must not advance the schedule.
                rest[:] = self._scheduler.forward(schedule.copy().inject())

        def backward() -> None:
            with self._cudnn_benchmark():
                if self._streams is not None and self._boundary.has_next:
                    self._streams.after_all_forward(self._stages)
                self._load_executors(schedule, due)
                self._transport.queues |= self._boundary.queues(before_backward)
                self._scheduler.finish(rest, self._is_continuous, may_stop=bool(updating))
                if self._streams is not None:
                    self._streams.join()
                if self._has_flags:
                    self._statistics.restore_if(torch.cat([e.restored for e in self.executors]))
                for executor in updating:
                    executor.begin_average()
                if not updating:
                    self._store_results(entering)

        def both() -> None:
            forward()
            backward()

        def update() -> None:
            for executor in updating:
                executor.is_reduced = True
            self._scheduler.finish(rest)
            self._store_results(entering)

        sections = [forward, backward] if self._boundary.has_next else [both]
        return [*sections, update] if updating else sections

    def failures(self, wait: bool = False) -> list[NonFiniteError]:
        """Bad micro-batches that have become known since the last call."""
        return self._reports.collect(wait)

    @contextmanager
    def _cudnn_benchmark(self) -> Iterator[None]:
        """Where programs are compiled, choose convolution algorithms by trial: shapes are fixed."""
        if not self._is_fused:
            yield
            return
        CUDNN_BENCHMARK.want(True)
        try:
            yield
        finally:
            CUDNN_BENCHMARK.release(True)

    def _random_keys(self, entering: int, due: Mapping[int, int]) -> dict[Pass, int]:
        return {
            (executor.index, microbatch - entering): mix(executor.stage.seed, microbatch)
            for executor in self.executors
            for microbatch in (entering, due[executor.index])
        }

    def _load_inputs(self, schedule: Schedule) -> None:
        """Put the static buffers where stages look for inputs, target and messages."""
        assert self._inputs is not None
        entering = schedule.injected
        for route in self._transport.routes:
            self._transport.begin(route, self._waiting_indices(schedule, route))
        values, target = self._inputs.value
        if values is not None:
            self.executors[0].inputs[entering] = values
        if self._is_last:
            self._loss_head.targets[entering] = target
        for executor in self.executors:
            executor.prepare_stage(captured=True)

    def _load_executors(self, schedule: Schedule, due: Mapping[int, int]) -> None:
        """Put the static buffers where backward passes look for weights and gradients.

        Args:
            schedule: Before the step.
            due: By stage, the micro-batch of its backward pass.
        """
        for position, (index, executor) in enumerate(self._by_stage.items()):
            executor.age = self._age(schedule, due[index], index)
            if schedule.accumulated[index]:
                executor.stage.gradients = dict(self._gradients[index].value)
            executor.count = self._counts[position]

    def _store_results(self, entering: int) -> None:
        """Copy what outlives the step to static buffers, and clear the executors."""
        if self._has_flags:
            torch.cat(self._current_flags(), out=self._flags)
            self._flag_rows.index_copy_(0, self._ends[0, -1:], self._flags.unsqueeze(0))
        torch.remainder(self._ends + 1, self._slot_counts, out=self._ends)
        for index, executor in self._by_stage.items():
            if gradients := executor.stage.gradients:
                self._gradient_buffers(index, gradients).copy_(gradients)
        if self._is_last:
            head = self._loss_head
            loss, output = (head.losses[entering], head.scale), head.outputs[entering]
            if self._loss is None or self._output is None:
                self._loss, self._output = StaticBuffers(loss), StaticBuffers(output)
            self._loss.copy_(loss)
            self._output.copy_(output)
            self._trainers_head.add(loss[0])
        self._counts.copy_(torch.stack([executor.count for executor in self.executors]))
        self._clear_executors()

    def _clear_executors(self) -> None:
        loss_head = self._loss_head
        for queue in (loss_head.targets, loss_head.losses, loss_head.outputs):
            queue.clear()
        self._transport.queues.clear()
        for position, executor in enumerate(self.executors):
            executor.clear()
            executor.prepare_stage(captured=False)
            executor.is_reduced = False
            executor.updater.found_inf = None
            executor.flag = executor.restored = self._flags[position : position + 1]
            executor.count = self._counts[position]
