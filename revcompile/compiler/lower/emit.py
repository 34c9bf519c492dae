"""Writing a stage's pieces into a graph: what forward, backward and inverse have in common."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from revcompile.compiler.lower.units import Group
from revcompile.ir import ops, stage_ops
from revcompile.ir.module_tree import convolves
from revcompile.ir.program import Partition, Piece
from revcompile.ir.types import TYPE, Coupling, Rearrange, TensorType
from revcompile.kernels.autocast import LOW_PRECISION

__all__ = ["Emitter", "legal"]


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
"""What may go if nobody reads its result."""


def legal(name: str) -> str:
    """A live value's name as Python can spell it."""
    return "".join(c if c.isalnum() or c == "_" else "_" for c in name)


class Emitter:
    """A graph in the making, and where in it each live value is."""

    def __init__(self, partition: Partition) -> None:
        self.partition = partition
        self.root: nn.Module = partition.rewired.root
        self.graph = fx.Graph()
        self.key = self.graph.placeholder("key")
        self.values: dict[str, fx.Node] = {}
        self.stores = True
        """Are buffers written? Once a micro-batch: in forward, not where it is computed again."""
        self.places = {
            id(piece): place for part in partition.parts for place, piece in enumerate(part.pieces)
        }
        self.streams = {
            name
            for part in partition.parts
            for piece in part.pieces
            if isinstance(piece.segment, Coupling)
            for name in piece.segment.streams_out
        }

    def placeholder(self, name: str, like: str | None = None) -> fx.Node:
        """An input of the program, after those already there."""
        nodes = [n for n in self.graph.nodes if n.op == "placeholder"]
        with self.graph.inserting_after(nodes[-1]):
            node = self.graph.placeholder(legal(name))
        node.target = node.name  # a parameter of another name could be overwritten by a variable
        node.meta[TYPE] = self.partition.types.get(like or name)
        return node

    def call(self, function: Callable[..., Any], *args: Any, name: str | None = None) -> fx.Node:
        """Append a call; `name` is what its result is called in the code."""
        hint = legal(name) if name else None
        return self.graph.create_node("call_function", function, args, name=hint)

    def reseed(self, group: Group, piece: Piece) -> None:
        """Random numbers depend on the piece's place in its stage, not on how it is grouped."""
        if piece.name in group.random:
            self.call(stage_ops.reseed, self.key, self.places[id(piece)], name="_")

    def record(self, on: bool) -> None:
        """From here on autograd records, or does not."""
        self.call(stage_ops.recording, on, name="_")

    def leaf(self, name: str, value: fx.Node) -> fx.Node:
        """A value as the beginning of a graph."""
        return self.call(stage_ops.leaf, value, name=f"{name}_leaf")

    def item(self, values: fx.Node, index: int, name: str | None = None) -> fx.Node:
        """One of several results."""
        return self.call(operator.getitem, values, index, name=name)

    def type(self, name: str) -> TensorType | None:
        """The type of a live value that is a tensor."""
        found = self.partition.types.get(name)
        return found if isinstance(found, TensorType) else None

    def graded(self, name: str) -> bool:
        """Does a live value have a gradient? Data, sizes and integers have none."""
        kind = self.type(name)
        is_data = name in self.partition.rewired.signature.placeholders
        return kind is not None and kind.differentiable and not is_data

    def inline(self, source: fx.Graph, inputs: Sequence[Any]) -> Any:
        """Copy a segment's graph; batch norms move their statistics only while recording."""
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
            if any(isinstance(inner, _BatchNorm) for inner in module.modules()):
                target = str(node.target)
                layer = self.graph.create_node("get_attr", target, name=legal(f"{target}_layer"))
                args = fx.map_arg(node.args, copies.__getitem__)
                kwargs = fx.map_arg(node.kwargs, copies.__getitem__)
                new = self.graph.create_node(
                    "call_function", stage_ops.normalised, (layer, *args), kwargs, name=node.name
                )
                new.meta = dict(node.meta)
                return new
        new = self.graph.node_copy(node, copies.__getitem__)
        function = getattr(node.target, "__name__", "")
        if node.name.startswith(function) and hasattr(ops, function):
            new._rename(f"{node.name}_value")  # shown code leaves out where functions come from
        return new

    # -- couplings ----------------------------------------------------------------------------

    def cast(self, piece: Piece) -> torch.dtype | None:
        """What a branch is given where the model itself computes in low precision."""
        assert isinstance(piece.segment, Coupling)
        kind = self.type(piece.segment.streams_in[0])
        return kind.dtype if kind is not None and kind.dtype in LOW_PRECISION else None

    def branch(self, piece: Piece, b: fx.Node, sides: Sequence[Any]) -> tuple[fx.Node, ...]:
        """F(b) and the extras."""
        assert isinstance(piece.segment, Coupling)
        cast = self.cast(piece)
        if cast is not None:
            b = self.graph.call_method("to", (b, cast))
        found = self.inline(piece.segment.branch, [b, *sides])
        return tuple(found) if piece.segment.extras else (found,)

    def rearrange(self, rearrange: Rearrange, stream: fx.Node) -> tuple[fx.Node, fx.Node]:
        """The stream rearranged, and the shapes that lead back."""
        arranged, shapes = self.inline(
            rearrange.forward, [stream, *map(self.value, rearrange.sides)]
        )
        return arranged, self.call(tuple, list(shapes))

    def value(self, name: str) -> fx.Node:
        """A live value that is known by now."""
        return self.values[name]

    def couple(self, piece: Piece) -> fx.Node | None:
        """`(a, b) -> (b, a + F(b))`; returns the shapes of its rearrange, if it has one."""
        segment = piece.segment
        assert isinstance(segment, Coupling) and piece.grid is not None
        a, b = map(self.value, segment.streams_in)
        if piece.opens:
            cast, is_conv = self.cast(piece), convolves(segment.branch, self.root)
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
        found = self.inline(segment.graph, [self._narrow(name) for name in segment.inputs])
        self.values |= dict(zip(segment.outputs, found, strict=True))

    def _narrow(self, name: str) -> fx.Node:
        kind = self.type(name)
        if name in self.streams and kind is not None and kind.dtype in LOW_PRECISION:
            return self.graph.call_method("to", (self.value(name), kind.dtype))
        return self.value(name)

    def compute(self, group: Group) -> dict[str, fx.Node]:
        """All pieces of a unit in order; returns the shapes of rearrangements, by piece."""
        shapes = {}
        for piece in group.pieces:
            self.reseed(group, piece)
            if piece.reversible:
                found = self.couple(piece)
                if found is not None:
                    shapes[piece.name] = found
            else:
                self.opaque(piece)
        return shapes

    def finish(self, *outputs: Any) -> fx.Graph:
        """Close the graph."""
        self.graph.output(outputs)
        for node in reversed(list(self.graph.nodes)):
            if not node.users and (node.op == "get_attr" or node.target in _REMOVABLE):
                self.graph.erase_node(node)
        self.graph.lint()
        return self.graph
