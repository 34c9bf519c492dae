"""What enters and leaves a stage: tensors are sent, sizes are computed again at every stage."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from revcompile.errors import InputError
from revcompile.ir.program import Part, Partition
from revcompile.ir.signature import Signature
from revcompile.ir.types import VALUE, Coupling, Opaque, Segment, TensorType


@dataclass(frozen=True)
class Boundary:
    """Inputs and outputs of a stage."""

    part: Part
    stages: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    sizes_read: tuple[str, ...]
    """Sizes of earlier stages that this one reads."""
    made: tuple[str, ...]
    """Values computed here that a later stage reads, or the model returns."""
    batch_source: tuple[str, TensorType, int] | None
    """An input, its type, and the dimension of it that grows with the batch size."""

    @staticmethod
    def of(partition: Partition, part: Part) -> Boundary:
        types, is_last = partition.types, part is partition.parts[-1]
        inputs = _tensors(part.inputs, types)
        results = partition.rewired.body.returned
        outputs = _tensors(results if is_last else part.outputs, types)
        read = {name for piece in part.pieces for name in piece.inputs}
        made = {name for piece in part.pieces for name in piece.outputs}
        sources = [
            (name, types[name], dim)
            for name in inputs
            for dim, step in enumerate(types[name].per_sample)
            if step
        ]
        return Boundary(
            part,
            len(partition.parts),
            inputs,
            outputs,
            tuple(name for name in _plain(partition, part.inputs) if name in read),
            tuple(name for name in part.outputs if name in made),
            sources[0] if sources else None,
        )

    def signature(self) -> Signature:
        """Positional tensors in, a tuple (or the only output of the last stage) out."""
        labels = tuple(
            name if name.isidentifier() else f"value_{index}"
            for index, name in enumerate(self.inputs)
        )
        kind = inspect.Parameter.POSITIONAL_ONLY
        is_alone = len(self.outputs) == 1 and self.part.index == self.stages - 1
        return Signature(
            forward=inspect.Signature([inspect.Parameter(label, kind) for label in labels]),
            given=(),
            in_spec=pytree.tree_structure(((0,) * len(labels), {})),
            fixed=(),
            placeholders=self.inputs,
            labels=labels,
            out_spec=pytree.tree_structure(0 if is_alone else (0,) * len(self.outputs)),
        )

    def described(self, types: Mapping[str, Any]) -> str:
        inputs, outputs = (
            ", ".join(f"{name}: {types[name]}" for name in names)
            for names in (self.inputs, self.outputs)
        )
        return f"stage {self.part.index} of {self.stages}: ({inputs}) -> ({outputs})"


def _tensors(names: Iterable[str], types: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(name for name in names if isinstance(types.get(name), TensorType))


def _plain(partition: Partition, names: Sequence[str]) -> tuple[str, ...]:
    """The values that are no tensors, without the grids of chains: every stage makes its own."""
    pieces = (piece for part in partition.parts for piece in part.pieces)
    grids = {piece.grid for piece in pieces if isinstance(piece, Coupling)}
    tensors = _tensors(names, partition.types)
    return tuple(name for name in names if name not in tensors and name not in grids)


# -- sizes that cross a cut -----------------------------------------------------------------------


Size = int | tuple[int, ...]


def crossing_sizes(partition: Partition) -> dict[str, tuple[Size, Size]]:
    """Sizes that are read by a later stage, each at the example's batch size and at one more."""
    made: dict[str, fx.Node] = {}
    for part in partition.parts:
        for piece in part.pieces:
            made |= _made(piece)
    sizes: dict[str, tuple[Size, Size]] = {}
    for part in partition.parts:
        for name in Boundary.of(partition, part).sizes_read:
            values = made[name].meta.get(VALUE) if name in made else None
            if values is None:
                raise InputError(
                    f"to_pipeline_stages: stage {part.index} reads {name!r} of an earlier stage, "
                    "which is neither a tensor nor a size, and torch.distributed.pipelining "
                    "carries tensors only; cut elsewhere with another num_stages, or train with "
                    "net.trainer(...)"
                )
            sizes[name] = values
    return sizes


def _made(segment: Segment) -> dict[str, fx.Node]:
    """The nodes that compute a segment's values, without a coupling's streams."""
    if isinstance(segment, Opaque):
        (output,) = segment.graph.find_nodes(op="output")
        return dict(zip(segment.outputs, output.args[0], strict=True))
    if not segment.extras:
        return {}
    (output,) = segment.branch.find_nodes(op="output")
    return dict(zip(segment.extras, output.args[0][1:], strict=True))


def compute_sizes(boundary: Boundary, sizes: Mapping[str, tuple[Size, Size]]) -> list[Segment]:
    """A segment that computes the sizes a stage reads from the batch size of its inputs."""
    names = boundary.sizes_read
    if not names:
        return []
    graph = fx.Graph()
    batch, inputs = _batch(graph, boundary, names[0])
    graph.output(tuple(graph.call_function(size_at, (*sizes[name], batch)) for name in names))
    return [Opaque("sizes", inputs, names, graph, "sizes of an earlier stage")]


def check_sizes(boundary: Boundary, sizes: Mapping[str, tuple[Size, Size]]) -> list[Segment]:
    """A segment that compares a stage's own sizes with those that later stages compute."""
    names = tuple(name for name in boundary.made if name in sizes)
    if not names:
        return []
    graph = fx.Graph()
    values = [graph.placeholder(f"size_{index}") for index in range(len(names))]
    batch, inputs = _batch(graph, boundary, names[0])
    for name, value in zip(names, values, strict=True):
        expected = graph.call_function(size_at, (*sizes[name], batch))
        graph.call_function(check_size, (name, value, expected))
    graph.output(())
    return [Opaque("sizes checked", (*names, *inputs), (), graph, "sizes for later stages")]


def _batch(graph: fx.Graph, boundary: Boundary, size: str) -> tuple[fx.Node, tuple[str, ...]]:
    """A node for the number of samples beyond the example's batch size, and the input it reads."""
    if boundary.batch_source is None:
        raise InputError(
            f"to_pipeline_stages: no tensor that enters stage {boundary.part.index} tells the "
            f"batch size, from which the size {size!r} is computed; cut elsewhere with another "
            "num_stages, or train with net.trainer(...)"
        )
    name, kind, dim = boundary.batch_source
    tensor = graph.placeholder("batch_source")
    args = (tensor, dim, kind.shape[dim], kind.per_sample[dim])
    return graph.call_function(samples_beyond, args), (name,)


def samples_beyond(tensor: Tensor, dim: int, size: int, per_sample: int) -> int:
    """How many samples more than the example a tensor holds.

    >>> samples_beyond(torch.zeros(3, 20), dim=1, size=8, per_sample=4)
    3
    """
    return (tensor.shape[dim] - size) // per_sample


def size_at(first: Size, second: Size, beyond: int) -> Size:
    """A size from its values at the example's batch size and at one more.

    >>> size_at(8, 12, beyond=3)
    20
    >>> size_at((2, 7), (3, 7), beyond=-1)
    torch.Size([1, 7])
    """
    if isinstance(first, int) and isinstance(second, int):
        return first + (second - first) * beyond
    assert isinstance(first, tuple) and isinstance(second, tuple)
    return torch.Size(a + (b - a) * beyond for a, b in zip(first, second, strict=True))


def check_size(name: str, value: Size, expected: Size) -> None:
    """Raise if a size does not grow linearly with the batch: later stages would compute another."""
    if value != expected:
        raise InputError(
            f"to_pipeline_stages: the size {name!r} is {value} here, but later stages compute "
            f"{expected} from the batch size, as if it grew linearly from the example's; compile "
            "with example inputs of the size of a micro-batch"
        )
