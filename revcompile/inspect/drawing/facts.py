"""What a drawing shows, taken from a partition and its programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, pairwise
from typing import Any, Protocol

from revcompile.errors import InputError
from revcompile.inspect.words import bytes_of
from revcompile.ir import Coupling, Refusal, TensorType
from revcompile.program import Part, Partition, Piece, Port, StageProgram
from revcompile.schedule import delay, window

__all__ = ["Block", "Memory", "Picture", "Stage", "Traveller", "Treaty", "picture"]


class Memory(Protocol):
    """What a stage holds at its peak, in bytes."""

    @property
    def buffers(self) -> int:
        """Kept from forward to backward, for all micro-batches in flight."""
        ...

    @property
    def total(self) -> int:
        """All of it."""
        ...


@dataclass(frozen=True)
class Block:
    """One segment, or a part of one. `enters`, `leaves`: one line or two streams."""

    name: str
    reversible: bool
    why: str
    parameters: int
    flops: int
    work: float
    enters: int
    leaves: int


@dataclass(frozen=True)
class Stage:
    """One stage: its blocks, what crosses its borders, what it holds."""

    index: int
    blocks: tuple[Block, ...]
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    window: int
    delay: int
    kept: int
    """Bytes kept from forward to backward, for all micro-batches in flight."""
    memory: Memory | None
    program: StageProgram

    @property
    def reversible(self) -> bool:
        """Is every block a coupling?"""
        return all(block.reversible for block in self.blocks)

    @property
    def work(self) -> float:
        """Forward and backward of all blocks."""
        return sum(block.work for block in self.blocks)

    @property
    def parameters(self) -> int:
        """How many; each counts where it is used first."""
        return sum(block.parameters for block in self.blocks)

    @property
    def flops(self) -> int:
        """Of the forward pass."""
        return sum(block.flops for block in self.blocks)


@dataclass(frozen=True)
class Traveller:
    """Tensors of a kind that pass together through stages: a skip's two streams, a mask."""

    names: tuple[str, ...]
    kind: TensorType
    first: int
    last: int
    readers: frozenset[int]


@dataclass(frozen=True)
class Treaty:
    """Weights that two stages share: the owner's updates travel, and the holder's gradients."""

    owner: int
    holder: int
    names: tuple[str, ...]


@dataclass(frozen=True)
class Picture:
    """Everything a drawing of a model shows."""

    name: str
    method: str
    batch: int | None
    stages: tuple[Stage, ...]
    travellers: tuple[Traveller, ...]
    treaties: tuple[Treaty, ...]
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

    def through(self, stage: int) -> tuple[Traveller, ...]:
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
    lines = _lines(partition)
    stages = tuple(
        _stage(partition, part, program, batch, memory[part.index] if memory else None, lines)
        for part, program in zip(partition.parts, programs, strict=True)
    )
    rewired = partition.rewired
    return Picture(
        name=name or rewired.name,
        method=programs[0].method.name,
        batch=batch if batch is not None else _batch(partition.types),
        stages=stages,
        travellers=_travellers(partition, programs),
        treaties=tuple(Treaty(t.owner, t.holder, names) for t, names in partition.ties.items()),
        notes=rewired.notes,
        refusals=rewired.refusals,
    )


def _stage(
    partition: Partition,
    part: Part,
    program: StageProgram,
    batch: int | None,
    memory: Memory | None,
    lines: Mapping[int, Sequence[tuple[int, int]]],
) -> Stage:
    count, method = len(partition.parts), program.method
    in_flight = window(method, count, part.index)
    kinds = (partition.types.get(kept) for kept in program.kept)
    kept = sum(bytes_of(kind, batch) for kind in kinds if isinstance(kind, TensorType))
    costs = part.costs or (None,) * len(part.pieces)
    blocks = tuple(
        Block(
            name=piece.name,
            reversible=piece.reversible,
            why=_why(piece),
            parameters=cost.parameters if cost else 0,
            flops=cost.flops if cost else 0,
            work=cost.forward + cost.backward if cost else 0.0,
            enters=entering,
            leaves=leaving,
        )
        for piece, cost, (entering, leaving) in zip(
            part.pieces, costs, lines[part.index], strict=True
        )
    )
    return Stage(
        index=part.index,
        blocks=blocks,
        inputs=program.inputs,
        outputs=program.outputs,
        window=in_flight,
        delay=delay(method, count, part.index),
        kept=memory.buffers if memory else in_flight * kept,
        memory=memory,
        program=program,
    )


def _why(piece: Piece) -> str:
    segment = piece.segment
    return segment.kind.value if isinstance(segment, Coupling) else segment.reason


def _lines(partition: Partition) -> dict[int, list[tuple[int, int]]]:
    """For every piece of each stage: how many lines enter and leave it, one or two streams."""
    pieces = [piece for part in partition.parts for piece in part.pieces]
    between = [_between(before, after, partition.types) for before, after in pairwise(pieces)]
    first, last = (2 if piece.reversible else 1 for piece in (pieces[0], pieces[-1]))
    pairs = zip([first, *between], [*between, last], strict=True)
    return {part.index: list(islice(pairs, len(part.pieces))) for part in partition.parts}


def _between(before: Piece, after: Piece, types: Mapping[str, Any]) -> int:
    if before.reversible or after.reversible:
        return 2
    crossing = [types.get(name) for name in before.outputs if name in after.inputs]
    tensors = [kind for kind in crossing if isinstance(kind, TensorType)]
    return 2 if len(tensors) == 2 and tensors[0] == tensors[1] else 1


def _travellers(partition: Partition, programs: Sequence[StageProgram]) -> tuple[Traveller, ...]:
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
        Traveller(tuple(names), kind, first, last, readers)
        for (first, last, readers, kind), names in together.items()
    )


def _reads(part: Part, name: str) -> bool:
    return any(name in piece.inputs for piece in part.pieces)


def _batch(types: Mapping[str, Any]) -> int | None:
    return next((kind.batch for kind in types.values() if isinstance(kind, TensorType)), None)
