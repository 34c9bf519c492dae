"""Writing a stage's pieces into an FX graph, as forward, backward and inverse do."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import fx, nn

from revcompile.ir import ops, stage_ops
from revcompile.ir.module_tree import convolves, has_batch_norm
from revcompile.ir.program import Partition, Piece, Unit, legal
from revcompile.ir.types import TYPE, Coupling, Rearrange, TensorType

__all__ = ["Emitter"]


_REMOVABLE: Final = frozenset(
    [
        operator.getitem,
        stage_ops.detached,
        stage_ops.leaf,
        stage_ops.minus,
        stage_ops.total,
        torch.permute,
        torch.reshape,
        torch.roll,
        torch.transpose,
    ]
)
"""Functions without side effects: a call whose result is not read is removed."""


class Emitter:
    """Appends calls to a graph; `values` maps each live value to its node."""

    def __init__(self, partition: Partition) -> None:
        self.partition = partition
        self.root: nn.Module = partition.rewired.root
        self.graph = fx.Graph()
        self.key = self.graph.placeholder("key")
        self.values: dict[str, fx.Node] = {}
        self.stores = True
        """Are buffers written? In forward; not where backward computes a piece again."""
        self.places = {
            id(piece): place for part in partition.parts for place, piece in enumerate(part.pieces)
        }
        self.streams = partition.stream_outputs

    def placeholder(self, name: str, like: str | None = None) -> fx.Node:
        """Add an input to the program, after the others."""
        nodes = [n for n in self.graph.nodes if n.op == "placeholder"]
        with self.graph.inserting_after(nodes[-1]):
            node = self.graph.placeholder(legal(name))
        node.target = node.name  # else a variable could have the parameter's name
        node.meta[TYPE] = self.partition.types.get(like or name)
        return node

    def call(self, function: Callable[..., Any], *args: Any, name: str | None = None) -> fx.Node:
        """Append a call; `name` is the variable that holds its result."""
        hint = legal(name) if name else None
        return self.graph.create_node("call_function", function, args, name=hint)

    def reseed(self, unit: Unit, piece: Piece) -> None:
        """Seed a piece by its place in the stage, so that all methods draw the same numbers."""
        if piece.name in unit.random:
            self.call(stage_ops.reseed, self.key, self.places[id(piece)], name="_")

    def record(self, on: bool) -> None:
        self.call(stage_ops.recording, on, name="_")

    def leaf(self, name: str, value: fx.Node) -> fx.Node:
        """A value as a leaf of a new autograd graph."""
        return self.call(stage_ops.leaf, value, name=f"{name}_leaf")

    def item(self, values: fx.Node, index: int, name: str | None = None) -> fx.Node:
        return self.call(operator.getitem, values, index, name=name)

    def type(self, name: str) -> TensorType | None:
        """The type of a live value that is a tensor."""
        kind = self.partition.types.get(name)
        return kind if isinstance(kind, TensorType) else None

    def inline(self, source: fx.Graph, inputs: Sequence[Any]) -> Any:
        """Copy a segment's graph into this one; returns its outputs."""
        placeholders = source.find_nodes(op="placeholder")
        copies: dict[fx.Node, fx.Node] = dict(zip(placeholders, inputs, strict=True))
        for node in source.nodes:
            if node.op == "output":
                return fx.map_arg(node.args[0], copies.__getitem__)
            if node not in copies and (self.stores or node.target is not ops.store_buffer):
                copies[node] = self._copy(node, copies)
        raise AssertionError("a graph without output")

    def _copy(self, node: fx.Node, copies: Mapping[fx.Node, fx.Node]) -> fx.Node:
        if node.op == "call_module":
            module = self.root.get_submodule(str(node.target))
            if has_batch_norm(module):
                target = str(node.target)
                layer = self.graph.create_node("get_attr", target, name=legal(f"{target}_layer"))
                args = fx.map_arg(node.args, copies.__getitem__)
                kwargs = fx.map_arg(node.kwargs, copies.__getitem__)
                new = self.graph.create_node(
                    "call_function", stage_ops.call_norm, (layer, *args), kwargs, name=node.name
                )
                new.meta = dict(node.meta)
                return new
        new = self.graph.node_copy(node, copies.__getitem__)
        function = getattr(node.target, "__name__", "")
        if node.name.startswith(function) and hasattr(ops, function):
            new._rename(f"{node.name}_value")  # printed code calls `ops.shape` just `shape`
        return new

    # -- couplings ----------------------------------------------------------------------------

    def branch(self, piece: Piece, b: fx.Node, sides: Sequence[Any]) -> tuple[fx.Node, ...]:
        """F(b) and the extras."""
        assert isinstance(piece.segment, Coupling)
        cast = self.partition.low_precision(piece.segment.streams_in[0])
        if cast is not None:
            b = self.graph.call_method("to", (b, cast))
        results = self.inline(piece.segment.branch, [b, *sides])
        return tuple(results) if piece.segment.extras else (results,)

    def rearrange(self, rearrange: Rearrange, stream: fx.Node) -> tuple[fx.Node, fx.Node]:
        """The stream rearranged, and the shapes that the inverse needs."""
        arranged, shapes = self.inline(
            rearrange.forward, [stream, *map(self.value, rearrange.sides)]
        )
        return arranged, self.call(tuple, list(shapes))

    def value(self, name: str) -> fx.Node:
        return self.values[name]

    def couple(self, piece: Piece) -> fx.Node | None:
        """`(a, b) -> (b, a + F(b))`; returns the shapes for undoing its `rearrange`, if any."""
        segment = piece.segment
        assert isinstance(segment, Coupling) and piece.grid is not None
        a, b = map(self.value, segment.streams_in)
        if piece.opens:
            cast = self.partition.low_precision(segment.streams_in[0])
            is_conv = convolves(segment.branch, self.root)
            entered = self.call(stage_ops.enter_chain, a, b, cast, is_conv, name="entered")
            names = (*segment.streams_in, piece.grid)
            a, b, self.values[piece.grid] = (
                self.item(entered, index, name=name) for index, name in enumerate(names)
            )
        shapes = None
        if segment.rearrange is not None:
            a, shapes = self.rearrange(segment.rearrange, a)
            b, _ = self.rearrange(segment.rearrange, b)
        addend, *extras = self.branch(piece, b, [self.value(side) for side in segment.sides])
        y = self.call(
            stage_ops.plus, a, addend, self.value(piece.grid), name=segment.streams_out[1]
        )
        self.values |= dict(zip(segment.streams_out, (b, y), strict=True))
        self.values |= dict(zip(segment.extras, extras, strict=True))
        return shapes

    def opaque(self, piece: Piece) -> None:
        """An opaque piece; streams are given to it in the model's own precision."""
        segment = piece.segment
        assert not isinstance(segment, Coupling)
        results = self.inline(segment.graph, [self._cast_down(name) for name in segment.inputs])
        self.values |= dict(zip(segment.outputs, results, strict=True))

    def _cast_down(self, name: str) -> fx.Node:
        cast = self.partition.low_precision(name) if name in self.streams else None
        value = self.value(name)
        return value if cast is None else self.graph.call_method("to", (value, cast))

    def compute(self, unit: Unit) -> dict[str, fx.Node]:
        """All pieces of a unit in order; returns what `couple` returned, by piece."""
        shapes = {}
        for piece in unit.pieces:
            self.reseed(unit, piece)
            if piece.reversible:
                shapes_of_piece = self.couple(piece)
                if shapes_of_piece is not None:
                    shapes[piece.name] = shapes_of_piece
            else:
                self.opaque(piece)
        return shapes

    def finish(self, *outputs: Any) -> fx.Graph:
        self.graph.output(outputs)
        for node in reversed(list(self.graph.nodes)):
            if not node.users and (node.op == "get_attr" or node.target in _REMOVABLE):
                self.graph.erase_node(node)
        self.graph.lint()
        return self.graph
