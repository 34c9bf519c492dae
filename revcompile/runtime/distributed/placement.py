"""Which stage lives on which rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from revcompile.errors import InputError

__all__ = ["Layout", "pipeline_ranks", "plan"]


@dataclass(frozen=True)
class Layout:
    """Stages on pipeline ranks, and copies of the whole pipeline ("replicas").

    `places[stage]` is the pipeline rank of a stage; a replica's pipeline ranks are consecutive
    ranks of the world.

    >>> layout = Layout(places=(0, 0, 1), replicas=2)
    >>> [layout.rank(stage, replica=1) for stage in range(3)], layout.stages(rank=3)
    ([2, 2, 3], (2,))
    """

    places: tuple[int, ...]
    replicas: int = 1

    @property
    def width(self) -> int:
        """Pipeline ranks of one replica."""
        return 1 + max(self.places)

    @property
    def world(self) -> int:
        """All ranks."""
        return self.width * self.replicas

    def rank(self, stage: int, replica: int = 0) -> int:
        """The rank a stage lives on."""
        return replica * self.width + self.places[stage]

    def replica(self, rank: int) -> int:
        """The copy of the pipeline a rank belongs to."""
        return rank // self.width

    def stages(self, rank: int) -> tuple[int, ...]:
        """A rank's stages."""
        return tuple(s for s, place in enumerate(self.places) if place == rank % self.width)


def pipeline_ranks(stages: int, world: int) -> int:
    """How many ranks one copy of the pipeline takes if nothing else is said.

    >>> pipeline_ranks(stages=4, world=2), pipeline_ranks(stages=4, world=8)
    (2, 4)
    """
    if world > stages and world % stages:
        raise InputError(
            f"trainer: {world} ranks for {stages} stages, but more ranks than stages train copies "
            f"of the whole pipeline, {stages} ranks each; start {world // stages * stages} ranks, "
            f"cut the model into {world} stages, or give places="
        )
    return min(stages, world)


def plan(stages: int, world: int, places: Sequence[int] | None, default: Sequence[int]) -> Layout:
    """The layout asked for, or the default one.

    >>> plan(4, 2, places=(0, 1, 1, 0), default=(0, 0, 1, 1)).stages(0)
    (0, 3)
    """
    chosen = tuple(default if places is None else places)
    if len(chosen) != stages:
        raise InputError(
            f"places={chosen} has {len(chosen)} entries, but there are {stages} stages; give one "
            "rank for each stage"
        )
    width = 1 + max(chosen)
    missing = sorted(set(range(width)) - set(chosen))
    if missing or min(chosen) < 0:
        raise InputError(
            f"places={chosen}: ranks are counted from 0 without gaps"
            + (f", but rank {missing[0]} has no stage" if missing else "")
        )
    if width > world or world % width:
        raise InputError(
            f"places={chosen} needs {width} ranks (or a multiple, for copies of the pipeline), "
            f"but there are {world}; start torchrun with --nproc-per-node {width}, or use other "
            "places="
        )
    return Layout(chosen, world // width)
