"""A stage's programs as a paper would write them: each branch a function F, called in a few lines.

    def layer1_0(self, x): ...
    def forward(self, a, b):
        a, b = b, plus(a, layer1_0(self, b), grid)
    def backward(self, a, b, grid, da, db):
        a, b, da, db = uncouple(layer1_0, self, a, b, da, db, grid, grads)

The programs that run are the same steps with F inlined (`compiler.lower`), which is what fusion
and the verifier need. The text here is complete: executed, it gives the same outputs, inputs and
gradients to the bit (`tests/inspect/test_source.py`). This file writes all but the backward program
(`source_backward`).
"""

from __future__ import annotations

from collections.abc import Sequence

from revcompile.inspect.function_text import Listing
from revcompile.inspect.program_text import Body, joined, value
from revcompile.ir import ops
from revcompile.ir.module_tree import convolves
from revcompile.ir.program import Part, Partition, Piece, StageProgram, Unit, legal
from revcompile.ir.types import Coupling
from revcompile.schedule import Keep

__all__ = ["SourceWriter", "call", "is_piece"]


class SourceWriter:
    """Functions of pieces and units, and the forward and inverse programs."""

    def __init__(self, partition: Partition, program: StageProgram) -> None:
        self.partition, self.program = partition, program
        self.part: Part = partition.parts[program.index]
        self.places = {id(piece): place for place, piece in enumerate(self.part.pieces)}
        self.listing = Listing(partition.rewired.root, ["forward", "inverse", "backward"])
        self.hints = _hints(partition)
        self.draws = [name for unit in program.units for name in unit.random]
        self.key = ["key"] if self.draws else []
        self._named: dict[tuple[int, str], str] = {}
        for unit in program.units:  # printed first, in the order in which they run
            for piece in unit.pieces:
                self.function(piece)

    # -- functions ----------------------------------------------------------------------------

    def function(self, piece: Piece, *, again: bool = False) -> str:
        """F of a coupling, or an opaque piece; `again`: without the buffers it writes."""
        again = again and stores(piece)
        role = "again" if again else ""
        if (id(piece), role) in self._named:
            return self._named[id(piece), role]
        segment, partition = piece.segment, self.partition
        if isinstance(segment, Coupling):
            dtype = partition.low_precision(segment.streams_in[0])
            casts = {} if dtype is None else {0: dtype}
            arguments = ["x", *map(legal, segment.sides)]
            comment = f"F of {segment.name}, {self._class(piece) or segment.kind.value}"
        else:
            arguments = [legal(self.hints.get(name, name)) for name in segment.inputs]
            streams = partition.stream_outputs
            dtypes = (partition.low_precision(n) if n in streams else None for n in segment.inputs)
            casts = {place: dtype for place, dtype in enumerate(dtypes) if dtype is not None}
            comment = self._class(piece) or f"not reversible: {segment.reason}"
        if again:
            comment += ", run again"
        called = self.listing.add_graph(
            piece.name + ("_again" if again else ""),
            segment.graph,
            comment,
            casts,
            arguments=arguments,
            stores=not again,
        )
        self._named[id(piece), role] = called
        return called

    def _class(self, piece: Piece) -> str:
        """The class of the module that a piece is named after, if it runs only that module."""
        called = piece.segment.graph.find_nodes(op="call_module")
        inside = all(f"{node.target}.".startswith(f"{piece.name}.") for node in called)
        modules = dict(self.listing.root.named_modules())
        return type(modules[piece.name]).__name__ if inside and piece.name in modules else ""

    def arrangement(self, piece: Piece, *, back: bool) -> str:
        """The function that rearranges a stream for a coupling, or the one that undoes it."""
        role = "restore" if back else "arrange"
        if (id(piece), role) not in self._named:
            assert isinstance(piece.segment, Coupling) and piece.segment.rearrange is not None
            rearrange = piece.segment.rearrange
            self._named[id(piece), role] = self.listing.add_graph(
                f"{piece.name}_{role}",
                rearrange.inverse if back else rearrange.forward,
                f"a stream {'back from' if back else 'in'} the arrangement of {piece.name}",
            )
        return self._named[id(piece), role]

    def unit_function(self, unit: Unit, *, again: bool = False) -> str:
        """A unit that is differentiated at once as one function of its inputs."""
        if is_piece(unit):
            return self.function(unit.pieces[0], again=again)
        writes = any(map(stores, unit.pieces))
        role = "unit again" if again and writes else "unit"
        if (id(unit), role) not in self._named:
            whole = len(self.program.units) == 1
            name = f"stage_{self.part.index}" if whole else "_to_".join(unit.name.split(" .. "))
            called = self.listing.name(name + ("_again" if role != "unit" else ""))
            body = Body([*self.unit_key(unit), *unit.inputs], self.hints)
            values = {name: value(name) for name in unit.inputs}
            for piece in unit.pieces:
                self.compute(body, piece, values, again=again)
            result = joined((values[name] for name in self.unit_outputs(unit)), brackets=False)
            text, _ = body.text(called, result, self.listing.taken, unit.name)
            self.listing.functions.append(text)
            self._named[id(unit), role] = called
        return self._named[id(unit), role]

    def unit_key(self, unit: Unit) -> list[str]:
        """`key`, if the unit's function has to seed random numbers itself."""
        return ["key"] if unit.random and not is_piece(unit) else []

    def unit_outputs(self, unit: Unit) -> list[str]:
        """What the unit's function returns."""
        if is_piece(unit):
            return list(unit.pieces[0].segment.outputs)
        later = self.program.units[self.program.units.index(unit) + 1 :]
        read = {name for after in later for name in after.inputs}
        read |= {*self.part.outputs, *self.program.kept}
        read |= {name.removesuffix(" graph") for name in self.program.kept}
        return [name for name in unit.outputs if name in read]

    # -- pieces -------------------------------------------------------------------------------

    def reseed(self, body: Body, piece: Piece) -> None:
        """Seed the random numbers of a piece that may draw some."""
        if piece.name in self.draws:
            place = self.places[id(piece)]
            body.assign([], f"{self.listing.use('reseed')}({value('key')}, {place})")

    def compute(
        self, body: Body, piece: Piece, values: dict[str, str], *, again: bool = False
    ) -> None:
        """Run a piece; `values` maps live values to how texts refer to them."""
        self.reseed(body, piece)
        segment, called = piece.segment, self.function(piece, again=again)
        if isinstance(segment, Coupling):
            self._couple(body, piece, segment, called, values)
        else:
            inputs = [values[name] for name in segment.inputs]
            body.assign(segment.outputs, call(called, inputs))
        values |= {name: value(name) for name in piece.outputs}

    def _couple(
        self, body: Body, piece: Piece, segment: Coupling, called: str, values: dict[str, str]
    ) -> None:
        assert piece.grid is not None
        a, b = (values[name] for name in segment.streams_in)
        if piece.opens:
            a, b = self._enter(body, piece, segment, a, b)
            values[piece.grid] = value(piece.grid)
        if segment.rearrange is not None:
            arrange = self.arrangement(piece, back=False)
            sides = [values[name] for name in segment.rearrange.sides]
            names = [f"arranged {name}" for name in segment.streams_in]
            body.assign([names[0], f"{piece.name} shapes"], call(arrange, [a, *sides]))
            body.assign([names[1], "_"], call(arrange, [b, *sides]))
            a, b = map(value, names)
        branch = call(called, [b, *(values[name] for name in segment.sides)])
        if segment.extras:
            body.assign([f"F of {piece.name}", *segment.extras], branch)
            branch = value(f"F of {piece.name}")
        y = f"{self.listing.use('plus')}({a}, {branch}, {values[piece.grid]})"
        body.assign(segment.streams_out, b, y, comment=piece.name, effects=False)

    def _enter(
        self, body: Body, piece: Piece, segment: Coupling, a: str, b: str
    ) -> tuple[str, str]:
        cast = self.partition.low_precision(segment.streams_in[0])
        if cast is not None:
            self.listing.imports["torch"] = ("", "torch")
        settings = f"cast={cast}, convolves={convolves(segment.branch, self.listing.root)}"
        first, second = (f"entered {name}" for name in segment.streams_in)
        entered = f"{self.listing.use('enter_chain')}({a}, {b}, {settings})"
        body.assign([first, second, str(piece.grid)], entered)
        return value(first), value(second)

    # -- programs -----------------------------------------------------------------------------

    def forward(self) -> dict[str, str]:
        """Print the forward program; returns the variables of its inputs and outputs."""
        program, part = self.program, self.part
        body = Body([*self.key, *part.inputs], self.hints)
        values = {name: value(name) for name in part.inputs}
        for index, unit in enumerate(program.units):
            if unit.keep is Keep.GRAPH:
                self._record(body, unit, index, values)
            elif unit.keep is Keep.INPUT and not is_piece(unit):
                inputs = [*map(value, self.unit_key(unit)), *(values[n] for n in unit.inputs)]
                outputs = self.unit_outputs(unit)
                body.assign(outputs, call(self.unit_function(unit), inputs))
                values |= {name: value(name) for name in outputs}
            else:
                self.compute(body, unit.pieces[0], values)
        sent = joined(values[name] for name in part.outputs)
        kept = joined(values.get(name, value(name)) for name in program.kept)
        result = f"{sent}, {kept}  # outputs, kept for backward"
        text, variables = body.text("forward", result, self.listing.taken)
        self.listing.functions.append(text)
        return {name: variables[name] for name in (*part.inputs, *part.outputs)}

    def _record(self, body: Body, unit: Unit, index: int, values: dict[str, str]) -> None:
        """Run a unit with autograd on; its leaves and the ends of its graph are kept."""
        inputs = [*map(value, self.unit_key(unit))]
        for name in unit.inputs:
            if self.partition.requires_grad(name):
                kept = f"{name} leaf {index}"
                body.hints[kept] = f"{self.hints.get(name, name)}_leaf"
                body.assign([kept], f"{self.listing.use('leaf')}({values[name]})")
                inputs.append(value(kept))
            else:
                inputs.append(values[name])
        if is_piece(unit):
            self.reseed(body, unit.pieces[0])
        outputs = self.unit_outputs(unit)
        recorded = [name for name in outputs if self.partition.requires_grad(name)]
        ends = [f"{name} graph" if name in recorded else name for name in outputs]
        function = f"{self.unit_function(unit)}, self"
        body.assign(ends, call(self.listing.use("record"), inputs, first=function))
        for name in recorded:
            detached = f"{self.listing.use('detached')}({value(f'{name} graph')})"
            body.assign([name], detached, effects=False)
        values |= {name: value(name) for name in outputs}

    def inverse(self) -> None:
        """Print the inverse program."""
        arguments = [*self.program.kept, *self.program.needs_back]
        body = Body([*self.key, *arguments], self.hints)
        streams: Sequence[str] = ()
        for unit in reversed(self.program.units):
            piece = unit.pieces[0]
            segment = piece.segment
            assert isinstance(segment, Coupling) and piece.grid is not None
            self.reseed(body, piece)
            b, y = map(value, segment.streams_out)
            branch = call(self.function(piece, again=True), [b, *map(value, segment.sides)])
            branch += "[0]" if segment.extras else ""
            a = f"{self.listing.use('minus')}({y}, {branch}, {value(piece.grid)})"
            streams = segment.streams_in
            if segment.rearrange is None:
                body.assign(streams, a, b, comment=piece.name, effects=False)
            else:
                names = [f"arranged {name}" for name in streams]
                body.assign(names, a, b, comment=piece.name, effects=False)
                restore, shapes = self.arrangement(piece, back=True), value(f"{piece.name} shapes")
                restored = (call(restore, [value(name), shapes]) for name in names)
                body.assign(streams, *restored, effects=False)
        text, _ = body.text("inverse", joined(map(value, streams)), self.listing.taken)
        self.listing.functions.append(text)


def call(function: str, arguments: Sequence[str], first: str = "self") -> str:
    """A call of a printed function, which gets the model first."""
    return f"{function}({', '.join([first, *arguments])})"


def stores(piece: Piece) -> bool:
    """Does a piece write buffers? Backward, which computes it again, must not."""
    return bool(piece.segment.graph.find_nodes(op="call_function", target=ops.store_buffer))


def is_piece(unit: Unit) -> bool:
    """Is a unit a single opaque piece, whose function serves for both?"""
    return len(unit.pieces) == 1 and not unit.reversible


def _hints(partition: Partition) -> dict[str, str]:
    """Variables: `a` and `b` for streams, `grid` for grids; others have their value's name."""
    hints: dict[str, str] = {}
    for part in partition.parts:
        for piece in part.pieces:
            if isinstance(piece.segment, Coupling):
                streams = (piece.segment.streams_in, piece.segment.streams_out)
                for hint, names in zip("ab", zip(*streams, strict=True), strict=True):
                    for name in names:
                        hints |= dict.fromkeys((name, f"entered {name}", f"arranged {name}"), hint)
                hints[f"{piece.name} shapes"] = "shapes"
                hints[f"F of {piece.name}"] = "f"
            if piece.grid is not None:
                hints[piece.grid] = "grid"
    return hints
