"""The inverse program of a reversible stage: `(key, *kept, *wanted) -> its input streams`.

Backward does the same on its way and differentiates besides; this is the inverse alone, to look
at and to test.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from revcompile.compiler.lower.backward import Backward
from revcompile.compiler.lower.emit import Emitter
from revcompile.compiler.lower.forward import shapes_of
from revcompile.compiler.lower.units import Group
from revcompile.ir import stage_ops
from revcompile.ir.program import Part, Partition
from revcompile.ir.types import Coupling
from revcompile.schedule import Keep

__all__ = ["inverse_graph"]


def inverse_graph(
    partition: Partition, part: Part, units: Sequence[Group], back: Backward
) -> fx.Graph | None:
    """Code that rebuilds a stage's input streams; None if the stage is not reversible."""
    if any(unit.keep is not Keep.NOTHING for unit in units):
        return None
    emitter = Emitter(partition)
    emitter.stores = False
    for name in (*back.kept, *back.wanted):
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
