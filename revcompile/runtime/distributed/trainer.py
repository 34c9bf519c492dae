"""The trainer of one rank: its own stages, the same rounds, messages to the others."""

from __future__ import annotations

import atexit
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.utils import _pytree as pytree

from revcompile.errors import InputError, NonFiniteError, RankError, RevcompileError
from revcompile.ir.program import Partition, StageProgram
from revcompile.ir.types import Live
from revcompile.runtime.checkpoint import until_signal
from revcompile.runtime.checkpoint.state import check_savable
from revcompile.runtime.distributed.checkpoints import SignalConsensus, load_together, save_together
from revcompile.runtime.distributed.collectives import compare, gather_plain
from revcompile.runtime.distributed.evaluation import Batches, Passing
from revcompile.runtime.distributed.handshake import facts
from revcompile.runtime.distributed.placement import pipeline_ranks, plan
from revcompile.runtime.distributed.process_groups import Ranks, join, open_links
from revcompile.runtime.distributed.rank_weights import deal, last_device
from revcompile.runtime.distributed.replicas import open_copies
from revcompile.runtime.distributed.transport import Distributed
from revcompile.runtime.distributed.weight_owners import check_buffers
from revcompile.runtime.executor.fingerprints import Fingerprint, compared, mixed_up
from revcompile.runtime.reversible.module import Reversible
from revcompile.runtime.stage.loss_head import Loss
from revcompile.runtime.stage.update import OptimizerFactory
from revcompile.runtime.trainer.evaluation import iterated
from revcompile.runtime.trainer.gradient_probes import Probe
from revcompile.runtime.trainer.metrics import Evaluation, Means, Metric, Metrics
from revcompile.runtime.trainer.settings import Settings
from revcompile.runtime.trainer.trainer import Trainer

__all__ = ["DistributedTrainer"]

Batch = TypeVar("Batch")

_open: Final[set[Distributed]] = set()
"""Transports whose threads wait for messages, whether or not anybody still has their trainer."""


class DistributedTrainer(Trainer):
    """Trains this rank's stages; every rank calls the same methods in the same order.

    `step` needs inputs where the first stage lives and targets where the last one does; other
    ranks may pass nothing. Where both are given they are compared: targets that are not those of
    the inputs stop all ranks (`loader` gives every rank the same batches). The loss is known where
    the last stage lives (`mean_loss` tells all, `report_loss` every step). A micro-batch that fails
    on one rank is left out by all: the rank where it failed raises after the round, the others go
    on, and so may the one that raised. Of the weights a rank holds those its stages use;
    `net.module()` brings all of them together.
    """

    guarded = True
    _given: tuple[Any, Any] = None, None
    """What this rank's step was called with."""

    def __init__(
        self,
        model: Reversible,
        partition: Partition,
        programs: Sequence[StageProgram],
        optimizer: OptimizerFactory,
        loss: Loss,
        settings: Settings,
        *,
        default_places: Callable[[int], Sequence[int]],
        places: Sequence[int] | None = None,
        device: torch.device | str | None = None,
        timeout: float = 600.0,
        report_loss: bool = False,
        average_statistics: bool = False,
    ) -> None:
        limit = timedelta(seconds=timeout)
        self.device = join(model, device or last_device(model), limit)
        self.timeout, self.report_loss = timeout, report_loss
        control = distributed.new_group(backend="gloo", timeout=limit)
        options = {
            "places": places,
            "report_loss": report_loss,
            "average_statistics": average_statistics,
            "device": self.device.type,
        }
        compare(gather_plain(facts(model, partition, programs, settings, options), control))
        stages, world = len(programs), distributed.get_world_size()
        default = () if places else default_places(pipeline_ranks(stages, world))
        layout = plan(stages, world, places, default)
        check_buffers(model, programs, layout)
        self.ranks = Ranks.arrange(layout, self.device, control)
        self._share = deal(model, programs, self.ranks, self.device)
        self._links = open_links(self.ranks, list(partition.ties), self.device, limit)
        super().__init__(model, partition, programs, optimizer, loss, settings)
        self._settle_in()
        if layout.replicas > 1:
            self._replicate(limit, average_statistics)
        self._losses: list[Tensor] = []
        _open.add(self.transport)

    def _settle_in(self) -> None:
        """The stages know their device, and the model has no copies besides theirs."""
        self._share.guard = self.transport.together
        for executor in self.executors:
            executor.stage.device = self.device
            if executor.objective is not None:
                executor.check_data = self._check_data
            copies = (name for names in executor.held.values() for name in names)
            self._share.adopt(
                self.model, {name: executor.stage.parameters[name] for name in copies}
            )

    def _replicate(self, timeout: timedelta, average_statistics: bool) -> None:
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        groups = open_copies(self.ranks, backend, timeout)
        for executor in self.executors:
            stage = executor.stage
            found = stage.statistics() if average_statistics else []
            self.transport.replicate(
                executor.index, stage.parameters, found, groups[executor.index]
            )

    def _connect(self) -> Distributed:
        return Distributed(self.ranks, self._links, self.timeout)

    def _home(self) -> torch.device:
        return self.device

    def _is_here(self, stage: int) -> bool:
        return stage in self.ranks.stages

    # -- training -----------------------------------------------------------------------------

    def step(self, inputs: Any = None, target: Any = None) -> Metrics:
        """Train on one micro-batch; see the class for who needs to pass what."""
        self._usable()
        self._in_train_mode()
        microbatch = self.schedule.injected
        values = self._accepted(inputs)
        if self.is_last:
            self._given = inputs, target
            self._take_target(microbatch, target)
        if self.is_first:
            self.executors[0].inputs[microbatch] = values
            if not self.is_last:
                found = Fingerprint.of(inputs, target, microbatch)
                self.executors[0].fingerprints[microbatch] = found
        self._measure(microbatch)
        rest = self._forward(self.schedule.inject())
        self._given = None, None
        self._finish(rest)
        self.objective.targets.pop(microbatch, None)
        self.transport.completed = microbatch
        samples = (
            self.intake.samples(values) if values is not None else self._output_size(microbatch)
        )
        self._samples += samples
        self.metrics = self._reported(self._metrics(microbatch, samples))
        self._traced()
        self._raise_failures()
        return self.metrics

    def _check_data(self, microbatch: int, sent: Fingerprint) -> None:
        """At the last stage: does the target belong to the inputs that have come this way?"""
        other = compared(sent, *self._given, microbatch)
        if other is not None:
            raise self._mixed_up(f"trainer.step, micro-batch {microbatch}", other)

    def _mixed_up(self, where: str, what: str) -> InputError:
        first, last = map(self.ranks.named, (self.ranks.owner(0), self.ranks.rank))
        return mixed_up(where, what, first, last)

    def _accepted(self, inputs: Any) -> dict[str, Any] | None:
        """The model's inputs; None where they are not needed or cannot be used."""
        if not self.is_first:
            return None
        try:
            return self.intake.taken(inputs)
        except Exception as error:
            self.executors[0].refused.append(error)
            return None

    def _take_target(self, microbatch: int, target: Any) -> None:
        """Where the target cannot be used, the micro-batch is lost like one of bad inputs."""
        try:
            self.objective.targets[microbatch] = self.intake.moved(target)
        except Exception as error:
            self.executors[-1].refused.append(error)

    def _forward(self, lists: Any) -> list[deque[Any]]:
        with self._stopping():
            return self.worker.forward(lists)

    def _raise_failures(self) -> None:
        refused = [error for executor in self.executors for error in executor.refused]
        for executor in self.executors:
            executor.refused = []
        super()._raise_failures()
        for error in refused:
            if isinstance(error, RevcompileError):
                raise error
            raise InputError(
                f"trainer.step: the model failed on this micro-batch: {type(error).__name__}: "
                f"{error}\nAll ranks have left the micro-batch out; feed inputs of the captured "
                "form (any batch size)."
            ) from error

    def _stopped(self, error: BaseException) -> None:
        super()._stopped(error)
        if not isinstance(error, RankError):
            who = self.ranks.named(self.ranks.rank)
            self.transport.abort(f"{who} stopped: {type(error).__name__}: {error}")

    def _output_size(self, microbatch: int) -> int:
        """Samples of a micro-batch, where the last stage lives; 0 elsewhere."""
        if microbatch not in self.objective.outputs:
            return 0
        leaves = pytree.tree_leaves(self.objective.outputs[microbatch])
        result = self.partition.rewired.body.result
        pairs = zip(result, leaves, strict=True)
        found = {r.name: t for r, t in pairs if isinstance(r, Live) and isinstance(t, Tensor)}
        return self.intake.samples(found)

    # -- where things are ---------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """Which of the processes this is."""
        return self.ranks.rank

    def everyone(self, value: Any) -> Sequence[Any]:
        """The plain values of all ranks. Every rank calls it."""
        with self.transport.together():
            return gather_plain(value, self.ranks.control)

    @property
    def replica(self) -> int:
        """Which copy of the pipeline this rank belongs to: its share of the data."""
        return self.ranks.replica

    @property
    def replicas(self) -> int:
        """How many copies of the pipeline there are."""
        return self.ranks.layout.replicas

    def parameters(self) -> dict[str, nn.Parameter]:
        """This rank's current parameters under their original names."""
        return {name: p for name, p in super().parameters().items() if not p.is_meta}

    # -- looking ------------------------------------------------------------------------------

    def _reported(self, metrics: Metrics) -> Metrics:
        if metrics.loss_tensor is not None:
            self._losses.append(metrics.loss_tensor)
        if not self.report_loss:
            return metrics
        loss = torch.full((), torch.nan, dtype=torch.float64, device=self.device)
        if metrics.loss_tensor is not None:
            loss.copy_(metrics.loss_tensor)
        with self.transport.together():
            owner = self.ranks.owner(len(self.programs) - 1)
            distributed.broadcast(loss, owner, group=self.ranks.pipeline)
        return replace(metrics, loss_tensor=loss)

    def mean_loss(self) -> float:
        """Mean loss of the steps since the last call, on every rank. Every rank calls it."""
        total = float(torch.stack(self._losses).double().sum()) if self._losses else 0.0
        mine = [total, len(self._losses)]
        self._losses.clear()
        with self.transport.together():
            found = gather_plain(mine, self.ranks.control)
        count = sum(n for _, n in found)
        return sum(t for t, _ in found) / count if count else float("nan")

    def evaluate(
        self, loader: Iterable[Any] | None = None, metrics: Mapping[str, Metric] | None = None
    ) -> Evaluation:
        """Mean loss (and other metrics) over a loader, on every rank. Every rank calls it.

        The loader is read where the first and the last stage live: for inputs and for targets.
        """
        if loader is not None:
            iterated(loader)
        if self.partition.rewired.eval_body is not None:
            raise InputError(
                f"trainer.evaluate: {self.partition.rewired.name} computes something else in eval "
                "mode than in training, which stages on several ranks cannot; use net.module()"
            )
        self._usable()
        self._settle_ties()
        means = Means(metrics)
        batches = Batches(loader, self.is_first, self.is_last)

        def source(number: int) -> tuple[Mapping[str, Any], Fingerprint] | None:
            found = batches.first()
            if found is None:
                return None
            where = f"evaluation, batch {number}"
            return self.intake.taken(found[0], where), Fingerprint.of(*found, number)

        def sink(number: int, outputs: Mapping[str, Any], sent: Fingerprint | None) -> None:
            where, (inputs, target) = f"evaluation, batch {number}", batches.last(number)
            other = sent and compared(sent, inputs, target, number)
            if other:
                raise self._mixed_up(where, other)
            output, target = self.objective.assembled(outputs), self.intake.moved(target, where)
            loss = self.objective.evaluate(output, target, where)
            means.add(loss, output, target, self.intake.samples(outputs))

        passing = Passing(self.executors, self.transport, len(self.programs) - 1, source, sink)
        with self._evaluating(), self._stopping():
            passing.run()
            passing.note(batches.check_end)
        return self._agreed(passing.error, means, Means(metrics))

    def _settle_ties(self) -> None:
        """Tied weights that are on their way arrive now instead of in the next round."""
        self._finish(self.worker.own(self.schedule.receive_tied_weights()))

    def _agreed(self, error: Exception | None, mine: Means, together: Means) -> Evaluation:
        text = None if error is None else f"{type(error).__name__}: {error}"
        with self.transport.together():
            found = gather_plain([text, mine.sums, mine.samples], self.ranks.control)
        for rank, (problem, sums, samples) in enumerate(found):
            if problem is not None:
                who = self.ranks.named(rank)
                raise InputError(f"trainer.evaluate, {who}: {problem}") from error
            together.join(sums, samples)
        return together.evaluation()

    def watch(self) -> Probe:
        """Not across ranks: a probe compares with the whole model."""
        raise InputError("trainer.watch: run in one process to compare gradients stage by stage")

    # -- the end ------------------------------------------------------------------------------

    def save(self, folder: str | Path, *, keep: int = 2, drain: bool = False) -> Path:
        """Write a checkpoint, every rank its own stages; see `Trainer.save`. Every rank calls it.

        If one rank cannot write, no checkpoint comes about, all raise, and training can go on.
        """
        self._usable()
        if drain:
            self._flush_together()
        check_savable(self)
        with self._stopping():
            saved, problem = save_together(self, folder, keep)
        if problem is not None:
            raise InputError(f"trainer.save: {problem}")
        return saved

    def _flush_together(self) -> None:
        """Flush; a gradient that turns out bad on one rank keeps all of them from saving."""
        failure: NonFiniteError | None = None
        try:
            self.flush()
        except NonFiniteError as error:
            failure = error
        found = self.everyone(None if failure is None else str(failure))
        if failure is not None:
            raise failure
        for rank, text in enumerate(found):
            if text is not None:
                raise InputError(f"trainer.save: not saved, {self.ranks.named(rank)}: {text}")

    def load(self, place: str | Path) -> None:
        """Go on from a checkpoint, or from the newest one in a folder; see `Trainer.load`.

        Every rank calls it. Where it does not fit one rank, all raise and nothing is changed.
        """
        self._usable()
        with self._stopping():
            problem = load_together(self, place)
        if problem is not None:
            raise InputError(problem)

    def _leaving(self, loader: Iterable[Batch], save: Callable[[], Path]) -> Iterator[Batch]:
        """Once any rank has had a SIGTERM, all save."""
        votes = SignalConsensus(self)
        return until_signal(loader, save, agree=votes.ask, settle=votes.settle)

    def state_dict(self) -> dict[str, Any]:
        """Of one process only."""
        raise InputError(
            "trainer.state_dict: no rank has the whole state; use trainer.save(folder), which "
            "every rank calls, or net.module().state_dict() for the weights"
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Of one process only."""
        raise InputError(
            "trainer.load_state_dict: use trainer.load(folder), which every rank calls"
        )

    def close(self) -> None:
        """Leave; every rank does, at the latest when its process ends."""
        _open.discard(self.transport)
        if not self.transport.close():
            raise RankError("trainer.close: another rank has not closed its trainer")


@atexit.register
def _leave() -> None:
    """Threads that wait inside torch would take the interpreter down with a crash."""
    for transport in list(_open):
        if not transport.close():
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
