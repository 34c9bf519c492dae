"""The steps of this process's stages: action by action, or captured; what they report."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from revcompile.errors import InputError, NonFiniteError, RevcompileError
from revcompile.runtime.executor.boundary import StepInputs
from revcompile.runtime.executor.executor import StageExecutor
from revcompile.runtime.executor.messages import TARGET, MessageKind, next_message
from revcompile.runtime.executor.runner import GraphRunner
from revcompile.runtime.executor.scheduler import LocalScheduler
from revcompile.runtime.stage.loss import LossHead, described
from revcompile.runtime.stage.settings import Task
from revcompile.runtime.trainer.inputs import InputBinder, as_dict
from revcompile.runtime.trainer.placement import Placement
from revcompile.schedule import Order, Schedule

Values = dict[str, Any]
"""The model's inputs by argument name, and the target; see `TARGET`."""


@dataclass(frozen=True)
class Metrics:
    """What a step reports. Reading `loss` waits for the device."""

    microbatch: int
    samples: int
    delays: tuple[int, ...]
    updates: tuple[int, ...]
    lr: float | None
    throughput: float
    """Samples per second so far, without the time of `evaluate`, `save`, `load` and capturing."""
    loss_tensor: Tensor | None = field(default=None, repr=False)
    output: Any = field(default=None, repr=False)

    @property
    def loss(self) -> float:
        """The micro-batch's loss; nan except on the rank of the last stage.

        `trainer.pop_mean_loss()` gives the mean to all ranks.
        """
        return float("nan") if self.loss_tensor is None else float(self.loss_tensor)

    def scalars(self) -> dict[str, float]:
        """The numbers that this rank has, by name, for a logger. Waits for the device."""
        found = {"loss": self.loss_tensor, "lr": self.lr}
        numbers = {name: float(value) for name, value in found.items() if value is not None}
        return numbers | {"throughput": self.throughput}

    def __repr__(self) -> str:
        rate = "" if self.lr is None else f", lr {self.lr:g}"
        loss = "on the last stage's rank" if self.loss_tensor is None else f"{self.loss:.4g}"
        return (
            f"micro-batch {self.microbatch}: loss {loss}{rate}, largest delay {max(self.delays)}, "
            f"{self.throughput:,.0f} samples/s"
        )


class Throughput:
    """Samples per second of steps that follow each other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._samples, self._seconds = 0, 0.0
        self._counted_until: float | None = None

    def resume(self) -> None:
        """A step begins."""
        if self._counted_until is None:
            self._counted_until = perf_counter()

    def add(self, samples: int, *, counts: bool = True) -> float:
        """A step has ended; returns the mean of all steps that count."""
        assert self._counted_until is not None
        now = perf_counter()
        if counts:
            self._samples += samples
            self._seconds += now - self._counted_until
        self._counted_until = now
        return self._samples / max(self._seconds, 1e-9)

    def pause(self) -> None:
        """Something other than training begins. The device may still be busy with steps."""
        if self._counted_until is not None:
            if self._device.type != "cpu":
                torch.accelerator.synchronize(self._device)
            self._seconds += perf_counter() - self._counted_until
            self._counted_until = None


class Steps:
    """Runs the steps of this process's stages.

    A micro-batch that cannot be used, or on which the model or the loss fails, is left out by all
    stages: a void message is sent in place of its values. The step itself continues with the
    micro-batches in flight; `failure` returns the error to raise after it.
    """

    def __init__(self, task: Task, placement: Placement, schedule: Schedule, seed: int) -> None:
        self._programs, self._settings, self.placement = task.programs, task.settings, placement
        self.binder = InputBinder(task.model, task.partition, placement)
        last = len(task.programs) - 1
        self.is_first, self.is_last = 0 in placement.stages, last in placement.stages
        with placement.all_or_none("net.trainer"):
            self.loss_head = LossHead(
                task.partition.rewired, task.loss, task.settings.autocast, last
            )
            given = placement.device, placement.transport, self.loss_head, seed
            _choose_cpu_matmuls(task)
            self.executors = [StageExecutor(task, index, *given) for index in placement.stages]
        placement.attach(self.executors)
        self.scheduler = LocalScheduler(self.executors)
        self.runner = GraphRunner(task, self.executors, self.loss_head, schedule)
        self.throughput = Throughput(placement.device)

    def run(self, schedule: Schedule, inputs: Any, target: Any) -> Values | None:
        """Run the step in which a micro-batch enters.

        Args:
            inputs: The model's inputs; only read where the first stage is.
            target: The target; only read where the first stage is.

        Returns:
            What enters, if the first stage is here and it can be used.
        """
        values, microbatch = None, schedule.injected
        if self.is_first:
            prepare, dense = self.binder.prepare, self.runner.is_on
            values = self._entering(lambda: prepare(as_dict(inputs), as_dict(target), dense=dense))
        if not self._run_captured(schedule, values):
            self._run_eagerly(schedule, values)
        self.placement.transport.completed = microbatch
        return values

    def _entering(self, prepare: Callable[[], Values]) -> Values | None:
        """What enters at the first stage; None if it cannot be used."""
        try:
            return prepare()
        except Exception as error:
            self.executors[0].forward_errors.append(error)
            return None

    def _run_eagerly(self, schedule: Schedule, values: Values | None) -> None:
        """Run the step action by action."""
        microbatch, take = schedule.injected, self.binder.take
        if self.is_first:
            self.executors[0].inputs[microbatch] = self._entering(lambda: take(values))
        remaining = self.scheduler.forward(schedule.inject())
        self.placement.check_shared_buffers(self.executors, microbatch)
        self.scheduler.finish(remaining)

    def _run_captured(self, schedule: Schedule, values: Any) -> bool:
        """Run the step as captured sections; False if it has to be run action by action."""
        if not self.runner.is_on:
            return False
        microbatch, first = schedule.injected, self.executors[0].index
        if not self.is_first:
            route, where = (first - 1, first, MessageKind.X), f"stage {first} for x of {microbatch}"
            message = next_message(self.placement.transport, route, where, keep=True, packed=True)
            values = None if message.void else message
        is_traced = self.executors[0].observer is not None  # a trace shows single actions
        allowed = not (values is None or is_traced)
        entering = StepInputs(values)
        is_done = self.runner.step(schedule, entering, allowed)
        if not is_done and values is not None:
            self.runner.observe(entering)
        return is_done

    # -- what a step reports ------------------------------------------------------------------

    def metrics(self, schedule: Schedule, microbatch: int, values: Values | None) -> Metrics:
        """The metrics of the step that has ended, for which `run` returned `values`."""
        loss, output, samples = self.loss_head.latest or (None, None, 0)
        self.loss_head.latest = None
        if values is not None:
            _, samples = values[TARGET]
        if loss is not None and not self.runner.is_active:  # captured steps add theirs themselves
            self.loss_head.add(loss)
        return Metrics(
            microbatch=microbatch,
            samples=samples,
            delays=schedule.delays,
            updates=schedule.updates,
            lr=next((lr for e in self.executors if (lr := e.updater.lr) is not None), None),
            throughput=self.throughput.add(samples, counts=not self.runner.is_capturing),
            loss_tensor=loss,
            output=output,
        )

    def failure(self, microbatch: int, values: Values | None = None) -> Any:
        """The error of a micro-batch that was left out, with further errors as notes, or None.

        Errors of bad gradients come first: their micro-batches are older. Other errors are of
        `microbatch`, which has just entered, with the inputs `values` if they are known.
        """
        failures: list[Exception] = [*self.runner.failures()]
        for executor in self.executors:
            failures += executor.failures
        for executor in self.executors:
            failures += executor.forward_errors
            executor.failures, executor.forward_errors = [], []
        if not failures:
            return None
        failure, *others = (
            each if isinstance(each, RevcompileError) else self._explained(each, microbatch, values)
            for each in failures
        )
        for other in others:
            failure.add_note(f"And {other}")
        if not all(isinstance(each, NonFiniteError) for each in failures):
            who = "all stages have left it out"
            if self._programs[0].method.order is Order.SYNTHETIC:
                who = "stages before the error have trained on it, with predicted gradients"
            failure.add_note(f"Micro-batch {microbatch} counts, and {who}.")
        return failure

    def _explained(self, cause: Exception, microbatch: int, values: Values | None) -> InputError:
        text = f"  captured with: {', '.join(map(str, self._programs[0].inputs))}\n"
        if values is not None:
            inputs = {name: value for name, value in values.items() if name != TARGET}
            got = ", ".join(f"{name}: {described(value)}" for name, value in inputs.items())
            text += f"  got:           {got}\n"
        error = InputError(
            f"trainer.step: the model failed on micro-batch {microbatch}: "
            f"{type(cause).__name__}: {cause}\n{text}"
            "Feed inputs of the captured form (any batch size)."
        )
        error.__cause__ = cause
        return error


def _choose_cpu_matmuls(task: Task) -> None:
    """Let torch choose its CPU matmul for low precision now, not in the middle of training.

    On a CPU without bf16 instructions the first bf16 matmul of some size makes torch switch
    oneDNN off for the whole process, and float32 convolutions and products round differently from
    then on. Ranks would compute that first product at different moments, or never, and no longer
    get the results of a run in one process.
    """
    dtypes = dict.fromkeys([task.settings.autocast, *(p.dtype for p in task.model.parameters())])
    for dtype in (torch.bfloat16, torch.float16):
        if dtype in dtypes:
            operand = torch.ones(64, 64, dtype=dtype)
            with torch.autocast("cpu", enabled=False), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns of the switch, which is intended here
                F.linear(operand, operand)
