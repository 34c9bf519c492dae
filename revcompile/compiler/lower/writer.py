"""Writing a stage's code, as the forward, inverse and backward programs do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from revcompile.compiler.lower.code import KEY, Program, Statement, Value, listed
from revcompile.compiler.lower.functions import Functions, writes_buffers
from revcompile.ir.module_tree import convolves
from revcompile.ir.program import GraphFunction, Part, Partition, Unit
from revcompile.ir.types import Coupling, Segment, TensorType

_SEEDS: Final = (
    "dropout etc.: seeded by micro-batch and place, so that backward draws what forward drew"
)
_GRID: Final = "grid: the unit of which a and b become multiples, so that sums are exact; or None"


class StageUnits:
    """The units of a stage, and the functions that compute them."""

    def __init__(self, partition: Partition, part: Part, units: Sequence[Unit]) -> None:
        self.partition, self.part, self.units = partition, part, units
        self.functions = Functions(partition, part)
        self.random = {id(p) for unit in units for p in unit.pieces if p.name in unit.random}
        self.runs: dict[tuple[int, bool], Program] = {}
        """Programs that compute several pieces."""

    def function(self, unit: Unit, *, again: bool = False) -> GraphFunction | Program:
        """A unit that is differentiated at once as one function of its inputs."""
        if is_piece(unit):
            return self.functions.of_piece(unit.pieces[0], again=again)
        again = again and any(map(writes_buffers, unit.pieces))
        if (id(unit), again) not in self.runs:
            whole = len(self.units) == 1
            name = f"stage_{self.part.index}" if whole else "_to_".join(unit.name.split(" .. "))
            writer = Writer(self, unit.inputs)
            for piece in unit.pieces:
                writer.compute(piece, again=again)
            self.runs[id(unit), again] = writer.program(
                self.functions.name(f"{name}_again" if again else name),
                (*self.key(unit), *map(Value, unit.inputs)),
                listed(writer.values[name] for name in self.outputs(unit)),
                comment=unit.name,
            )
        return self.runs[id(unit), again]

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
        note: str = "",
        parameters: tuple[str, ...] = (),
    ) -> None:
        texts = tuple(map(str, values))
        self.statements.append(Statement(tuple(targets), texts, unpacks, comment, note, parameters))

    def program(
        self, name: str, arguments: Iterable[Value], result: str, **comments: str
    ) -> Program:
        """What was written, as a program."""
        return Program(name, tuple(arguments), tuple(self.statements), result, **comments)

    def called(self, function: GraphFunction | Program, names: Iterable[str], *first: Any) -> str:
        """A call of one of the stage's functions."""
        return f"{function.name}({listed(['self', *first, *(self.values[n] for n in names)])})"

    # -- pieces -------------------------------------------------------------------------------

    def reseed(self, piece: Segment) -> None:
        """Seed a piece by its place in the stage, so that all methods draw the same numbers."""
        if id(piece) in self.stage.random:
            place = self.functions.places[id(piece)]
            self.assign((), f"reseed({KEY}, {place})", note=_SEEDS)

    def compute(self, piece: Segment, *, again: bool = False) -> None:
        """Run a piece; `again`: in backward, where buffers are not written."""
        self.reseed(piece)
        function = self.functions.of_piece(piece, again=again)
        if isinstance(piece, Coupling):
            self._couple(piece, function)
        else:
            self.assign(map(Value, piece.outputs), self.called(function, piece.inputs))
        self.values |= {name: Value(name) for name in piece.outputs}

    def _couple(self, piece: Coupling, function: GraphFunction) -> None:
        """`(a, b) -> (b, a + F(b))`."""
        assert piece.grid is not None
        a, b = (self.values[name] for name in piece.streams_in)
        if piece.opens:
            cast = self.partition.low_precision(piece.streams_in[0])
            is_conv = convolves(piece.branch, self.partition.rewired.root)
            entered = f"enter_chain({a}, {b}, cast={cast}, convolves={is_conv})"
            if piece.averaged:
                entered = f"enter_average(self.training, {a}, {b})"
            a, b = (Value(name, "entered") for name in piece.streams_in)
            self.values[piece.grid] = Value(piece.grid)
            self.assign((a, b, Value(piece.grid)), entered, note=_GRID)
        if piece.rearrange is not None:
            shapes: Value | None = Value(piece.name, "shapes")
            arrange = self.functions.rearrangement(piece, back=False)
            arranged = [Value(name, "arranged") for name in piece.streams_in]
            for stream, target in zip((a, b), arranged, strict=True):
                arranging = self.called(arrange, piece.rearrange.sides, stream)
                self.assign((target, shapes), arranging)
                shapes = None
            a, b = arranged
        sign = self.sign(piece, b)
        addend = self.branch(piece, b, function, [Value(name) for name in piece.extras])
        before, after = map(Value, piece.streams_out)
        grid = self.values[piece.grid]
        if sign is None:
            self.assign((before, after), b, f"plus({a}, {addend}, {grid})", comment=piece.name)
        else:
            y = f"couple_average({a}, {b}, {addend}, {sign}, {grid})"
            self.assign((after, Value(piece.name, "lost")), y, comment=piece.name)
            self.assign((before,), b)

    def sign(self, piece: Coupling, b: Value) -> Value | None:
        """Draw the signs of an averaged coupling, before its branch draws anything."""
        if not piece.averaged:
            return None
        kind = self.partition.types.get(piece.streams_out[1])
        dim = kind.batch_dim if isinstance(kind, TensorType) else None
        sign = Value(piece.name, "sign")
        self.assign((sign,), f"draw_sign(self.training, {b}, {dim})")
        return sign

    def branch(
        self, piece: Coupling, b: Value, function: GraphFunction, extras: Sequence[Value | None]
    ) -> Value | str:
        """F(b); where it has more results, they are assigned to `extras`."""
        called = self.called(function, piece.sides, b)
        if not extras:
            return called
        addend = Value(piece.name, "branch")
        self.assign((addend, *extras), called)
        return addend
