"""The forward and inverse programs of a stage.

    forward  (key, *inputs)             -> (outputs, kept)
    inverse  (key, *kept, *needs_back)  -> input streams

Backward rebuilds the input streams on its way; the inverse alone is for reading and for tests.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from revcompile.compiler.lower.emit import Emitter
from revcompile.ir import stage_ops
from revcompile.ir.program import Part, Partition, Unit
from revcompile.ir.types import Coupling
from revcompile.schedule import Keep

__all__ = ["forward_graph", "graph_of", "inverse_graph", "leaf_of", "shapes_of"]


def leaf_of(name: str, unit: int) -> str:
    """Key of an input of a unit that keeps its graph: each unit has a leaf of its own."""
    return f"{name} leaf {unit}"


def graph_of(name: str) -> str:
    """Key of an output of such a unit, with its autograd graph."""
    return f"{name} graph"


def shapes_of(name: str) -> str:
    """Key of the shapes that undo a coupling's `rearrange`."""
    return f"{name} shapes"


def forward_graph(
    partition: Partition, part: Part, units: Sequence[Unit], kept: Sequence[str]
) -> fx.Graph:
    """Computes a stage's outputs, and what its backward program was found to need (`kept`)."""
    emitter = Emitter(partition)
    for name in part.inputs:
        emitter.values[name] = emitter.placeholder(name)
    stored: dict[str, fx.Node] = {}
    for index, unit in enumerate(units):
        if unit.keep is Keep.GRAPH:
            stored |= _recorded(emitter, unit, index)
        else:
            shapes = emitter.compute(unit)
            stored |= {shapes_of(piece): node for piece, node in shapes.items()}
    values = {**emitter.values, **stored}
    return emitter.finish(
        tuple(emitter.values[name] for name in part.outputs), tuple(values[name] for name in kept)
    )


def _recorded(emitter: Emitter, unit: Unit, index: int) -> dict[str, fx.Node]:
    """Run a unit with autograd on, from new leaves to detached outputs."""
    stored, outside = {}, dict(emitter.values)
    emitter.record(True)
    for name in unit.inputs:
        if emitter.partition.requires_grad(name):
            stored[leaf_of(name, index)] = emitter.leaf(name, emitter.value(name))
            emitter.values[name] = stored[leaf_of(name, index)]
    emitter.compute(unit)
    emitter.record(False)
    for name in unit.outputs:
        if emitter.partition.requires_grad(name):
            stored[graph_of(name)] = emitter.value(name)
            emitter.values[name] = emitter.call(
                stage_ops.detached, emitter.value(name), name=f"{name}_out"
            )
    emitter.values |= {name: outside[name] for name in unit.inputs}
    return stored


def inverse_graph(
    partition: Partition, units: Sequence[Unit], arguments: Sequence[str]
) -> fx.Graph | None:
    """Rebuilds a stage's input streams from `arguments`; None if the stage is not reversible."""
    if any(unit.keep is not Keep.NOTHING for unit in units):
        return None
    emitter = Emitter(partition)
    emitter.stores = False
    for name in arguments:
        emitter.values[name] = emitter.placeholder(name)
    streams: Sequence[fx.Node] = ()
    for unit in reversed(units):
        (piece,) = unit.pieces
        segment = piece.segment
        assert isinstance(segment, Coupling) and piece.grid is not None
        b, y = map(emitter.value, segment.streams_out)
        emitter.reseed(unit, piece)
        addend, *_ = emitter.branch(piece, b, [emitter.value(side) for side in segment.sides])
        a = emitter.call(
            stage_ops.minus, y, addend, emitter.value(piece.grid), name=segment.streams_in[0]
        )
        streams = (a, b)
        if segment.rearrange is not None:
            shapes = emitter.value(shapes_of(piece.name))
            streams = [emitter.inline(segment.rearrange.inverse, [s, shapes]) for s in streams]
        emitter.values |= dict(zip(segment.streams_in, streams, strict=True))
    return emitter.finish(*streams)
