"""The backward program as a paper would write it: `uncouple` for couplings, VJPs for the rest.

The walk is that of `compiler.lower.backward`, from the last unit to the first, in calls of the
functions that `source` prints.
"""

from __future__ import annotations

from collections.abc import Sequence

from revcompile.inspect.program_text import Body, joined, value
from revcompile.inspect.source import SourceWriter, call, is_piece
from revcompile.ir.program import Piece, Unit
from revcompile.ir.types import Coupling
from revcompile.schedule import Keep

__all__ = ["BackwardWriter"]

_GRADS = value("grads")


class BackwardWriter:
    """Prints the backward program; values and gradients are kept as texts refer to them."""

    def __init__(self, writer: SourceWriter) -> None:
        self.writer, self.program = writer, writer.program
        self.partition, self.part = writer.partition, writer.part
        self.use = writer.listing.use
        self.is_last = self.part.index == len(self.partition.parts) - 1
        self.hints = dict(writer.hints)
        self.hints |= {f"kept {n}": self.hints.get(n, n) for n in self.program.kept}
        self.values: dict[str, str] = {}
        self.gradients: dict[str, list[str]] = {}
        self.count = 0
        arriving = [self._new_gradient(name) for name in self.program.outputs_with_grad]
        for name, gradient in zip(self.program.outputs_with_grad, arriving, strict=True):
            self.gradients[name] = [value(gradient)]
        kept = [f"kept {name}" for name in self.program.kept]
        arguments = [*writer.key, *kept, *self.program.needs_back, *arriving]
        self.body = Body(arguments, self.hints)

    def _new_gradient(self, name: str) -> str:
        """A name for one more gradient of a value."""
        self.count += 1
        gradient, hint = f"gradient {self.count} of {name}", self.hints.get(name, name)
        self.hints[gradient] = f"d{hint}" if hint in ("a", "b") else f"d_{hint}"
        return gradient

    def value(self, name: str) -> str:
        """A live value: rebuilt, sent back by the next stage, or kept."""
        if name not in self.values:
            comes_back = name in self.part.outputs and not self.is_last
            self.values[name] = value(name if comes_back else f"kept {name}")
        return self.values[name]

    def gradient(self, name: str) -> str | None:
        """The sum of a value's gradients so far."""
        terms = self.gradients.get(name, [])
        if len(terms) > 1:
            summed = self._new_gradient(name)
            total = f"{self.use('total')}({', '.join(terms)})"
            self.body.assign([summed], total, effects=False)
            self.gradients[name] = terms = [value(summed)]
        return terms[0] if terms else None

    def add_gradient(self, name: str, gradient: str) -> None:
        if self.partition.requires_grad(name):
            self.gradients.setdefault(name, []).append(value(gradient))

    def write(self) -> None:
        """Print the program."""
        program = self.program
        self.body.assign(["grads"], "{}")
        for index, unit in reversed(list(enumerate(program.units))):
            if unit.keep is Keep.NOTHING:
                self._uncouple(unit.pieces[0])
            else:
                self._vjp(unit, index)
        values = joined(self.value(name) for name in program.sends_back)
        gradients = joined(self.gradient(name) for name in program.inputs_with_grad)
        result = f"{values}, {gradients}, {_GRADS}"
        result += "  # sent back: values, gradients; gradients of parameters"
        text, _ = self.body.text("backward", result, self.writer.listing.taken)
        self.writer.listing.functions.append(text)

    def _vjp(self, unit: Unit, index: int) -> None:
        """Through the graph that forward kept, or through one made from the kept inputs."""
        writer = self.writer
        outputs = writer.unit_outputs(unit)
        gradients = {name: self.gradient(name) for name in outputs}
        if not any(gradients.values()):
            return
        with_grad = [name for name in unit.inputs if self.partition.requires_grad(name)]
        results = {name: self._new_gradient(name) for name in with_grad}
        if unit.keep is Keep.GRAPH:
            ends = joined(value(f"kept {n} graph") for n, g in gradients.items() if g)
            given = joined(filter(None, gradients.values()))
            leaves = joined(value(f"kept {name} leaf {index}") for name in with_grad)
            vjp = f"{self.use('accumulate_vjp')}(self, {ends}, {given}, {leaves}, {_GRADS})"
            self.body.assign([*results.values()], vjp, comment=unit.name)
        else:
            self.values |= {name: value(f"kept {name}") for name in unit.inputs}
            if is_piece(unit):
                writer.reseed(self.body, unit.pieces[0])
            key = writer.unit_key(unit)
            inputs = [self._leaf(n) if n in results else self.value(n) for n in unit.inputs]
            called = writer.unit_function(unit, again=True)
            arguments = f"{joined([*map(value, key), *inputs])}, {joined(gradients.values())}"
            vjp = f"{self.use('recompute_vjp')}({called}, self, {arguments}, {_GRADS})"
            targets = [*("_" for _ in key), *(results.get(name, "_") for name in unit.inputs)]
            self.body.assign(targets, vjp, comment=unit.name)
        for name, gradient in results.items():
            self.add_gradient(name, gradient)

    def _leaf(self, name: str) -> str:
        return f"{self.use('leaf')}({self.value(name)})"

    def _uncouple(self, piece: Piece) -> None:
        segment = piece.segment
        assert isinstance(segment, Coupling) and piece.grid is not None
        self.writer.reseed(self.body, piece)
        b, y = map(self.value, segment.streams_out)
        of_b, of_y = map(self.gradient, segment.streams_out)
        extras = [self.gradient(name) for name in segment.extras]
        with_grad = [name for name in segment.sides if self.partition.requires_grad(name)]
        sides = [self._leaf(n) if n in with_grad else self.value(n) for n in segment.sides]
        arguments = [str(of_b), str(of_y), self.value(piece.grid), _GRADS, *sides]
        arguments += [f"extras={joined(extras)}"] if extras else []
        called = f"{self.writer.function(piece, again=True)}, self"
        uncoupled = call(self.use("uncouple"), [b, y, *arguments], first=called)
        gradients = [self._new_gradient(name) for name in segment.streams_in]
        of_sides = {name: self._new_gradient(name) for name in with_grad}
        names: Sequence[str] = segment.streams_in
        if segment.rearrange is not None:
            names = [f"arranged {name}" for name in names]
        targets = [*names, *gradients, *(of_sides.get(name, "_") for name in segment.sides)]
        self.body.assign(targets, uncoupled, comment=piece.name)
        if segment.rearrange is not None:
            gradients = self._restore(piece, segment, gradients)
        self.values |= {name: value(name) for name in segment.streams_in}
        if of_y is not None:
            self.add_gradient(segment.streams_in[0], gradients[0])
        self.add_gradient(segment.streams_in[1], gradients[1])
        for name, gradient in of_sides.items():
            self.add_gradient(name, gradient)

    def _restore(self, piece: Piece, segment: Coupling, gradients: Sequence[str]) -> list[str]:
        """A rearrangement only moves elements, so gradients go back as values do."""
        restore = self.writer.arrangement(piece, back=True)
        shapes = value(f"kept {piece.name} shapes")
        a, b = (value(f"arranged {name}") for name in segment.streams_in)
        restored = [self._new_gradient(name) for name in segment.streams_in]
        for target, gradient in zip(restored, gradients, strict=True):
            present = f"{self.use('zeros_if_none')}({value(gradient)}, {b})"
            self.body.assign([target], call(restore, [present, shapes]), effects=False)
        for target, stream in zip(segment.streams_in, (a, b), strict=True):
            self.body.assign([target], call(restore, [stream, shapes]), effects=False)
        return restored
