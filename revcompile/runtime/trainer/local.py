"""The trainer of a single process, which holds all stages."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from revcompile.arguments import file_path
from revcompile.errors import InputError, RevcompileError
from revcompile.ir.module_tree import device_of_model
from revcompile.runtime.checkpoint.folder import Checkpoint, find_checkpoint
from revcompile.runtime.checkpoint.training import save_training, set_generators
from revcompile.runtime.checkpoint.tree import located
from revcompile.runtime.executor.captured.runner import GraphRunner
from revcompile.runtime.executor.stage_executor import StageExecutor
from revcompile.runtime.executor.transport import MessageKind, Transport
from revcompile.runtime.stage.loss_head import described
from revcompile.runtime.stage.tensors import clone_tree, detach_tree
from revcompile.runtime.trainer.core import Trainer
from revcompile.runtime.trainer.inputs import split_batch, split_call
from revcompile.runtime.trainer.metrics import (
    Evaluation,
    Metric,
    Metrics,
    RunningMeans,
    check_loader,
)
from revcompile.runtime.trainer.settings import Task
from revcompile.schedule import Schedule


class LocalTrainer(Trainer):
    """Trains all stages of a model in this process.

    A micro-batch on which the model or the loss fails changes nothing, and does not count. One
    whose loss or gradient is not finite counts, and is left out: by the stage that meets it and by
    those before it. Captured steps (see `Backend`) report it some steps later.
    """

    def __init__(self, task: Task) -> None:
        stages = range(len(task.programs))
        device = device_of_model(task.model)
        super().__init__(task, transport=Transport(len(stages)), device=device, stages=stages)
        backend = self.settings.backend
        self.runner = GraphRunner(backend, self.executors, self.loss_head, self.schedule)

    def everyone(self, value: Any) -> Sequence[Any]:
        return [value]

    # -- training -----------------------------------------------------------------------------

    def step(self, inputs: Any = None, target: Any = None) -> Metrics:
        self._check_usable()
        self._resume_training()
        if (problem := self._refusal()) is not None:
            raise InputError(f"trainer.step: {problem}")
        try:
            return self._step(inputs, target)
        finally:
            if not self.runner.is_replaying:
                self._follow_settings()  # layers may change their own as they run

    def _step(self, inputs: Any, target: Any) -> Metrics:
        binder, dense = self.binder, self.runner.is_on
        values = binder.prepare(inputs, dense=dense)
        binder.check_tensors(target, dense=dense)
        if (metrics := self._captured_step(values, target)) is not None:
            return metrics
        microbatch, samples = self.schedule.injected, binder.count_samples(values)
        transaction = Transaction(self.schedule, self.executors)
        self.executors[0].inputs[microbatch] = binder.take(values)
        self.loss_head.targets[microbatch] = binder.take(target)
        self._measure(microbatch)
        try:
            remaining = self.scheduler.forward(self.schedule.inject())
        except BaseException as error:
            self.schedule = transaction.rollback()
            if isinstance(error, RevcompileError) or not isinstance(error, Exception):
                error.add_note("Nothing was changed by this step.")
                raise
            raise self._explained(error, values) from error
        transaction.commit()
        self._finish(remaining)
        metrics = self._metrics(microbatch, samples)
        self.runner.observe((values, target))
        return self._report(metrics)

    def _captured_step(self, values: dict[str, Any], target: Any) -> Metrics | None:
        """The step as a replay of a captured one; None if it has to run action by action."""
        if not self.runner.is_on:
            return None
        microbatch = self.schedule.injected
        is_observed = self._trace is not None or self._is_measured(microbatch)
        batch = values, target
        with self._stop_on_error():
            if not self.runner.step(self.schedule, self.transport, batch, not is_observed):
                return None
        return self._report(self._metrics(microbatch, self.binder.count_samples(values)))

    def _explained(self, error: Exception, values: Mapping[str, Any]) -> InputError:
        expected = ", ".join(map(str, self.programs[0].inputs))
        got = ", ".join(f"{name}: {described(value)}" for name, value in values.items())
        return InputError(
            f"trainer.step: the model failed on this micro-batch: {type(error).__name__}: {error}\n"
            f"  captured with: {expected}\n  got:           {got}\n"
            "Nothing was changed by this step; feed inputs of the captured form (any batch size)."
        )

    # -- evaluation and diagnostics -----------------------------------------------------------

    def evaluate(
        self, loader: Iterable[Any], metrics: Mapping[str, Metric] | None = None
    ) -> Evaluation:
        means = RunningMeans(metrics)
        self._check_usable()
        self._throughput.pause()
        self._check_tree("trainer.evaluate")
        with self._evaluating():
            for number, batch in enumerate(check_loader(loader)):
                self._evaluate_batch(f"evaluation, batch {number}", batch, means)
        return means.evaluation()

    def _evaluate_batch(self, where: str, batch: Any, means: RunningMeans) -> None:
        split = split_batch(batch, self.loss_head.has_target)
        self.binder.check_tensors(split, where)
        inputs, target = self.binder.take(split, copy=False)
        samples = self.binder.count_samples(self.binder.bind(inputs, where))
        args, kwargs = split_call(inputs)
        try:
            output = self.model(*args, **kwargs)
        except RevcompileError:
            raise
        except Exception as error:
            raise InputError(
                f"{where}: the model failed on it: {type(error).__name__}: {error}\n"
                f"  inputs: {described(inputs)}"
            ) from error
        means.add(self.loss_head.evaluate(output, target, where), output, target, samples)
        self.binder.wait_copied()

    # -- checkpoints --------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        self._check_usable(to_read=True)
        self._throughput.pause()
        self.runner.leave(self.schedule, self.transport)
        self._check_savable()
        return self._state(self.model.state_dict(), clone_tree)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._check_latest()
        self.runner.leave(self.schedule, self.transport)
        self._check_fits(state)
        with self._stop_on_error():
            self._load_state(state)
        self.runner.clear()
        self._follow_settings()
        self._stop_reason = None

    def _write_checkpoint(self, folder: Path, keep: int) -> Path:
        state = self._state(self.model.state_dict(), detach_tree)
        return save_training(folder, state, keep=keep)

    def load(self, place: str | Path) -> None:
        self._throughput.pause()
        checkpoint = Checkpoint(find_checkpoint(file_path("trainer.load", place, "runs/a")))
        state = self._read_state(checkpoint, device_of_model(self.model))
        with located(f"trainer.load: {checkpoint.path}"):
            self.load_state_dict(state)
        set_generators(state["rng"])


class Transaction:
    """The state of a trainer before a micro-batch enters, to return to if forward fails on it.

    transaction = Transaction(...)                snapshot
    rest = scheduler.forward(schedule.inject())   if it raises: transaction.rollback()
    transaction.commit()                          an error from here on stays
    """

    def __init__(self, schedule: Schedule, executors: Sequence[StageExecutor]) -> None:
        self.microbatch = schedule.injected
        self._executors, self._transport = executors, executors[0].transport
        self._schedule = schedule.copy()
        self._queues = {key: deque(queue) for key, queue in self._transport.queues.items()}
        self._scales = [None if e.scaling is None else e.scaling.values.clone() for e in executors]
        # Tied weights that arrive with this step arrive once more with the next, if it is undone.
        self._undo_tied = [
            e.stage.weights.snapshot(message.values)
            for e in executors
            for message in self._transport.queued(e.index, MessageKind.TIED_WEIGHT)
        ]

    def commit(self) -> None:
        """Let messages be freed as they are read."""
        self._queues.clear()
        self._undo_tied.clear()

    def rollback(self) -> Schedule:
        """Undo the step; returns the schedule to go on with."""
        microbatch, loss_head = self.microbatch, self._executors[-1].loss_head
        for executor, scale in zip(self._executors, self._scales, strict=True):
            executor.undo(microbatch)
            executor.forget(microbatch)
            if executor.scaling is not None and scale is not None:
                executor.scaling.values.copy_(scale)
            executor.measured.discard(microbatch)
            executor.stage.reconstruction.pop(microbatch, None)
            executor.forward_errors = []
        for undo in self._undo_tied:
            undo()
        self._transport.queues = self._queues
        assert loss_head is not None
        for by_microbatch in (loss_head.targets, loss_head.losses, loss_head.outputs):
            by_microbatch.pop(microbatch, None)
        return self._schedule
