"""Which stage is on which rank, the process groups of the ranks, and what they agree on.

4 stages, 4 ranks, stage_to_rank=(0, 0, 1, 1):    replica 0: rank 0 (stages 0, 1), rank 1 (2, 3)
                                                  replica 1: rank 2 (stages 0, 1), rank 3 (2, 3)
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.rendezvous import rendezvous

from revcompile.errors import InputError, RankError
from revcompile.ir.python_code import source_of
from revcompile.runtime.distributed.failures import GRACE, in_thread
from revcompile.runtime.stage.loss import described
from revcompile.runtime.stage.settings import Task


@dataclass(frozen=True)
class Layout:
    """The stages of each rank, and how many copies ("replicas") of the pipeline there are.

    `stage_to_rank[stage]` is a rank within the pipeline; the ranks of a replica are consecutive.

    >>> layout = Layout(stage_to_rank=(0, 0, 1), replicas=2)
    >>> [layout.rank(stage, replica=1) for stage in range(3)], layout.stages(rank=3)
    ([2, 2, 3], (2,))
    """

    stage_to_rank: tuple[int, ...]
    replicas: int = 1

    @property
    def width(self) -> int:
        """The number of ranks of one replica."""
        return 1 + max(self.stage_to_rank)

    @property
    def world(self) -> int:
        return self.width * self.replicas

    def rank(self, stage: int, replica: int = 0) -> int:
        return replica * self.width + self.stage_to_rank[stage]

    def replica(self, rank: int) -> int:
        return rank // self.width

    def stages(self, rank: int) -> tuple[int, ...]:
        return tuple(s for s, r in enumerate(self.stage_to_rank) if r == rank % self.width)


def _pipeline_ranks(stages: int, world: int) -> int:
    """How many ranks one copy of the pipeline takes by default.

    >>> _pipeline_ranks(stages=4, world=2), _pipeline_ranks(stages=4, world=8)
    (2, 4)
    """
    if world > stages and world % stages:
        raise InputError(
            f"trainer: {world} ranks for {stages} stages, but more ranks than stages train copies "
            f"of the whole pipeline, {stages} ranks each; start {world // stages * stages} ranks, "
            f"cut the model into {world} stages, or give stage_to_rank="
        )
    return min(stages, world)


def make_layout(
    stages: int,
    world: int,
    stage_to_rank: Sequence[int] | None,
    assign: Callable[[int], Iterable[int]],
) -> Layout:
    """The layout given by `stage_to_rank`, or else by `assign`.

    Args:
        stage_to_rank: The rank of each stage within one pipeline, see `check_stage_to_rank`.
        assign: Used if that is None: maps the number of ranks of one pipeline to such ranks.

    Raises:
        InputError: The number of ranks does not fit, or a rank has no stage.

    >>> make_layout(4, 2, stage_to_rank=(0, 1, 1, 0), assign=range).stages(0)
    (0, 3)
    """
    if stage_to_rank is None:
        stage_to_rank = tuple(assign(_pipeline_ranks(stages, world)))
    chosen = tuple(stage_to_rank)
    width = 1 + max(chosen)
    missing = [rank for rank in range(width) if rank not in chosen]
    if missing:
        raise InputError(
            f"stage_to_rank={chosen}: ranks are counted from 0 without gaps, but rank {missing[0]} "
            "has no stage"
        )
    if width > world or world % width:
        raise InputError(
            f"stage_to_rank={chosen} needs {width} ranks (or a multiple, for copies of the "
            f"pipeline), but there are {world}; start torchrun with --nproc-per-node {width}, or "
            "use another stage_to_rank="
        )
    return Layout(chosen, world // width)


@dataclass(frozen=True)
class Ranks:
    """The mesh of replicas and stages that the ranks form, seen from one of them."""

    layout: Layout
    rank: int
    pipeline: Any
    """The group of the ranks of this replica."""
    control: Any
    """The group of all ranks, over gloo."""

    @classmethod
    def arrange(cls, layout: Layout, device: torch.device, control: Any) -> Ranks:
        shape, names = (layout.replicas, layout.width), ("replica", "stage")
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
        return cls(layout, distributed.get_rank(), mesh.get_group("stage"), control)

    @property
    def replica(self) -> int:
        return self.layout.replica(self.rank)

    def owner(self, stage: int) -> int:
        """The rank of this replica that has a stage."""
        return self.layout.rank(stage, self.replica)

    def named(self, rank: int) -> str:
        """A rank in error messages: `rank 2 (stage 1)`."""
        stages = self.layout.stages(rank)
        plural = "s" if len(stages) > 1 else ""
        return f"rank {rank} (stage{plural} {', '.join(map(str, stages))})"


Made = TypeVar("Made")


def world_size() -> int:
    """How many processes there are, in a process group or started by torchrun."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def join(model: nn.Module, device: torch.device | str | None, timeout: timedelta) -> torch.device:
    """Join the process group unless that is done; returns this rank's device."""
    device = torch.device(device or _device_type(model))
    if device.type == "cuda":
        if device.index is None:
            local = int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")))
            device = torch.device("cuda", local % torch.cuda.device_count())
        torch.cuda.set_device(device)
    if not distributed.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        # When a peer is gone NCCL must stop waiting, but not kill this process: the trainer reports
        # which rank is gone.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
        # Its watchdog must not delay the end of the process either: after a failure it writes a
        # dump and sleeps for four times the dump timeout (a minute by default) before it stops
        # waiting for the peer. The trainer itself finds ranks that hang.
        os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
        os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "250")
        # Use all hardware queues of a GPU: then no communicator waits behind another one.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        everyone = range(world_size())
        store, rank, world = _bounded(lambda: _rendezvous(timeout), everyone, timeout)
        _bounded(
            lambda: distributed.init_process_group(
                backend, timeout=timeout, store=store, rank=rank, world_size=world
            ),
            range(world),
            timeout,
        )
    _check_unbound()
    return device


def _device_type(model: nn.Module) -> str:
    """The device type of the model's tensors on this rank; others are on the meta device."""
    kinds = {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} - {"meta"}
    if len(kinds) > 1 or not kinds <= {"cpu", "cuda"}:
        raise InputError(
            f"trainer: the model's parameters are on {', '.join(sorted(kinds))}; move them to the "
            "CPU or to CUDA before petrafy, or say device="
        )
    return kinds.pop() if kinds else "cpu"


def _rendezvous(timeout: timedelta) -> tuple[Any, int, int]:
    """The ranks' store, this rank and the world size. Each restart has its own key prefix.

    After a restart, torchrun's store still has the addresses of the ranks that are gone.
    """
    # Half the timeout: a rank that waits for rank 0's store tries twice.
    store, rank, world = next(iter(rendezvous("env://", timeout=timeout / 2)))
    store.set_timeout(timeout)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    own = distributed.PrefixStore(  # type: ignore[attr-defined]
        f"revcompile/attempt_{attempt}", store
    )
    return own, rank, world


def _check_unbound() -> None:
    """Refuse a bound group: before torch 2.15, ranks outside a new gloo group wait for NCCL."""
    world = distributed.group.WORLD
    bound = getattr(world, "bound_device_id", None)
    if bound is not None and torch.__version__ < "2.15":
        raise InputError(
            f"trainer: the process group is bound to {bound}, with which torch {torch.__version__} "
            "hangs while groups are made; leave out device_id= of init_process_group (or let "
            "net.trainer call it)"
        )


def new_group(ranks: Sequence[int], backend: str, timeout: timedelta) -> Any:
    """A process group. All ranks call it, members or not."""
    return _bounded(
        lambda: distributed.new_group(sorted(ranks), timeout=timeout, backend=backend),
        ranks,
        timeout,
    )


def _bounded(make: Callable[[], Made], ranks: Sequence[int], timeout: timedelta) -> Made:
    """Call `make` in a thread of its own; raise an error if it takes longer than the timeout.

    Gloo has timeouts, but waits for ever for a rank that ends while the two connect. torch's store
    waits for ever if rank 0 has ended and another process has taken its port.
    """
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def run() -> Made:
        if device is not None:
            torch.cuda.set_device(device)
        return make()

    made = in_thread(run)
    try:
        return made.result(timeout.total_seconds() + GRACE)  # torch's own error says more
    except FutureTimeoutError:
        if made.done():
            raise  # torch's own timeout
        who = ", ".join(map(str, sorted(ranks)))
        raise RankError(
            f"trainer: ranks {who} were not connected within {timeout.total_seconds():g} s; one of "
            "them has ended or hangs: start all of them again"
        ) from None


# -- what all ranks do together --------------------------------------------------------------------


def gather_plain(value: Any, group: Any) -> list[Any]:
    """Every rank's value (plain, as JSON can hold it), on every rank."""
    encoded = json.dumps(value).encode()
    world = distributed.get_world_size(group)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
    distributed.all_gather(lengths, torch.tensor([len(encoded)]), group=group)
    longest = max(int(length) for length in lengths)
    padded = torch.frombuffer(bytearray(encoded.ljust(longest)), dtype=torch.uint8)
    gathered = [torch.empty(longest, dtype=torch.uint8) for _ in range(world)]
    distributed.all_gather(gathered, padded, group=group)
    return [json.loads(text.numpy().tobytes()) for text in gathered]


# -- what all ranks have to train ------------------------------------------------------------------


def run_facts(task: Task, device: str) -> dict[str, Any]:
    """What must be the same on every rank, by name, as plain values.

    Args:
        device: The type of the device that a rank trains on.
    """
    model, partition, programs, settings = task.model, task.partition, task.programs, task.settings
    method = programs[0].method
    values = (getattr(method, field.name) for field in dataclasses.fields(method))
    named: dict[str, Any] = {
        "revcompile version": sys.modules[__name__.partition(".")[0]].__version__,
        "torch version": torch.__version__,
        "model": partition.rewired.name,
        "stages": len(programs),
        "method": ", ".join(str(v.value if isinstance(v, enum.Enum) else v) for v in values),
    }
    for name, value in (vars(settings.options) | vars(settings) | {"device": device}).items():
        if name != "options":
            named[name] = "a function" if callable(value) else str(value)
    for name, parameter in model.named_parameters():
        frozen = "" if parameter.requires_grad else ", frozen"
        named[f"parameter {name}"] = described(parameter) + frozen
    for name, buffer in model.named_buffers():
        named[f"buffer {name}"] = described(buffer)
    for part, program in zip(partition.parts, programs, strict=True):
        named[f"stage {part.index}"] = ", ".join(piece.name for piece in part.pieces)
        code = source_of(program.forward) + source_of(program.backward)
        digest = hashlib.sha256(code.encode()).hexdigest()[:12]
        named[f"code of stage {part.index}"] = digest
    return named


def check_ranks_agree(facts_of_ranks: Sequence[Mapping[str, Any]]) -> None:
    """Refuse to start when ranks differ; the first differences are listed, with the ranks."""
    lines, advice = [], ""
    for name in dict.fromkeys(name for found in facts_of_ranks for name in found):
        ranks: dict[str, list[int]] = {}
        for rank, found in enumerate(facts_of_ranks):
            ranks.setdefault(str(found.get(name, "nothing")), []).append(rank)
        if len(ranks) > 1:
            shown = "; ".join(f"{text} on {_listed(who)}" for text, who in ranks.items())
            lines.append(f"  {name}: {shown}")
            if name.startswith("stage "):
                advice = (
                    ' Costs measured on each rank (cost="measured") cut differently: use '
                    'cost="analytic".'
                )
    if lines:
        more = [f"  ... and {len(lines) - 5} more"] if len(lines) > 5 else []
        text = "\n".join([*lines[:5], *more])
        raise InputError(
            f"trainer: the ranks do not agree, so nothing was started:\n{text}\n"
            f"Run the same script with the same versions and settings on every rank.{advice}"
        )


def _listed(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
