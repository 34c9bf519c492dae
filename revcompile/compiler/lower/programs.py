"""The two programs of a stage.

    forward    (key, *inputs) -> (outputs, kept)
    backward   PETRA's Eq. 4 and 5, unit by unit from the last to the first

    Keep.NOTHING   a coupling: rebuild `a = y - F(b)` with autograd on, then VJP through that graph
    Keep.INPUT     run the unit again from its kept input with autograd on, then VJP
    Keep.GRAPH     VJP through the graph that forward kept

Backward also reads values that it has not rebuilt: outputs of the stage are sent back by the next
stage (`needs_back`), all other values are kept from forward (`kept`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from revcompile.compiler.lower.code import GRADS, KEY, Program, Value, listed, tupled
from revcompile.compiler.lower.writer import StageUnits, Writer, is_piece
from revcompile.ir.program import Unit
from revcompile.ir.types import Coupling, Segment
from revcompile.schedule import Keep

_EQUATIONS: Final = (
    "PETRA, Eq. 4: a, b = b - F(a), a   Eq. 5: da, db = db, da + db dF/da; grads += db dF/dw"
)
_AVERAGED: Final = "undoes couple_average, and differentiates through the same graph of F"


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


class BackwardWriter(Writer):
    """Goes through a stage's units from the last to the first; finds the values to keep."""

    def __init__(self, stage: StageUnits) -> None:
        super().__init__(stage)
        self.part = stage.part
        self.is_last = self.part.index == len(self.partition.parts) - 1
        self.kept: dict[str, Value] = {}
        self.needs_back: dict[str, Value] = {}
        self.gradients: dict[str, list[Value]] = {}
        self.count = 0
        with_grad = [name for name in self.part.outputs if self.partition.requires_grad(name)]
        self.arriving = [self.new_gradient(name) for name in with_grad]
        for gradient in self.arriving:
            self.gradients[gradient.name] = [gradient]

    def write(self, sends_back: Iterable[str]) -> Program:
        """The program, which takes `(key, *needs_back, *kept, *gradients)`.

        `sends_back` are the inputs whose values the previous stage needs.
        """
        for index, unit in reversed(list(enumerate(self.stage.units))):
            if unit.keep is Keep.NOTHING:
                if unit.is_frozen:
                    continue
                (piece,) = unit.pieces
                self._uncouple(piece, unit)
            else:
                self._vjp(unit, index)
        values = tupled([self.value(name) for name in sends_back])
        inputs = [name for name in self.part.inputs if self.partition.requires_grad(name)]
        of_inputs = tupled([self.gradient(name) for name in inputs])
        comment = "sent back: values, gradients; gradients of parameters"
        arguments = (KEY, *self.needs_back.values(), *self.kept.values(), *self.arriving)
        result = f"{values}, {of_inputs}, {GRADS}"
        return self.program("backward", arguments, result, result_comment=comment)

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of all parameters of the stage."""
        return tuple(dict.fromkeys(name for unit in self.stage.units for name in unit.parameters))

    # -- values and gradients -----------------------------------------------------------------

    def value(self, name: str) -> Value:
        """A live value: rebuilt, sent back by the next stage, or kept."""
        if name not in self.values:
            if name in self.part.outputs and not self.is_last:
                self.values[name] = self.needs_back[name] = Value(name, "returned")
            else:
                self.values[name] = self.keep(Value(name, "kept"))
        return self.values[name]

    def keep(self, value: Value) -> Value:
        return self.kept.setdefault(value.key, value)

    def new_gradient(self, name: str) -> Value:
        """One more gradient of a value."""
        self.count += 1
        return Value(name, "gradient", self.count)

    def gradient(self, name: str) -> Value | None:
        """The sum of a value's gradients so far; None if it has none."""
        terms = self.gradients.get(name, [])
        if len(terms) > 1:
            summed = self.new_gradient(name)
            self.assign((summed,), f"total({listed(terms)})")
            self.gradients[name] = terms = [summed]
        return terms[0] if terms else None

    def add_gradients(self, gradients: Iterable[Value | None]) -> None:
        for gradient in gradients:
            if gradient is not None and self.partition.requires_grad(gradient.name):
                self.gradients.setdefault(gradient.name, []).append(gradient)

    def leaves(self, names: Iterable[str]) -> list[str]:
        """Values as expressions: those with a gradient are leaves of a new autograd graph."""
        has_grad = self.partition.requires_grad
        return [f"leaf({self.value(n)})" if has_grad(n) else str(self.value(n)) for n in names]

    def gradient_targets(self, names: Iterable[str]) -> list[Value | None]:
        """What the gradients of values are assigned to; None where there are none."""
        return [self.new_gradient(n) if self.partition.requires_grad(n) else None for n in names]

    # -- units --------------------------------------------------------------------------------

    def _vjp(self, unit: Unit, index: int) -> None:
        """Write a VJP through the graph that forward kept, or one recomputed from kept inputs."""
        gradients = {name: self.gradient(name) for name in self.stage.outputs(unit)}
        if not any(gradients.values()):
            return
        targets = self.gradient_targets(unit.inputs)
        if unit.keep is Keep.GRAPH:
            given = {name: gradient for name, gradient in gradients.items() if gradient}
            ends = tupled([self.keep(Value(name, "graph")) for name in given])
            with_grad = [target for target in targets if target is not None]
            leaves = tupled([self.keep(Value(t.name, "leaf", index)) for t in with_grad])
            vjp = f"accumulate_vjp(self, {ends}, {tupled(given.values())}, {leaves}, {GRADS})"
            to: Sequence[Value | None] = with_grad
        else:
            self.values |= {name: self.keep(Value(name, "kept")) for name in unit.inputs}
            if is_piece(unit):
                self.reseed(unit.pieces[0])
            key = self.stage.key(unit)
            inputs = tupled([*key, *self.leaves(unit.inputs)])
            function = self.stage.function(unit).name
            given_back = tupled(gradients.values())
            vjp = f"recompute_vjp({function}, self, {inputs}, {given_back}, {GRADS})"
            to = [*(None for _ in key), *targets]
        self.assign(to, vjp, unpacks=True, comment=unit.name, parameters=unit.parameters)
        self.add_gradients(targets)

    def _uncouple(self, piece: Segment, unit: Unit) -> None:
        """`(b, y) -> (y - F(b), b)` and the gradients, with one graph of F."""
        assert isinstance(piece, Coupling) and piece.grid is not None
        self.reseed(piece)
        b, y = map(self.value, piece.streams_out)
        of_b, of_y = map(self.gradient, piece.streams_out)
        extras = [self.gradient(name) for name in piece.extras]
        grid, sides = self.value(piece.grid), self.leaves(piece.sides)
        function = self.stage.of_piece(piece).name
        arguments = [function, "self", b, y, of_b, of_y, grid, GRADS, *sides]
        if extras:
            arguments.append(f"extras={tupled(extras)}")
        sign = self.sign(piece, b)
        if sign is not None:
            arguments.append(f"averaged=({sign}, {self.keep(Value(piece.name, 'lost'))})")
        streams: Sequence[Value] = [Value(name) for name in piece.streams_in]
        if piece.rearrange is not None:
            streams = [Value(name, "arranged") for name in piece.streams_in]
        gradients = [self.new_gradient(name) for name in piece.streams_in]
        of_sides = self.gradient_targets(piece.sides)
        self.assign(
            (*streams, *gradients, *of_sides),
            f"uncouple({listed(arguments)})",
            comment=piece.name,
            note=_EQUATIONS if sign is None else _AVERAGED,
            parameters=unit.parameters,
        )
        if piece.rearrange is not None:
            gradients = self._restore(piece, streams, gradients)
        self.values |= {name: Value(name) for name in piece.streams_in}
        # The gradient of `a` is that of `y`, which may have none.
        self.add_gradients([*(gradients if of_y else gradients[1:]), *of_sides])

    def _restore(
        self, piece: Segment, streams: Sequence[Value], gradients: Sequence[Value]
    ) -> list[Value]:
        """Undo a rearrangement, of gradients as of streams: it only moves elements."""
        restore = self.stage.of_piece(piece, "restore").name
        shapes = self.keep(Value(piece.name, "shapes"))
        restored = [self.new_gradient(gradient.name) for gradient in gradients]
        for target, gradient in zip(restored, gradients, strict=True):
            present = f"zeros_if_none({gradient}, {streams[1]})"
            self.assign((target,), f"{restore}(self, {present}, {shapes})")
        for stream in streams:
            self.assign((Value(stream.name),), f"{restore}(self, {stream}, {shapes})")
        return restored
