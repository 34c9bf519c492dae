"""The backward program as a paper would write it: `uncouple` for couplings, VJPs for the rest.

The walk is that of `compiler.lower.backward`, from the last unit to the first, in calls of the
functions that `source` prints.
"""

from __future__ import annotations

from collections.abc import Sequence

from revcompile.inspect.function_text import Body, call, joined, slot, slots
from revcompile.inspect.source import SourceWriter, is_piece
from revcompile.ir.program import Piece, Unit
from revcompile.ir.types import Coupling
from revcompile.schedule import Keep

__all__ = ["BackwardWriter"]


class BackwardWriter:
    """The backward program: the same walk as `compiler.lower.backward`, in calls of functions."""

    def __init__(self, writer: SourceWriter) -> None:
        self.writer, self.program = writer, writer.program
        self.partition, self.part = writer.partition, writer.part
        self.use = writer.listing.use
        self.is_last = self.part.index == len(self.partition.parts) - 1
        self.arriving = [f"grad {name}" for name in self.program.outputs_with_grad]
        kept = [f"kept {name}" for name in self.program.kept]
        self.hints = dict(writer.hints)
        self.hints |= {f"kept {n}": self.hints.get(n, n) for n in self.program.kept}
        arguments = [*kept, *self.program.needs_back, *self.arriving]
        self.body = Body([*writer.key, *arguments], self.hints)
        self.values: dict[str, str] = {}
        self.gradients = {name: [f"grad {name}"] for name in self.program.outputs_with_grad}
        self.count = 0
        for name, gradient in zip(self.program.outputs_with_grad, self.arriving, strict=True):
            self.hints[gradient] = self._gradient_hint(name)

    def _gradient_hint(self, name: str) -> str:
        hint = self.hints.get(name, name)
        return f"d{hint}" if hint in ("a", "b") else f"d_{hint}"

    def _new_gradient(self, name: str) -> str:
        self.count += 1
        made = f"grad {name} {self.count}"
        self.hints[made] = self._gradient_hint(name)
        return made

    def value(self, name: str) -> str:
        """A live value: rebuilt, sent back by the next stage, or kept."""
        if name not in self.values:
            comes_back = name in self.part.outputs and not self.is_last
            self.values[name] = name if comes_back else f"kept {name}"
        return self.values[name]

    def gradient(self, name: str) -> str | None:
        """The sum of a value's gradients so far."""
        terms = self.gradients.get(name, [])
        if len(terms) > 1:
            summed = self._new_gradient(name)
            self.body.assign([summed], (call(self.use("total"), terms), terms), effects=False)
            self.gradients[name] = terms = [summed]
        return terms[0] if terms else None

    def add_gradient(self, name: str, gradient: str) -> None:
        if self.partition.requires_grad(name):
            self.gradients.setdefault(name, []).append(gradient)

    def write(self) -> None:
        """Print the program."""
        program, body = self.program, self.body
        body.assign(["grads"], ("{{}}", []))
        for index, unit in reversed(list(enumerate(program.units))):
            if unit.keep is Keep.NOTHING:
                self._uncouple(unit.pieces[0])
            else:
                self._vjp(unit, index)
        values = [self.value(name) for name in program.sends_back]
        gradients = [self.gradient(name) for name in program.inputs_with_grad]
        present = [gradient for gradient in gradients if gradient is not None]
        sent = slots(gradients, brackets=True)
        result = f"{slots(values, brackets=True)}, {sent}, {{}}"
        result += "  # sent back: values, gradients; gradients of parameters"
        taken = self.writer.listing.taken
        text, _ = body.text("backward", result, [*values, *present, "grads"], taken)
        self.writer.listing.functions.append(text)

    def _vjp(self, unit: Unit, index: int) -> None:
        """Through the graph that forward kept, or through one made from the kept inputs."""
        writer, body = self.writer, self.body
        outputs = writer.unit_outputs(unit)
        given = [self.gradient(name) for name in outputs]
        if not any(given):
            return
        with_grad = [name for name in unit.inputs if self.partition.requires_grad(name)]
        targets = {name: self._new_gradient(name) for name in with_grad}
        if unit.keep is Keep.GRAPH:
            ends = [f"kept {n} graph" for n, g in zip(outputs, given, strict=True) if g]
            leaves = [f"kept {name} leaf {index}" for name in with_grad]
            present = [gradient for gradient in given if gradient]
            text = ", ".join(slots(group, brackets=True) for group in (ends, present, leaves))
            text = f"{self.use('accumulate_vjp')}(self, {text}, {{}})"
            body.assign(
                list(targets.values()),
                (text, [*ends, *present, *leaves, "grads"]),
                comment=unit.name,
            )
        else:
            self.values |= {name: f"kept {name}" for name in unit.inputs}
            if is_piece(unit):
                writer.reseed(body, unit.pieces[0])
            leaf = self.use("leaf") if with_grad else "leaf"
            inputs = [f"{leaf}({{}})" if name in targets else "{}" for name in unit.inputs]
            key = writer.unit_key(unit)
            called = writer.unit_function(unit, again=True)
            reads = [*key, *(self.values[name] for name in unit.inputs)]
            arguments = joined([*("{}" for _ in key), *inputs])
            text = f"{called}, self, {arguments}, {slots(given, brackets=True)}, {{}}"
            body.assign(
                [*("_" for _ in key), *(targets.get(name, "_") for name in unit.inputs)],
                (f"{self.use('recompute_vjp')}({text})", [*reads, *filter(None, given), "grads"]),
                comment=unit.name,
            )
        for name, gradient in targets.items():
            self.add_gradient(name, gradient)

    def _uncouple(self, piece: Piece) -> None:
        writer, body, segment = self.writer, self.body, piece.segment
        assert isinstance(segment, Coupling) and piece.grid is not None
        b, y = map(self.value, segment.streams_out)
        grid = self.value(piece.grid)
        sides = {name: self.value(name) for name in segment.sides}
        with_grad = [name for name in sides if self.partition.requires_grad(name)]
        of_b, of_y = map(self.gradient, segment.streams_out)
        extras = [self.gradient(name) for name in segment.extras]
        writer.reseed(body, piece)
        names = segment.streams_in
        if segment.rearrange is not None:
            names = (f"arranged {names[0]}", f"arranged {names[1]}")
        gradients = [self._new_gradient(name) for name in segment.streams_in]
        of_sides = {name: self._new_gradient(name) for name in with_grad}
        leaf = self.use("leaf") if with_grad else "leaf"
        given = [f"{leaf}({{}})" if name in of_sides else "{}" for name in sides]
        arguments = ["{}", "{}", slot(of_b), slot(of_y), "{}", "{}", *given]
        if extras:
            arguments.append(f"extras={slots(extras, brackets=True)}")
        called = writer.function(piece, again=True)
        reads = [b, y, of_b, of_y, grid, "grads", *sides.values(), *extras]
        body.assign(
            [*names, *gradients, *(of_sides.get(name, "_") for name in sides)],
            (
                f"{self.use('uncouple')}({', '.join([called, 'self', *arguments])})",
                [value for value in reads if value is not None],
            ),
            comment=piece.name,
        )
        if segment.rearrange is not None:
            gradients = self._restore(piece, names, gradients)
        self.values |= {name: name for name in segment.streams_in}
        for name, gradient, is_given in zip(
            segment.streams_in, gradients, (of_y is not None, True), strict=True
        ):
            if is_given:
                self.add_gradient(name, gradient)
        for name, gradient in of_sides.items():
            self.add_gradient(name, gradient)

    def _restore(self, piece: Piece, names: Sequence[str], gradients: list[str]) -> list[str]:
        """A rearrangement only moves elements, so gradients go back as values do."""
        assert isinstance(piece.segment, Coupling)
        restore, shapes = self.writer.arrangement(piece, back=True), f"kept {piece.name} shapes"
        zeros, b = self.use("zeros_if_none"), names[1]
        restored = [self._new_gradient(name) for name in piece.segment.streams_in]
        text = f"{restore}(self, {zeros}({{}}, {{}}), {{}})"
        for target, gradient in zip(restored, gradients, strict=True):
            self.body.assign([target], (text, [gradient, b, shapes]), effects=False)
        for target, name in zip(piece.segment.streams_in, names, strict=True):
            value = (call(restore, [name, shapes]), [name, shapes])
            self.body.assign([target], value, effects=False)
        return restored
