"""The data about a model in stages that tables, explanations and drawings show."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from revcompile.inspect.formatting import counted, size, span
from revcompile.ir.program import Partition, Port, StageMemory, StageProgram
from revcompile.ir.types import (
    PATH,
    Cost,
    Coupling,
    Residual,
    ResidualKind,
    Rewired,
    Segment,
    TensorType,
)
from revcompile.schedule import Keep, Tie, delay, window


@dataclass(frozen=True)
class BlockView:
    """One segment, or a part of one. `enters`, `leaves`: 1 for one value, 2 for two streams."""

    piece: Segment
    cost: Cost
    work: float
    enters: int
    leaves: int

    @property
    def name(self) -> str:
        return self.piece.name

    @property
    def reversible(self) -> bool:
        return self.piece.reversible

    @property
    def why(self) -> str:
        """The kind of its shortcut, or why it is not reversible."""
        piece = self.piece
        if not isinstance(piece, Coupling):
            return piece.reason
        return "x + F(x)" if piece.kind is ResidualKind.IDENTITY else piece.kind.value


@dataclass(frozen=True)
class StageView:
    """One stage: its blocks, inputs and outputs, and what it keeps."""

    blocks: tuple[BlockView, ...]
    program: StageProgram
    keep: Keep
    """What the stage keeps of a micro-batch."""
    memory: StageMemory
    batch: int
    """Samples in a micro-batch."""
    work_share: float
    """The stage's share of the work of all stages."""

    @property
    def index(self) -> int:
        return self.program.index

    @property
    def window(self) -> int:
        """The most micro-batches in flight."""
        return window(self.program.method, self.program.stages, self.index)

    @property
    def delay(self) -> int:
        """Updates between forward and backward of a micro-batch, at accumulation_steps=1."""
        return delay(self.program.method, self.program.stages, self.index)

    @property
    def reversible(self) -> bool:
        """Whether every block is a coupling."""
        return all(block.reversible for block in self.blocks)

    @property
    def pieces(self) -> tuple[str, ...]:
        return tuple(block.name for block in self.blocks)

    @property
    def title(self) -> str:
        return span(self.pieces)

    @property
    def modules(self) -> tuple[str, ...]:
        """Paths of the modules whose code the stage runs."""
        paths = (path for block in self.blocks for path in modules_of(block.piece))
        return tuple(dict.fromkeys(paths))

    @property
    def opaque(self) -> tuple[tuple[str, str], ...]:
        """Pieces that are not reversible, and why."""
        return tuple((block.name, block.why) for block in self.blocks if not block.reversible)

    @property
    def parameters(self) -> int:
        """Number of parameters; a shared one counts where it is used first."""
        return sum(block.cost.parameters for block in self.blocks)

    @property
    def flops(self) -> int:
        """FLOPs of the forward pass."""
        return sum(block.cost.flops for block in self.blocks)

    @property
    def sends(self) -> tuple[str, ...]:
        """The types of the tensors sent to the next stage."""
        return counted(tensors(self.program.outputs))

    @property
    def sent_bytes(self) -> int:
        return sum(kind.nbytes(self.batch) for kind in tensors(self.program.outputs))

    @property
    def keeps(self) -> str:
        """Bytes kept from forward to backward, for all micro-batches in flight, as text."""
        return size(self.memory.buffers) if self.memory.buffers else "nothing"


@dataclass(frozen=True)
class SkipValue:
    """Tensors of one type that cross the same stages: a skip connection's streams, a mask."""

    names: tuple[str, ...]
    kind: TensorType
    first: int
    last: int
    readers: frozenset[int]


@dataclass(frozen=True)
class ModelView:
    """All stages, and the values that cross several of them."""

    partition: Partition
    name: str
    batch: int
    stages: tuple[StageView, ...]
    skips: tuple[SkipValue, ...]

    @property
    def rewired(self) -> Rewired:
        return self.partition.rewired

    @property
    def method(self) -> str:
        return self.stages[0].program.method.name

    @property
    def ties(self) -> Mapping[Tie, tuple[str, ...]]:
        """Names of the weights that two stages share."""
        return self.partition.ties

    @property
    def blocks(self) -> list[BlockView]:
        return [block for stage in self.stages for block in stage.blocks]

    @cached_property
    def work(self) -> float:
        """The work of all stages."""
        return math.fsum(block.work for block in self.blocks) or 1.0

    @property
    def balance(self) -> float:
        """The largest stage's work over the mean: 1 is a perfect cut."""
        return max(stage.work_share for stage in self.stages) * len(self.stages)


def model_view(
    partition: Partition,
    programs: Sequence[StageProgram],
    keeps: Sequence[Keep],
    memory: Sequence[StageMemory],
    batch: int,
    name: str | None = None,
) -> ModelView:
    """Collect the data; `batch` is the micro-batch size, `name` the name of the model."""
    pieces = [piece for part in partition.parts for piece in part.pieces]
    between = [_between(before, after, partition.types) for before, after in pairwise(pieces)]
    first, last = (2 if piece.reversible else 1 for piece in (pieces[0], pieces[-1]))
    ends = pairwise([first, *between, last])
    blocks = [
        tuple(
            BlockView(piece, cost, work, *next(ends))
            for piece, cost, work in zip(
                part.pieces, part.costs, partition.works(part, keeps[part.index]), strict=True
            )
        )
        for part in partition.parts
    ]
    work = math.fsum(one.work for part in blocks for one in part) or 1.0
    stages = tuple(
        StageView(own, program, keep, held, batch, math.fsum(one.work for one in own) / work)
        for own, program, keep, held in zip(blocks, programs, keeps, memory, strict=True)
    )
    name = name or partition.rewired.name
    return ModelView(partition, name, batch, stages, _skip_values(partition, programs))


def tensors(ports: Sequence[Port]) -> list[TensorType]:
    """The types of the ports that are tensors."""
    return [port.type for port in ports if port.type is not None]


def modules_of(piece: Segment) -> tuple[str, ...]:
    """Paths of the modules in a piece, in the order they run."""
    called = (node for node in piece.graph.nodes if node.op.startswith("call"))
    paths = (str(node.meta.get(PATH, "")) for node in called)
    return tuple(dict.fromkeys(path for path in paths if path))


def block_of(rewired: Rewired, piece: Segment) -> Residual | None:
    """The residual block that a piece was made of, recognised by the names of its nodes."""
    names = {node.name for node in piece.graph.nodes if node.op.startswith("call")}
    return next((block for block in rewired.residuals if names & {*block.branch}), None)


def _between(before: Segment, after: Segment, types: Mapping[str, Any]) -> int:
    """1 if one value passes between two pieces, 2 for two streams."""
    if before.reversible or after.reversible:
        return 2
    crossing = [types.get(name) for name in before.outputs if name in after.inputs]
    kinds = [kind for kind in crossing if isinstance(kind, TensorType)]
    return 2 if len(kinds) == 2 and kinds[0] == kinds[1] else 1


def _skip_values(partition: Partition, programs: Sequence[StageProgram]) -> tuple[SkipValue, ...]:
    """Tensors that cross two boundaries or more."""
    stages_of: dict[tuple[str, TensorType], list[int]] = {}
    for program in programs[1:]:
        for port in program.inputs:
            if port.type is not None:
                stages_of.setdefault((port.name, port.type), []).append(program.index)
    grouped: dict[Any, list[str]] = {}
    for (name, kind), stages in stages_of.items():
        if len(stages) > 1:
            reads = ((p.index, name in piece.inputs) for p in partition.parts for piece in p.pieces)
            readers = frozenset(index for index, is_read in reads if is_read)
            grouped.setdefault((kind, stages[0] - 1, stages[-1], readers), []).append(name)
    return tuple(SkipValue(tuple(names), *key) for key, names in grouped.items())
