"""The forward and inverse programs of a stage.

    forward  (key, *inputs)             -> (outputs, kept)
    inverse  (key, *kept, *needs_back)  -> input streams

Backward rebuilds the input streams on its way; the inverse alone is for reading and for tests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from revcompile.compiler.lower.writer import StageUnits, Writer, is_piece
from revcompile.ir import coupling_ops
from revcompile.ir.program import Unit
from revcompile.ir.stage_code import KEY, SELF, Program, Value, call
from revcompile.ir.types import Coupling
from revcompile.schedule import Keep


def forward_program(stage: StageUnits, kept: Iterable[Value]) -> Program:
    """Computes a stage's outputs, and what its backward program was found to need (`kept`)."""
    writer = Writer(stage, stage.part.inputs)
    for index, unit in enumerate(stage.units):
        if unit.keep is Keep.GRAPH:
            _record(writer, unit, index)
        elif unit.keep is Keep.INPUT and not is_piece(unit):
            inputs = [*stage.key(unit), *(writer.values[name] for name in unit.inputs)]
            outputs = stage.outputs(unit)
            writer.assign(map(Value, outputs), call(stage.function(unit), *inputs))
            writer.values |= {name: Value(name) for name in outputs}
        else:
            writer.compute(unit.pieces[0])
    sent = tuple(writer.values[name] for name in stage.part.outputs)
    stored = tuple(writer.values[v.name] if v.role == "kept" else v for v in kept)
    arguments = (KEY, *map(Value, stage.part.inputs))
    comment = "outputs, kept for backward"
    return writer.program("forward", arguments, (sent, stored), result_comment=comment)


def _record(writer: Writer, unit: Unit, index: int) -> None:
    """Run a unit with autograd on, from new leaves to detached outputs."""
    stage = writer.stage
    inputs = [*stage.key(unit)]
    for name in unit.inputs:
        value = writer.values[name]
        if writer.partition.requires_grad(name):
            value = Value(name, "leaf", index)
            writer.assign((value,), call(coupling_ops.leaf, writer.values[name]))
        inputs.append(value)
    if is_piece(unit):
        writer.reseed(unit.pieces[0])
    outputs = stage.outputs(unit)
    recorded = [name for name in outputs if writer.partition.requires_grad(name)]
    ends = [Value(name, "graph") if name in recorded else Value(name) for name in outputs]
    writer.assign(ends, call(coupling_ops.record, stage.function(unit), SELF, *inputs))
    for name in recorded:
        writer.assign((Value(name),), call(coupling_ops.detached, Value(name, "graph")))
    writer.values |= {name: Value(name) for name in outputs}


def inverse_program(
    stage: StageUnits, kept: Sequence[Value], needs_back: Sequence[Value]
) -> Program | None:
    """Rebuilds a stage's input streams; None if the stage does not, or not as a whole."""
    if any(unit.keep is not Keep.NOTHING or unit.is_frozen for unit in stage.units):
        return None
    writer = Writer(stage)
    writer.values = {value.key: value for value in (*kept, *needs_back)}
    streams: tuple[Value, ...] = ()
    for unit in reversed(stage.units):
        (piece,) = unit.pieces
        assert isinstance(piece, Coupling) and piece.grid is not None
        writer.reseed(piece)
        b, y = (writer.values[name] for name in piece.streams_out)
        function = writer.functions.of_piece(piece, again=True)
        sign = writer.sign(piece, b)
        addend = writer.branch(piece, b, function, [None] * len(piece.extras))
        a = call(coupling_ops.minus, y, addend, writer.values[piece.grid])
        if sign is not None:
            given = y, b, addend, sign, writer.values[piece.grid], Value(piece.name, "lost")
            a = call(coupling_ops.uncouple_average, *given)
        streams = tuple(map(Value, piece.streams_in))
        if piece.rearrange is None:
            writer.assign(streams, a, b, comment=piece.name)
        else:
            arranged = [Value(name, "arranged") for name in piece.streams_in]
            writer.assign(arranged, a, b, comment=piece.name)
            shapes = Value(piece.name, "shapes")
            restore = writer.functions.rearrangement(piece, back=True)
            writer.assign(streams, *(call(restore, value, shapes) for value in arranged))
        writer.values |= dict(zip(piece.streams_in, streams, strict=True))
    return writer.program("inverse", (KEY, *kept, *needs_back), streams)
