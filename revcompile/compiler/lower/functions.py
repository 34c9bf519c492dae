"""The functions that a stage's code calls: branches, opaque pieces, and rearrangements."""

from __future__ import annotations

import keyword
from collections.abc import Mapping
from typing import Literal

import torch
from torch import fx, nn

from revcompile.compiler.lower.code import GRADS, hints
from revcompile.ir import coupling_ops, ops
from revcompile.ir.module_tree import has_batch_norm
from revcompile.ir.program import GraphFunction, Part, Partition, legal
from revcompile.ir.types import Coupling, Segment


class Functions:
    """Makes each function of a stage once. No variable may have one of the `names`."""

    def __init__(self, partition: Partition, part: Part) -> None:
        self.partition = partition
        self.places = {id(piece): place for place, piece in enumerate(part.pieces)}
        programs = ("forward", "inverse", "backward")
        self.names = {*coupling_ops.HELPERS, *programs, "self", "torch", GRADS}
        self._hints = hints(partition)
        self._made: dict[tuple[int, str], GraphFunction] = {}

    @property
    def made(self) -> tuple[GraphFunction, ...]:
        """All of them, in the order of the stage's pieces."""
        return tuple(sorted(self._made.values(), key=lambda f: self.places[id(f.segment)]))

    def name(self, wanted: str) -> str:
        """A name for a function that nothing else has."""
        name = legal(wanted)
        while name in self.names or keyword.iskeyword(name):
            name += "_"
        self.names.add(name)
        return name

    def of_piece(self, piece: Segment, *, again: bool = False) -> GraphFunction:
        """F of a coupling, or an opaque piece; `again`: without the buffers it writes."""
        role: Literal["again", "run"] = "again" if again and writes_buffers(piece) else "run"
        if (id(piece), role) not in self._made:
            root = self.partition.rewired.root
            name = self.name(piece.name if role == "run" else f"{piece.name}_again")
            inputs = ("x", *piece.sides) if isinstance(piece, Coupling) else piece.inputs
            arguments = tuple(legal(self._hints.get(given, given)) for given in inputs)
            graph = _prepared(piece.graph, root, self._casts(piece), stores=role == "run")
            self._made[id(piece), role] = GraphFunction(name, piece, role, graph, arguments)
        return self._made[id(piece), role]

    def _casts(self, piece: Segment) -> dict[int, torch.dtype]:
        """Streams are float32 at least, and are given to the model's code in its own precision."""
        if isinstance(piece, Coupling):
            streams = [piece.streams_in[0]]
        else:
            of_couplings = self.partition.stream_outputs
            streams = [name if name in of_couplings else "" for name in piece.inputs]
        dtypes = enumerate(map(self.partition.low_precision, streams))
        return {place: dtype for place, dtype in dtypes if dtype is not None}

    def rearrangement(self, piece: Segment, *, back: bool) -> GraphFunction:
        """Rearranges a stream for a coupling, and gives shapes; `back`: undoes it, given those."""
        role: Literal["restore", "arrange"] = "restore" if back else "arrange"
        if (id(piece), role) not in self._made:
            assert isinstance(piece, Coupling) and piece.rearrange is not None
            graph = piece.rearrange.inverse if back else piece.rearrange.forward
            name = self.name(f"{piece.name}_{role}")
            self._made[id(piece), role] = GraphFunction(name, piece, role, graph, ())
        return self._made[id(piece), role]


def writes_buffers(piece: Segment) -> bool:
    """Does a piece write buffers? Backward, which computes it again, must not."""
    return bool(piece.graph.find_nodes(op="call_function", target=ops.store_buffer))


def _prepared(
    graph: fx.Graph, root: nn.Module, casts: Mapping[int, torch.dtype], stores: bool
) -> fx.Graph:
    """The graph with inputs cast, and with batch norms called by `call_norm`."""
    prepared = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for place, node in enumerate(graph.find_nodes(op="placeholder")):
        copies[node] = prepared.node_copy(node)
        if place in casts:
            copies[node] = prepared.call_method("to", (copies[node], casts[place]))
    for node in graph.nodes:
        if node in copies or (node.target is ops.store_buffer and not stores):
            continue
        if node.op == "call_module" and has_batch_norm(root.get_submodule(str(node.target))):
            copies[node] = _norm_call(prepared, node, copies)
        else:
            copies[node] = prepared.node_copy(node, copies.__getitem__)
    return prepared


def _norm_call(graph: fx.Graph, node: fx.Node, copies: Mapping[fx.Node, fx.Node]) -> fx.Node:
    target = str(node.target)
    layer = graph.create_node("get_attr", target, name=legal(f"{target}_layer"))
    args, kwargs = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
    called = graph.create_node(
        "call_function", coupling_ops.call_norm, (layer, *args), kwargs, name=node.name
    )
    called.meta = dict(node.meta)
    return called
