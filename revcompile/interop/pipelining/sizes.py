"""Sizes that cross a cut: worked out anew at every stage, from the batch size of what arrives."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, fx

from revcompile.errors import InputError
from revcompile.interop.pipelining.boundary import Boundary
from revcompile.ir.program import Partition
from revcompile.ir.types import VALUE, Opaque, Segment

__all__ = ["Size", "arriving", "crossing_sizes", "leaving"]

Size = int | tuple[int, ...]


def crossing_sizes(partition: Partition) -> dict[str, tuple[Size, Size]]:
    """Every size a stage reads of an earlier one, at the example's batch size and at one more."""
    made: dict[str, fx.Node] = {}
    for part in partition.parts:
        for piece in part.pieces:
            made |= _made(piece.segment)
    found: dict[str, tuple[Size, Size]] = {}
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
            found[name] = values
    return found


def _made(segment: Segment) -> dict[str, fx.Node]:
    """The nodes behind a segment's values, a coupling's streams left out."""
    if isinstance(segment, Opaque):
        (output,) = segment.graph.find_nodes(op="output")
        return dict(zip(segment.outputs, output.args[0], strict=True))
    if not segment.extras:
        return {}
    (output,) = segment.branch.find_nodes(op="output")
    return dict(zip(segment.extras, output.args[0][1:], strict=True))


def arriving(boundary: Boundary, sizes: Mapping[str, tuple[Size, Size]]) -> list[Segment]:
    """A segment that works out the sizes a stage reads."""
    names = boundary.sizes_read
    if not names:
        return []
    graph = fx.Graph()
    batch, inputs = _batch(graph, boundary, names[0])
    graph.output(tuple(graph.call_function(size_at, (*sizes[name], batch)) for name in names))
    return [Opaque("sizes", inputs, names, graph, "sizes of an earlier stage")]


def leaving(boundary: Boundary, sizes: Mapping[str, tuple[Size, Size]]) -> list[Segment]:
    """A segment that compares the sizes a stage makes with what later stages believe."""
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
    """A node that counts the samples beyond the example's batch size, and what it reads."""
    if boundary.gauge is None:
        raise InputError(
            f"to_pipeline_stages: no tensor that enters stage {boundary.part.index} tells the "
            f"batch size, which the size {size!r} is worked out from; cut elsewhere with another "
            "num_stages, or train with net.trainer(...)"
        )
    name, kind, dim = boundary.gauge
    tensor = graph.placeholder("gauge")
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
    """A size that does not grow evenly with the batch cannot be worked out at a later stage."""
    if value != expected:
        raise InputError(
            f"to_pipeline_stages: the size {name!r} is {value} here, but later stages work out "
            f"{expected} from the batch size, as if it grew evenly from the example's; compile "
            "with example inputs of the size of a micro-batch"
        )
