"""Writing a stage's code, as the forward, inverse and backward programs do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from revcompile.compiler.lower.functions import Functions, writes_buffers
from revcompile.ir import coupling_ops
from revcompile.ir.module_tree import convolves
from revcompile.ir.program import Part, Partition, Unit
from revcompile.ir.stage_code import KEY, SELF, Call, Function, Program, Statement, Value, call
from revcompile.ir.types import Coupling, Segment, TensorType


class StageUnits:
    """The units of a stage, and the functions that compute them."""

    def __init__(self, partition: Partition, part: Part, units: Sequence[Unit]) -> None:
        self.partition, self.part, self.units = partition, part, units
        self.functions = Functions(partition)
        self.places = {id(piece): place for place, piece in enumerate(part.pieces)}
        self.random = {id(p) for unit in units for p in unit.pieces if p.name in unit.random}
        self._made: dict[tuple[int, bool], Program] = {}

    def function(self, unit: Unit, *, again: bool = False) -> Function:
        """A unit that is differentiated at once as one function of its inputs."""
        if is_piece(unit):
            return self.functions.of_piece(unit.pieces[0], again=again)
        again = again and any(map(writes_buffers, unit.pieces))
        if (id(unit), again) not in self._made:
            whole = len(self.units) == 1
            name = f"stage_{self.part.index}" if whole else "_to_".join(unit.name.split(" .. "))
            writer = Writer(self, unit.inputs)
            for piece in unit.pieces:
                writer.compute(piece, again=again)
            self._made[id(unit), again] = writer.program(
                f"{name}_again" if again else name,
                (*self.key(unit), *map(Value, unit.inputs)),
                tuple(writer.values[name] for name in self.outputs(unit)),
                comment=unit.name,
            )
        return self._made[id(unit), again]

    def key(self, unit: Unit) -> tuple[Value, ...]:
        """`key`, if the unit's function has to seed random numbers itself."""
        return (KEY,) if unit.random and not is_piece(unit) else ()

    def outputs(self, unit: Unit) -> list[str]:
        """What the unit's function returns: what is read after it."""
        if is_piece(unit):
            return list(unit.pieces[0].outputs)
        later = self.units[self.units.index(unit) + 1 :]
        read = {*self.part.outputs, *(name for after in later for name in after.inputs)}
        return [name for name in unit.outputs if name in read]


def is_piece(unit: Unit) -> bool:
    """Is a unit a single opaque piece, whose function serves for both?"""
    return len(unit.pieces) == 1 and not unit.reversible


class Writer:
    """Appends statements; `values` maps each live value to what holds it at this point."""

    def __init__(self, stage: StageUnits, inputs: Iterable[str] = ()) -> None:
        self.stage, self.partition = stage, stage.partition
        self.functions = stage.functions
        self.values = {name: Value(name) for name in inputs}
        self.statements: list[Statement] = []

    def assign(
        self,
        targets: Iterable[Value | None],
        *values: Any,
        unpacks: bool = False,
        comment: str = "",
    ) -> None:
        self.statements.append(Statement(tuple(targets), values, unpacks, comment))

    def program(
        self, name: str, arguments: Iterable[Value], result: tuple[Any, ...], **comments: str
    ) -> Program:
        """What was written, as a program."""
        return Program(name, tuple(arguments), tuple(self.statements), result, **comments)

    # -- pieces -------------------------------------------------------------------------------

    def reseed(self, piece: Segment) -> None:
        """Seed a piece by its place in the stage, so that all methods draw the same numbers."""
        if id(piece) in self.stage.random:
            self.assign((), call(coupling_ops.reseed, KEY, self.stage.places[id(piece)]))

    def compute(self, piece: Segment, *, again: bool = False) -> None:
        """Run a piece; `again`: in backward, where buffers are not written."""
        self.reseed(piece)
        function = self.functions.of_piece(piece, again=again)
        if isinstance(piece, Coupling):
            self._couple(piece, function)
        else:
            inputs = [self.values[name] for name in piece.inputs]
            self.assign(map(Value, piece.outputs), call(function, *inputs))
        self.values |= {name: Value(name) for name in piece.outputs}

    def _couple(self, piece: Coupling, function: Function) -> None:
        """`(a, b) -> (b, a + F(b))`."""
        assert piece.grid is not None
        a, b = (self.values[name] for name in piece.streams_in)
        if piece.opens:
            cast = self.partition.low_precision(piece.streams_in[0])
            is_conv = convolves(piece.branch, self.partition.rewired.root)
            entered = call(coupling_ops.enter_chain, a, b, cast=cast, convolves=is_conv)
            if piece.averaged:
                entered = call(coupling_ops.enter_average, SELF, a, b)
            a, b = (Value(name, "entered") for name in piece.streams_in)
            self.values[piece.grid] = Value(piece.grid)
            self.assign((a, b, Value(piece.grid)), entered)
        if piece.rearrange is not None:
            sides = [self.values[name] for name in piece.rearrange.sides]
            shapes: Value | None = Value(piece.name, "shapes")
            arrange = self.functions.rearrangement(piece, back=False)
            arranged = [Value(name, "arranged") for name in piece.streams_in]
            for stream, target in zip((a, b), arranged, strict=True):
                self.assign((target, shapes), call(arrange, stream, *sides))
                shapes = None
            a, b = arranged
        sign = self.sign(piece, b)
        addend = self.branch(piece, b, function, [Value(name) for name in piece.extras])
        before, after = map(Value, piece.streams_out)
        grid = self.values[piece.grid]
        if sign is None:
            y = call(coupling_ops.plus, a, addend, grid)
            self.assign((before, after), b, y, comment=piece.name)
        else:
            y = call(coupling_ops.couple_average, a, b, addend, sign, grid)
            self.assign((after, Value(piece.name, "lost")), y, comment=piece.name)
            self.assign((before,), b)

    def sign(self, piece: Coupling, b: Value) -> Value | None:
        """Draw the signs of an averaged coupling, before its branch draws anything."""
        if not piece.averaged:
            return None
        kind = self.partition.types.get(piece.streams_out[1])
        dim = kind.batch_dim if isinstance(kind, TensorType) else None
        sign = Value(piece.name, "sign")
        self.assign((sign,), call(coupling_ops.draw_sign, SELF, b, dim))
        return sign

    def branch(
        self, piece: Coupling, b: Value, function: Function, extras: Sequence[Value | None]
    ) -> Call | Value:
        """F(b); where it has more results, they are assigned to `extras`."""
        called = call(function, b, *(self.values[name] for name in piece.sides))
        if not extras:
            return called
        addend = Value(piece.name, "branch")
        self.assign((addend, *extras), called)
        return addend
