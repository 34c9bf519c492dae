"""The trainer: feeds micro-batches to the stages and reports what comes out."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from revcompile.errors import InputError, RevcompileError, TrainerStoppedError
from revcompile.ir.module_tree import device_of_model
from revcompile.ir.program import Partition, StageProgram
from revcompile.ir.stage_ops import mix
from revcompile.runtime.checkpoint import load_training, save_training, set_generators, until_signal
from revcompile.runtime.checkpoint.codec import located
from revcompile.runtime.checkpoint.state import (
    load_trainer,
    referenced,
    save_trainer,
    stages_with_graphs,
)
from revcompile.runtime.executor.captured import Backend, GraphRunner
from revcompile.runtime.executor.stage_executor import LocalScheduler, StageExecutor
from revcompile.runtime.executor.trace import Trace
from revcompile.runtime.executor.transaction import Transaction
from revcompile.runtime.executor.transport import InProcess
from revcompile.runtime.reversible.module import Reversible
from revcompile.runtime.stage.loss_head import Loss, LossHead, described
from revcompile.runtime.stage.update import OptimizerFactory
from revcompile.runtime.trainer.build import build_executor
from revcompile.runtime.trainer.cpu_matmul import choose_cpu_matmul
from revcompile.runtime.trainer.data import Loader, Share, shared_loader
from revcompile.runtime.trainer.evaluation import evaluate_batch, evaluating, iterated
from revcompile.runtime.trainer.gradient_probes import Probe
from revcompile.runtime.trainer.inputs import InputBinder, Planned, check_planned
from revcompile.runtime.trainer.metrics import Evaluation, Means, Metric, Metrics
from revcompile.runtime.trainer.settings import Settings
from revcompile.schedule import Schedule, delay, mean_delay

Batch = TypeVar("Batch")

__all__ = ["Trainer"]


class Trainer:
    """Trains a staged model with one of the methods, all stages in this process.

    `step` takes a micro-batch, `flush` drains the pipeline, `evaluate` can be called at any
    moment. A step that fails leaves no trace. Only where a gradient turns out bad after later
    stages have used it is the micro-batch left out of the updates still to come. Recorded rounds
    (see `Backend`) leave bad micro-batches out everywhere, and say so some steps later.
    """

    skip_on_error: ClassVar[bool] = False
    """Does a micro-batch that fails in a forward pass go on as lost, and is not taken back?"""

    def __init__(
        self,
        model: Reversible,
        partition: Partition,
        programs: Sequence[StageProgram],
        optimizer: OptimizerFactory,
        loss: Loss,
        settings: Settings,
    ) -> None:
        self.model, self.partition, self.settings = model, partition, settings
        self.programs = tuple(programs)
        for dtype in {settings.autocast, *(p.dtype for p in model.parameters())}:
            choose_cpu_matmul(dtype)
        method, stages = programs[0].method, len(programs)
        self.schedule = Schedule(method, stages, settings.accumulate, partition.ties)
        self.delays = tuple(delay(method, stages, j, settings.accumulate) for j in range(stages))
        self.transport = self._connect()
        self.intake = InputBinder(partition, self._home())
        self.loss_head = LossHead(partition.rewired, loss, settings.autocast, stages - 1)
        self.loss_head.check_finite = settings.check_finite
        here = [program for program in programs if self._is_here(program.index)]
        self.executors = [self._actor(program, optimizer) for program in here]
        self.worker = LocalScheduler(self.executors)
        self.probes: list[Probe] = []
        for executor in self.executors:
            executor.stage.observers = self.probes
        self._fast = self._recorder()
        self._broken: str | None = None
        self._trace: Trace | None = None
        self._samples, self._started = 0, time.perf_counter()
        self.memory_plan: Planned | None = None
        """What stages keep under a budget of memory, if there is one."""
        self.metrics: Metrics | None = None
        """What the last step returned."""

    def _connect(self) -> Any:
        """What carries messages between the stages."""
        return InProcess(len(self.programs))

    def _home(self) -> torch.device:
        """Where this process's stages compute."""
        return device_of_model(self.model)

    def _recorder(self) -> GraphRunner | None:
        """What runs the rounds of a full pipeline, if all its stages are here."""
        backend, check = self.settings.backend, self.settings.check_finite
        if not isinstance(self.transport, InProcess):
            if backend not in (Backend.AUTO, Backend.EAGER):
                warnings.warn(
                    f"backend={backend.value!r}: stages on several ranks are run one action at a "
                    "time; backend='eager' says that this is meant",
                    stacklevel=4,
                )
            return None
        return GraphRunner(
            backend, self.executors, self.loss_head, self.schedule, check_finite=check
        )

    def _is_here(self, stage: int) -> bool:
        """Does a stage live in this process?"""
        return True

    def _actor(self, program: StageProgram, optimizer: OptimizerFactory) -> StageExecutor:
        stages, accumulate = len(self.programs), self.settings.accumulate
        is_last = program.index == stages - 1
        return build_executor(
            program,
            self.model,
            self.partition.ties,
            optimizer,
            self.settings,
            self.transport,
            seed=self.stage_seed,
            delay=mean_delay(program.method, stages, program.index, accumulate),
            loss_head=self.loss_head if is_last else None,
            skip_on_error=self.skip_on_error,
        )

    # -- training -----------------------------------------------------------------------------

    def step(self, inputs: Any = None, target: Any = None) -> Metrics:
        """Train on one micro-batch: `trainer.step(x, y)`.

        `inputs` is what the model takes: a tensor, a tuple of positional arguments, or a dict of
        keyword arguments.
        """
        self._usable()
        self._in_train_mode()
        if (metrics := self._recorded(inputs, target)) is not None:
            return metrics
        values = self.intake.taken(inputs)
        microbatch, samples = self.schedule.injected, self.intake.samples(values)
        attempt = Transaction(self.schedule, self.executors, self.transport, self.loss_head)
        self.executors[0].inputs[microbatch] = values
        self.loss_head.targets[microbatch] = self.intake.moved(target)
        for probe in self.probes:
            probe.fed(microbatch, values, self.loss_head.targets[microbatch])
        self._measure(microbatch)
        try:
            rest = self.worker.forward(self.schedule.inject())
            attempt.backward(rest)
        except BaseException as error:
            self.schedule = attempt.rollback()
            for probe in self.probes:
                probe.taken_back(microbatch)
            if isinstance(error, RevcompileError) or not isinstance(error, Exception):
                raise
            raise self._explained(error, values) from error
        self._finish(rest)
        self._samples += samples
        self.metrics = self._metrics(microbatch, samples)
        self._probed()
        if self._fast is not None:
            self._fast.observe((values, target))
        self._traced()
        self._raise_failures()
        return self.metrics

    def _recorded(self, inputs: Any, target: Any) -> Metrics | None:
        """The step as a recorded round; None if it has to be taken action by action."""
        if self._fast is None or not self._fast.is_on:
            return None
        values = self.intake.checked(self.intake.bound(inputs))
        microbatch = self.schedule.injected
        watched = bool(self.probes or self._trace) or self._is_measured(microbatch)
        self._in_train_mode()
        with self._stopping():
            outcome = self._fast.step(
                self.schedule, self.transport, (values, target), allowed=not watched
            )
        if outcome is None:
            return None
        self._fast.observe((values, target))
        self.loss_head.losses[microbatch] = outcome.loss
        self.loss_head.outputs[microbatch] = outcome.output
        samples = self.intake.samples(values)
        self._samples += samples
        self.metrics = self._metrics(microbatch, samples)
        self._raise_failures()
        return self.metrics

    def _settle(self) -> None:
        """What is in flight is with the stages, for whoever wants to see it."""
        self._usable()
        if self._fast is not None:
            self._fast.leave(self.schedule, self.transport)

    def flush(self) -> None:
        """Drain the pipeline: every micro-batch comes back, and its gradient is applied."""
        self._settle()
        self._in_train_mode()
        self._finish(self.worker.own(self.schedule.drain()))
        self._probed(drained=True)
        self._raise_failures()

    def _measure(self, microbatch: int) -> None:
        """Have reconstruction errors measured when it is time; train mode for all that follows."""
        for executor in self.executors:
            executor.measured = {microbatch} if self._is_measured(microbatch) else set()
        self._in_train_mode()

    def _is_measured(self, microbatch: int) -> bool:
        every = self.settings.measure_every
        return every is not None and microbatch % every == 0

    def _in_train_mode(self) -> None:
        if not self.model.training:
            self.model.train()

    def _finish(self, rest: Any) -> None:
        with self._stopping():
            self.worker.finish(rest)

    @contextmanager
    def _stopping(self) -> Iterator[None]:
        """Around what cannot be taken back: a failure there is the end of this trainer."""
        try:
            yield
        except BaseException as error:
            self._stopped(error)
            raise

    def _stopped(self, error: BaseException) -> None:
        self._broken = f"{type(error).__name__}: {error}"

    def _explained(self, error: Exception, values: Mapping[str, Any]) -> InputError:
        expected = ", ".join(map(str, self.programs[0].inputs))
        got = ", ".join(f"{name}: {described(value)}" for name, value in values.items())
        return InputError(
            f"trainer.step: the model failed on this micro-batch: {type(error).__name__}: {error}\n"
            f"  captured with: {expected}\n  got:           {got}\n"
            "Nothing was changed by this step; feed inputs of the captured form (any batch size)."
        )

    def _raise_failures(self) -> None:
        failures = [] if self._fast is None else self._fast.failures()
        failures += [error for executor in self.executors for error in executor.failures]
        for executor in self.executors:
            executor.failures = []
        if failures:
            raise failures[0]

    def _usable(self) -> None:
        if self._broken is not None:
            raise TrainerStoppedError(
                f"this trainer stopped in the middle of a step ({self._broken}); build a new one "
                "and load its last state_dict"
            )

    # -- looking ------------------------------------------------------------------------------

    def evaluate(
        self, loader: Iterable[Any], metrics: Mapping[str, Metric] | None = None
    ) -> Evaluation:
        """Mean loss (and other metrics) over a loader of `(inputs, target)`, in eval mode.

        Training goes on afterwards as if nothing had happened.
        """
        found = Means(metrics)
        with self._evaluating():
            for number, batch in enumerate(iterated(loader)):
                evaluate_batch(number, batch, self.model, self.intake, self.loss_head, found)
        return found.evaluation()

    def _evaluating(self) -> AbstractContextManager[None]:
        return evaluating(self.model, self.settings.autocast)

    # -- data ---------------------------------------------------------------------------------

    @property
    def is_first(self) -> bool:
        """Does this process need inputs?"""
        return self._is_here(0)

    @property
    def is_last(self) -> bool:
        """Does this process need targets, and know the loss?"""
        return self._is_here(len(self.programs) - 1)

    @property
    def replica(self) -> int:
        """Which copy of the pipeline this is: its share of the data."""
        return 0

    @property
    def replicas(self) -> int:
        """How many copies of the pipeline there are."""
        return 1

    @property
    def stage_seed(self) -> int:
        """What the stages draw from: copies of the pipeline drop other elements."""
        seed = self.settings.seed
        return mix(seed, self.replica) if self.replica else seed

    def loader(
        self,
        data: Any,
        batch_size: int | None = None,
        *,
        epoch: int = 0,
        skip: int = 0,
        **options: Any,
    ) -> Loader:
        """An epoch of `(inputs, target)` in an order that the trainer's seed and the epoch fix.

        Every rank gets the same batches of its copy's share; ranks that need no data read none.

        Args:
            data: a dataset, which is shuffled, or a DataLoader of your own, of which dataset,
                batch size, sampling, collation and workers are taken over. Its order is drawn
                anew from the seed, so that all ranks agree.
            batch_size: samples a batch; a DataLoader's own if not given.
            epoch: every epoch has another order; so write a new loader for each.
            skip: batches to pass over, which a run that goes on has had.
            options: those of torch's DataLoader.
        """
        return shared_loader(
            data,
            batch_size,
            Share(self.settings.seed, epoch, self.replica, self.replicas, skip),
            needed=self.is_first or self.is_last,
            **options,
        )

    def parameters(self) -> dict[str, nn.Parameter]:
        """The current parameters under their original names."""
        return dict(self.model.named_parameters())

    def _metrics(self, microbatch: int, samples: int) -> Metrics:
        if self.memory_plan is not None:
            check_planned(self.memory_plan, samples)
        found = {}
        for executor in self.executors:
            for measured in list(executor.stage.reconstruction):
                found[executor.index] = executor.stage.reconstruction.pop(measured)
        elapsed = max(time.perf_counter() - self._started, 1e-9)
        scalings = [executor.scaling for executor in self.executors if executor.scaling is not None]
        return Metrics(
            microbatch=microbatch,
            samples=samples,
            delays=self.delays,
            updates=self.schedule.updates,
            lr=next((a.updater.lr for a in self.executors if a.updater.lr is not None), None),
            throughput=self._samples / elapsed,
            loss_tensor=self.loss_head.losses.pop(microbatch, None),
            output=self.loss_head.outputs.pop(microbatch, None),
            reconstruction=found,
            loss_scale=self.loss_head.scale,
            skipped=sum(scaling.skipped for scaling in scalings),
        )

    def watch(self) -> Probe:
        """Compare the gradients of the next micro-batch: PETRA's Appendix B, stage by stage.

        The probe fills in the steps (or the flush) that follow; `probe.report` is there once
        `probe.complete`. Training goes on as if nobody watched.
        """
        self._settle()
        stages = [executor.stage for executor in self.executors]
        rewired, accumulate = self.partition.rewired, self.settings.accumulate
        probe = Probe(self.schedule.injected, stages, rewired, self.loss_head, accumulate)
        self.probes.append(probe)
        return probe

    def trace(self, path: str | Path, *, steps: int | None = None) -> Trace:
        """Record what every stage does from now on, as a Chrome trace with a row for each.

        Write `with trainer.trace("run.json"): ...`, or `trainer.trace("run.json", steps=20)` and
        go on training. Open the file at ui.perfetto.dev. Recorded rounds are taken action by
        action meanwhile. Every rank calls it; rank 0 writes the file.
        """
        if self._trace is not None:
            raise InputError(f"trainer.trace: already at work on {self._trace.path}; stop() it")
        self._settle()
        name = f"{self.partition.rewired.name}, {self.programs[0].method.name}"
        self._trace = Trace(self, path, steps, name)
        return self._trace

    def _traced(self) -> None:
        if self._trace is not None:
            self._trace.stepped()

    def untraced(self) -> None:
        """The trace at work has ended."""
        self._trace = None

    @property
    def rank(self) -> int:
        """Which of the processes this is."""
        return 0

    def everyone(self, value: Any) -> Sequence[Any]:
        """The plain values of all processes, by rank."""
        return [value]

    def _probed(self, drained: bool = False) -> None:
        for probe in tuple(self.probes):
            self.probes.remove(probe)  # for good, if it fails
            probe.settle(drained)
            if not probe.over:
                self.probes.append(probe)

    # -- checkpoints --------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on exactly from here, micro-batches in flight included."""
        self._settle()
        return save_trainer(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`, also of another number of stages if nothing was in flight."""
        if self._fast is not None:
            self._fast.leave(self.schedule, self.transport)
        load_trainer(self, state)
        if self._fast is not None:
            self._fast.clear()
        self.probes.clear()
        self._broken = None

    def save(self, folder: str | Path, *, keep: int = 2, drain: bool = False) -> Path:
        """Write a checkpoint beside the older ones in a folder; the newest `keep` stay.

        It holds exactly this moment, micro-batches in flight included: saving changes nothing in
        the training, and a run that loads it goes on to the bit, on any number of ranks with the
        same stages and method. `drain` flushes first, which trains on with what is in flight and
        lets the pipeline run empty: that checkpoint loads into other stages and methods too.
        Methods that keep graphs cannot be saved with micro-batches in flight: those need `drain`,
        unless they have just updated (`gpipe`, `1f1b`). Whatever interrupts a save, the
        checkpoints before it stay whole. Returns the new one's place.
        """
        self._settle()
        if drain:
            self.flush()
        stages = [executor.index for executor in self.executors]
        return save_training(folder, save_trainer(self, referenced), self.model, stages, keep=keep)

    def load(self, place: str | Path) -> None:
        """Go on from a checkpoint, or from the newest one in a folder.

        With micro-batches in flight it needs the stages and method it was saved with, after
        `save(..., drain=True)` any; otherwise it is refused and nothing is changed. The random
        generators of torch and Python go on from there too, if there are as many ranks as then.
        """
        checkpoint, state = load_training(place, device_of_model(self.model))
        with located(f"trainer.load: {checkpoint.path}"):
            self.load_state_dict(state)
        set_generators(state["rng"])

    def save_on_signal(
        self, folder: str | Path, loader: Iterable[Batch], *, keep: int = 2, drain: bool = False
    ) -> Iterator[Batch]:
        """The loader's batches; a SIGTERM has the step at work end, saves, and exits with 143.

        Write `for x, y in trainer.save_on_signal(folder, loader): trainer.step(x, y)`. Methods
        that keep graphs are drained first. On several ranks it is enough that one gets the signal.
        """

        def save() -> Path:
            return self.save(folder, keep=keep, drain=drain or bool(stages_with_graphs(self)))

        return self._leaving(loader, save)

    def _leaving(self, loader: Iterable[Batch], save: Callable[[], Path]) -> Iterator[Batch]:
        return until_signal(loader, save)
