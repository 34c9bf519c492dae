"""The forward program of a stage: `(key, *inputs) -> (outputs, kept)`."""

from __future__ import annotations

from collections.abc import Iterable

from revcompile.compiler.lower.code import KEY, Program, Value, listed, tupled
from revcompile.compiler.lower.writer import StageUnits, Writer, is_piece
from revcompile.ir.program import Unit
from revcompile.schedule import Keep


def forward_program(stage: StageUnits, kept: Iterable[Value]) -> Program:
    """Compute a stage's outputs, and the values that its backward program needs (`kept`)."""
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
