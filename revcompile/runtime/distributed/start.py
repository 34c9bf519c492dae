"""The process group, the mesh of ranks, and a communicator for every direction."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from revcompile.errors import InputError
from revcompile.runtime.distributed.layout import Layout
from revcompile.runtime.distributed.links import Link
from revcompile.schedule import Tie

__all__ = ["Ranks", "join", "many_ranks", "open_links"]


def many_ranks() -> bool:
    """Is this process one of several: has somebody joined them, or did torchrun start it?"""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size() > 1
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def join(model: nn.Module, timeout: timedelta) -> torch.device:
    """Join the process group if nobody has; the model moves to this rank's device."""
    kinds = {p.device.type for p in (*model.parameters(), *model.buffers())} or {"cpu"}
    if len(kinds) > 1 or not kinds <= {"cpu", "cuda"}:
        raise InputError(
            f"trainer: the model's parameters are on {', '.join(sorted(kinds))}; move them to the "
            "CPU or to CUDA before petrafy"
        )
    device = torch.device("cpu")
    if kinds == {"cuda"}:
        local = int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")))
        device = torch.device("cuda", local % torch.cuda.device_count())
        torch.cuda.set_device(device)
        model.to(device)
    if not distributed.is_initialized():
        if device.type == "cuda":
            backend = "cpu:gloo,cuda:nccl"
            distributed.init_process_group(backend, timeout=timeout, device_id=device)
        else:
            distributed.init_process_group("gloo", timeout=timeout)
    return device


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
) -> list[Link]:
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
            control = _group(ends, "gloo", timeout)
            payload = _group(ends, "nccl", timeout) if device.type == "cuda" else control
            if ranks.rank in ends:
                found.append(Link(source, target, ends, control, payload, device))
    for link in found:
        _connect(link, ranks.rank == link.ranks[0])
    return found


def _group(ranks: tuple[int, int], backend: str, timeout: timedelta) -> Any:
    return distributed.new_group(sorted(ranks), backend=backend, timeout=timeout)


def _connect(link: Link, sends: bool) -> None:
    """A first exchange: NCCL connects two ranks when both have called."""
    if link.uses_cuda:
        link.exchange([torch.zeros(1, dtype=torch.uint8, device=link.device)], sends)
        torch.cuda.synchronize(link.device)
