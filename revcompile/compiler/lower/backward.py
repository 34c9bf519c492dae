"""The backward program of a stage: PETRA's Eq. 4 and 5, unit by unit from the last to the first.

    Keep.NOTHING   a coupling: rebuild `a = y - F(b)` with autograd on, then VJP through that graph
    Keep.INPUT     run the unit again from its kept input with autograd on, then VJP
    Keep.GRAPH     VJP through the graph that forward kept

What backward reads and has not rebuilt itself must come from somewhere: an output of the stage is
sent back by the next stage (`needs_back`), everything else is kept from forward (`kept`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import fx

from revcompile.compiler.lower.emit import Emitter
from revcompile.compiler.lower.forward import graph_of, leaf_of, shapes_of
from revcompile.ir import stage_ops
from revcompile.ir.program import Part, Partition, Piece, Unit
from revcompile.ir.types import Coupling
from revcompile.schedule import Keep

__all__ = ["Backward", "backward"]


@dataclass(frozen=True)
class Backward:
    """A backward program, which takes `(key, *kept, *needs_back, *gradients)`."""

    graph: fx.Graph
    kept: tuple[str, ...]
    needs_back: tuple[str, ...]
    parameters: tuple[str, ...]


def backward(
    partition: Partition, part: Part, units: Sequence[Unit], sends_back: Iterable[str]
) -> Backward:
    """Turns values and gradients of a stage's outputs into those of its inputs.

    `sends_back` are the inputs whose values the stage before needs.
    """
    walk = _Walk(partition, part)
    for index, unit in reversed(list(enumerate(units))):
        walk.step_back(unit, index)
    return walk.finish(sends_back, [name for unit in units for name in unit.parameters])


class _Walk:
    """Goes through a stage's units from the last to the first."""

    def __init__(self, partition: Partition, part: Part) -> None:
        self.partition, self.part = partition, part
        self.is_last = part.index == len(partition.parts) - 1
        self.emitter = Emitter(partition)
        self.emitter.stores = False
        self.kept: dict[str, fx.Node] = {}
        self.needs_back: dict[str, fx.Node] = {}
        self.arriving: dict[str, fx.Node] = {}
        self.gradients: dict[str, list[fx.Node]] = {}
        self.of_parameters: dict[str, list[fx.Node]] = {}
        for name in part.outputs:
            if self.partition.requires_grad(name):
                self.arriving[name] = self.emitter.placeholder(f"grad_{name}", like=name)
                self.gradients[name] = [self.arriving[name]]

    # -- values and gradients -----------------------------------------------------------------

    def value(self, name: str) -> fx.Node:
        """A live value: rebuilt, sent back by the next stage, or kept."""
        values = self.emitter.values
        if name not in values:
            if name in self.part.outputs and not self.is_last:
                values[name] = self.needs_back[name] = self.emitter.placeholder(name)
            else:
                values[name] = self.keep(name)
        return values[name]

    def keep(self, name: str) -> fx.Node:
        if name not in self.kept:
            self.kept[name] = self.emitter.placeholder(name)
        return self.kept[name]

    def gradient(self, name: str) -> fx.Node | None:
        """The sum of a value's gradients so far; None if it has none."""
        terms = self.gradients.get(name, [])
        if len(terms) > 1:
            self.gradients[name] = terms = [self._sum(name, terms)]
        return terms[0] if terms else None

    def _sum(self, name: str, terms: Sequence[fx.Node]) -> fx.Node:
        return self.emitter.call(stage_ops.total, *terms, name=f"grad_{name}")

    def add_gradient(self, name: str, gradient: fx.Node | None) -> None:
        if gradient is not None and self.partition.requires_grad(name):
            self.gradients.setdefault(name, []).append(gradient)

    # -- units --------------------------------------------------------------------------------

    def step_back(self, unit: Unit, index: int) -> None:
        """Compute values and gradients of a unit's inputs from those of its outputs."""
        if unit.keep is Keep.NOTHING:
            (piece,) = unit.pieces
            self._uncouple(piece, unit)
            return
        outputs = [n for n in unit.outputs if self.gradient(n) is not None]
        if not outputs:
            return
        inputs = [name for name in unit.inputs if self.partition.requires_grad(name)]
        if unit.keep is Keep.GRAPH:
            ends = {name: self.keep(graph_of(name)) for name in outputs}
            leaves = {name: self.keep(leaf_of(name, index)) for name in inputs}
        else:
            ends, leaves = self._recompute(unit, outputs)
        self._vjp(unit, ends, leaves)

    def _recompute(
        self, unit: Unit, outputs: Sequence[str]
    ) -> tuple[dict[str, fx.Node], dict[str, fx.Node]]:
        """Run a unit again from its kept input with autograd on."""
        emitter = self.emitter
        known = {name: self.keep(name) for name in unit.inputs}
        outside, emitter.values = {**emitter.values, **known}, dict(known)
        emitter.record(True)
        leaves = {n: emitter.leaf(n, known[n]) for n in known if self.partition.requires_grad(n)}
        emitter.values |= leaves
        emitter.compute(unit)
        emitter.record(False)
        ends = {name: emitter.value(name) for name in outputs}
        emitter.values = outside
        return ends, leaves

    def _vjp(self, unit: Unit, ends: dict[str, fx.Node], leaves: dict[str, fx.Node]) -> None:
        emitter = self.emitter
        results = emitter.call(
            stage_ops.vjp,
            tuple(ends.values()),
            tuple(self.gradient(name) for name in ends),
            tuple(leaves.values()),
            tuple(emitter.graph.get_attr(name) for name in unit.parameters),
            name="grads",
        )
        for index, name in enumerate(leaves):
            self.add_gradient(name, emitter.item(results, index, name=f"grad_{name}"))
        self._add_parameter_gradients(unit, results, len(leaves))

    def _add_parameter_gradients(self, unit: Unit, results: fx.Node, start: int) -> None:
        for index, name in enumerate(unit.parameters, start):
            gradient = self.emitter.item(results, index, name=f"grad_{name}")
            self.of_parameters.setdefault(name, []).append(gradient)

    def _uncouple(self, piece: Piece, unit: Unit) -> None:
        """`(b, y) -> (y - F(b), b)` and the gradient, with one graph of F."""
        emitter, segment = self.emitter, piece.segment
        assert isinstance(segment, Coupling) and piece.grid is not None
        b, y = map(self.value, segment.streams_out)
        grid = self.value(piece.grid)
        sides = {name: self.value(name) for name in segment.sides}
        emitter.record(True)
        leaf = emitter.leaf(segment.streams_out[0], b)
        with_grad = [name for name in sides if self.partition.requires_grad(name)]
        leaves = {name: emitter.leaf(name, sides[name]) for name in with_grad}
        emitter.reseed(unit, piece)
        ends = emitter.branch(piece, leaf, list({**sides, **leaves}.values()))
        emitter.record(False)
        a = emitter.call(stage_ops.minus, y, ends[0], grid, name=segment.streams_in[0])
        of_y = self.gradient(segment.streams_out[1])
        results = emitter.call(
            stage_ops.vjp,
            ends,
            (of_y, *(self.gradient(name) for name in segment.extras)),
            (leaf, *leaves.values()),
            tuple(emitter.graph.get_attr(name) for name in unit.parameters),
            name="grads",
        )
        terms = [self.gradient(segment.streams_out[0]), emitter.item(results, 0)]
        present = [term for term in terms if term is not None]
        of_b = present[0] if len(present) == 1 else self._sum(segment.streams_in[1], present)
        values, gradients = [a, b], [of_y, of_b]
        if segment.rearrange is not None:
            # A rearrangement only moves elements, so gradients go back as values do.
            inverse, shapes = segment.rearrange.inverse, self.keep(shapes_of(piece.name))
            gradients = [
                gradient and emitter.call(stage_ops.zeros_if_none, gradient, b)
                for gradient in gradients
            ]
            values = [emitter.inline(inverse, [value, shapes]) for value in values]
            gradients = [
                gradient and emitter.inline(inverse, [gradient, shapes]) for gradient in gradients
            ]
        for name, value, gradient in zip(segment.streams_in, values, gradients, strict=True):
            emitter.values[name] = value
            self.add_gradient(name, gradient)
        for position, name in enumerate(leaves, 1):
            self.add_gradient(name, emitter.item(results, position, name=f"grad_{name}"))
        self._add_parameter_gradients(unit, results, 1 + len(leaves))

    # -- the end ------------------------------------------------------------------------------

    def finish(self, sends_back: Iterable[str], parameters: Iterable[str]) -> Backward:
        """Close the graph: values sent back, gradients of inputs, gradients of parameters."""
        names = tuple(dict.fromkeys(parameters))
        values = tuple(self.value(name) for name in sends_back)
        inputs = [name for name in self.part.inputs if self.partition.requires_grad(name)]
        of_inputs = tuple(self.gradient(name) for name in inputs)
        of_parameters = []
        for name in names:
            terms = self.of_parameters.get(name, [])
            summed = self._sum(name, terms) if len(terms) > 1 else None
            of_parameters.append(summed or (terms[0] if terms else None))
        self._order_placeholders()
        graph = self.emitter.finish(values, of_inputs, tuple(of_parameters))
        return Backward(graph, tuple(self.kept), tuple(self.needs_back), names)

    def _order_placeholders(self) -> None:
        """Arguments in order: `key`, kept, needs_back, gradients."""
        previous = self.emitter.key
        for node in (*self.kept.values(), *self.needs_back.values(), *self.arriving.values()):
            previous.append(node)
            previous = node
