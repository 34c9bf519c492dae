"""What tables and drawings show of every stage: blocks, inputs and outputs, memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

from revcompile.inspect.formatting import bytes_of
from revcompile.ir.program import Part, Partition, Port, StageMemory, StageProgram
from revcompile.ir.types import PATH, Coupling, Residual, Rewired, Segment, TensorType
from revcompile.schedule import delay, window


@dataclass(frozen=True)
class BlockView:
    """One segment, or a part of one. `enters`, `leaves`: 1 for one value, 2 for two streams."""

    name: str
    reversible: bool
    why: str
    parameters: int
    flops: int
    work: float
    enters: int
    leaves: int
    modules: tuple[str, ...] = ()
    """Paths of the modules in it, in the order they run."""


@dataclass(frozen=True)
class StageView:
    """One stage: its blocks, inputs and outputs, and what it keeps."""

    index: int
    blocks: tuple[BlockView, ...]
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    window: int
    delay: int
    kept: int
    """Bytes kept from forward to backward, for all micro-batches in flight."""
    memory: StageMemory | None
    program: StageProgram

    @property
    def reversible(self) -> bool:
        """Is every block a coupling?"""
        return all(block.reversible for block in self.blocks)

    @property
    def work(self) -> float:
        """Forward and backward of all blocks."""
        return math.fsum(block.work for block in self.blocks)

    @property
    def parameters(self) -> int:
        """How many; each counts where it is used first."""
        return sum(block.parameters for block in self.blocks)

    @property
    def flops(self) -> int:
        """Of the forward pass."""
        return sum(block.flops for block in self.blocks)


def stage_views(
    partition: Partition,
    programs: Sequence[StageProgram],
    batch: int | None = None,
    memory: Sequence[StageMemory] | None = None,
) -> tuple[StageView, ...]:
    """Every stage; `batch` is the size of a micro-batch (default: the example's)."""
    lines = _lines(partition)
    return tuple(
        _stage(partition, part, program, batch, memory[part.index] if memory else None, lines)
        for part, program in zip(partition.parts, programs, strict=True)
    )


def _stage(
    partition: Partition,
    part: Part,
    program: StageProgram,
    batch: int | None,
    memory: StageMemory | None,
    lines: Mapping[int, Sequence[tuple[int, int]]],
) -> StageView:
    count, method = len(partition.parts), program.method
    in_flight = window(method, count, part.index)
    kinds = (partition.types.get(kept) for kept in program.kept)
    kept = sum(bytes_of(kind, batch) for kind in kinds if isinstance(kind, TensorType))
    costs = part.costs or (None,) * len(part.pieces)
    works = partition.works(part) or (0.0,) * len(part.pieces)
    blocks = tuple(
        BlockView(
            name=piece.name,
            reversible=piece.reversible,
            why=_why(piece),
            parameters=cost.parameters if cost else 0,
            flops=cost.flops if cost else 0,
            work=work,
            enters=entering,
            leaves=leaving,
            modules=modules_of(piece),
        )
        for piece, cost, work, (entering, leaving) in zip(
            part.pieces, costs, works, lines[part.index], strict=True
        )
    )
    return StageView(
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


def _why(piece: Segment) -> str:
    return piece.kind.value if isinstance(piece, Coupling) else piece.reason


def modules_of(piece: Segment) -> tuple[str, ...]:
    """Paths of the modules in a piece, in the order they run."""
    called = (node for node in piece.graph.nodes if node.op.startswith("call"))
    paths = (str(node.meta.get(PATH, "")) for node in called)
    return tuple(dict.fromkeys(path for path in paths if path))


def block_of(rewired: Rewired, piece: Segment) -> Residual | None:
    """The residual block that a piece was made of, recognised by the names of its nodes."""
    names = {node.name for node in piece.graph.nodes if node.op.startswith("call")}
    return next((block for block in rewired.residuals if names & {*block.branch}), None)


def refusals_by_reason(rewired: Rewired) -> dict[str, list[str]]:
    """Where sums were not rewired, for every reason."""
    places: dict[str, list[str]] = {}
    for refusal in rewired.refusals:
        places.setdefault(refusal.reason, []).append(refusal.path or "(top level)")
    return places


def _lines(partition: Partition) -> dict[int, list[tuple[int, int]]]:
    """For every piece of each stage: how many lines enter and leave it, one or two streams."""
    pieces = [piece for part in partition.parts for piece in part.pieces]
    between = [_between(before, after, partition.types) for before, after in pairwise(pieces)]
    first, last = (2 if piece.reversible else 1 for piece in (pieces[0], pieces[-1]))
    pairs = zip([first, *between], [*between, last], strict=True)
    return {part.index: list(islice(pairs, len(part.pieces))) for part in partition.parts}


def _between(before: Segment, after: Segment, types: Mapping[str, Any]) -> int:
    if before.reversible or after.reversible:
        return 2
    crossing = [types.get(name) for name in before.outputs if name in after.inputs]
    tensors = [kind for kind in crossing if isinstance(kind, TensorType)]
    return 2 if len(tensors) == 2 and tensors[0] == tensors[1] else 1
