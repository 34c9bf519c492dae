"""The trainer: feeds micro-batches to the stages and reports what comes out."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from revcompile.errors import InputError, RevcompileError
from revcompile.ir import TensorType
from revcompile.program import Partition, StageProgram
from revcompile.runtime.attempt import Attempt
from revcompile.runtime.backend import Backend, Fast
from revcompile.runtime.checkpoint import (
    load_training,
    save_training,
    set_generators,
    until_signal,
)
from revcompile.runtime.data import Unread, same_order
from revcompile.runtime.diagnostics import Probe
from revcompile.runtime.objective import Loss, Objective, described
from revcompile.runtime.reversible import Reversible, bind
from revcompile.runtime.shipping.names import located
from revcompile.runtime.stage import Stage
from revcompile.runtime.state import load_trainer, referenced, save_trainer
from revcompile.runtime.synthesis import Synthesiser
from revcompile.runtime.trace import Trace
from revcompile.runtime.transport import InProcess
from revcompile.runtime.update import OptimizerFactory, ParamGroups, ScheduleFactory, Updater
from revcompile.runtime.worker import Actor, Worker
from revcompile.schedule import Order, Schedule, delay
from revcompile.steps import mix
from revcompile.tree import device_of_model

Batch = TypeVar("Batch")

__all__ = ["Evaluation", "Metric", "Metrics", "Settings", "Trainer", "batch_pair"]


class Metric(Protocol):
    """A mean over a batch, from the model's output and the target."""

    def __call__(self, output: Any, target: Any, /) -> float | Tensor:
        """The mean."""
        ...


@dataclass(frozen=True)
class Settings:
    """How to train: what `net.trainer(...)` takes besides optimizer and loss."""

    accumulate: int = 1
    lr_schedule: ScheduleFactory | None = None
    param_groups: ParamGroups | None = None
    autocast: torch.dtype | None = None
    clip_grad_norm: float | None = None
    seed: int = 0
    check_finite: bool = True
    measure_every: int | None = None
    backend: Backend = Backend.AUTO
    buffers: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.accumulate < 1:
            raise InputError(f"accumulate={self.accumulate}; an update needs at least 1")
        if self.clip_grad_norm is not None and not self.clip_grad_norm > 0:
            raise InputError(f"clip_grad_norm={self.clip_grad_norm}; use a positive norm or None")
        if self.autocast not in (None, torch.bfloat16):
            raise InputError(
                f"autocast={self.autocast}; use torch.bfloat16 or None (float16 needs loss "
                "scaling, which delayed gradients do not survive)"
            )
        if self.buffers not in (None, torch.bfloat16, torch.float16):
            raise InputError(
                f"buffers={self.buffers}; use torch.bfloat16, torch.float16 or None (as they are)"
            )


@dataclass(frozen=True)
class Metrics:
    """What has reached the last stage by now.

    `loss` waits for the device the first time it is read.
    """

    microbatch: int
    samples: int
    delays: tuple[int, ...]
    updates: tuple[int, ...]
    lr: float | None
    throughput: float
    """Samples a second, since the trainer was made or last asked to count anew."""
    loss_tensor: Tensor | None = field(default=None, repr=False)
    output: Any = field(default=None, repr=False)
    reconstruction: Mapping[int, float] = field(default_factory=dict)
    """Relative error of each stage's rebuilt input, when measured in this step."""

    @property
    def loss(self) -> float:
        """The micro-batch's loss."""
        return float("nan") if self.loss_tensor is None else float(self.loss_tensor)


@dataclass(frozen=True)
class Evaluation:
    """Means over all samples of a loader."""

    loss: float
    samples: int
    metrics: Mapping[str, float]


class Trainer:
    """Trains a staged model with one of the methods, all stages in this process.

    `step` takes a micro-batch, `flush` drains the pipeline, `evaluate` can be called at any
    moment. A step that fails leaves no trace. Only where a gradient turns out bad after later
    stages have used it is the micro-batch left out of the updates still to come. Recorded rounds
    (see `Backend`) leave bad micro-batches out everywhere, and say so some steps later.
    """

    guarded: ClassVar[bool] = False
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
        method, stages = programs[0].method, len(programs)
        self.schedule = Schedule(method, stages, settings.accumulate, partition.ties)
        self.delays = tuple(delay(method, stages, j, settings.accumulate) for j in range(stages))
        self.transport = self._connect()
        self.objective = Objective(partition.rewired, loss, settings.autocast, stages - 1)
        self.objective.check_finite = settings.check_finite
        self.actors = [self._actor(p, optimizer) for p in programs if self._is_here(p.index)]
        self.worker = Worker(self.actors)
        self.probes: list[Probe] = []
        for actor in self.actors:
            actor.stage.observers = self.probes
        self._fast = self._recorder()
        self._broken: str | None = None
        self._trace: Trace | None = None
        self._samples, self._started = 0, time.perf_counter()
        self.metrics: Metrics | None = None
        """What the last step returned."""

    def _connect(self) -> Any:
        """What carries messages between the stages."""
        return InProcess(len(self.programs))

    def _recorder(self) -> Fast | None:
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
        return Fast(backend, self.actors, self.objective, self.schedule, check_finite=check)

    def _is_here(self, stage: int) -> bool:
        """Does a stage live in this process?"""
        return True

    def _actor(self, program: StageProgram, optimizer: OptimizerFactory) -> Actor:
        settings, index = self.settings, program.index
        ties = self.partition.ties
        held = {tie.owner: names for tie, names in ties.items() if tie.holder == index}
        owned = {tie.holder: names for tie, names in ties.items() if tie.owner == index}
        replicas = [name for names in held.values() for name in names]
        stage = Stage(
            program,
            self.model,
            seed=self.stage_seed,
            autocast=settings.autocast,
            replicas=replicas,
            check_finite=settings.check_finite,
            buffers=settings.buffers,
        )
        own = {n: p for n, p in stage.parameters.items() if n not in replicas}
        updater = Updater(
            f"stage {index}",
            own,
            optimizer,
            groups=settings.param_groups,
            lr_schedule=settings.lr_schedule,
        )
        is_last = index == len(self.programs) - 1
        synthesiser = None
        if program.method.order is Order.SYNTHETIC and not is_last:
            synthesiser = Synthesiser(index, program.outputs, optimizer, stage._device())
        return Actor(
            stage,
            updater,
            self.transport,
            objective=self.objective if is_last else None,
            synthesiser=synthesiser,
            clip_grad_norm=settings.clip_grad_norm,
            held=held,
            owned=owned,
            guarded=self.guarded,
        )

    # -- training -----------------------------------------------------------------------------

    def step(self, inputs: Any, target: Any = None) -> Metrics:
        """Train on one micro-batch.

        `inputs` is what the model takes: a tensor, a tuple of positional arguments, or a dict of
        keyword arguments.
        """
        self._usable()
        if (metrics := self._recorded(inputs, target)) is not None:
            return metrics
        values = self._bound(inputs)
        microbatch, samples = self.schedule.injected, self._size(values)
        attempt = Attempt(self.schedule, self.actors, self.transport, self.objective)
        self.actors[0].inputs[microbatch] = values
        self.objective.targets[microbatch] = self._moved(target)
        for probe in self.probes:
            probe.fed(microbatch, values, self.objective.targets[microbatch])
        self._measure(microbatch)
        try:
            rest = self.worker.forward(self.schedule.inject())
            attempt.backward(rest)
        except BaseException as error:
            self.schedule = attempt.take_back()
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
            self._fast.saw((values, target))
        self._traced()
        self._raise_failures()
        return self.metrics

    def _recorded(self, inputs: Any, target: Any) -> Metrics | None:
        """The step as a recorded round; None if it has to be taken action by action."""
        if self._fast is None or not self._fast.is_on:
            return None
        args, kwargs = _call(inputs)
        rewired, microbatch = self.partition.rewired, self.schedule.injected
        values = bind(rewired.signature, rewired.name, args, kwargs)
        every = self.settings.measure_every
        watched = bool(self.probes or self._trace)
        watched |= every is not None and microbatch % every == 0
        if not self.model.training:
            self.model.train()
        with self._stopping():
            outcome = self._fast.step(
                self.schedule, self.transport, (values, target), allowed=not watched
            )
        if outcome is None:
            return None
        self._fast.saw((values, target))
        self.objective.losses[microbatch] = outcome.loss
        self.objective.outputs[microbatch] = outcome.output
        samples = self._size(values)
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
        if not self.model.training:
            self.model.train()
        self._finish(self.worker.own(self.schedule.drain()))
        self._probed(drained=True)
        self._raise_failures()

    def _measure(self, microbatch: int) -> None:
        """Have reconstruction errors measured when it is time; train mode for all that follows."""
        every = self.settings.measure_every
        due = every is not None and microbatch % every == 0
        for actor in self.actors:
            actor.measured = {microbatch} if due else set()
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
        failures += [error for actor in self.actors for error in actor.failures]
        for actor in self.actors:
            actor.failures = []
        if failures:
            raise failures[0]

    def _usable(self) -> None:
        if self._broken is not None:
            raise RuntimeError(
                f"this trainer stopped in the middle of a step ({self._broken}); build a new one "
                "and load its last state_dict"
            )

    # -- inputs -------------------------------------------------------------------------------

    def _bound(self, inputs: Any) -> dict[str, Any]:
        args, kwargs = _call(inputs)
        return bind(
            self.partition.rewired.signature,
            self.partition.rewired.name,
            self._moved(args),
            self._moved(kwargs),
        )

    def _size(self, values: Mapping[str, Any]) -> int:
        """How many samples the model's inputs hold: the dimension that grows with the batch."""
        for name, value in values.items():
            kind = self.partition.types.get(name)
            if isinstance(kind, TensorType) and len(kind.shape) == value.dim():
                for step, size in zip(kind.per_sample, value.shape, strict=True):
                    if step:
                        return int(size) // step
        return next((len(value) for value in values.values() if value.dim()), 1)

    def _moved(self, tree: Any) -> Any:
        device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        return pytree.tree_map_only(Tensor, lambda t: t.to(device, non_blocking=True), tree)

    # -- looking ------------------------------------------------------------------------------

    def evaluate(
        self, loader: Iterable[Any], metrics: Mapping[str, Metric] | None = None
    ) -> Evaluation:
        """Mean loss (and other metrics) over a loader of `(inputs, target)`, in eval mode.

        Training goes on afterwards as if nothing had happened.
        """
        sums: dict[str, float] = {"loss": 0.0, **dict.fromkeys(metrics or {}, 0.0)}
        samples = 0
        with self._evaluating():
            for number, batch in enumerate(loader):
                inputs, target = batch_pair(batch)
                args, kwargs = _call(self._moved(inputs))
                target = self._moved(target)
                output = self.model(*args, **kwargs)
                size = self._size(self._bound(inputs))
                loss = self.objective.evaluate(output, target, f"evaluation, batch {number}")
                sums["loss"] += float(loss) * size
                for name, metric in (metrics or {}).items():
                    sums[name] += float(metric(output, target)) * size
                samples += size
        if not samples:
            raise InputError("trainer.evaluate: the loader is empty")
        means = {name: total / samples for name, total in sums.items()}
        return Evaluation(means.pop("loss"), samples, means)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        modes = {module: module.training for module in self.model.modules()}
        devices = {p.device for p in self.model.parameters() if p.is_cuda}
        kind = next(iter(devices)).type if devices else "cpu"
        autocast = self.settings.autocast
        self.model.eval()
        try:
            with (
                torch.random.fork_rng(list(devices)),
                torch.no_grad(),
                torch.autocast(kind, autocast, enabled=autocast is not None),
            ):
                yield
        finally:
            for module, mode in modes.items():
                module.training = mode

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
        self, dataset: Any, batch_size: int, *, epoch: int = 0, skip: int = 0, **options: Any
    ) -> DataLoader[Any] | Unread:
        """An epoch of a dataset of `(inputs, target)`, in an order that the seed and epoch fix.

        Every rank gets the same batches of its copy's share; ranks that need no data read none.
        `skip` passes over the batches that a run which goes on has had; `options` are those of
        torch's DataLoader.
        """
        found = same_order(
            dataset,
            batch_size,
            self.settings.seed,
            epoch,
            replica=self.replica,
            replicas=self.replicas,
            skip=skip,
            **options,
        )
        return found if self.is_first or self.is_last else Unread(len(found))

    def parameters(self) -> dict[str, nn.Parameter]:
        """The current parameters under their original names."""
        return dict(self.model.named_parameters())

    def _metrics(self, microbatch: int, samples: int) -> Metrics:
        found = {}
        for actor in self.actors:
            for measured in list(actor.stage.reconstruction):
                found[actor.index] = actor.stage.reconstruction.pop(measured)
        elapsed = max(time.perf_counter() - self._started, 1e-9)
        return Metrics(
            microbatch=microbatch,
            samples=samples,
            delays=self.delays,
            updates=self.schedule.updates,
            lr=next((a.updater.lr for a in self.actors if a.updater.lr is not None), None),
            throughput=self._samples / elapsed,
            loss_tensor=self.objective.losses.pop(microbatch, None),
            output=self.objective.outputs.pop(microbatch, None),
            reconstruction=found,
        )

    def watch(self) -> Probe:
        """Compare the gradients of the next micro-batch: PETRA's Appendix B, stage by stage.

        The probe fills in the steps (or the flush) that follow; `probe.report` is there once
        `probe.complete`. Training goes on as if nobody watched.
        """
        self._settle()
        stages = [actor.stage for actor in self.actors]
        rewired, accumulate = self.partition.rewired, self.settings.accumulate
        probe = Probe(self.schedule.injected, stages, rewired, self.objective, accumulate)
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
            self._fast.forget()
        self.probes.clear()
        self._broken = None

    def save(self, folder: str | Path, *, keep: int = 2, drain: bool = False) -> Path:
        """Write a checkpoint beside the older ones in a folder; the newest `keep` stay.

        A run that loads it goes on to the bit, micro-batches in flight included. `drain` flushes
        first, so that it loads into other stages and methods too. Whatever interrupts a save,
        the checkpoints before it stay whole. Returns the new one's place.
        """
        self._settle()
        if drain:
            self.flush()
        stages = [actor.index for actor in self.actors]
        return save_training(folder, save_trainer(self, referenced), self.model, stages, keep=keep)

    def load(self, place: str | Path) -> None:
        """Go on from a checkpoint, or from the newest one in a folder.

        The random generators of torch and Python go on from there too.
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
        that keep graphs are drained first.
        """

        def save() -> None:
            graphs = any(actor.stage.keeps_graphs for actor in self.actors)
            self.save(folder, keep=keep, drain=drain or graphs)

        return until_signal(loader, save)


def _call(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, tuple | list):
        return tuple(inputs), {}
    if isinstance(inputs, dict):
        return (), inputs
    return (inputs,), {}


def batch_pair(batch: Any) -> tuple[Any, Any]:
    """Inputs and target, from what a loader yields."""
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    raise InputError(
        f"trainer.evaluate: expected batches of (inputs, target), got {described(batch)}"
    )
