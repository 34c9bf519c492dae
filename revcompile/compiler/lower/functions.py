"""The functions that a stage's code calls: branches, opaque pieces, and rearrangements."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx, nn

from revcompile.ir import coupling_ops, ops
from revcompile.ir.module_tree import has_batch_norm
from revcompile.ir.program import Partition, legal
from revcompile.ir.stage_code import FunctionRole, GraphFunction
from revcompile.ir.types import Coupling, Segment


class Functions:
    """Makes each function of a stage once."""

    def __init__(self, partition: Partition) -> None:
        self.partition = partition
        self._made: dict[tuple[int, str], GraphFunction] = {}

    def of_piece(self, piece: Segment, *, again: bool = False) -> GraphFunction:
        """F of a coupling, or an opaque piece; `again`: without the buffers it writes."""
        role: FunctionRole = "again" if again and writes_buffers(piece) else "run"
        if (id(piece), role) not in self._made:
            root = self.partition.rewired.root
            arguments = piece.inputs
            if isinstance(piece, Coupling):
                arguments = ("x", *piece.sides)
            graph = _prepared(piece.graph, root, self._casts(piece), stores=role == "run")
            self._made[id(piece), role] = GraphFunction(piece, role, graph, arguments)
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
        role: FunctionRole = "restore" if back else "arrange"
        if (id(piece), role) not in self._made:
            assert isinstance(piece, Coupling) and piece.rearrange is not None
            graph = piece.rearrange.inverse if back else piece.rearrange.forward
            self._made[id(piece), role] = GraphFunction(piece, role, graph, ())
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
