"""Rounds of a full pipeline at fixed places: entered from, and left to, the ordinary way.

Once the pipeline is full every round has the same actions, so a round can be recorded once and
repeated. Everything that outlives a round then lies in boxes: the micro-batch that enters, what
stages keep, messages that wait, gathered gradients. `enter` moves what is in flight into the boxes,
`leave` hands it back; all else (filling, draining, odd batches, checkpoints) knows nothing of this.
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
from revcompile.ir.stage_ops import mix
from revcompile.runtime.executor.captured.found_inf import NonFiniteReports
from revcompile.runtime.executor.captured.fusion import Fused
from revcompile.runtime.executor.captured.graphs import CaptureUnsupported, Keys, Recorder
from revcompile.runtime.executor.captured.in_flight import (
    InFlightState,
    held_by,
    in_flight,
    missing_room,
    on_device,
)
from revcompile.runtime.executor.captured.ring_buffers import Ring, RingBuffers, SideStream
from revcompile.runtime.executor.captured.stages import RecordedActor
from revcompile.runtime.executor.captured.static_buffers import (
    InPlaceMessages,
    Recycled,
    StaticBuffers,
    StaticTransport,
    apart,
    contents,
    fill_all,
)
from revcompile.runtime.executor.captured.streams import Lanes
from revcompile.runtime.executor.captured.weight_stash import Versions, age
from revcompile.runtime.executor.stage_executor import LocalScheduler, StageExecutor
from revcompile.runtime.executor.transport import InProcess, Message, MessageKind
from revcompile.runtime.stage.loss_head import Objective
from revcompile.schedule import Action, Order, Schedule, delay, window

__all__ = ["Engine", "Outcome"]

Lists = Sequence[Sequence[Action]]


@dataclass(frozen=True)
class Outcome:
    """What a round gives: safe from the rounds after it."""

    loss: Tensor
    output: Any


class Engine:
    """The rounds of one trainer, all stages in one process."""

    def __init__(
        self,
        executors: Sequence[StageExecutor],
        objective: Objective,
        schedule: Schedule,
        recorder: Recorder,
        *,
        check_finite: bool = True,
        fused: Fused | None = None,
    ) -> None:
        self._ordinary = list(executors)
        self._recorder = recorder
        self._check_finite, self._is_fused = check_finite, fused is not None
        method, count = schedule.method, schedule.stages
        self._accumulate = schedule.accumulate
        self._delays = [delay(method, count, j, schedule.accumulate) for j in range(count)]
        self._windows = [window(method, count, j, schedule.accumulate) for j in range(count)]
        self._post = StaticTransport(count)
        self._ahead = method.order is Order.CONTINUOUS
        device = executors[0].stage._device()
        beside = self._ahead and device.type == "cuda"
        self._lanes = Lanes(device, count - 1) if beside else None
        self._objective = copy.copy(objective)
        self._objective.targets, self._objective.losses = {}, {}
        self._objective.outputs, self._objective.check_finite = {}, False
        self.executors = [
            RecordedActor(
                executor,
                self._post,
                self._objective if executor.objective is not None else None,
                accumulate=schedule.accumulate,
                check_finite=check_finite,
                fused=fused,
                lanes=self._lanes,
            )
            for executor in executors
        ]
        self._worker = LocalScheduler(self.executors)
        waiting = [a - b for a, b in zip(self._windows, self._windows[1:], strict=False)]
        self._waiting = waiting
        """How many messages wait for each stage between rounds."""
        self._alternates = self._ahead and set(waiting) <= {1}
        self._side = SideStream(device) if beside and self._alternates else None
        self._period = math.lcm(1, *(n for n in waiting if n))
        self._alarms = NonFiniteReports()
        self._losses, self._outputs = Recycled(), Recycled()
        self.active = False
        self._reset()

    def _reset(self) -> None:
        self._inputs: StaticBuffers | None = None
        self._rings: dict[int, Ring] = {}
        self._belt = RingBuffers(self._rings, self._side)
        self._fresh: dict[Hashable, dict[int, Any]] = {}
        """For every kind of round: where it leaves what stages keep of the newest micro-batch."""
        self._leavings: dict[Hashable, InPlaceMessages] = {}
        """For every kind of round that does so: where it leaves messages."""
        self._left: InPlaceMessages | None = None
        self._turn = 1
        self._sums: dict[int, StaticBuffers] = {}
        self._result: StaticBuffers | None = None
        self._flags = torch.cat([executor.flag for executor in self.executors])
        self._counts = torch.stack([executor.count for executor in self.executors])
        self._settings: list[tuple[Any, ...]] = []
        self._post.boxes.clear()

    # -- coming and going ---------------------------------------------------------------------

    def enter(self, schedule: Schedule, transport: InProcess, batch: Any, alike: int) -> bool:
        """Move what is in flight into the boxes; False if the pipeline is not full of its like.

        `alike`: how many micro-batches of this shape have entered last.
        `CaptureUnsupported`: nothing has happened.
        """
        if not self._steady(schedule, alike) or not all(a.updater.started for a in self.executors):
            return False
        held = held_by(self._ordinary, transport, self._flags[:1] if self._check_finite else None)
        if held is None or not self._of_age(schedule):
            return False
        if not self._fits(held, batch) or self.is_outdated:
            self.forget()
            # The last stage's update may run beside another one.
            held.set_aside = sum(sorted(a.updater.set_aside for a in self.executors)[-2:])
            if why := missing_room(held, self._flags.device):
                raise CaptureUnsupported(why)
            self._make_room(held, batch)
        self._take(schedule, held)
        transport.queues.clear()
        return True

    def _steady(self, schedule: Schedule, alike: int) -> bool:
        lengths = [len(found) + 1 for found in schedule.outstanding]
        return lengths == self._windows and alike >= max(lengths) - 1

    def _of_age(self, schedule: Schedule) -> bool:
        """Are stashed weights as old as they will be from here on? Not right after a start."""
        return all(
            {
                m: self._age(m, schedule.injected, schedule.accumulated, executor.index)
                for m in found
            }
            == found
            for executor in self._ordinary
            if executor.stage.is_stashing and (found := executor.stage.ages())
        )

    def _age(self, microbatch: int, entering: int, accumulated: Sequence[int], stage: int) -> int:
        return age(microbatch, entering, accumulated[stage], self._accumulate)

    def _fits(self, held: InFlightState, batch: Any) -> bool:
        if self._inputs is None or not self._inputs.fits(batch):
            return False
        return all(
            self._rings[stage].slot(0).fits(kept)
            for stage, found in held.kept.items()
            for kept in found.values()
        ) and all(
            self._post.box(key, message.index).fits(contents(message))
            for key, messages in held.mail.items()
            for message in messages
        )

    def _make_room(self, held: InFlightState, batch: Any) -> None:
        self._inputs = StaticBuffers(on_device(self._flags.device, batch))
        for stage, found in held.kept.items():
            like, turns = next(iter(found.values())), 1 if self._side is None else 2
            self._rings[stage] = Ring(like, self._windows[stage] - 1, turns)
        for key, messages in held.mail.items():
            like = contents(messages[0])
            self._post.boxes[key] = [StaticBuffers(like) for _ in range(self._waiting[key[1]])]
        for index in held.versions:
            executor = self.executors[index]
            executor.versions = Versions(executor.stage.parameters, self._delays[index])

    def _take(self, schedule: Schedule, held: InFlightState) -> None:
        filled = [
            (self._rings[stage].slot(microbatch), kept)
            for stage, found in held.kept.items()
            for microbatch, kept in found.items()
        ]
        for key, messages in held.mail.items():
            filled += [(self._post.box(key, m.index), contents(m)) for m in messages]
        for executor in self._ordinary:
            if executor.stage.gradients:
                self._sum_of(executor.index, executor.stage.gradients)
                filled.append((self._sums[executor.index], executor.stage.gradients))
        fill_all(filled)
        for index, versions in held.versions.items():
            for updates, weights in versions.items():
                if (kept := self.executors[index].versions) is not None:
                    kept.take(updates, weights)
        self._counts.copy_(
            torch.tensor([float(executor.contributed) for executor in self._ordinary])
        )
        for executor, mine in zip(self._ordinary, self.executors, strict=True):
            executor.stage.in_flight.clear()
            executor.stage.gradients, executor.contributed = {}, 0
            mine.updater.enter()
        self._settings = self._current()
        self._left, self._turn = None, 0 if self._alternates else 1
        self.active = True

    def _sum_of(self, stage: int, gradients: Mapping[str, Tensor]) -> StaticBuffers:
        if stage not in self._sums or not self._sums[stage].fits(dict(gradients)):
            self._sums[stage] = StaticBuffers(dict(gradients))
        return self._sums[stage]

    def leave(self, schedule: Schedule, transport: InProcess) -> None:
        """What is in flight goes back to the ordinary way; waits for the device."""
        if not self.active:
            return
        self._belt.stop()
        counts = self._counts.tolist()
        for executor, mine in zip(self._ordinary, self.executors, strict=True):
            mine.updater.leave()
            stage, index = executor.stage, executor.index
            stage.updated()
            weights: dict[int, Any] = {0: stage.stashed_weights()}
            for microbatch in schedule.outstanding[index]:
                kept = self._rings[index].slot(microbatch).value
                ago = self._age(microbatch, schedule.injected, schedule.accumulated, index)
                if ago not in weights and mine.versions is not None:
                    weights[ago] = mine.versions.given(ago)
                stage.in_flight[microbatch] = in_flight(kept, weights.get(ago))
            if schedule.accumulated[index]:
                contributed = schedule.accumulated[index]
                executor.contributed = int(counts[index]) if self._check_finite else contributed
                stage.gradients = dict(self._sums[index].value) if executor.contributed else {}
        for key in self._post.boxes:
            indices = self._pending(schedule.outstanding, key)
            for found in self._post.pending(key, indices, self._left):
                void = found.bad is not None and bool(found.bad)
                kept = Message(found.index, void=True) if void else replace(found, bad=None)
                transport.send(*key, kept)
        self.active = False

    def _pending(
        self, outstanding: Sequence[Sequence[int]], key: tuple[int, int, MessageKind]
    ) -> Sequence[int]:
        """The micro-batches whose gradients wait for a stage."""
        return outstanding[key[1]][: self._waiting[key[1]]]

    def forget(self) -> None:
        """Nothing here is of use any more: shapes or tensors are others now."""
        self.active = False
        self._belt.stop()
        for executor in self.executors:
            executor.updater.leave()
        self._recorder.forget()
        self._reset()

    # -- rounds -------------------------------------------------------------------------------

    def takes(self, batch: Any) -> bool:
        """Can the next round be run here, as things are?"""
        fits = self._inputs is not None and self._inputs.fits(batch)
        return self.active and fits and not self.is_outdated

    @property
    def is_outdated(self) -> bool:
        """Has somebody changed optimizers' settings (but learning rates) since the last entry?"""
        return bool(self._settings) and self._settings != self._current()

    def _current(self) -> list[tuple[Any, ...]]:
        return [executor.updater.settings() for executor in self.executors]

    def step(self, schedule: Schedule, batch: Any) -> Outcome:
        """The round in which this micro-batch enters; `CaptureUnsupported`: nothing happened."""
        assert self._inputs is not None
        entering, accumulated = schedule.injected, schedule.accumulated
        due = {j: entering - w + 1 for j, w in enumerate(self._windows)}
        outstanding = schedule.outstanding
        kind = (accumulated, entering % self._period, self._turn)
        trial = schedule if self._recorder.is_known(kind) else schedule.copy()
        lists = trial.inject()
        self._inputs.fill(batch)
        self._belt.bring(entering, self._turn)
        for executor in self.executors:
            executor.casts.refresh_if_changed()
            executor.updater.prepare()

        def body() -> None:
            with self._tuned():
                self._install(entering, due, outstanding, accumulated)
                self._worker.finish(self._worker.forward(lists), ahead=self._ahead)
                if self._lanes is not None:
                    self._lanes.join()
                self._collect(entering, kind)

        try:
            self._recorder.run(kind, body, self._keys(entering, due))
        except CaptureUnsupported:
            self._clear()
            if self._lanes is not None:
                self._lanes.forget()
            raise
        if trial is not schedule:
            schedule.inject()
            for executor in self.executors:
                executor.casts.mark_fresh()
        self._belt.take(entering, self._turn, self._fresh[kind])
        if self._alternates:
            self._left, self._turn = self._leavings.get(kind), 1 - self._turn
        return self._finished(due, accumulated, schedule)

    @contextmanager
    def _tuned(self) -> Iterator[None]:
        """Where rounds are compiled, convolutions are tried out too: shapes stay as they are."""
        before = torch.backends.cudnn.benchmark
        torch.backends.cudnn.benchmark = before or self._is_fused
        try:
            yield
        finally:
            torch.backends.cudnn.benchmark = before

    def _finished(
        self, due: Mapping[int, int], accumulated: Sequence[int], schedule: Schedule
    ) -> Outcome:
        for executor, gathered in zip(self.executors, accumulated, strict=True):
            if gathered + 1 == schedule.accumulate:
                executor.updater.advance()
        if self._check_finite:
            self._alarms.note(self._flags, due)
        assert self._result is not None
        loss, output = self._result.value
        return Outcome(self._losses.copy(loss), self._outputs.copy(output))

    def failures(self, everything: bool = False) -> list[NonFiniteError]:
        """Bad micro-batches that have become known."""
        return self._alarms.arrived(everything)

    def _keys(self, entering: int, due: Mapping[int, int]) -> Keys:
        return {
            (executor.index, microbatch - entering): mix(executor.stage.seed, microbatch)
            for executor in self.executors
            for microbatch in (entering, due[executor.index])
        }

    def _install(
        self,
        entering: int,
        due: Mapping[int, int],
        outstanding: Sequence[Sequence[int]],
        accumulated: Sequence[int],
    ) -> None:
        """Everything as an executor expects to find it."""
        assert self._inputs is not None
        values, target = self._inputs.value
        self.executors[0].inputs[entering] = values
        self._objective.targets[entering] = target
        for index, executor in enumerate(self.executors):
            stage = executor.stage
            if index in self._rings:
                kept = self._rings[index].due(self._turn).value
                ago = self._age(due[index], entering, accumulated, index)
                versions = executor.versions
                weights = versions.ago(ago) if versions is not None else None
                stage.in_flight[due[index]] = in_flight(kept, weights)
            if accumulated[index]:
                stage.gradients = dict(self._sums[index].value)
            executor.count = self._counts[index]
            executor.use(True)
        for key in self._post.boxes:
            waiting = self._post.pending(key, self._pending(outstanding, key), self._left)
            self._post.queues[key] = deque(waiting)
        self._post.leaving = self._leaving() if self._turn == 0 else None

    def _leaving(self) -> InPlaceMessages:
        assert self._inputs is not None
        dues = [box for ring in self._rings.values() for box in ring.dues]
        return InPlaceMessages([*(t for box in dues for t in box.tensors), *self._inputs.tensors])

    def _collect(self, entering: int, kind: Hashable) -> None:
        """What outlives the round goes where it is kept; nothing else is left behind."""
        self._fresh[kind] = {}
        if self._post.leaving is not None:
            self._leavings[kind] = self._post.leaving
        # The next round's input may be on its way while this is still carried to its ring.
        borrowed = self._inputs.tensors if self._side is not None and self._inputs else ()
        for index in self._rings:
            kept = self.executors[index].stage.in_flight[entering].kept
            self._fresh[kind][index] = apart(kept, borrowed)
        for index, executor in enumerate(self.executors):
            if executor.stage.gradients:
                self._sum_of(index, executor.stage.gradients).fill(executor.stage.gradients)
        found = self._objective.losses[entering], self._objective.outputs[entering]
        if self._result is None:
            self._result = StaticBuffers(found)
        self._result.fill(found)
        self._flags.copy_(torch.cat([executor.flag for executor in self.executors]))
        self._counts.copy_(torch.stack([executor.count for executor in self.executors]))
        self._clear()

    def _clear(self) -> None:
        objective = self._objective
        for found in (objective.targets, objective.losses, objective.outputs, self._post.queues):
            found.clear()
        for executor in self.executors:
            stage = executor.stage
            stage.in_flight.clear()
            stage.gradients = {}
            executor.use(False)
            executor.gradients, executor.contributed, executor.updater.bad = None, 0, None
            executor.flag = self._flags[executor.index : executor.index + 1]
            executor.count = self._counts[executor.index]
            for mail in (executor.inputs, executor.outputs, executor.incoming, executor.outgoing):
                mail.clear()
