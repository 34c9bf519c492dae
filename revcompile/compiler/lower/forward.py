"""The forward and inverse programs of a stage.

    forward  (key, *inputs)             -> (outputs, kept)
    inverse  (key, *needs_back, *kept)  -> input streams

Backward rebuilds the input streams on its way; the inverse alone is for reading and for tests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from revcompile.compiler.lower.code import KEY, Program, Value, listed, tupled
from revcompile.compiler.lower.writer import StageUnits, Writer, is_piece
from revcompile.ir.program import Unit
from revcompile.ir.types import Coupling
from revcompile.schedule import Keep


def forward_program(stage: StageUnits, kept: Iterable[Value]) -> Program:
    """Computes a stage's outputs, and what its backward program was found to need (`kept`)."""
    writer = Writer(stage, stage.part.inputs)
    for index, unit in enumerate(stage.units):
        if unit.keep is Keep.GRAPH:
            _record(writer, unit, index)
        elif unit.keep is Keep.INPUT and not is_piece(unit):
            outputs = stage.outputs(unit)
            called = writer.called(stage.function(unit), unit.inputs, *stage.key(unit))
            writer.assign(map(Value, outputs), called)
            writer.values |= {name: Value(name) for name in outputs}
        else:
            writer.compute(unit.pieces[0])
    sent = tupled(writer.values[name] for name in stage.part.outputs)
    stored = tupled(writer.values[v.name] if v.role == "kept" else v for v in kept)
    arguments = (KEY, *map(Value, stage.part.inputs))
    comment = "outputs, kept for backward"
    return writer.program("forward", arguments, f"{sent}, {stored}", result_comment=comment)


def _record(writer: Writer, unit: Unit, index: int) -> None:
    """Run a unit with autograd on, from new leaves to detached outputs."""
    stage = writer.stage
    inputs: list[Value | str] = [stage.function(unit).name, "self", *stage.key(unit)]
    for name in unit.inputs:
        value = writer.values[name]
        if writer.partition.requires_grad(name):
            value = Value(name, "leaf", index)
            writer.assign((value,), f"leaf({writer.values[name]})")
        inputs.append(value)
    if is_piece(unit):
        writer.reseed(unit.pieces[0])
    outputs = stage.outputs(unit)
    recorded = [name for name in outputs if writer.partition.requires_grad(name)]
    ends = [Value(name, "graph") if name in recorded else Value(name) for name in outputs]
    writer.assign(ends, f"record({listed(inputs)})")
    for name in recorded:
        writer.assign((Value(name),), f"detached({Value(name, 'graph')})")
    writer.values |= {name: Value(name) for name in outputs}


def inverse_program(stage: StageUnits, given: Sequence[Value]) -> Program | None:
    """Rebuilds a stage's input streams; None if the stage does not, or not as a whole."""
    if any(unit.keep is not Keep.NOTHING or unit.is_frozen for unit in stage.units):
        return None
    writer = Writer(stage)
    writer.values = {value.key: value for value in given}
    streams: tuple[Value, ...] = ()
    for unit in reversed(stage.units):
        (piece,) = unit.pieces
        assert isinstance(piece, Coupling) and piece.grid is not None
        writer.reseed(piece)
        b, y = (writer.values[name] for name in piece.streams_out)
        function = stage.of_piece(piece, "again")
        sign = writer.sign(piece, b)
        addend = writer.branch(piece, b, function, [None] * len(piece.extras))
        grid, lost = writer.values[piece.grid], Value(piece.name, "lost")
        a = f"minus({y}, {addend}, {grid})"
        if sign is not None:
            a = f"uncouple_average({y}, {b}, {addend}, {sign}, {grid}, {lost})"
        streams = tuple(map(Value, piece.streams_in))
        if piece.rearrange is None:
            writer.assign(streams, a, b, comment=piece.name)
        else:
            arranged = [Value(name, "arranged") for name in piece.streams_in]
            writer.assign(arranged, a, b, comment=piece.name)
            shapes = Value(piece.name, "shapes")
            restore = stage.of_piece(piece, "restore")
            writer.assign(streams, *(f"{restore.name}(self, {one}, {shapes})" for one in arranged))
        writer.values |= dict(zip(piece.streams_in, streams, strict=True))
    return writer.program("inverse", (KEY, *given), listed(streams))
