"""What the user calls: step, flush, evaluate, save and load.

StagedModel.trainer(...) --> Trainer(task, Placement(...))       all stages in this process
                         --> Trainer(task, RankPlacement(...))   the stages of one rank
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from revcompile.arguments import file_path
from revcompile.errors import InputError, NonFiniteError, TrainerStoppedError, warn
from revcompile.runtime.checkpoint.folder import Checkpoint, find_checkpoint, on_all
from revcompile.runtime.checkpoint.training import save_training, set_generators
from revcompile.runtime.checkpoint.tree import located
from revcompile.runtime.executor.trace import Trace
from revcompile.runtime.reversible.module_guards import (
    StageGuard,
    TreeGuard,
    changed_in_flight,
    written_in_flight,
)
from revcompile.runtime.stage.settings import Task
from revcompile.runtime.stage.tensors import clone_tree, detach_tree
from revcompile.runtime.trainer.evaluation import (
    Evaluation,
    EvaluationPass,
    Metric,
    RunningMeans,
    evaluate_model,
    loader_problem,
)
from revcompile.runtime.trainer.inputs import Loader, make_loader, split_batch
from revcompile.runtime.trainer.placement import Placement
from revcompile.runtime.trainer.state import TrainerState, check_latest, make_latest
from revcompile.runtime.trainer.steps import Metrics
from revcompile.schedule import Method

_CLOSED: Final = "trainer.close() has ended this trainer"
_REMEDY: Final = "build a new one and load its last state"


class Trainer(TrainerState):
    """Trains a staged model; `net.trainer(...)` makes one.

    `step` takes a micro-batch, `flush` drains the pipeline, `evaluate` can be called at any
    moment, `save` and `load` write and read checkpoints.

    A bad micro-batch is skipped: the model or the loss fails on it, or its loss or gradient is not
    finite. (If a gradient is not finite, only its stage and the stages before it skip the
    micro-batch.) It counts as a step, but not in the mean of its update. An error after the step
    names it, and training can continue; captured steps report it some steps later. Other errors in
    a step stop the trainer.

    On several ranks every rank calls the same methods in the same order. Only the rank of the first
    stage needs data (`is_first`): the target goes to the last stage with the micro-batch, and what
    other ranks pass is ignored. The rank of the last stage has the loss; `pop_mean_loss` gives its
    mean to all ranks. The rank that meets a bad micro-batch reports it. A rank holds only the
    weights of its stages; `net.to_module()` collects all weights.
    """

    def __init__(self, task: Task, placement: Placement) -> None:
        super().__init__(task, placement)
        self.delays, steps = self._schedule.delays, self._steps
        self._loss_head, self._throughput = steps.loss_head, steps.throughput
        self.is_first = steps.is_first
        """Whether this process needs data: the first stage is here."""
        self.is_last = steps.is_last
        """Whether this process knows the loss: the last stage is here."""
        self.memory_plan: Any = None
        """A `MemoryPlan`: what each stage keeps under a memory budget, if there is one."""
        self.metrics: Metrics | None = None
        """What the last step returned."""

    def _take_over(self) -> None:
        """Become the model's trainer. A trainer that is refused before this has changed nothing."""
        self._tree = TreeGuard(self._partition.rewired, self.model, only_here=True)
        stages = [executor.stage for executor in self._executors]
        parameters = [each for stage in stages for each in stage.parameters.items()]
        self._guard = StageGuard([each for stage in stages for each in stage.watched], parameters)
        make_latest(self, self.model)

    def __repr__(self) -> str:
        here = [executor.index for executor in self._executors]
        where = f", stages {here} here" if self._placement.world > 1 else ""
        if kept := [p.index for p in self._programs if p.graphs_outlive_updates]:
            where += f", graphs of stages {kept} kept"
        return (
            f"Trainer({self._partition.rewired.name}: {len(self._programs)} stages{where}, "
            f"{self.method.name}, accumulation_steps={self._settings.accumulation_steps}, "
            f"largest delay {max(self.delays)}, "
            f"{self.microbatches_seen} micro-batches seen)"
        )

    @property
    def method(self) -> Method:
        """The method, with its choices."""
        return self._schedule.method

    @property
    def microbatches_seen(self) -> int:
        """Micro-batches given to `step`, including those before the checkpoint that was loaded."""
        return self._schedule.injected

    # -- training -----------------------------------------------------------------------------

    def step(self, inputs: Any = None, target: Any = None) -> Metrics:
        """Train on one micro-batch: `trainer.step(x, y)`. Every rank calls it.

        Args:
            inputs: a tensor, a tuple of positional arguments, or a mapping of keyword arguments (a
                dict, what a tokenizer returns).
            target: the second argument of the loss; nothing with `loss=None`.

        Both are copied: their memory may be refilled as soon as `step` returns. On several ranks
        they are ignored except on the rank of the first stage.

        Returns:
            The metrics of this micro-batch.

        Raises:
            InputError: The micro-batch cannot be used, or the model or the loss failed on it: it
                was skipped. Or the model was changed.
            NonFiniteError: A loss or gradient is not finite: its micro-batch was skipped.
        """
        self._check_usable()
        self._resume_training()
        self._refuse_changed_model()
        try:
            return self._step(inputs, target)
        finally:
            if not self._runner.is_replaying:
                self._adopt_layers()  # layers may change their own settings as they run

    def steps(self, batches: Iterable[Any]) -> Iterator[Metrics]:
        """Train on batches and yield their metrics.

        A batch is `(inputs, target)`, with inputs as in `step`; `(a, b, target)` is short for
        `((a, b), target)`. With `loss=None` it is inputs alone. Ranks without the first stage
        ignore what is in their batches, and take as many steps as there are.
        """
        for batch in batches:
            given: Any = (None, None)
            if self.is_first:
                given = split_batch(batch, self._loss_head.has_target, "trainer.steps")
            yield self.step(*given)

    def _step(self, inputs: Any, target: Any) -> Metrics:
        microbatch, steps = self._schedule.injected, self._steps
        with self._stop_on_error():
            values = steps.run(self._schedule, inputs, target)
        self.metrics = metrics = steps.metrics(self._schedule, microbatch, values)
        steps.binder.wait_copied()
        if (failure := steps.failure(microbatch, values)) is not None:
            raise failure
        # Last: warnings may be errors, and the step is complete.
        self._runner.warn()
        planned = None if self.memory_plan is None else self.memory_plan.microbatch_size
        if planned is not None and metrics.samples > planned:
            warn(
                f"memory_budget=: planned for micro-batches of {planned} samples, but one has "
                f"{metrics.samples} and takes more memory; set net.microbatch_size = "
                f"{metrics.samples} and build the trainer again"
            )
        return metrics

    def flush(self) -> None:
        """Drain the pipeline: all gradients come back and are applied. Every rank calls it.

        With micro-batches in flight nothing of the model may change: no modes, settings or hooks
        of layers, and no weights. After a flush they may. Learning rates may change at any time.

        Raises:
            NonFiniteError: A gradient is not finite: its micro-batch was skipped, and the pipeline
                is drained. All ranks raise it.
        """
        self._check_usable()
        self._resume_training()
        self._raise_on_all("trainer.flush", self._problem())
        self._runner.leave()  # bad micro-batches of captured steps become known
        self._finish(self._schedule.drain())
        self._throughput.pause()
        failure = self._steps.failure(self._schedule.injected - 1)
        own = None if failure is None else (str(failure), failure.stage, failure.microbatch)
        for text, stage, microbatch in filter(None, self._placement.gather(own)):
            failure = failure or NonFiniteError(text, stage=stage, microbatch=microbatch)
            failure.add_note("The pipeline is drained; go on without another flush.")
            raise failure

    def _finish(self, actions: Any) -> None:
        scheduler = self._steps.scheduler
        with self._stop_on_error():
            scheduler.finish(scheduler.own(actions))

    def _resume_training(self) -> None:
        self._throughput.resume()
        if not self.model.training:
            self.model.train()

    # -- what goes wrong ----------------------------------------------------------------------

    @contextmanager
    def _stop_on_error(self, *, changes_nothing: bool = False) -> Iterator[None]:
        """Around code that must run completely: after an error there this trainer is unusable.

        If the code `changes_nothing`, a trainer in one process can continue; on several ranks it
        can continue after an `InputError`, which all of them raise.
        """
        try:
            yield
            if not changes_nothing:
                self._guard.see()
        except GeneratorExit:  # collected as garbage: an interrupt came before the code began
            raise
        except BaseException as error:
            if changes_nothing and (isinstance(error, InputError) or self._placement.world == 1):
                raise
            if self._stop_reason is None:
                error.add_note(f"This trainer cannot go on; {_REMEDY}.")
            cause = f"{type(error).__name__}: {error}"
            self._stop_reason = f"this trainer stopped in the middle of a call ({cause})"
            self._transport.stop_all(error)
            raise

    def _check_usable(self, *, to_read: bool = False, to_load: bool = False) -> None:
        """Raise if this trainer cannot continue, or another has taken over.

        Args:
            to_read: The state is only read, which is allowed until the other trainer trains.
            to_load: A state is loaded, from which a trainer that has stopped can continue.
        """
        check_latest(self, self.model, to_read)
        if self._stop_reason is not None and not (to_load and self._stop_reason != _CLOSED):
            raise TrainerStoppedError(f"{self._stop_reason}; {_REMEDY}")

    # -- changes of the model -------------------------------------------------------------------

    # With micro-batches in flight nothing of the model may change; after a flush all of it may,
    # except what stages are compiled for.

    def _refuse_changed_model(self) -> None:
        """Raise before a step if the model cannot be trained as it is now.

        Other ranks wait for this one's messages, so all of them stop.
        """
        problem = self._problem()
        if problem is not None:
            with nullcontext() if self._placement.world == 1 else self._stop_on_error():
                raise InputError(f"trainer.step: {problem}")

    def _problem(self) -> str | None:
        """Why the model cannot be trained as it is now, or None; adopts what may change."""
        found = self._tree.problem() or self._guard.problem()
        return found or self._written_in_flight() or self._changed_in_flight()

    def _changed_in_flight(self) -> str | None:
        """The error if layers have changed with micro-batches in flight; else adopt them."""
        change = self._guard.change()
        if change is None:
            return None
        if any(self._schedule.outstanding):
            return changed_in_flight(change)
        for executor in self._executors:
            executor.stage.leaves_checked = False  # new tensors may require gradients
        self._adopt_layers()
        return None

    def _adopt_layers(self) -> None:
        """Expect modes, settings, buffers and hooks of layers as they are now."""
        if self._guard.change() is not None:
            self._guard.take()
            self._runner.restart()

    def _written_in_flight(self) -> str | None:
        """The error if something in flight needs the values before a write; else adopt them."""
        if not (written := self._guard.written()):
            return None
        shared = [tie for tie, names in self._partition.ties.items() if written.keys() & names]
        waiting = (self._schedule.waiting_tied(tie.owner, tie.holder) for tie in shared)
        if any(self._schedule.outstanding) or any(waiting):
            return written_in_flight(next(iter(written)))
        for executor in self._executors:
            executor.updates.load_copied(written)
            if executor.stage.parameters.keys() & written.keys():
                executor.stage.weights.loaded()
        self._guard.see()
        return None

    def _raise_on_all(self, where: str, problem: str | None) -> None:
        """Raise on all ranks if one of them has a problem. Every rank calls it."""
        for found in self._placement.gather(problem):
            if found is not None:
                raise InputError(f"{where}: {found}")

    # -- evaluation and diagnostics -----------------------------------------------------------

    def evaluate(
        self, loader: Iterable[Any] | None = None, metrics: Mapping[str, Metric] | None = None
    ) -> Evaluation:
        """Means over a loader of `(inputs, target)`, in eval mode; training is not affected.

        Every rank calls it, and gets the result. The loader is read on the rank of the first stage;
        other ranks may pass nothing. An error on one rank is raised on all.

        Args:
            loader: batches as `steps` takes them.
            metrics: functions of `(output, target)` that return a mean over the batch, by name.
        """
        means = RunningMeans(self._steps, metrics)
        self._check_usable()
        self._throughput.pause()
        problem = self._tree.problem() or self._written_in_flight()
        self._raise_on_all("trainer.evaluate", problem or loader_problem(loader, self.is_first))
        if self._placement.world == 1:
            with self._evaluating():
                evaluate_model(self._steps, self.model, loader, means)
            return means.evaluation()
        if self._partition.rewired.eval_body is not None:
            raise InputError(
                f"trainer.evaluate: {self._partition.rewired.name} computes something else in eval "
                "mode than in training, which stages on several ranks cannot; use net.to_module()"
            )
        self._finish(self._schedule.receive_tied_weights())  # usually done by the next step
        evaluation = EvaluationPass(self._steps, loader, means)
        with self._stop_on_error(changes_nothing=True), self._evaluating():
            evaluation.run()
        with self._placement.all_or_none("trainer.evaluate"):
            if evaluation.error is not None:
                raise evaluation.error
        return means.evaluation()

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Eval mode without gradients; modules' modes and random generators are restored.

        Settings that layers change themselves are adopted.
        """
        is_same = self._guard.change() is None
        modes = {module: module.training for module in self.model.modules()}
        device, autocast = self._placement.device, self._settings.autocast
        self.model.eval()
        try:
            with (
                torch.random.fork_rng([device] if device.type == "cuda" else []),
                torch.no_grad(),
                torch.autocast(device.type, autocast, enabled=autocast is not None),
            ):
                yield
        finally:
            for module, mode in modes.items():
                module.training = mode
            self._guard.see()
            if is_same:
                self._adopt_layers()

    def pop_mean_loss(self) -> float:
        """Mean loss of the steps since the last call. Every rank calls it, and gets the mean.

        It is nan if there were no steps. Losses that are not finite do not count. Checkpoints do
        not contain it.
        """
        totals = self._loss_head.totals
        of_ranks = self._placement.gather([0.0, 0.0] if totals is None else totals.tolist())
        if totals is not None:
            totals.zero_()
        total, count = map(sum, zip(*of_ranks, strict=True))
        return float(total / count) if count else float("nan")

    def trace(self, path: str | Path) -> Trace:
        """Record the actions of every stage as a Chrome trace with a row per stage.

        Write `with trainer.trace("run.json"): ...`, or call `stop()` of the result. Open the file
        at ui.perfetto.dev. Meanwhile steps run action by action, not captured. Every rank calls it;
        rank 0 writes the file.
        """
        if (running := self._executors[0].observer) is not None:
            raise InputError(f"trainer.trace: already at work on {running.path}; stop() it")
        self._check_usable()
        self._runner.leave()
        name = f"{self._partition.rewired.name}, {self._programs[0].method.name}"
        return Trace(self, path, name)

    # -- data ---------------------------------------------------------------------------------

    def loader(
        self,
        data: Any,
        batch_size: int,
        *,
        epoch: int = 0,
        skip: int = 0,
        shuffle: bool = True,
        **options: Any,
    ) -> Loader:
        """An epoch of a dataset in batches, in an order that depends on the seed and the epoch.

        Each replica of the pipeline gets its share. Ranks that need no data read none, and get as
        many empty batches.

        Args:
            data: a dataset.
            batch_size: samples per batch.
            epoch: every epoch has another order, so make a new loader for each.
            skip: batches to skip, because a resumed run has trained on them.
            shuffle: False: in the dataset's order.
            options: options of torch's DataLoader.
        """
        return make_loader(
            data,
            batch_size,
            seed=self._settings.seed,
            epoch=epoch,
            skip=skip,
            shuffle=shuffle,
            replica=self.replica,
            replicas=self.replicas,
            needed=self.is_first,
            **options,
        )

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The current parameters of this process under their original names."""
        return ((name, p) for name, p in self.model.named_parameters() if not p.is_meta)

    # -- checkpoints --------------------------------------------------------------------------

    def save(self, folder: str | Path, *, keep_last: int = 2, drain: bool = False) -> Path:
        """Write a checkpoint beside the older ones in a folder. Every rank calls it.

        It includes the micro-batches in flight; without `drain` it does not affect training. A run
        that loads it with the same stages, method, `accumulation_steps` and replicas is
        bit-identical to one that never stopped. Graphs that stages keep cannot be saved: use
        `drain` while micro-batches are in flight (`gpipe` and `1f1b` have none after an update).

        If a save is interrupted, older checkpoints stay intact. If one rank cannot write, all
        raise, there is no new checkpoint, and training can continue.

        Args:
            folder: where checkpoints are; all ranks must see it.
            keep_last: how many of the newest checkpoints to keep.
            drain: flush first, which may make an early update. Any stages and method can load it.

        Returns:
            The path of the new checkpoint.

        Raises:
            NonFiniteError: With `drain`, after the checkpoint is written: a micro-batch in flight
                was skipped, as in `flush`.
        """
        self._check_usable()
        self._throughput.pause()
        folder = file_path("trainer.save", folder, "runs/a")
        failure = None
        if drain:
            try:
                self.flush()
            except NonFiniteError as error:  # the pipeline is drained all the same
                failure = error
        self._runner.leave()
        self._raise_on_all("trainer.save", self._written_in_flight())
        self._check_savable()
        with self._stop_on_error(changes_nothing=True):
            self._transport.wait_all_delivered()
            state = self._state(self._placement.own_entries(self.model.state_dict()), detach_tree)
            who, gather = (self.rank, self.replica), self._placement.gather
            saved = save_training(folder, state, *who, gather=gather, keep_last=keep_last)
        if failure is not None:
            failure.add_note(f"The checkpoint {saved} is written, without these micro-batches.")
            raise failure
        return saved

    def load(self, place: str | Path) -> None:
        """Continue from a checkpoint, or from the newest one in a folder. Every rank calls it.

        With micro-batches in flight, stages, method, `accumulation_steps` and replicas must be
        those of the checkpoint. If it does not fit, no rank changes anything. With the same number
        of ranks, the random generators of torch and Python continue too.
        """
        self._check_usable(to_load=True)
        self._throughput.pause()
        folder, state = file_path("trainer.load", place, "runs/a"), dict[str, Any]()
        gather = self._placement.gather

        def find() -> str | None:
            # Rank 0 chooses: other ranks may see an older version of the folder.
            return os.path.relpath(find_checkpoint(folder), folder) if self.rank == 0 else None

        def read(name: str) -> None:
            checkpoint = Checkpoint(folder / name)
            state.update(self._read_state(checkpoint))
            with located(str(checkpoint.path)):
                self._check_fits(state)

        with self._stop_on_error(changes_nothing=True):
            name, *_ = on_all("trainer.load", find, gather)
            on_all("trainer.load", lambda: read(name), gather)
        self._continue_from(state)
        set_generators(state["rng"])

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue exactly from here, micro-batches in flight included.

        Only in one process; on ranks use `save`.
        """
        if self._placement.world > 1:
            raise InputError(
                "trainer.state_dict: no rank has the whole state; use trainer.save(folder), which "
                "every rank calls, or net.to_module().state_dict() for the weights"
            )
        self._check_usable(to_read=True)
        self._throughput.pause()
        self._runner.leave()
        self._raise_on_all("trainer.state_dict", self._written_in_flight())
        self._check_savable()
        return self._state(self.model.state_dict(), clone_tree)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`; with nothing in flight it also fits other stages.

        Only in one process; on ranks use `load`.
        """
        if self._placement.world > 1:
            raise InputError("trainer.load_state_dict: every rank calls trainer.load(folder)")
        self._check_usable(to_load=True)
        self._check_fits(state)
        self._continue_from(state)

    def _continue_from(self, state: Mapping[str, Any]) -> None:
        """Load a state that fits, and drop what is in flight. Every rank calls it."""
        with self._stop_on_error():
            self._transport.wait_all_delivered()
            self._runner.leave()
            self._load_state(state)
            self._runner.clear()
            self._adopt_layers()
            self._transport.completed = self._schedule.injected - 1
            self._placement.gather(None)  # no rank sends before all have dropped what was in flight
        self._stop_reason = None

    def close(self) -> None:
        """End the training: this trainer cannot be used any more. Every rank calls it.

        It ends the threads and sockets of a rank, which otherwise end with the process.
        """
        self._stop_reason = _CLOSED
        self._placement.close()
