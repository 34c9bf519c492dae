"""Gradient paths: which parameters are trained, and which live values depend on none of them.

A path goes through every node that computes floating-point or complex numbers from others (through
tuples, dicts and leaf modules too); it ends at `detach`, integers and sizes.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, Final

import networkx as nx
from torch import fx, nn

from revcompile.compiler.dataflow import cuts_gradient
from revcompile.ir.module_tree import called_module, has_batch_norm, parameters_of
from revcompile.ir.program import Partition
from revcompile.ir.types import Coupling, Rewired, Segment, TensorType

_ENDS: Final = object()
"""A node of the path graph: all results or, in `frozen_values`, everything that is trained."""


def trained_parameters(rewired: Rewired) -> list[str]:
    """Parameters with `requires_grad` that have a gradient path to the results.

    From one segment to the next only live values of a differentiable type carry a path, since only
    those have a gradient when the model runs.
    """
    body, graph = rewired.body, _paths(rewired.body.segments, rewired.root)
    kinds = body.types.items()
    is_tensor = {name for name, t in kinds if isinstance(t, TensorType) and t.differentiable}
    graph.remove_nodes_from([name for name, _ in kinds if name not in is_tensor])
    graph.add_edges_from((name, _ENDS) for name in body.returned if name in is_tensor)
    reached = nx.ancestors(graph, _ENDS) if _ENDS in graph else set()
    named = rewired.root.named_parameters()
    return [name for name, p in named if p.requires_grad and id(p) in reached]


def frozen_values(partition: Partition) -> frozenset[str]:
    """Live values that are computed without any parameter that has `requires_grad`.

    Values computed from a batch norm are not frozen: its statistics move in the backward pass.
    """
    root, pieces = partition.rewired.root, [p for part in partition.parts for p in part.pieces]
    graph = _paths(pieces, root)
    graph.add_edges_from((_ENDS, id(p)) for p in root.parameters() if p.requires_grad)
    for node in (node for piece in pieces for node in piece.graph.nodes):
        module = called_module(node, root)
        if module is not None and has_batch_norm(module):
            graph.add_edge(_ENDS, node)
    moving = nx.descendants(graph, _ENDS) if _ENDS in graph else set()
    made = (p.results if isinstance(p, Coupling) else p.outputs for p in pieces)
    return frozenset(name for names in made for name in names if name not in moving)


def _paths(segments: Iterable[Segment], root: nn.Module) -> nx.DiGraph[Hashable]:
    """Paths from parameters (by id) and live values (by name), through nodes, to live values."""
    graph: nx.DiGraph[Hashable] = nx.DiGraph()
    for segment in segments:
        inputs, outputs = segment.inputs, segment.outputs
        if isinstance(segment, Coupling):  # a rearrangement changes no path
            (a, b), (before, after) = segment.streams_in, segment.streams_out
            inputs, outputs = (b, *segment.sides), (after, *segment.extras)
            graph.add_edges_from([(b, before), (a, after)])
            if segment.averaged:
                graph.add_edge(b, after)
        graph.add_edges_from(zip(inputs, segment.graph.find_nodes(op="placeholder"), strict=True))
        for node in (node for node in segment.graph.nodes if not cuts_gradient(node)):
            sources = [*node.all_input_nodes, *map(id, parameters_of(node, root))]
            graph.add_edges_from((source, node) for source in sources if node.op != "output")
        result: Any = segment.graph.output_node().args[0]
        leaves = result if isinstance(result, tuple | list) else (result,)
        pairs = zip(leaves, outputs, strict=True)
        graph.add_edges_from(pair for pair in pairs if isinstance(pair[0], fx.Node))
    return graph
