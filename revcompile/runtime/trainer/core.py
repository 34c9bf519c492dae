"""What every trainer has: stages to run, data to load, metrics, traces and checkpoints.

StagedModel.trainer(...) --> LocalTrainer         all stages in this process
                         --> DistributedTrainer   the stages of one rank
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Final, NoReturn
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

from revcompile.arguments import file_path
from revcompile.errors import InputError, NonFiniteError, TrainerStoppedError
from revcompile.runtime.checkpoint.training import TrainerState
from revcompile.runtime.executor.captured.runner import GraphRunner
from revcompile.runtime.executor.scheduler import LocalScheduler
from revcompile.runtime.executor.trace import Trace
from revcompile.runtime.executor.transport import Transport
from revcompile.runtime.stage.loss_head import LossHead
from revcompile.runtime.stage.module_guards import StageGuard, changed_in_flight
from revcompile.runtime.trainer.data import Loader, make_loader
from revcompile.runtime.trainer.inputs import InputBinder, split_batch, warn_if_larger_than_planned
from revcompile.runtime.trainer.metrics import Evaluation, Metric, Metrics, Throughput, eval_mode
from revcompile.runtime.trainer.settings import Task, build_executors
from revcompile.schedule import Schedule, delay

_latest: Final[WeakKeyDictionary[nn.Module, ref[Any]]] = WeakKeyDictionary()
"""The trainer of each model: the one that was made last. Trainers write to the model's own
parameters. Two that take turns would train each other's weights, and weights that are loaded while
micro-batches are in flight would get gradients that belong to others: the trainer that cannot go on
raises when it is used again."""


def _tell_trainer(model: nn.Module, _: Any) -> None:
    """After `load_state_dict`; copies of the model have this hook, too, and no trainer."""
    latest = _latest.get(model)
    trainer = None if latest is None else latest()
    if trainer is not None:
        trainer.weights_loaded()


class _StopOnError:
    """Tells `stop` of an error, and lets it pass. Not a generator: every step enters one."""

    __slots__ = ("_stop",)

    def __init__(self, stop: Callable[[BaseException], None]) -> None:
        self._stop = stop

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        if error is not None:
            self._stop(error)


class Trainer(TrainerState, ABC):
    """Trains a staged model; `net.trainer(...)` makes one.

    `step` takes a micro-batch, `flush` drains the pipeline, `evaluate` can be called at any
    moment, `save` and `load` write and read checkpoints.
    """

    runner: GraphRunner
    """Runs captured steps, where they can be."""
    skip_on_error: ClassVar[bool] = False
    """Is a micro-batch left out by all stages if the model fails on it? Or is the step undone?"""

    def __init__(
        self,
        task: Task,
        *,
        transport: Transport,
        device: torch.device,
        stages: Sequence[int],
        rank: int = 0,
        replica: int = 0,
        replicas: int = 1,
    ) -> None:
        model, partition, settings = task.model, task.partition, task.settings
        self.model, self.partition, self.settings, self.tree = model, partition, settings, task.tree
        self.programs = programs = tuple(task.programs)
        self.transport: Transport = transport
        self.rank, self.replica, self.replicas = rank, replica, replicas
        self.is_first = 0 in stages
        """Does this process need inputs?"""
        self.is_last = len(programs) - 1 in stages
        """Does this process need targets, and know the loss?"""
        method, count, accumulate = programs[0].method, len(programs), settings.accumulate
        self.schedule = Schedule(method, count, accumulate, partition.ties, settings.synchronous)
        self.delays = tuple(delay(method, count, j, accumulate) for j in range(count))
        self.binder = InputBinder(partition, device)
        self.loss_head = LossHead(partition.rewired, task.loss, settings.autocast, count - 1)
        self.loss_head.check_finite = settings.check_finite
        given = transport, self.loss_head, self.stage_seed, self.skip_on_error
        self.executors = build_executors(task, stages, *given)
        self.scheduler = LocalScheduler(self.executors)
        self._stop_reason: str | None = None
        self._trace: Trace | None = None
        self._throughput = Throughput(device)
        self.memory_plan: Any = None
        """A `MemoryPlan`: what each stage keeps under a memory budget, if there is one."""
        self.metrics: Metrics | None = None
        """What the last step returned."""

    def take_over(self) -> None:
        """Train the model from now on. Until then, a trainer that is refused changes nothing."""
        self._guard = StageGuard([watched for e in self.executors for watched in e.stage.watched])
        if self.model not in _latest:
            hooked: nn.Module = self.model
            hooked.register_load_state_dict_post_hook(_tell_trainer)
        _latest[self.model] = ref(self)

    # -- training -----------------------------------------------------------------------------

    @abstractmethod
    def step(self, inputs: Any = None, target: Any = None) -> Metrics:
        """Train on one micro-batch: `trainer.step(x, y)`.

        Args:
            inputs: what the model takes: a tensor, a tuple of positional arguments, or a dict of
                keyword arguments.
            target: what the loss takes as its second argument.

        Both are copied: their memory may be refilled as soon as `step` returns.

        Returns:
            The metrics of this micro-batch.
        """

    def steps(self, batches: Iterable[Any]) -> Iterator[Metrics]:
        """Train on batches of `(inputs, target)`, or of inputs alone, and yield their metrics."""
        for batch in batches:
            yield self.step(*split_batch(batch))

    def flush(self) -> None:
        """Drain the pipeline: all gradients come back and are applied. Every rank calls it.

        Raises:
            NonFiniteError: Of one on its way back, which was left out; the pipeline is drained.
                On all ranks, whichever has met it.
        """
        self._check_usable()
        self._resume_training()
        self._check_tree("trainer.flush", self._changed_in_flight())
        self._drain()
        failure = self._failure()
        own = None if failure is None else (str(failure), failure.stage, failure.microbatch)
        for text, stage, microbatch in filter(None, self.everyone(own)):
            failure = failure or NonFiniteError(text, stage=stage, microbatch=microbatch)
            failure.add_note("The pipeline is drained; go on without another flush.")
            raise failure

    def _drain(self) -> None:
        self._sync_stages()
        self._finish(self.scheduler.own(self.schedule.drain()))
        self._throughput.pause()

    def _sync_stages(self) -> None:
        """Make the stages hold everything that is in flight, for whoever reads it there."""
        self._check_usable()
        self.runner.leave(self.schedule, self.transport)

    def _measure(self, microbatch: int) -> None:
        """Have reconstruction errors measured in this step, if it is time."""
        for executor in self.executors:
            executor.measured = {microbatch} if self._is_measured(microbatch) else set()

    def _is_measured(self, microbatch: int) -> bool:
        every = self.settings.measure_every
        return every is not None and microbatch % every == 0

    def _resume_training(self) -> None:
        self._throughput.resume()
        if not self.model.training:
            self.model.train()

    def _finish(self, actions: Any) -> None:
        with self._stop_on_error():
            self.scheduler.finish(actions)

    def _stop_on_error(self) -> _StopOnError:
        """Around what cannot be rolled back: after a failure there this trainer is unusable."""
        return _StopOnError(self._stop)

    def _stop(self, error: BaseException) -> None:
        if self._stop_reason is None:
            error.add_note("This trainer cannot go on; build a new one and load its last state.")
        cause = f"{type(error).__name__}: {error}"
        self._stop_reason = f"this trainer stopped in the middle of a step or a load ({cause})"

    @property
    def is_unused(self) -> bool:
        return self.schedule.injected == 0

    def _check_usable(self, *, to_read: bool = False) -> None:
        self._check_latest(to_read=to_read)
        if self._stop_reason is not None:
            raise TrainerStoppedError(
                f"{self._stop_reason}; build a new one and load its last state"
            )

    def _check_latest(self, *, to_read: bool = False) -> None:
        """Raise if another trainer has taken over; its state can be read until that one trains."""
        found = _latest.get(self.model)
        latest = self if found is None else found()  # None if both are copies
        if latest is not self and not (to_read and latest is not None and latest.is_unused):
            raise TrainerStoppedError(
                "net.trainer(...) has been called again, and the new trainer trains the model "
                "since; use that one, or call petrafy once more for a model of its own"
            )

    def weights_loaded(self) -> None:
        """A state dict has been loaded into the model by other means than `load`."""
        self.runner.leave(self.schedule, self.transport)
        if not self.schedule.idle:
            self._stop_reason = (
                "weights were loaded into the model while this trainer had micro-batches in "
                "flight, whose gradients belong to the weights before; call trainer.flush() "
                "before you load weights. This trainer cannot go on"
            )
            return
        weights = dict(self.model.named_parameters())
        for executor in self.executors:
            executor.weights_loaded(weights)

    def _refusal(self) -> str | None:
        """Why the model cannot be trained on as it is, or None; changed settings are followed."""
        problem = self.tree.problem() or self._guard.problem() or self._changed_in_flight()
        if problem is None:
            self._follow_settings()
        return problem

    def _changed_in_flight(self) -> str | None:
        """What is different of layers since something that is in flight was computed."""
        change = self._guard.settings.first_change() if any(self.schedule.outstanding) else None
        return None if change is None else changed_in_flight(change)

    def _follow_settings(self) -> None:
        """Go on with the settings of layers as they are now."""
        if self._guard.settings.first_change() is not None:
            self._guard.settings.take()
            self.runner.restart(self.schedule, self.transport)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Eval mode, without gradients. What layers change themselves is no change of settings."""
        is_same = self._guard.settings.first_change() is None
        try:
            with eval_mode(self.model, self.settings.autocast):
                yield
        finally:
            if is_same:
                self._follow_settings()

    def _check_tree(self, where: str, problem: str | None = None) -> None:
        """Raise if modules have changed; on all ranks if they have on one. Every rank calls it."""
        self._raise_on_all(where, self.tree.problem() or problem)

    def _raise_on_all(self, where: str, problem: str | None) -> None:
        for found in self.everyone(problem):
            if found is not None:
                raise InputError(f"{where}: {found}")

    def _failure(self) -> Any:
        """An error of a micro-batch left out, if one has become known; it names the others.

        That of a bad gradient comes first: it is of an older one. Between steps there are no other.
        """
        failures: list[Exception] = [*self.runner.failures()]
        for executor in self.executors:
            failures += executor.failures
        for executor in self.executors:
            failures += executor.forward_errors
            executor.failures, executor.forward_errors = [], []
        for other in failures[1:]:
            failures[0].add_note(f"And {other}")
        return failures[0] if failures else None

    # -- evaluation and diagnostics -----------------------------------------------------------

    @abstractmethod
    def evaluate(
        self, loader: Iterable[Any], metrics: Mapping[str, Metric] | None = None
    ) -> Evaluation:
        """Means over a loader of `(inputs, target)`, in eval mode; training is not affected.

        Args:
            loader: batches of `(inputs, target)`; with `loss=None`, as the model returns its own
                loss, batches as `step` takes them.
            metrics: functions of `(output, target)` that return a mean over the batch, by name.

        Returns:
            Mean loss and metrics over all samples.
        """

    def mean_loss(self) -> float:
        """Mean loss of the steps since the last call; nan without any. Every rank calls it.

        Losses that are not finite, whose micro-batches were left out, are not in it. It is not part
        of a checkpoint: after `load` the mean begins anew.
        """
        totals = self.loss_head.totals
        of_ranks = self.everyone([0.0, 0.0] if totals is None else totals.tolist())
        if totals is not None:
            totals.zero_()
        total, count = map(sum, zip(*of_ranks, strict=True))
        return float(total / count) if count else float("nan")

    def _metrics(self, microbatch: int, samples: int) -> Metrics:
        if self.memory_plan is not None:
            warn_if_larger_than_planned(self.memory_plan.batch_size, samples)
        errors = {}
        for executor in self.executors if self.settings.measure_every is not None else ():
            for measured in list(executor.stage.reconstruction):
                errors[executor.index] = executor.stage.reconstruction.pop(measured)
        loss = self.loss_head.losses.pop(microbatch, None)
        if loss is not None and not self.runner.is_active:  # captured steps add theirs themselves
            self.loss_head.add(loss)
        scalings = [executor.scaling for executor in self.executors if executor.scaling is not None]
        return Metrics(
            microbatch=microbatch,
            samples=samples,
            delays=self.delays if not self.schedule.is_synchronous else (0,) * len(self.delays),
            updates=self.schedule.updates,
            lr=next((e.updater.lr for e in self.executors if e.updater.lr is not None), None),
            throughput=self._throughput.add(samples, counts=not self.runner.is_capturing),
            loss_tensor=loss,
            output=self.loss_head.outputs.pop(microbatch, None),
            reconstruction=errors,
            scale=self.loss_head.scale,
            overflowed=sum(s.skipped for s in scalings),
        )

    def _report(self, metrics: Metrics) -> Metrics:
        """The end of a step."""
        self.binder.wait_copied()
        self.metrics = metrics
        if self._trace is not None:
            self._trace.stepped()
        if (failure := self._failure()) is not None:
            raise failure
        return metrics

    def trace(self, path: str | Path, *, steps: int | None = None) -> Trace:
        """Record what every stage does from now on, as a Chrome trace with a row for each.

        Write `with trainer.trace("run.json"): ...`, or `trainer.trace("run.json", steps=20)` and
        go on training. Open the file at ui.perfetto.dev. Meanwhile steps run action by action,
        not captured. Every rank calls it; rank 0 writes the file.
        """
        if self._trace is not None:
            raise InputError(f"trainer.trace: already at work on {self._trace.path}; stop() it")
        self._sync_stages()
        name = f"{self.partition.rewired.name}, {self.programs[0].method.name}"
        self._trace = Trace(self, path, steps, name)
        return self._trace

    def untraced(self) -> None:
        """Called by a trace that has ended."""
        self._trace = None

    @abstractmethod
    def everyone(self, value: Any) -> Sequence[Any]:
        """The plain values of all processes, by rank. Every rank calls it."""

    # -- data ---------------------------------------------------------------------------------

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

        The ranks of one pipeline get the same batches; ranks that need no data read none.

        Args:
            data: a dataset, which is shuffled, or a DataLoader that shuffles its dataset or reads
                it in order. Its dataset, batch size, collation and workers are taken over.
            batch_size: samples a batch; a DataLoader's own if not given.
            epoch: every epoch has another order, so make a new loader for each.
            skip: batches to skip, because a resumed run has had them already.
            options: those of torch's DataLoader.
        """
        return make_loader(
            data,
            batch_size,
            seed=self.settings.seed,
            epoch=epoch,
            skip=skip,
            replica=self.replica,
            replicas=self.replicas,
            needed=self.is_first or self.is_last,
            **options,
        )

    def parameters(self) -> dict[str, nn.Parameter]:
        """The current parameters of this process under their original names."""
        return {name: p for name, p in self.model.named_parameters() if not p.is_meta}

    # -- checkpoints --------------------------------------------------------------------------

    def save(self, folder: str | Path, *, keep: int = 2, drain: bool = False) -> Path:
        """Write a checkpoint beside the older ones in a folder. Every rank calls it.

        It holds exactly this moment, micro-batches in flight included: saving changes nothing in
        the training, and a run that loads it continues to the bit, on any number of ranks with the
        same stages and method. Methods that keep graphs cannot be saved with micro-batches in
        flight: those need `drain`, unless they have just updated (`gpipe`, `1f1b`).

        Whatever interrupts a save, the checkpoints before it stay whole. If one rank cannot write,
        all raise, there is no new checkpoint, and training can go on.

        Args:
            folder: where checkpoints are; all ranks must see it.
            keep: how many of the newest checkpoints stay.
            drain: flush first, which trains on with what is in flight and empties the pipeline:
                that checkpoint loads into other stages and methods too.

        Returns:
            The path of the new checkpoint.

        Raises:
            NonFiniteError: With `drain`, after the checkpoint is written: a micro-batch in flight
                was left out, as in `flush`.
        """
        self._check_usable()
        self._throughput.pause()
        folder = file_path("trainer.save", folder, "runs/a")
        self._sync_stages()
        try:
            if drain:
                self.flush()
        except NonFiniteError as error:  # the pipeline is drained all the same
            saved = self._write_checkpoint(folder, keep)
            error.add_note(f"The checkpoint {saved} is written, without these micro-batches.")
            raise
        self._check_savable()
        return self._write_checkpoint(folder, keep)

    @abstractmethod
    def _write_checkpoint(self, folder: Path, keep: int) -> Path: ...

    @abstractmethod
    def load(self, place: str | Path) -> None:
        """Continue from a checkpoint, or from the newest one in a folder. Every rank calls it.

        With micro-batches in flight it needs the stages and method it was saved with, after
        `save(..., drain=True)` any; otherwise it is refused and nothing is changed, on any rank.
        The random generators of torch and Python continue too, if there are as many ranks.
        """

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue exactly from here, micro-batches in flight included.

        Only in one process; on ranks use `save`.
        """
        self._needs_one_process(
            "state_dict",
            "no rank has the whole state; use trainer.save(folder), which every rank calls, or "
            "net.module().state_dict() for the weights",
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`; one with nothing in flight fits other stages too.

        Only in one process; on ranks use `load`.
        """
        self._needs_one_process(
            "load_state_dict", "use trainer.load(folder), which every rank calls"
        )

    def close(self) -> None:
        """End the training; every rank does, at the latest when its process ends.

        The trainer cannot be used any more; on ranks, its threads and sockets are gone.
        """
        self._stop_reason = self._stop_reason or "trainer.close() has ended this trainer"

    def _needs_one_process(self, method: str, advice: str) -> NoReturn:
        raise InputError(f"trainer.{method}: {advice}")
