"""The data behind a drawing: stages, skip values, tied weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from revcompile.inspect.formatting import bytes_of
from revcompile.inspect.views import StageView, stage_views
from revcompile.ir.program import Part, Partition, StageMemory, StageProgram
from revcompile.ir.types import TensorType
from revcompile.schedule import Tie


@dataclass(frozen=True)
class SkipValue:
    """Tensors of one type that cross the same stages: a skip connection's streams, a mask."""

    names: tuple[str, ...]
    kind: TensorType
    first: int
    last: int
    readers: frozenset[int]


@dataclass(frozen=True)
class Picture:
    """Everything a drawing of a model shows."""

    partition: Partition
    name: str
    method: str
    batch: int | None
    stages: tuple[StageView, ...]
    skip_values: tuple[SkipValue, ...]

    @property
    def ties(self) -> Mapping[Tie, tuple[str, ...]]:
        """Names of the weights that two stages share."""
        return self.partition.ties

    @cached_property
    def work(self) -> float:
        """Of all stages."""
        return sum(stage.work for stage in self.stages)

    @property
    def balance(self) -> float:
        """The largest stage's work over the mean: 1 is a perfect cut."""
        return max(stage.work for stage in self.stages) * len(self.stages) / (self.work or 1)

    def bytes_of(self, kind: TensorType | None) -> int:
        """Bytes of a value at the picture's batch size."""
        return bytes_of(kind, self.batch)

    def through(self, stage: int) -> tuple[SkipValue, ...]:
        """The skip values that start or end at a stage, or pass it."""
        return tuple(skip for skip in self.skip_values if skip.first <= stage <= skip.last)


def picture(
    partition: Partition,
    programs: Sequence[StageProgram],
    *,
    name: str | None = None,
    batch: int | None = None,
    memory: Sequence[StageMemory] | None = None,
) -> Picture:
    """The data of a drawing.

    Args:
        partition: The stages.
        programs: A program for each.
        name: Title of the drawing (default: the model's class).
        batch: Samples in a micro-batch (default: the example's).
        memory: Peak memory of each stage, where it is to be shown.
    """
    return Picture(
        partition=partition,
        name=name or partition.rewired.name,
        method=programs[0].method.name,
        batch=batch if batch is not None else _batch(partition.types),
        stages=stage_views(partition, programs, batch, memory),
        skip_values=_skip_values(partition, programs),
    )


def _skip_values(partition: Partition, programs: Sequence[StageProgram]) -> tuple[SkipValue, ...]:
    """Tensors that cross two boundaries or more."""
    stages_of: dict[str, list[int]] = {}
    kinds: dict[str, TensorType] = {}
    for program in programs[1:]:
        for port in program.inputs:
            if port.type is not None:
                kinds[port.name] = port.type
                stages_of.setdefault(port.name, []).append(program.index)
    grouped: dict[tuple[int, int, frozenset[int], TensorType], list[str]] = {}
    for name, stages in stages_of.items():
        if len(stages) > 1:
            readers = frozenset(p.index for p in partition.parts if _reads(p, name))
            key = (stages[0] - 1, stages[-1], readers, kinds[name])
            grouped.setdefault(key, []).append(name)
    return tuple(
        SkipValue(tuple(names), kind, first, last, readers)
        for (first, last, readers, kind), names in grouped.items()
    )


def _reads(part: Part, name: str) -> bool:
    return any(name in piece.inputs for piece in part.pieces)


def _batch(types: Mapping[str, Any]) -> int | None:
    return next((kind.batch for kind in types.values() if isinstance(kind, TensorType)), None)
