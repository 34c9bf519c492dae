"""The backward program of a stage: PETRA's Eq. 4 and 5, unit by unit from the last to the first.

    Keep.NOTHING   a coupling: rebuild `a = y - F(b)` with autograd on, then VJP through that graph
    Keep.INPUT     run the unit again from its kept input with autograd on, then VJP
    Keep.GRAPH     VJP through the graph that forward kept

What backward reads and has not rebuilt itself must come from somewhere: an output of the stage is
sent back by the next stage (`needs_back`), everything else is kept from forward (`kept`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from revcompile.compiler.lower.writer import StageUnits, Writer, is_piece
from revcompile.ir import coupling_ops
from revcompile.ir.program import Unit
from revcompile.ir.stage_code import KEY, SELF, Call, ParameterGradients, Program, Value, call
from revcompile.ir.types import Coupling, Segment
from revcompile.schedule import Keep


class BackwardWriter(Writer):
    """Goes through a stage's units from the last to the first; finds what has to be kept."""

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
        """The program, which takes `(key, *kept, *needs_back, *gradients)`.

        `sends_back` are the inputs whose values the stage before needs.
        """
        for index, unit in reversed(list(enumerate(self.stage.units))):
            if unit.keep is Keep.NOTHING:
                if unit.is_frozen:
                    continue
                (piece,) = unit.pieces
                self._uncouple(piece, unit)
            else:
                self._vjp(unit, index)
        values = tuple(self.value(name) for name in sends_back)
        inputs = [name for name in self.part.inputs if self.partition.requires_grad(name)]
        of_inputs = tuple(self.gradient(name) for name in inputs)
        of_parameters = ParameterGradients(self.parameters)
        arguments = (KEY, *self.kept.values(), *self.needs_back.values(), *self.arriving)
        comment = "sent back: values, gradients; gradients of parameters"
        result = (values, of_inputs, of_parameters)
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
            self.assign((summed,), call(coupling_ops.total, *terms))
            self.gradients[name] = terms = [summed]
        return terms[0] if terms else None

    def add_gradients(self, gradients: Iterable[Value | None]) -> None:
        for gradient in gradients:
            if gradient is not None and self.partition.requires_grad(gradient.name):
                self.gradients.setdefault(gradient.name, []).append(gradient)

    def leaves(self, names: Iterable[str]) -> tuple[Call | Value, ...]:
        """Values, as leaves of a new autograd graph where they have a gradient."""
        return tuple(
            call(coupling_ops.leaf, self.value(name))
            if self.partition.requires_grad(name)
            else self.value(name)
            for name in names
        )

    def gradient_targets(self, names: Iterable[str]) -> list[Value | None]:
        """What the gradients of values are assigned to; None where there are none."""
        return [self.new_gradient(n) if self.partition.requires_grad(n) else None for n in names]

    # -- units --------------------------------------------------------------------------------

    def _vjp(self, unit: Unit, index: int) -> None:
        """Through the graph that forward kept, or through one made from the kept inputs."""
        gradients = {name: self.gradient(name) for name in self.stage.outputs(unit)}
        if not any(gradients.values()):
            return
        of_parameters = ParameterGradients(unit.parameters)
        targets = self.gradient_targets(unit.inputs)
        if unit.keep is Keep.GRAPH:
            given = {name: gradient for name, gradient in gradients.items() if gradient}
            ends = tuple(self.keep(Value(name, "graph")) for name in given)
            with_grad = [target for target in targets if target is not None]
            leaves = tuple(self.keep(Value(t.name, "leaf", index)) for t in with_grad)
            graph = (SELF, ends, tuple(given.values()), leaves, of_parameters)
            vjp = call(coupling_ops.accumulate_vjp, *graph)
            self.assign(with_grad, vjp, unpacks=True, comment=unit.name)
        else:
            self.values |= {name: self.keep(Value(name, "kept")) for name in unit.inputs}
            if is_piece(unit):
                self.reseed(unit.pieces[0])
            key = self.stage.key(unit)
            inputs = (*key, *self.leaves(unit.inputs))
            function = self.stage.function(unit, again=True)
            again = (function, SELF, inputs, tuple(gradients.values()), of_parameters)
            vjp = call(coupling_ops.recompute_vjp, *again)
            self.assign((*(None for _ in key), *targets), vjp, unpacks=True, comment=unit.name)
        self.add_gradients(targets)

    def _uncouple(self, piece: Segment, unit: Unit) -> None:
        """`(b, y) -> (y - F(b), b)` and the gradient, with one graph of F."""
        assert isinstance(piece, Coupling) and piece.grid is not None
        self.reseed(piece)
        b, y = map(self.value, piece.streams_out)
        of_b, of_y = map(self.gradient, piece.streams_out)
        extras = tuple(self.gradient(name) for name in piece.extras)
        grid, sides = self.value(piece.grid), self.leaves(piece.sides)
        function = self.functions.of_piece(piece, again=True)
        arguments = (b, y, of_b, of_y, grid, ParameterGradients(unit.parameters), *sides)
        options: dict[str, tuple[Any, ...]] = {"extras": extras} if extras else {}
        sign = self.sign(piece, b)
        if sign is not None:
            options["averaged"] = sign, self.keep(Value(piece.name, "lost"))
        uncoupled = call(coupling_ops.uncouple, function, SELF, *arguments, **options)
        streams: Sequence[Value] = [Value(name) for name in piece.streams_in]
        if piece.rearrange is not None:
            streams = [Value(name, "arranged") for name in piece.streams_in]
        gradients = [self.new_gradient(name) for name in piece.streams_in]
        of_sides = self.gradient_targets(piece.sides)
        self.assign((*streams, *gradients, *of_sides), uncoupled, comment=piece.name)
        if piece.rearrange is not None:
            gradients = self._restore(piece, streams, gradients)
        self.values |= {name: Value(name) for name in piece.streams_in}
        # The gradient of `a` is that of `y`, which may have none.
        self.add_gradients([*(gradients if of_y else gradients[1:]), *of_sides])

    def _restore(
        self, piece: Segment, streams: Sequence[Value], gradients: Sequence[Value]
    ) -> list[Value]:
        """A rearrangement only moves elements, so gradients go back as values do."""
        restore = self.functions.rearrangement(piece, back=True)
        shapes = self.keep(Value(piece.name, "shapes"))
        restored = [self.new_gradient(gradient.name) for gradient in gradients]
        for target, gradient in zip(restored, gradients, strict=True):
            present = call(coupling_ops.zeros_if_none, gradient, streams[1])
            self.assign((target,), call(restore, present, shapes))
        for stream in streams:
            self.assign((Value(stream.name),), call(restore, stream, shapes))
        return restored
