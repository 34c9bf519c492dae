"""What a drawing shows, taken from a partition and its programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from revcompile.errors import InputError
from revcompile.inspect.facts import Memory, Stage, stages_of
from revcompile.inspect.words import bytes_of
from revcompile.ir.program import Part, Partition, StageProgram
from revcompile.ir.types import Refusal, TensorType

__all__ = ["Picture", "SkipValue", "TiedWeight", "picture"]


@dataclass(frozen=True)
class SkipValue:
    """Tensors of a kind that pass together through stages: a skip's two streams, a mask."""

    names: tuple[str, ...]
    kind: TensorType
    first: int
    last: int
    readers: frozenset[int]


@dataclass(frozen=True)
class TiedWeight:
    """Weights that two stages share: the owner's updates travel, and the holder's gradients."""

    owner: int
    holder: int
    names: tuple[str, ...]


@dataclass(frozen=True)
class Picture:
    """Everything a drawing of a model shows."""

    partition: Partition
    name: str
    method: str
    batch: int | None
    stages: tuple[Stage, ...]
    travellers: tuple[SkipValue, ...]
    treaties: tuple[TiedWeight, ...]
    notes: tuple[str, ...]
    refusals: tuple[Refusal, ...]

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
        """The travellers that stop at a stage, start there or pass it."""
        return tuple(one for one in self.travellers if one.first <= stage <= one.last)


def picture(
    partition: Partition,
    programs: Sequence[StageProgram],
    *,
    name: str | None = None,
    batch: int | None = None,
    memory: Sequence[Memory] | None = None,
) -> Picture:
    """The facts of a partition and its programs.

    `batch` is the size of a micro-batch (default: the example's), `memory` what each stage holds.
    """
    count = len(partition.parts)
    for what, given in (("programs", programs), ("memory", memory)):
        if given is not None and len(given) != count:
            raise InputError(f"draw: {len(given)} {what}, but {count} stages; give one each")
    if batch is not None and batch < 1:
        raise InputError(f"draw: batch={batch}; a micro-batch has at least 1 sample")
    rewired = partition.rewired
    return Picture(
        partition=partition,
        name=name or rewired.name,
        method=programs[0].method.name,
        batch=batch if batch is not None else _batch(partition.types),
        stages=stages_of(partition, programs, batch, memory),
        travellers=_travellers(partition, programs),
        treaties=tuple(TiedWeight(t.owner, t.holder, names) for t, names in partition.ties.items()),
        notes=rewired.notes,
        refusals=rewired.refusals,
    )


def _travellers(partition: Partition, programs: Sequence[StageProgram]) -> tuple[SkipValue, ...]:
    """Tensors that cross two borders or more under one name."""
    found: dict[str, list[int]] = {}
    kinds: dict[str, TensorType] = {}
    for program in programs[1:]:
        for port in program.inputs:
            if port.type is not None:
                kinds[port.name] = port.type
                found.setdefault(port.name, []).append(program.index)
    together: dict[tuple[int, int, frozenset[int], TensorType], list[str]] = {}
    for name, stages in found.items():
        if len(stages) > 1:
            readers = frozenset(p.index for p in partition.parts if _reads(p, name))
            key = (stages[0] - 1, stages[-1], readers, kinds[name])
            together.setdefault(key, []).append(name)
    return tuple(
        SkipValue(tuple(names), kind, first, last, readers)
        for (first, last, readers, kind), names in together.items()
    )


def _reads(part: Part, name: str) -> bool:
    return any(name in piece.inputs for piece in part.pieces)


def _batch(types: Mapping[str, Any]) -> int | None:
    return next((kind.batch for kind in types.values() if isinstance(kind, TensorType)), None)
