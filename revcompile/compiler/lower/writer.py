"""Parts that write a stage's code, for the forward and backward programs.

units_of    the units of a stage: each is differentiated at once
StageUnits  the units of a stage, and the functions that compute them
Writer      statements that call the functions
"""

from __future__ import annotations

import itertools
import keyword
from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch
from torch import fx, nn

from revcompile.compiler.lower.code import GRADS, KEY, Program, Statement, Value, hints, listed
from revcompile.ir import coupling_ops
from revcompile.ir.module_tree import convolves, has_batch_norm, parameter_names
from revcompile.ir.program import GraphFunction, Part, Partition, Role, Unit, legal
from revcompile.ir.python_code import copied
from revcompile.ir.random_numbers import random_reads
from revcompile.ir.types import Coupling, Segment, TensorType
from revcompile.schedule import Keep

_SEEDS: Final = (
    "dropout etc.: seeded by micro-batch and place, so that backward draws what forward drew"
)
_GRID: Final = "grid: the unit of which a and b become multiples, so that sums are exact; or None"


def units_of(partition: Partition, part: Part, keep: Keep) -> tuple[Unit, ...]:
    """A stage's units.

    Under `Keep.NOTHING` every coupling is a unit, and so is each run of opaque pieces, which keeps
    its input (at the last stage, where backward follows forward at once, its graph):

        stem | block | block | transition, pooling | block
        INPUT  NOTHING NOTHING        INPUT          NOTHING

    Otherwise the whole stage is one unit.
    """
    if keep is not Keep.NOTHING:
        return (_unit(partition, part.pieces, keep),)
    is_last = part.index == len(partition.parts) - 1
    opaque = Keep.GRAPH if is_last else Keep.INPUT
    units: list[Unit] = []
    for reversible, run in itertools.groupby(part.pieces, lambda piece: piece.reversible):
        if reversible:
            units += [_unit(partition, (piece,), Keep.NOTHING) for piece in run]
        else:
            units.append(_unit(partition, tuple(run), opaque))
    return tuple(units)


def _unit(partition: Partition, pieces: tuple[Segment, ...], keep: Keep) -> Unit:
    root = partition.rewired.root
    graphs = [piece.graph for piece in pieces]
    parameters = dict.fromkeys(n for g in graphs for n in parameter_names(g, root))
    random = tuple(piece.name for piece in pieces if _draws(piece, root))
    is_frozen = not any(partition.requires_grad(name) for p in pieces for name in p.outputs)
    return Unit(pieces, keep, tuple(parameters), random, is_frozen)


def _draws(piece: Segment, root: nn.Module) -> bool:
    """Whether a piece may draw random numbers: in its graph, or signs of an averaged coupling."""
    if isinstance(piece, Coupling) and piece.averaged:
        return True
    return random_reads(piece.graph, root).may_ever_draw


def _prepared(graph: fx.Graph, root: nn.Module, casts: Mapping[int, torch.dtype]) -> fx.Graph:
    """The graph with inputs cast, and with batch norms called by `call_norm`."""
    prepared = copied(graph)
    placeholders = prepared.find_nodes(op="placeholder")
    for place, dtype in casts.items():
        with prepared.inserting_after(placeholders[-1]):
            cast = prepared.call_method("to", (placeholders[place], dtype))
        placeholders[place].replace_all_uses_with(cast, lambda user, cast=cast: user is not cast)
    for node in prepared.find_nodes(op="call_module"):
        target = str(node.target)
        if has_batch_norm(root.get_submodule(target)):
            with prepared.inserting_before(node):
                layer = prepared.create_node("get_attr", target, name=legal(f"{target}_layer"))
            node.op, node.target = "call_function", coupling_ops.call_norm
            node.args = (layer, *node.args)
    return prepared


class StageUnits:
    """The units of a stage, and the functions that compute them, each made once.

    No variable may have one of the `names`.
    """

    def __init__(self, partition: Partition, part: Part, keep: Keep) -> None:
        self.partition, self.part = partition, part
        self.units = units_of(partition, part, keep)
        self.random = {id(p) for unit in self.units for p in unit.pieces if p.name in unit.random}
        self.places = {id(piece): place for place, piece in enumerate(part.pieces)}
        self.runs: dict[int, Program] = {}
        """Programs that compute several pieces."""
        self.names = {*coupling_ops.HELPERS, "forward", "backward", "self", "torch", GRADS}
        self._hints = hints(partition)
        self._made: dict[tuple[int, str], GraphFunction] = {}

    @property
    def functions(self) -> tuple[GraphFunction, ...]:
        """The functions of graphs, in the order of the stage's pieces."""
        return tuple(sorted(self._made.values(), key=lambda f: self.places[id(f.segment)]))

    def name(self, wanted: str) -> str:
        """A name for a function that nothing else has."""
        name = legal(wanted)
        while name in self.names or keyword.iskeyword(name):
            name += "_"
        self.names.add(name)
        return name

    def of_piece(self, piece: Segment, role: Role = "run") -> GraphFunction:
        """A piece's function: F of a coupling, an opaque piece, a rearrangement or its inverse."""
        if (id(piece), role) not in self._made:
            name = self.name(piece.name if role == "run" else f"{piece.name}_{role}")
            made = GraphFunction(name, piece, role, *self._graph(piece, role))
            self._made[id(piece), role] = made
        return self._made[id(piece), role]

    def _graph(self, piece: Segment, role: Role) -> tuple[fx.Graph, tuple[str, ...]]:
        """What a function computes, and its arguments."""
        if role in ("arrange", "restore"):
            assert isinstance(piece, Coupling) and piece.rearrange is not None
            return piece.rearrange.inverse if role == "restore" else piece.rearrange.forward, ()
        inputs = ("x", *piece.sides) if isinstance(piece, Coupling) else piece.inputs
        arguments = tuple(legal(self._hints.get(given, given)) for given in inputs)
        root = self.partition.rewired.root
        return _prepared(piece.graph, root, self._casts(piece)), arguments

    def _casts(self, piece: Segment) -> dict[int, torch.dtype]:
        """The inputs to cast: streams are at least float32, but the model's code may need less."""
        if isinstance(piece, Coupling):
            streams = [piece.streams_in[0]]
        else:
            of_couplings = self.partition.stream_outputs
            streams = [name if name in of_couplings else "" for name in piece.inputs]
        dtypes = enumerate(map(self.partition.low_precision, streams))
        return {place: dtype for place, dtype in dtypes if dtype is not None}

    def function(self, unit: Unit) -> GraphFunction | Program:
        """A unit, which is differentiated at once, as one function of its inputs."""
        if is_piece(unit):
            return self.of_piece(unit.pieces[0])
        if id(unit) not in self.runs:
            whole = len(self.units) == 1
            name = f"stage_{self.part.index}" if whole else "_to_".join(unit.name.split(" .. "))
            writer = Writer(self, unit.inputs)
            for piece in unit.pieces:
                writer.compute(piece)
            self.runs[id(unit)] = writer.program(
                self.name(name),
                (*self.key(unit), *map(Value, unit.inputs)),
                listed(writer.values[name] for name in self.outputs(unit)),
                comment=unit.name,
            )
        return self.runs[id(unit)]

    def key(self, unit: Unit) -> tuple[Value, ...]:
        """`key`, if the unit's function has to seed random numbers itself."""
        return (KEY,) if unit.random and not is_piece(unit) else ()

    def outputs(self, unit: Unit) -> list[str]:
        """The outputs of the unit's function: the values that are read after it."""
        if is_piece(unit):
            return list(unit.pieces[0].outputs)
        later = self.units[self.units.index(unit) + 1 :]
        read = {*self.part.outputs, *(name for after in later for name in after.inputs)}
        return [name for name in unit.outputs if name in read]


def is_piece(unit: Unit) -> bool:
    """Whether a unit is a single opaque piece; the piece's function is then the unit's, too."""
    return len(unit.pieces) == 1 and not unit.reversible


class Writer:
    """Appends statements; `values` maps each live value to what holds it at this point."""

    def __init__(self, stage: StageUnits, inputs: Iterable[str] = ()) -> None:
        self.stage, self.partition = stage, stage.partition
        self.values = {name: Value(name) for name in inputs}
        self.statements: list[Statement] = []

    def assign(self, targets: Iterable[Value | None], *values: Any, **details: Any) -> None:
        """Append `targets = values`; `details` are further fields of the statement."""
        self.statements.append(Statement(tuple(targets), tuple(map(str, values)), **details))

    def program(
        self, name: str, arguments: Iterable[Value], result: str, **comments: str
    ) -> Program:
        """The statements so far, as a program."""
        return Program(name, tuple(arguments), tuple(self.statements), result, **comments)

    def called(self, function: GraphFunction | Program, names: Iterable[str], *first: Any) -> str:
        """A call of one of the stage's functions."""
        return f"{function.name}({listed(['self', *first, *(self.values[n] for n in names)])})"

    # -- pieces -------------------------------------------------------------------------------

    def reseed(self, piece: Segment) -> None:
        """Seed a piece by its place in the stage: all methods then draw the same numbers."""
        if id(piece) in self.stage.random:
            place = self.stage.places[id(piece)]
            self.assign((), f"reseed({KEY}, {place})", note=_SEEDS)

    def compute(self, piece: Segment) -> None:
        """Run a piece."""
        self.reseed(piece)
        function = self.stage.of_piece(piece)
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
            arrange = self.stage.of_piece(piece, "arrange")
            arranged = [Value(name, "arranged") for name in piece.streams_in]
            for stream, target in zip((a, b), arranged, strict=True):
                arranging = self.called(arrange, piece.rearrange.sides, stream)
                self.assign((target, shapes), arranging)
                shapes = None
            a, b = arranged
        sign = self.sign(piece, b)
        addend: Value | str = self.called(function, piece.sides, b)
        if piece.extras:
            called, addend = addend, Value(piece.name, "branch")
            self.assign((addend, *map(Value, piece.extras)), called)
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
