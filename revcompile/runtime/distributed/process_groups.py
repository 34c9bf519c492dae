"""The process group, the mesh of ranks, and a communicator for every direction."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from revcompile.errors import InputError
from revcompile.runtime.distributed.channel import Channel
from revcompile.runtime.distributed.placement import Layout
from revcompile.schedule import Tie

__all__ = ["Ranks", "join", "many_ranks", "new_group", "open_links", "world_size"]


def many_ranks() -> bool:
    """Is this process one of several: has somebody joined them, or did torchrun start it?"""
    return world_size() > 1


def world_size() -> int:
    """How many processes train together."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def join(model: nn.Module, wanted: torch.device | str | None, timeout: timedelta) -> torch.device:
    """Join the process group if nobody has; returns this rank's device."""
    device = torch.device(wanted or _kind(model))
    if device.type == "cuda":
        if device.index is None:
            local = int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")))
            device = torch.device("cuda", local % torch.cuda.device_count())
        torch.cuda.set_device(device)
    if not distributed.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        # When a peer is gone NCCL is to stop waiting, not to take this process down with it: its
        # trainer says who is gone.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
        # Nor to hold it up for a minute at its end, waiting for traces of what NCCL did last.
        os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "1000")
        # As many queues as a GPU has: no communicator is to wait behind another's.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        store, rank, world = _meeting_place(timeout)
        distributed.init_process_group(
            backend, timeout=timeout, store=store, rank=rank, world_size=world
        )
    _check_unbound()
    return device


def _kind(model: nn.Module) -> str:
    """The kind of device a model is on; of one on several ranks, that of what is here."""
    kinds = {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} - {"meta"}
    if len(kinds) > 1 or not kinds <= {"cpu", "cuda"}:
        raise InputError(
            f"trainer: the model's parameters are on {', '.join(sorted(kinds))}; move them to the "
            "CPU or to CUDA before petrafy, or say device="
        )
    return kinds.pop() if kinds else "cpu"


def _meeting_place(timeout: timedelta) -> tuple[Any, int, int]:
    """Where the ranks find each other, with names of its own for each attempt.

    After a restart torchrun's store still has the addresses of the ranks that are gone.
    """
    # A rank that waits for rank 0's store tries twice.
    store, rank, world = next(iter(rendezvous("env://", timeout=timeout / 2)))
    store.set_timeout(timeout)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    own = distributed.PrefixStore(  # type: ignore[attr-defined]
        f"revcompile/attempt_{attempt}", store
    )
    return own, rank, world


def _check_unbound() -> None:
    """Before torch 2.15 ranks outside a new gloo group wait for a split of NCCL's communicator."""
    world = distributed.group.WORLD
    bound = getattr(world, "bound_device_id", None)
    if bound is not None and torch.__version__ < "2.15":
        raise InputError(
            f"trainer: the process group is bound to {bound}, with which torch {torch.__version__} "
            "hangs while groups are made; leave out device_id= of init_process_group (or let "
            "net.trainer call it)"
        )


@dataclass(frozen=True)
class Ranks:
    """The ranks of a run as a mesh of replicas and stages, seen from one of them."""

    layout: Layout
    rank: int
    mesh: DeviceMesh
    control: Any
    """All ranks, over gloo."""

    @classmethod
    def arrange(cls, layout: Layout, device: torch.device, control: Any) -> Ranks:
        """The mesh of a layout."""
        shape, names = (layout.replicas, layout.width), ("replica", "stage")
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
        return cls(layout, distributed.get_rank(), mesh, control)

    @property
    def replica(self) -> int:
        """Which copy of the pipeline this rank belongs to."""
        return self.layout.replica(self.rank)

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages of this rank."""
        return self.layout.stages(self.rank)

    @property
    def pipeline(self) -> Any:
        """The ranks of this copy of the pipeline."""
        return self.mesh.get_group("stage")

    def owner(self, stage: int) -> int:
        """The rank of this copy of the pipeline that has a stage."""
        return self.layout.rank(stage, self.replica)

    def named(self, rank: int) -> str:
        """A rank for messages: `rank 2 (stage 1)`."""
        stages = self.layout.stages(rank)
        plural = "s" if len(stages) > 1 else ""
        return f"rank {rank} (stage{plural} {', '.join(map(str, stages))})"


def open_links(
    ranks: Ranks, ties: list[Tie], device: torch.device, timeout: timedelta
) -> list[Channel]:
    """A communicator for every two stages and direction; returns those this rank is part of.

    Making one is a matter of all ranks: all make all of them, in the same order.
    """
    stages = len(ranks.layout.places)
    pairs = {(s, s + 1) for s in range(stages - 1)} | {(t.owner, t.holder) for t in ties}
    directed = sorted(pairs | {(b, a) for a, b in pairs})
    found = []
    for replica in range(ranks.layout.replicas):
        for source, target in directed:
            ends = ranks.layout.rank(source, replica), ranks.layout.rank(target, replica)
            if ends[0] == ends[1]:
                continue
            control = new_group(ends, "gloo", timeout)
            payload = new_group(ends, "nccl", timeout) if device.type == "cuda" else control
            if ranks.rank in ends:
                found.append(Channel(source, target, ends, control, payload, device))
    for link in found:
        _connect(link, ranks.rank == link.ranks[0])
    return found


def new_group(ranks: Sequence[int], backend: str, timeout: timedelta) -> Any:
    """A communicator; every rank asks for it, its members get it."""
    return distributed.new_group(sorted(ranks), timeout=timeout, backend=backend)


def _connect(link: Channel, sends: bool) -> None:
    """A first exchange: NCCL connects two ranks when both have called."""
    if link.uses_cuda:
        link.exchange([torch.zeros(1, dtype=torch.uint8, device=link.device)], sends)
        torch.cuda.synchronize(link.device)
