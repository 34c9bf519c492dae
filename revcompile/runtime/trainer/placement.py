"""Where the stages of a trainer are: all in this process, or on several ranks.

Both classes have the same methods: a trainer calls them where ranks have to act together.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any, Final

import torch
from torch import Tensor, distributed
from torch.utils import _pytree as pytree

from revcompile.errors import InputError, RankError
from revcompile.ir.module_tree import device_of_model
from revcompile.optim.combined import elementary
from revcompile.runtime.distributed.channel import open_channels
from revcompile.runtime.distributed.layout import (
    Layout,
    Ranks,
    check_ranks_agree,
    gather_plain,
    join,
    make_layout,
    new_group,
    run_facts,
)
from revcompile.runtime.distributed.rank_weights import SharedBuffers, distribute, last_device
from revcompile.runtime.distributed.transport import DistributedTransport
from revcompile.runtime.distributed.wire import check_sendable
from revcompile.runtime.executor.executor import StageExecutor
from revcompile.runtime.executor.messages import Transport
from revcompile.runtime.stage.settings import Task

_open: Final[list[DistributedTransport]] = []
"""Transports whose threads wait for messages, even if their trainer was garbage-collected."""


class Placement:
    """All stages in this process: it is the only rank.

    Args:
        task: What is trained.
        undo: Gets callbacks that restore the model, in case the trainer is refused.
        device: Where to train. Default: where the model is.
    """

    rank = replica = 0
    world = replicas = 1

    def __init__(self, task: Task, undo: ExitStack, device: torch.device | None = None) -> None:
        self._task = task
        if device is not None:
            undo.callback(task.model.to, device_of_model(task.model))
            task.model.to(device)
        self.device = device_of_model(task.model)
        self.stages: Sequence[int] = range(len(task.programs))
        """The stages of this process."""
        self.transport = Transport(len(task.programs))
        self.ranks = Ranks(Layout((0,) * len(task.programs)), 0, None, None)

    # -- building a trainer -------------------------------------------------------------------

    def attach(self, executors: Sequence[StageExecutor]) -> None:
        """Set up communication for the executors of this process's stages."""

    # -- what all ranks do --------------------------------------------------------------------

    def gather(self, value: Any) -> Sequence[Any]:
        """The plain values of all ranks. Every rank calls it."""
        return [value]

    @contextmanager
    def all_or_none(self, where: str) -> Iterator[None]:
        """If the code inside fails on one rank, all ranks raise. Every rank calls it.

        The rank that failed raises its own error, the others one that names that rank.
        """
        own = None
        try:
            yield
        except Exception as error:
            own = error
        text = None if own is None else f"{type(own).__name__}: {own}"
        for rank, found in enumerate(self.gather(text)):
            if found is not None:
                raise own or InputError(f"{where}, {self.ranks.named(rank)}: {found}")

    # -- steps --------------------------------------------------------------------------------

    def check_target(self, target: Any, where: str) -> None:
        """Refuse a target that cannot go to the rank of the last stage."""

    def check_shared_buffers(self, executors: Sequence[StageExecutor], microbatch: int) -> None:
        """Refuse changes in forward of a buffer that stages on several ranks share."""

    # -- checkpoints --------------------------------------------------------------------------

    def own_entries(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Entries of the model's state dict that no other rank saves."""
        return dict(state)

    def close(self) -> None:
        """End the training."""


class RankPlacement(Placement):
    """Stages on several ranks: this rank holds its own stages, and no other weights.

    Args:
        task: What is trained.
        undo: See `Placement`.
        device: Where this rank trains.
        assign: See `make_layout`.
    """

    transport: DistributedTransport

    def __init__(
        self,
        task: Task,
        undo: ExitStack,
        device: torch.device | None = None,
        *,
        assign: Callable[[int], Sequence[int]],
    ) -> None:
        self._task, model, programs = task, task.model, task.programs
        self._options = options = task.settings.options
        self._timeout = timedelta(seconds=options.timeout)
        self.device = join(model, device or last_device(model), self._timeout)
        stages, self.world = len(programs), distributed.get_world_size()
        control = new_group(range(self.world), "gloo", self._timeout)
        facts = run_facts(task, self.device.type)
        check_ranks_agree(gather_plain(facts, control))
        layout = make_layout(stages, self.world, options.stage_to_rank, assign)
        self._shared_buffers = SharedBuffers(model, programs, layout)
        self.ranks = ranks = Ranks.arrange(layout, self.device, control)
        self.rank, self.replica, self.replicas = ranks.rank, ranks.replica, layout.replicas
        self.stages = layout.stages(ranks.rank)
        self._weights = distribute(task, ranks, self.device, undo)
        channels = open_channels(ranks, list(task.partition.ties), self.device, self._timeout)
        self.transport = DistributedTransport(ranks, channels, options.timeout)
        self._weights.transport = self.transport
        undo.callback(self.transport.close)

    # -- building a trainer -------------------------------------------------------------------

    def attach(self, executors: Sequence[StageExecutor]) -> None:
        for executor in executors:
            tied = {name: executor.stage.parameters[name] for name in executor.updates.copied}
            self._weights.adopt(self._task.model, tied)
        if self.replicas > 1:
            self._refuse_different_optimizers(executors)
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            self.transport.replicate({e.index: e.stage.parameters for e in executors}, backend)
        _open.append(self.transport)

    def _refuse_different_optimizers(self, executors: Sequence[StageExecutor]) -> None:
        """Replicas of a stage with different optimizers would drift apart."""
        named = self.ranks.named
        own = [[e.index, _described(e.updater.optimizer)] for e in executors]
        first: dict[int, tuple[int, str]] = {}
        for rank, found in enumerate(self.gather(own)):
            for stage, text in found:
                other, expected = first.setdefault(stage, (rank, text))
                if text != expected:
                    raise InputError(
                        f"net.trainer: replicas of stage {stage} have different optimizers:\n"
                        f"  {named(other)}: {expected}\n  {named(rank)}: {text}\n"
                        "Make the same optimizer with the same settings on every rank."
                    )

    # -- what all ranks do --------------------------------------------------------------------

    def gather(self, value: Any) -> Sequence[Any]:
        with self.transport.collective():
            return gather_plain(value, self.ranks.control)

    # -- steps --------------------------------------------------------------------------------

    def check_target(self, target: Any, where: str) -> None:
        if self.ranks.layout.width == 1:
            return
        try:
            check_sendable(target)
        except InputError as error:
            raise InputError(
                f"{where}: the target goes to the rank of the last stage, but it has {error}; give "
                "nested tuples, lists and dicts of dense tensors, numbers and strings"
            ) from None

    def check_shared_buffers(self, executors: Sequence[StageExecutor], microbatch: int) -> None:
        for in_flight in (executor.stage.in_flight for executor in executors):
            if microbatch in in_flight:
                self._shared_buffers.check_changed(in_flight[microbatch].buffers)

    # -- checkpoints --------------------------------------------------------------------------

    def own_entries(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Replicas have the same parameters, which the first one saves, but their own buffers.

        Entries that no stage uses never change: the rank of the first stage saves them.
        """
        owners, first = self._weights.owners, self.ranks.owner(0)
        own = {name: v for name, v in state.items() if owners.get(name, first) == self.rank}
        if self.replica:
            for name, _ in self._task.model.named_parameters(remove_duplicate=False):
                own.pop(name, None)
        return own

    def close(self) -> None:
        if self.transport in _open:
            _open.remove(self.transport)
        if not self.transport.close():
            raise RankError("trainer.close: another rank has not closed its trainer")


def _described(optimizer: Any) -> str:
    """A stage's optimizer as text: classes, settings, and shapes of parameters."""
    texts = []
    for each in elementary(optimizer):
        for group in each.param_groups:
            shapes = [list(p.shape) for p in group["params"]]
            numbers = pytree.tree_map_only(Tensor, Tensor.tolist, group | {"params": shapes})
            plain = {k: v for k, v in numbers.items() if not callable(v)}  # those show addresses
            texts.append(f"{type(each).__name__} {plain}")
    return "; ".join(texts)


@atexit.register
def close_all() -> None:
    """Close transports: threads that wait inside torch would crash the interpreter at exit.

    A rank that ends with an uncaught error tells the others first: they may wait for it where no
    message says that it has closed, as in a save.
    """
    error = getattr(sys, "last_value", None)
    for transport in _open:
        if error is not None:
            transport.stop_all(error)
        if not transport.close():
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
