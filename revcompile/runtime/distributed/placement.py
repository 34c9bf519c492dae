"""Which stage is on which rank.

4 stages, 4 ranks, stage_to_rank=(0, 0, 1, 1):    replica 0: rank 0 (stages 0, 1), rank 1 (2, 3)
                                                  replica 1: rank 2 (stages 0, 1), rank 3 (2, 3)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from revcompile.errors import InputError


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
        """Ranks of one replica."""
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


def pipeline_ranks(stages: int, world: int) -> int:
    """How many ranks one copy of the pipeline takes by default.

    >>> pipeline_ranks(stages=4, world=2), pipeline_ranks(stages=4, world=8)
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
    stages: int, world: int, stage_to_rank: Sequence[int] | None, default: Sequence[int]
) -> Layout:
    """The layout of `stage_to_rank` if it is given, else of `default`.

    Raises:
        InputError: the ranks of the world cannot be used so.

    >>> make_layout(4, 2, stage_to_rank=(0, 1, 1, 0), default=(0, 0, 1, 1)).stages(0)
    (0, 3)
    """
    chosen = tuple(default if stage_to_rank is None else stage_to_rank)
    if len(chosen) != stages:
        raise InputError(
            f"stage_to_rank={chosen} has {len(chosen)} entries, but there are {stages} stages; "
            "give one rank for each stage"
        )
    width = 1 + max(chosen)
    missing = [rank for rank in range(width) if rank not in chosen]
    if missing or min(chosen) < 0:
        raise InputError(
            f"stage_to_rank={chosen}: ranks are counted from 0 without gaps"
            + (f", but rank {missing[0]} has no stage" if missing else "")
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
    mesh: DeviceMesh
    control: Any
    """The group of all ranks, over gloo."""

    @classmethod
    def arrange(cls, layout: Layout, device: torch.device, control: Any) -> Ranks:
        shape, names = (layout.replicas, layout.width), ("replica", "stage")
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
        return cls(layout, distributed.get_rank(), mesh, control)

    @property
    def replica(self) -> int:
        return self.layout.replica(self.rank)

    @property
    def stages(self) -> tuple[int, ...]:
        return self.layout.stages(self.rank)

    @property
    def pipeline(self) -> Any:
        """The group of the ranks of this replica."""
        return self.mesh.get_group("stage")

    def owner(self, stage: int) -> int:
        """The rank of this replica that has a stage."""
        return self.layout.rank(stage, self.replica)

    def named(self, rank: int) -> str:
        """A rank in error messages: `rank 2 (stage 1)`."""
        stages = self.layout.stages(rank)
        plural = "s" if len(stages) > 1 else ""
        return f"rank {rank} (stage{plural} {', '.join(map(str, stages))})"
