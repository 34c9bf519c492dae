"""Decides which steps of a trainer run as captured steps, and says why others cannot."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Final

import torch

from revcompile.errors import NonFiniteError, warn
from revcompile.runtime.executor.boundary import StepInputs
from revcompile.runtime.executor.captured_steps import CapturedSteps
from revcompile.runtime.executor.executor import StageExecutor
from revcompile.runtime.executor.flags import NonFiniteReports
from revcompile.runtime.executor.graphs import CaptureUnsupported, CudaGraphReplay, EagerReplay
from revcompile.runtime.executor.messages import MessageKind, MessageSlots
from revcompile.runtime.reversible.bindings import LayerHooks
from revcompile.runtime.stage.loss import LossHead
from revcompile.runtime.stage.optimizers import why_not_capturable_optimizer
from revcompile.runtime.stage.settings import Backend, Task
from revcompile.runtime.stage.slots import Flat, empty_on
from revcompile.schedule import Order, Schedule

_log: Final = logging.getLogger("revcompile")
_CALM: Final = 16
"""After a change of what captured steps hold fixed, so many steps run eagerly."""
_MOST_FAILURES: Final = 2
"""Capturing ends after this many failures. One may be bad luck: others use the device too."""
_MOST_KINDS: Final = 16
"""Most `accumulation_steps`: each position between two updates is captured separately."""


class GraphRunner:
    """Runs steps as captured steps where possible, and warns where it never will be possible."""

    def __init__(
        self,
        task: Task,
        executors: Sequence[StageExecutor],
        loss_head: LossHead,
        schedule: Schedule,
    ) -> None:
        self._executors, device = executors, executors[0].stage.device
        self._hooks = LayerHooks([layer for e in executors for layer in e.stage.hooks.layers])
        self._backend = backend = task.settings.backend
        if backend is Backend.AUTO:
            self._backend = Backend.CUDAGRAPHS if device.type == "cuda" else Backend.EAGER
        self._captured: CapturedSteps | None = None
        self._reports = NonFiniteReports([e.index for e in executors], loss_head.overflow_advice)
        self._last_batch: Flat | None = None
        """Structure, shapes and types of the last micro-batch, on the meta device."""
        self.alike = 0
        """How many micro-batches of this form have entered in a row."""
        self._failures = 0
        self._calm = _CALM
        """Steps since the last change of what captured steps hold fixed."""
        self._warned: set[str] = set()
        self._unsaid: list[str] = []
        """Warnings of the step that runs: it has to end first, as warnings may be errors."""
        if self._backend is Backend.EAGER:
            return
        if why := why_not_capturable(executors, schedule, self._backend):
            self._give_up(why)
            self.warn()
            return
        use_slots(executors, schedule)
        replay = EagerReplay() if backend is Backend.STATIC else CudaGraphReplay(device)
        given = executors, loss_head, schedule, replay, self._reports
        self._captured = CapturedSteps(*given, fuse=task.fuse)
        if backend is Backend.AUTO:
            _log.info(
                "backend='auto': steps of a full pipeline are captured as CUDA graphs; 'inductor' "
                "compiles them, too, which takes a minute at the first start"
            )

    @property
    def is_on(self) -> bool:
        """Whether steps are captured once the pipeline is full."""
        return self._captured is not None

    @property
    def is_active(self) -> bool:
        """Whether the last step was called, captured or replayed as a whole."""
        return self._captured is not None and self._captured.is_active

    @property
    def is_replaying(self) -> bool:
        """Whether the last step was the replay of a graph, which runs no layers in Python."""
        return self.is_active and self._captured is not None and self._captured.is_replaying

    @property
    def is_capturing(self) -> bool:
        """Whether the last step prepared or captured graphs, which takes longer than to train."""
        return self.is_active and not self.is_replaying and self._backend is not Backend.STATIC

    def _give_up(self, why: str) -> None:
        self._captured = None
        use_no_slots(self._executors)
        self._unsaid.append(
            f"backend={self._backend.value!r}: steps are run one action at a time, because {why}. "
            "Pass backend='eager' to silence this warning"
        )

    def _warn(self, why: str, advice: str) -> None:
        """Have `warn` say once that steps are not captured for a while."""
        if why not in self._warned:
            self._warned.add(why)
            self._unsaid.append(
                f"backend={self._backend.value!r}: while {why}, steps are run one action at a "
                f"time; {advice}"
            )

    def warn(self) -> None:
        """Warn of what the step that has ended could not do."""
        while self._unsaid:
            warn(self._unsaid.pop(0))

    def step(self, schedule: Schedule, inputs: StepInputs, allowed: bool) -> bool:
        """Run the step in which a micro-batch enters; False if it has to run action by action.

        Args:
            inputs: The inputs of the step.
            allowed: False if a trace needs to see single actions.
        """
        captured = self._captured
        if captured is None:
            return False
        if not captured.is_active:
            # Wait for the first updates: they show what stages and optimizers do.
            if not min(schedule.updates):
                return False
            if stateful := [e.index for e in self._executors if e.stage.stateful.have_changed]:
                self._give_up(f"stage {stateful[0]} has layers whose buffers change in every call")
                return False
        if self._hooks:
            allowed = False
            why = "layers have hooks, which captured steps would not call"
            self._warn(why, "remove the hooks to train at full speed")
        if captured.is_outdated:
            if self._calm < _CALM:
                self._warn(
                    "settings of the optimizer, or where tensors lie, change so often",
                    "of schedules only learning rates may change in each step (OneCycleLR takes "
                    "cycle_momentum=False); write weights with copy_, not by .data = ...",
                )
            self._wait()
            captured.hold_fixed()
        self._calm += 1
        if self._calm <= _CALM:
            return False
        if not allowed:
            captured.leave()
            return False
        is_same = captured.is_active and captured.accepts(inputs)
        try:
            if not is_same:
                captured.leave()
                last = self._last_batch
                is_like_last = last is not None and last.matches(inputs.all)
                alike = self.alike if is_like_last else 0
                if not captured.is_ready(schedule, inputs, alike):
                    return False
            captured.step(schedule, inputs)
        except CaptureUnsupported as error:
            captured.clear()
            self._failures += 1
            if self._failures >= _MOST_FAILURES:
                self._give_up(str(error))
            return False
        if is_same:
            self.alike += 1
        else:
            self.observe(inputs)
        return True

    def observe(self, inputs: StepInputs) -> None:
        """Count a micro-batch that has entered."""
        if self._captured is not None:
            values = inputs.all
            if self._last_batch is None or not self._last_batch.matches(values):
                self._last_batch = Flat.of(empty_on(torch.device("meta"), values.value))
                self.alike = 0
            self.alike += 1

    def leave(self) -> None:
        """End captured steps for now; `failures` then reports all steps so far."""
        if self._captured is not None:
            self._captured.leave()

    def restart(self) -> None:
        """Drop captured steps because layers have changed; capture again later."""
        self._wait()
        if self._captured is not None:
            self._captured.is_fused = False  # programs were fused for the old settings

    def _wait(self) -> None:
        """Drop captured steps; capture again after `_CALM` steps without a change."""
        self.clear()
        self._calm = 0

    def clear(self) -> None:
        """Forget captured steps: parameters, optimizers or what is in flight have been replaced."""
        self._last_batch, self.alike = None, 0
        if self._captured is not None:
            self._captured.clear()

    def failures(self) -> list[NonFiniteError]:
        """Errors of bad micro-batches: known some steps late, or when captured steps end."""
        return self._reports.collect(wait=not self.is_active)


# -- what can be captured ------------------------------------------------------------------------


def why_not_capturable(
    executors: Sequence[StageExecutor], schedule: Schedule, backend: Backend
) -> str | None:
    """Why steps cannot be captured; None if they can."""
    devices = {p.device for executor in executors for p in executor.stage.parameters.values()}
    if backend is not Backend.STATIC and any(device.type != "cuda" for device in devices):
        return "the model is not on a CUDA device; net.trainer(device='cuda') moves it there"
    if len(devices) != 1:
        return f"the model is on {len(devices)} devices; a step is captured on one"
    method = schedule.method
    stages = [executor.index for executor in executors]
    if len(stages) < schedule.stages:
        if method.order is not Order.CONTINUOUS:
            return f"{method.name!r} on several ranks is not captured; use a method like 'petra'"
        if stages != list(range(stages[0], stages[-1] + 1)):
            return f"the stages of a rank must follow each other, but they are {stages}"
        if any(tie.owner in stages and tie.holder in stages for tie in schedule.ties):
            return "stages of one of several ranks share parameters; put them on different ranks"
    if method.order not in (Order.CONTINUOUS, Order.LOCKED):
        return f"steps of {method.name!r} differ from each other; use 'petra' or 'backprop'"
    is_stashing = any(e.stage.weights.stash is not None for e in executors)
    if schedule.ties and schedule.accumulation_steps > 1 and is_stashing:
        return "stashed weights: tied ones change between two updates; use accumulation_steps=1"
    if (count := schedule.accumulation_steps) > _MOST_KINDS:
        return f"accumulation_steps={count}; at most {_MOST_KINDS} kinds of steps are captured"
    for executor in executors:
        program = executor.program
        if program.keeps_graphs_in_flight and not program.graphs_outlive_updates:
            return (
                f"stage {executor.index} keeps graphs of micro-batches in flight, as "
                f"{method.name!r} does; use 'pipedream' or 'petra_stashed' to have steps captured"
            )
        if why := why_not_capturable_optimizer(executor.updater.optimizer):
            return why
    return None


def use_slots(executors: Sequence[StageExecutor], schedule: Schedule) -> None:
    """Have stages and their transport store in slots whatever outlives a step."""
    windows, accumulation_steps = schedule.windows, schedule.accumulation_steps
    stages, transport = [e.index for e in executors], executors[0].transport
    device = executors[0].stage.device
    for executor in executors:
        window, late = windows[executor.index], schedule.delays[executor.index]
        executor.updater.use_device()
        executor.stage.use_slots(window if window > 1 else 0, late, accumulation_steps > 1)
    for stage in stages[:-1]:
        if waiting := windows[stage] - windows[stage + 1]:
            route = stage + 1, stage, MessageKind.DY
            transport.slots[route] = MessageSlots(waiting, device, has_flags=True)
    for tie in schedule.ties:
        if tie.owner in stages and tie.holder in stages:
            route = tie.owner, tie.holder, MessageKind.TIED_WEIGHT
            transport.slots[route] = MessageSlots(1, device)
            if late := windows[tie.owner] - windows[tie.holder]:  # else received in the same step
                route = tie.holder, tie.owner, MessageKind.TIED_GRAD
                most = 1 + math.ceil(late / accumulation_steps)
                transport.slots[route] = MessageSlots(most, device, has_flags=True, in_ring=True)


def use_no_slots(executors: Sequence[StageExecutor]) -> None:
    """Free all slots: steps will not be captured."""
    executors[0].transport.slots.clear()
    for executor in executors:
        executor.stage.use_slots(0, None, False)
        executor.updater.stay_on_host()
