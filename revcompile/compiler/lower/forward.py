"""The forward program of a stage: `(key, *inputs) -> (outputs, kept)`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from revcompile.compiler.lower.emit import Emitter
from revcompile.compiler.lower.units import Group
from revcompile.ir import stage_ops
from revcompile.ir.program import Part, Partition
from revcompile.schedule import Keep

__all__ = ["forward_graph", "graph_of", "leaf_of", "shapes_of"]


def leaf_of(name: str, unit: int) -> str:
    """What an input of a recorded unit is kept under: each reader has a leaf of its own."""
    return f"{name} leaf {unit}"


def graph_of(name: str) -> str:
    """What an output of a recorded unit, with its graph, is kept under."""
    return f"{name} graph"


def shapes_of(name: str) -> str:
    """What the shapes of a coupling's rearrange are kept under."""
    return f"{name} shapes"


def forward_graph(
    partition: Partition, part: Part, units: Sequence[Group], kept: Sequence[str]
) -> fx.Graph:
    """Code that computes a stage's outputs and all that is to be kept."""
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


def _recorded(emitter: Emitter, unit: Group, index: int) -> dict[str, fx.Node]:
    """A unit run with autograd on, cut off from the others at both ends."""
    stored, outside = {}, dict(emitter.values)
    emitter.record(True)
    for name in unit.inputs:
        if emitter.graded(name):
            stored[leaf_of(name, index)] = emitter.leaf(name, emitter.value(name))
            emitter.values[name] = stored[leaf_of(name, index)]
    emitter.compute(unit)
    emitter.record(False)
    for name in unit.outputs:
        if emitter.graded(name):
            stored[graph_of(name)] = emitter.value(name)
            emitter.values[name] = emitter.call(
                stage_ops.detached, emitter.value(name), name=f"{name}_out"
            )
    emitter.values |= {name: outside[name] for name in unit.inputs}
    return stored
