"""The trainer of one rank: its own stages, the same steps, messages to the other ranks."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, distributed
from torch.utils import _pytree as pytree

from revcompile.arguments import file_path
from revcompile.errors import InputError, RankError, RevcompileError
from revcompile.ir.types import Live
from revcompile.runtime.checkpoint.folder import Checkpoint, find_checkpoint, on_all
from revcompile.runtime.checkpoint.training import save_training, set_generators
from revcompile.runtime.checkpoint.tree import located
from revcompile.runtime.distributed.channel import open_channels
from revcompile.runtime.distributed.collectives import check_ranks_agree, gather_plain, run_facts
from revcompile.runtime.distributed.evaluation import EvaluationPass
from revcompile.runtime.distributed.layout import (
    Ranks,
    join,
    make_layout,
    new_group,
    pipeline_ranks,
)
from revcompile.runtime.distributed.rank_weights import (
    SharedBuffers,
    distribute,
    last_device,
    owning_stages,
)
from revcompile.runtime.distributed.replicas import open_replica_groups
from revcompile.runtime.distributed.transport import DistributedTransport
from revcompile.runtime.executor.captured.runner import GraphRunner
from revcompile.runtime.executor.fingerprints import Fingerprint, compared, mixed_up
from revcompile.runtime.executor.stage_executor import StageExecutor
from revcompile.runtime.executor.transport import MessageKind, next_message
from revcompile.runtime.stage.tensors import detach_tree
from revcompile.runtime.trainer.core import Trainer
from revcompile.runtime.trainer.metrics import (
    Evaluation,
    Metric,
    Metrics,
    RunningMeans,
    check_loader,
)
from revcompile.runtime.trainer.settings import Task

Made = TypeVar("Made")

_open: Final[list[DistributedTransport]] = []
"""Transports whose threads wait for messages, even if their trainer was garbage-collected."""


class DistributedTrainer(Trainer):
    """Trains this rank's stages; every rank calls the same methods in the same order.

    `step` needs inputs on the rank of the first stage and targets on that of the last one; other
    ranks may pass nothing. Where both are given they are compared: targets that are not those of
    the inputs stop all ranks (`loader` gives every rank the same batches). The loss is known on the
    rank of the last stage (`mean_loss` tells all, `report_loss` every step). A micro-batch that
    fails on one rank is left out by all: the rank where it failed raises after the step, and all
    may go on. A rank holds only the weights its stages use; `net.module()` collects all of them.

    Args:
        default_stage_to_rank: from the ranks of one pipeline to the rank of each stage.
        undo: is told how to make the model what it was, should the trainer be refused.
        stage_to_rank: the rank of each stage, within one copy of the pipeline.
        device: where this rank trains.
        timeout: after how many seconds without a message a rank gives up.
        report_loss: tell every rank the loss of each step.
        average_statistics: average running statistics over copies of the pipeline.
    """

    skip_on_error = True
    transport: DistributedTransport

    def __init__(
        self,
        task: Task,
        *,
        default_stage_to_rank: Callable[[int], Sequence[int]],
        undo: ExitStack,
        stage_to_rank: Sequence[int] | None = None,
        device: torch.device | str | None = None,
        timeout: float = 600.0,
        report_loss: bool = False,
        average_statistics: bool = False,
    ) -> None:
        model, partition, programs = task.model, task.partition, task.programs
        settings, limit = task.settings, timedelta(seconds=timeout)
        self.device = join(model, device or last_device(model), limit)
        self.report_loss = report_loss
        control = new_group(range(distributed.get_world_size()), "gloo", limit)
        options = {
            "stage_to_rank": stage_to_rank,
            "report_loss": report_loss,
            "average_statistics": average_statistics,
            "device": self.device.type,
        }
        check_ranks_agree(gather_plain(run_facts(task, options), control))
        stages, world = len(programs), distributed.get_world_size()
        default = () if stage_to_rank else default_stage_to_rank(pipeline_ranks(stages, world))
        layout = make_layout(stages, world, stage_to_rank, default)
        self._shared_buffers = SharedBuffers(model, programs, layout)
        self._shared_buffers.check_statistics(model)
        self.ranks = Ranks.arrange(layout, self.device, control)
        weights = distribute(model, programs, self.ranks, self.device, undo)
        channels = open_channels(self.ranks, list(partition.ties), self.device, limit)
        self.transport = DistributedTransport(self.ranks, channels, timeout)
        refusal: Exception | None = None
        try:
            super().__init__(
                task,
                transport=self.transport,
                device=self.device,
                stages=self.ranks.stages,
                rank=self.ranks.rank,
                replica=self.ranks.replica,
                replicas=layout.replicas,
            )
        except Exception as error:
            refusal = error
        self._raise_refusals(refusal)
        weights.collective, weights.stop_all = self.transport.collective, self.transport.stop_all
        for executor in self.executors:
            executor.stage.device = self.device
            if executor.loss_head is not None:
                executor.check_data = self._check_data
            tied = {name: executor.stage.parameters[name] for name in executor.replicas}
            weights.adopt(model, tied)
        if layout.replicas > 1:
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            groups = open_replica_groups(self.ranks, backend, limit)
            for index, stage in ((e.index, e.stage) for e in self.executors):
                statistics = stage.statistics() if average_statistics else []
                self.transport.replicate(index, stage.parameters, statistics, groups[index])
        self.runner = GraphRunner(settings.backend, self.executors, self.loss_head, self.schedule)
        self._given: tuple[Any, Any] = None, None
        """What this rank's step was called with, while its forward passes run."""
        self._captured_samples: int | None = None
        """Samples of the last micro-batch, if its step was captured."""
        _open.append(self.transport)

    def _raise_refusals(self, refusal: Exception | None) -> None:
        """Raise on all ranks if one could not build its stages. Every rank calls it."""
        text = None if refusal is None else f"{type(refusal).__name__}: {refusal}"
        for rank, found in enumerate(self.everyone(text)):
            if found is not None:
                self.transport.close()
                raise refusal or InputError(f"net.trainer, {self.ranks.named(rank)}: {found}")

    def everyone(self, value: Any) -> Sequence[Any]:
        with self.transport.collective():
            return gather_plain(value, self.ranks.control)

    # -- training -----------------------------------------------------------------------------

    def step(self, inputs: Any = None, target: Any = None) -> Metrics:
        """Train on one micro-batch; see the class for which rank needs to pass what."""
        self._check_usable()
        self._resume_training()
        problem = self._refusal()
        # What is in flight goes back all the same, with the settings it was computed with.
        with nullcontext() if problem is None else self._guard.settings.restored():
            try:
                return self._step(inputs, target, problem)
            finally:
                if not self.runner.is_replaying:
                    self._follow_settings()  # layers may change their own as they run

    def _step(self, inputs: Any, target: Any, problem: str | None) -> Metrics:
        microbatch = self.schedule.injected
        refusal = problem and f"trainer.step: {problem}"
        for executor in self.executors:
            executor.refusal = refusal
        values, binder, dense = None, self.binder, self.runner.is_on
        if self.is_first:
            values = self._prepared(self.executors[0], lambda: binder.prepare(inputs, dense=dense))
        if self.is_last:
            self._given = inputs, target
            checked = self._prepared(
                self.executors[-1], lambda: (binder.check_tensors(target, dense=dense),)
            )
            if checked is not None:
                (self.loss_head.targets[microbatch],) = checked
        fingerprint = None
        if self.is_first and not self.is_last:
            fingerprint = Fingerprint.of(inputs, target, microbatch)
        with self._stop_on_error():
            is_captured = self._captured_step(values, fingerprint, problem is None)
            if not is_captured:
                self._eager_step(values, fingerprint)
        self._given = None, None
        self.loss_head.targets.pop(microbatch, None)
        self.transport.completed = microbatch
        samples = self._captured_samples
        if not is_captured or samples is None or self.runner.alike == 1:
            samples = self._count_samples(values, microbatch)
        self._captured_samples = samples if is_captured else None
        return self._report(self._with_reported_loss(self._metrics(microbatch, samples)))

    def _eager_step(self, values: dict[str, Any] | None, fingerprint: Fingerprint | None) -> None:
        """Action by action."""
        microbatch, take = self.schedule.injected, self.binder.take
        first, last, targets = self.executors[0], self.executors[-1], self.loss_head.targets
        if self.is_first:
            first.inputs[microbatch] = self._prepared(first, lambda: take(values))
        if microbatch in targets:
            taken = self._prepared(last, lambda: {microbatch: take(targets.pop(microbatch))})
            targets.update(taken or {})
        if fingerprint is not None:
            self.executors[0].fingerprints[microbatch] = fingerprint
        self._measure(microbatch)
        remaining = self.scheduler.forward(self.schedule.inject())
        for executor in self.executors:
            if microbatch in executor.stage.in_flight:
                self._shared_buffers.check_changed(executor.stage.in_flight[microbatch].buffers)
        self.scheduler.finish(remaining)

    def _captured_step(self, values: Any, fingerprint: Fingerprint | None, is_usable: bool) -> bool:
        """As a replay of captured sections; False if it has to be run action by action.

        Args:
            values: The model's inputs, where the first stage is.
            fingerprint: Of its data, there.
            is_usable: Are the modules as they were compiled?
        """
        if not self.runner.is_on:
            return False
        microbatch, first = self.schedule.injected, self.executors[0].index
        route = first - 1, first, MessageKind.X
        if not self.is_first:
            where = f"stage {first} for x of micro-batch {microbatch}"
            message = next_message(self.transport, route, where, keep=True, packed=True)
            values = None if message.void else message
            fingerprint = message.fingerprint
        has_target = not self.is_last or microbatch in self.loss_head.targets
        is_observed = self._trace is not None or self._is_measured(microbatch)
        allowed = is_usable and has_target and values is not None and not is_observed
        if allowed and self.is_last and fingerprint is not None:
            self._check_data(microbatch, fingerprint)
        batch = values, self.loss_head.targets.get(microbatch)
        if self.runner.step(self.schedule, self.transport, batch, allowed, fingerprint):
            return True
        if values is not None:
            self.runner.observe(batch)
        return False

    def _prepared(self, executor: StageExecutor, prepare: Callable[[], Made]) -> Made | None:
        """Inputs or target; None if they cannot be used: all ranks then skip the micro-batch."""
        try:
            return prepare()
        except Exception as error:
            executor.forward_errors.append(error)
            return None

    def _check_data(self, microbatch: int, sent: Fingerprint) -> None:
        """At the last stage: does the target belong to the inputs of the first stage?"""
        different = compared(sent, *self._given, microbatch)
        if different is not None:
            raise self.mixed_up(f"trainer.step, micro-batch {microbatch}", different)

    def mixed_up(self, where: str, what: str) -> InputError:
        first, last = map(self.ranks.named, (self.ranks.owner(0), self.ranks.rank))
        return mixed_up(where, what, first, last)

    def _count_samples(self, values: dict[str, Any] | None, microbatch: int) -> int:
        """Samples of a micro-batch on the ranks of the first and the last stage; 0 on others."""
        if values is not None:
            return self.binder.count_samples(values)
        if microbatch not in self.loss_head.outputs:
            return 0
        leaves = pytree.tree_leaves(self.loss_head.outputs[microbatch])
        pairs = zip(self.partition.rewired.body.result, leaves, strict=True)
        outputs = {r.name: t for r, t in pairs if isinstance(r, Live) and isinstance(t, Tensor)}
        return self.binder.count_samples(outputs)

    def _failure(self) -> Any:
        failure = super()._failure()
        if isinstance(failure, InputError):
            failure.add_note("All ranks have left the micro-batch out.")
        if failure is None or isinstance(failure, RevcompileError):
            return failure
        error = InputError(
            f"trainer.step: the model failed on this micro-batch: {type(failure).__name__}: "
            f"{failure}\nAll ranks have left the micro-batch out; feed inputs of the captured "
            "form (any batch size)."
        )
        error.__cause__ = failure
        return error

    def _stop(self, error: BaseException) -> None:
        super()._stop(error)
        self.transport.stop_all(error)

    # -- losses and evaluation ----------------------------------------------------------------

    def _with_reported_loss(self, metrics: Metrics) -> Metrics:
        if not self.report_loss:
            return metrics
        loss = torch.full((), torch.nan, dtype=torch.float64, device=self.device)
        if metrics.loss_tensor is not None:
            loss.copy_(metrics.loss_tensor)
        with self.transport.collective():
            owner = self.ranks.owner(len(self.programs) - 1)
            distributed.broadcast(loss, owner, group=self.ranks.pipeline)
        return replace(metrics, loss_tensor=loss)

    def evaluate(
        self, loader: Iterable[Any] | None = None, metrics: Mapping[str, Metric] | None = None
    ) -> Evaluation:
        """Means over a loader, on every rank; see `Trainer.evaluate`. Every rank calls it.

        The loader is read on the ranks of the first and the last stage: for inputs and targets. An
        error on one rank is raised on all.
        """
        if loader is not None:
            check_loader(loader)
        if self.partition.rewired.eval_body is not None:
            raise InputError(
                f"trainer.evaluate: {self.partition.rewired.name} computes something else in eval "
                "mode than in training, which stages on several ranks cannot; use net.module()"
            )
        self._check_usable()
        self._throughput.pause()
        self._check_tree("trainer.evaluate")
        if any({tie.owner, tie.holder} <= {*self.ranks.stages} for tie in self.schedule.ties):
            self._sync_stages()  # captured steps have the messages between stages here
        # Tied weights that have been sent are received now instead of in the next step.
        self._finish(self.scheduler.own(self.schedule.receive_tied_weights()))
        means, merged = RunningMeans(metrics), RunningMeans(metrics)
        evaluation = EvaluationPass(self, loader, means)
        with self._evaluating(), self._stop_on_error():
            evaluation.run()
        error = evaluation.error
        text = None if error is None else f"{type(error).__name__}: {error}"
        of_ranks = self.everyone([text, means.sums, means.samples])
        for rank, (problem, sums, samples) in enumerate(of_ranks):
            if problem is not None:
                who = self.ranks.named(rank)
                raise InputError(f"trainer.evaluate, {who}: {problem}") from error
            merged.join(sums, samples)
        return merged.evaluation()

    # -- checkpoints --------------------------------------------------------------------------

    @contextmanager
    def _refused_by_all(self) -> Iterator[None]:
        """Around what ranks agree on: after an `InputError`, which all raise, they can go on."""
        refusal = None
        with self._stop_on_error():
            try:
                yield
            except InputError as error:
                refusal = error
        if refusal is not None:
            raise refusal

    def _write_checkpoint(self, folder: Path, keep: int) -> Path:
        """Every rank writes its own stages; if one cannot, all raise and training can go on."""
        with self._refused_by_all():
            self.transport.wait_all_delivered()
            return save_training(
                folder,
                self._own_state(),
                keep=keep,
                rank=self.rank,
                replica=self.replica,
                gather=self.everyone,
            )

    def _own_state(self) -> dict[str, Any]:
        """What no other rank saves.

        Replicas have the same parameters and optimizers, but each its own micro-batches,
        statistics and random generators.
        """
        owners, layout = owning_stages(self.model, self.programs), self.ranks.layout
        # What no stage uses never changes: the rank of the first stage saves it.
        own = {
            name: value
            for name, value in self.model.state_dict().items()
            if layout.stage_to_rank[owners.get(name, 0)] == self.rank % layout.width
        }
        state = self._state(own, detach_tree)
        if self.replica:
            parameters = dict(self.model.named_parameters(remove_duplicate=False))
            buffers = {n: value for n, value in state["model"].items() if n not in parameters}
            state |= {"model": buffers, "optimizer": {}}
        return state

    def load(self, place: str | Path) -> None:
        self._check_usable()
        self._throughput.pause()
        folder, state = file_path("trainer.load", place, "runs/a"), dict[str, Any]()

        def find() -> str | None:
            # The first rank chooses: what others see of the folder may be older.
            return os.path.relpath(find_checkpoint(folder), folder) if self.rank == 0 else None

        def read(name: str) -> None:
            checkpoint = Checkpoint(folder / name)
            state.update(self._read_state(checkpoint, self.device, self.ranks.layout.world))
            with located(str(checkpoint.path)):
                self._check_fits(state)

        with self._refused_by_all():
            name, *_ = on_all("trainer.load", find, self.everyone)
            on_all("trainer.load", lambda: read(name), self.everyone)
        with self._stop_on_error():
            self.transport.wait_all_delivered()  # what is in flight is dropped below
            self.runner.leave(self.schedule, self.transport)
            self._load_state(state)
            self.runner.clear()
            self._follow_settings()
            set_generators(state["rng"])
            self.transport.completed = self.schedule.injected - 1
            self.everyone(None)  # no rank sends before all have dropped what was in flight

    def close(self) -> None:
        super().close()
        if self.transport in _open:
            _open.remove(self.transport)
        if not self.transport.close():
            raise RankError("trainer.close: another rank has not closed its trainer")


@atexit.register
def _close_all() -> None:
    """Threads that wait inside torch would crash the interpreter at exit.

    A rank that ends for an error nobody caught says so first: others may wait for it where no
    message tells them that it has closed, as in a save.
    """
    error = getattr(sys, "last_value", None)
    for transport in _open:
        if error is not None:
            transport.stop_all(error)
        if not transport.close():
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
