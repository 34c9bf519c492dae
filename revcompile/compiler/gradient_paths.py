"""Which parameters that are trained have a gradient path to a value.

A path goes through every node that computes floating-point or complex numbers from others (through
tuples, dicts and leaf modules too); it ends at `detach`, integers and sizes. A set of parameters is
an integer with one bit for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import fx, nn

from revcompile.compiler.dataflow import cuts_gradient
from revcompile.ir.module_tree import called_module, has_batch_norm, parameters_of
from revcompile.ir.program import Partition
from revcompile.ir.types import Coupling, Live, Rewired, Segment, TensorType


def trained_parameters(rewired: Rewired) -> list[str]:
    """Parameters with `requires_grad` that have a gradient path to the results.

    From one segment to the next only live values of a differentiable type carry a path, since only
    those have a gradient when the model runs.
    """
    paths, body = _Paths(rewired.root), rewired.body
    masks: dict[str, int] = {}
    for segment in body.segments:
        for name, mask in zip(segment.outputs, paths.through(segment, masks), strict=True):
            kind = body.types.get(name)
            masks[name] = mask if isinstance(kind, TensorType) and kind.differentiable else 0
    reached = _union(masks.get(leaf.name, 0) for leaf in body.result if isinstance(leaf, Live))
    bits = ((name, paths.bits.get(id(p), 0)) for name, p in rewired.root.named_parameters())
    return [name for name, bit in bits if bit & reached]


def frozen_values(partition: Partition) -> frozenset[str]:
    """Live values that no parameter with `requires_grad` is a source of.

    Behind a batch norm there is none: its statistics move in the backward pass.
    """
    root = partition.rewired.root
    paths, masks = _Paths(root), dict[str, int]()
    for piece in (piece for part in partition.parts for piece in part.pieces):
        outputs = paths.through(piece, masks)
        called = (called_module(node, root) for node in piece.graph.nodes)
        if any(module is not None and has_batch_norm(module) for module in called):
            outputs = [-1] * len(outputs)
        names = piece.results if isinstance(piece, Coupling) else piece.outputs
        masks |= dict(zip(names, outputs, strict=True))
    return frozenset(name for name, mask in masks.items() if not mask)


class _Paths:
    """The trained parameters of a model, and how they spread."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self.bits = {id(p): 1 << i for i, p in enumerate(root.parameters()) if p.requires_grad}

    def through(self, segment: Segment, masks: Mapping[str, int]) -> list[int]:
        """The sources of a segment's outputs; a rearrangement changes none."""
        if not isinstance(segment, Coupling):
            return self._propagated(segment.graph, [masks.get(n, 0) for n in segment.inputs])
        a, b, *sides = (masks.get(name, 0) for name in (*segment.streams_in, *segment.sides))
        addend, *extras = self._propagated(segment.branch, [b, *sides])
        return [b, a | addend, *extras]

    def _propagated(self, graph: fx.Graph, given: Sequence[int]) -> list[int]:
        """The sources of each output of a graph, given the sources of its inputs."""
        masks: dict[fx.Node, int] = {}
        inputs = iter(given)
        for node in graph.nodes:
            if node.op == "placeholder":
                masks[node] = next(inputs)
            elif node.op == "output":
                result = node.args[0]
                leaves = result if isinstance(result, (tuple, list)) else (result,)
                return [masks[leaf] if isinstance(leaf, fx.Node) else 0 for leaf in leaves]
            elif cuts_gradient(node):
                masks[node] = 0
            else:
                own = _union(self.bits.get(id(p), 0) for p in parameters_of(node, self._root))
                masks[node] = own | _union(masks[source] for source in node.all_input_nodes)
        raise AssertionError("a graph without output")


def _union(masks: Iterable[int]) -> int:
    union = 0
    for mask in masks:
        union |= mask
    return union
