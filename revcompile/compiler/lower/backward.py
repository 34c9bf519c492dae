"""The backward program of a stage: PETRA's Eq. 4 and 5, unit by unit from the last to the first.

    coupling     rebuild `a = y - F(b)` keeping the graph of F, and pull the gradient through it
    input kept   compute the unit again, recorded, and pull the gradient through that
    graph kept   pull the gradient through what forward recorded

The walk also finds out what must be kept: whatever it needs that neither it has rebuilt nor the
next stage sends back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import fx

from revcompile.compiler.lower.emit import Emitter
from revcompile.compiler.lower.forward import graph_of, leaf_of, shapes_of
from revcompile.compiler.lower.units import Group
from revcompile.ir import stage_ops
from revcompile.ir.program import Part, Partition, Piece
from revcompile.ir.types import Coupling
from revcompile.schedule import Keep

__all__ = ["Backward", "backward"]


@dataclass(frozen=True)
class Backward:
    """The graph, and what it takes: `(key, *kept, *wanted, *gradients)`."""

    graph: fx.Graph
    kept: tuple[str, ...]
    wanted: tuple[str, ...]
    parameters: tuple[str, ...]


def backward(
    partition: Partition, part: Part, units: Sequence[Group], returned: Iterable[str]
) -> Backward:
    """Code that turns what comes back from the next stage into what goes back to the one before.

    `returned` are the inputs whose values the stage before wants.
    """
    walk = _Walk(partition, part)
    for index, unit in reversed(list(enumerate(units))):
        walk.step_back(unit, index)
    return walk.finish(returned, [name for unit in units for name in unit.parameters])


class _Walk:
    """One walk back through a stage."""

    def __init__(self, partition: Partition, part: Part) -> None:
        self.part = part
        self.is_last = part.index == len(partition.parts) - 1
        self.emitter = Emitter(partition)
        self.emitter.stores = False
        self.kept: dict[str, fx.Node] = {}
        self.wanted: dict[str, fx.Node] = {}
        self.arriving: dict[str, fx.Node] = {}
        self.gradients: dict[str, list[fx.Node]] = {}
        self.of_parameters: dict[str, list[fx.Node]] = {}
        for name in part.outputs:
            if self.emitter.graded(name):
                self.arriving[name] = self.emitter.placeholder(f"grad_{name}", like=name)
                self.gradients[name] = [self.arriving[name]]

    # -- values and gradients -----------------------------------------------------------------

    def value(self, name: str) -> fx.Node:
        """A value as it is now: rebuilt, sent back by the next stage, or kept."""
        values = self.emitter.values
        if name not in values:
            if name in self.part.outputs and not self.is_last:
                values[name] = self.wanted[name] = self.emitter.placeholder(name)
            else:
                values[name] = self.keep(name)
        return values[name]

    def keep(self, name: str) -> fx.Node:
        """A value kept from the forward pass."""
        if name not in self.kept:
            self.kept[name] = self.emitter.placeholder(name)
        return self.kept[name]

    def gradient(self, name: str) -> fx.Node | None:
        """The sum of all gradients that have come back for a value."""
        found = self.gradients.get(name, [])
        if len(found) > 1:
            total = self.emitter.call(stage_ops.total, *found, name=f"grad_{name}")
            self.gradients[name] = found = [total]
        return found[0] if found else None

    def give(self, name: str, gradient: fx.Node | None) -> None:
        """One more gradient for a value."""
        if gradient is not None and self.emitter.graded(name):
            self.gradients.setdefault(name, []).append(gradient)

    # -- units --------------------------------------------------------------------------------

    def step_back(self, unit: Group, index: int) -> None:
        """Values and gradients of a unit's inputs from those of its outputs."""
        if unit.keep is Keep.NOTHING:
            (piece,) = unit.pieces
            self._uncouple(piece, unit)
            return
        outputs = [n for n in unit.outputs if self.gradient(n) is not None]
        if not outputs:
            return
        inputs = [name for name in unit.inputs if self.emitter.graded(name)]
        if unit.keep is Keep.GRAPH:
            ends = {name: self.keep(graph_of(name)) for name in outputs}
            leaves = {name: self.keep(leaf_of(name, index)) for name in inputs}
        else:
            ends, leaves = self._recompute(unit, outputs)
        self._pull_back(unit, ends, leaves)

    def _recompute(
        self, unit: Group, outputs: Sequence[str]
    ) -> tuple[dict[str, fx.Node], dict[str, fx.Node]]:
        """Run a unit again from the input it kept, recorded."""
        emitter = self.emitter
        known = {name: self.keep(name) for name in unit.inputs}
        outside, emitter.values = {**emitter.values, **known}, dict(known)
        emitter.record(True)
        leaves = {n: emitter.leaf(n, known[n]) for n in known if emitter.graded(n)}
        emitter.values |= leaves
        emitter.compute(unit)
        emitter.record(False)
        ends = {name: emitter.value(name) for name in outputs}
        emitter.values = outside
        return ends, leaves

    def _pull_back(self, unit: Group, ends: dict[str, fx.Node], leaves: dict[str, fx.Node]) -> None:
        emitter = self.emitter
        found = emitter.call(
            stage_ops.pull_back,
            tuple(ends.values()),
            tuple(self.gradient(name) for name in ends),
            tuple(leaves.values()),
            tuple(emitter.graph.get_attr(name) for name in unit.parameters),
            name="found",
        )
        for index, name in enumerate(leaves):
            self.give(name, emitter.item(found, index, name=f"grad_{name}"))
        self._of_parameters(unit, found, len(leaves))

    def _of_parameters(self, unit: Group, found: fx.Node, start: int) -> None:
        for index, name in enumerate(unit.parameters, start):
            gradient = self.emitter.item(found, index, name=f"grad_{name}")
            self.of_parameters.setdefault(name, []).append(gradient)

    def _uncouple(self, piece: Piece, unit: Group) -> None:
        """`(b, y) -> (y - F(b), b)` and the gradient, with one graph of F."""
        emitter, segment = self.emitter, piece.segment
        assert isinstance(segment, Coupling) and piece.grid is not None
        b, y = map(self.value, segment.streams_out)
        grid = self.value(piece.grid)
        sides = {name: self.value(name) for name in segment.sides}
        emitter.record(True)
        leaf = emitter.leaf(segment.streams_out[0], b)
        leaves = {n: emitter.leaf(n, v) for n, v in sides.items() if emitter.graded(n)}
        emitter.reseed(unit, piece)
        ends = emitter.branch(piece, leaf, list({**sides, **leaves}.values()))
        emitter.record(False)
        a = emitter.call(stage_ops.minus, y, ends[0], grid, name=segment.streams_in[0])
        of_y = self.gradient(segment.streams_out[1])
        found = emitter.call(
            stage_ops.pull_back,
            ends,
            (of_y, *(self.gradient(name) for name in segment.extras)),
            (leaf, *leaves.values()),
            tuple(emitter.graph.get_attr(name) for name in unit.parameters),
            name="found",
        )
        name = f"grad_{segment.streams_in[1]}"
        of_b = [g for g in (self.gradient(segment.streams_out[0]), emitter.item(found, 0)) if g]
        back = (
            a,
            b,
            of_y,
            of_b[0] if len(of_b) == 1 else emitter.call(stage_ops.total, *of_b, name=name),
        )
        if segment.rearrange is not None:
            shapes = self.keep(shapes_of(piece.name))
            graded = (gradient and self._there(gradient, b) for gradient in back[2:])
            back = tuple(  # type: ignore[assignment]
                self._unlink(piece, stream, shapes) for stream in (a, b, *graded)
            )
        for position, name in enumerate(segment.streams_in):
            emitter.values[name] = back[position]  # type: ignore[assignment]
            self.give(name, back[2 + position])
        for position, name in enumerate(leaves, 1):
            self.give(name, emitter.item(found, position, name=f"grad_{name}"))
        self._of_parameters(unit, found, 1 + len(leaves))

    def _there(self, gradient: fx.Node, stream: fx.Node) -> fx.Node:
        return self.emitter.call(stage_ops.no_gradient_as_zeros, gradient, stream)

    def _unlink(self, piece: Piece, stream: fx.Node | None, shapes: fx.Node) -> fx.Node | None:
        """A rearrange only moves elements, so a gradient goes back the way the values do."""
        assert isinstance(piece.segment, Coupling) and piece.segment.rearrange is not None
        if stream is None:
            return None
        node: fx.Node = self.emitter.inline(piece.segment.rearrange.inverse, [stream, shapes])
        return node

    # -- the end ------------------------------------------------------------------------------

    def finish(self, returned: Iterable[str], parameters: Iterable[str]) -> Backward:
        """Close the graph: returned values, gradients of inputs, gradients of parameters."""
        emitter, names = self.emitter, tuple(dict.fromkeys(parameters))
        values = tuple(self.value(name) for name in returned)
        inputs = [name for name in self.part.inputs if emitter.graded(name)]
        gradients = tuple(self.gradient(name) for name in inputs)
        found = []
        for name in names:
            of_one = self.of_parameters.get(name, [])
            found.append(
                emitter.call(stage_ops.total, *of_one, name=f"grad_{name}")
                if len(of_one) > 1
                else of_one[0]
                if of_one
                else None
            )
        kept, wanted = tuple(self.kept), tuple(self.wanted)
        self._order_placeholders()
        return Backward(emitter.finish(values, gradients, tuple(found)), kept, wanted, names)

    def _order_placeholders(self) -> None:
        """`key`, kept, wanted, gradients."""
        order = (*self.kept.values(), *self.wanted.values(), *self.arriving.values())
        previous = self.emitter.key
        for node in order:
            previous.append(node)
            previous = node
