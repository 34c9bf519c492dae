"""Dataflow of a captured graph (ancestors as bit sets, regions), and of the pieces made of it."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
from torch import fx, nn

from revcompile.ir.module_tree import parameters_of
from revcompile.ir.ops import FACTORIES, op_name
from revcompile.ir.random_numbers import draws_random
from revcompile.ir.reached import reached
from revcompile.ir.types import (
    TYPE,
    VALUE,
    Coupling,
    Rewired,
    Segment,
    TensorType,
    types_in,
)

_ADDS: Final = frozenset(
    {operator.add, operator.iadd, torch.add, torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor}
)

_WEIGHTED_FUNCTIONS: Final = frozenset(
    ("linear", "bilinear", "conv1d", "conv2d", "conv3d", "conv_transpose2d", "matmul", "bmm", "mm")
) | {"addmm"}


def tensor_type(node: fx.Node) -> TensorType | None:
    """The node's type if it is a single tensor."""
    kind = node.meta.get(TYPE)
    return kind if isinstance(kind, TensorType) else None


def is_plain(node: fx.Node) -> bool:
    """Whether the value is not a tensor but, for example, a size, a flag or a device."""
    return node.op not in ("placeholder", "output") and not types_in(node.meta.get(TYPE))


def cuts_gradient(node: fx.Node) -> bool:
    """Whether no gradient flows from the node's value back to its inputs."""
    if node.op in ("placeholder", "get_attr", "output"):
        return False
    if not any(kind.differentiable for kind in types_in(node.meta.get(TYPE))):
        return True
    if node.target is getattr:
        return bool(node.args[1] == "data")
    name = op_name(node)
    return node.op != "call_module" and (name in ("detach", "detach_") or name in FACTORIES)


def operands(node: fx.Node) -> tuple[Any, ...]:
    """The operands of a sum or product, given by position or keyword."""
    return *node.args, *(node.kwargs[name] for name in ("input", "other") if name in node.kwargs)


def is_add(node: fx.Node) -> bool:
    """Whether the node is a plain sum of two tensors that have its own shape and type."""
    by_function = node.op == "call_function" and node.target in _ADDS
    by_method = node.op == "call_method" and node.target in ("add", "add_")
    if not (by_function or by_method) or node.kwargs.get("alpha", 1) != 1:
        return False
    kind, given = tensor_type(node), operands(node)
    return kind is not None and all(
        isinstance(arg, fx.Node) and tensor_type(arg) == kind for arg in given
    )


class Flow:
    """Ancestors and regions of one graph, and what may be computed anywhere in it.

    Attributes:
        plain: nodes whose value is not a tensor.
        constant: parameters, and values computed from parameters alone.
        derived: values computed from parameters and from sizes and types that any block can read.
    """

    def __init__(self, graph: fx.Graph, root: nn.Module) -> None:
        self.graph = graph
        self.root = root
        self.nodes: list[fx.Node] = list(graph.nodes)
        self.by_name = {n.name: n for n in self.nodes}
        self.index = {n: i for i, n in enumerate(self.nodes)}
        self.plain = {n for n in self.nodes if is_plain(n)}
        self._ancestors: dict[fx.Node, int] = {}
        self._metadata: dict[fx.Node, int] = {}
        self.constant: set[fx.Node] = set()
        self.derived: set[fx.Node] = set()
        for node in self.nodes:
            mask = 0
            for source in () if node in self.plain else node.all_input_nodes:
                mask |= self._ancestors[source] | (1 << self.index[source])
            self._ancestors[node] = mask
        starts = self._starts()
        for node in self.nodes:
            self._visit(node, starts)

    def _starts(self) -> int:
        """A bit set: the last common ancestor of each sum's operands, where a block may start."""
        with_self = {n: mask | 1 << self.index[n] for n, mask in self._ancestors.items()}
        inputs = sum(with_self[n] for n in self.graph.find_nodes(op="placeholder"))
        fed = sum(1 << self.index[n] for n, mask in with_self.items() if mask & inputs)
        starts = 0
        for node in filter(is_add, self.nodes):
            common = fed
            for source in node.all_input_nodes:
                common &= with_self[source]
            starts |= 1 << common.bit_length() >> 1
        return starts

    def _visit(self, node: fx.Node, starts: int) -> None:
        inputs = node.all_input_nodes
        metadata = 0
        for source in () if node.meta.get(VALUE) is not None else inputs:
            metadata |= self._metadata[source]
            is_inner = self._ancestors[source] & starts and not starts >> self.index[source] & 1
            if node in self.plain and is_inner:
                metadata |= self._ancestors[source]
        self._metadata[node] = metadata
        from_constants = all(i in self.constant for i in inputs)
        is_known = all(i in self.plain or self.recomputable(i) for i in inputs)
        is_call = node.op in ("call_function", "call_method") and bool(inputs)
        is_call = is_call and not draws_random(node)
        if node.op == "get_attr" or (is_call and from_constants):
            self.constant.add(node)
        elif is_call and is_known and node not in self.plain and not metadata:
            self.derived.add(node)

    def recomputable(self, node: fx.Node) -> bool:
        """Whether the value can be recomputed wherever it is needed, from parameters and sizes."""
        return node in self.constant or node in self.derived

    def sources(self, node: fx.Node) -> set[fx.Node]:
        """A recomputable value with everything it is computed from."""

        def sources(of: fx.Node) -> list[fx.Node]:
            return of.all_input_nodes if of is node or of not in self.plain else []

        return {*reached([node], sources)}

    def depends(self, node: fx.Node, on: fx.Node) -> bool:
        """Whether `on` is a tensor ancestor of `node`."""
        return bool(self._ancestors[node] >> self.index[on] & 1)

    def needs(self, node: fx.Node, x: fx.Node) -> bool:
        """Whether the node depends on `x`, or on a type or device that is known only after `x`.

        In T5, for example, the first block makes a bias for all blocks on the device of its scores.
        """
        return self.depends(node, x) or bool(self._metadata[node] >> self.index[x] & 1)

    def latest_common_ancestor(self, a: fx.Node, b: fx.Node) -> fx.Node | None:
        """The last value that both nodes are computed from and that is not recomputable."""
        mask = self._ancestors[a] & self._ancestors[b]
        while mask:
            last = mask.bit_length() - 1
            node = self.nodes[last]
            if node not in self.plain and not self.recomputable(node):
                return node
            mask ^= 1 << last
        return None

    def region(self, x: fx.Node, ends: Iterable[fx.Node]) -> tuple[set[fx.Node], list[fx.Node]]:
        """All nodes needed to compute `ends` from `x`, and the side values they read.

        Recomputable values, sizes of values inside and all items of structured values inside belong
        to the region; everything else that does not depend on `x` is a side value.
        """

        def following(node: fx.Node) -> list[fx.Node]:
            others = [*node.all_input_nodes, *self.items(node)] if self._belongs(node, x) else []
            return [other for other in others if other is not x]

        found = reached([end for end in ends if end is not x], following)
        inside = {node for node in found if self._belongs(node, x)}
        return inside, sorted(found.keys() - inside)

    def _belongs(self, node: fx.Node, x: fx.Node) -> bool:
        """Whether a node belongs to the region after `x`. A size does if all of its inputs do."""
        if node in self.plain and not self.recomputable(node):
            return all(source is x or self._belongs(source, x) for source in node.all_input_nodes)
        return self.recomputable(node) or self.needs(node, x)

    def items(self, node: fx.Node) -> list[fx.Node]:
        """The items of a structured value, which stay with the node that computes it."""
        is_single = tensor_type(node) is not None or node in self.plain
        return [] if is_single or node.op in ("placeholder", "output") else list(node.users)

    def weights(self, nodes: Iterable[fx.Node]) -> int:
        """How many of the nodes multiply by a weight matrix or kernel."""
        return sum(self.is_weighted(n) for n in nodes)

    def is_weighted(self, node: fx.Node) -> bool:
        """Whether the node multiplies by a weight matrix or kernel."""
        if node.op == "call_module":
            return any(p.dim() >= 2 for p in parameters_of(node, self.root))
        return node.op == "call_function" and op_name(node) in _WEIGHTED_FUNCTIONS

    def in_order(self, names: Iterable[str]) -> list[fx.Node]:
        """Nodes by name, in the graph's order."""
        return sorted(self.by_name[name] for name in names)

    def parameter_count(self, node: fx.Node) -> int:
        """How many parameters the node itself reads."""
        return sum(p.numel() for p in parameters_of(node, self.root))

    def users(self, node: fx.Node) -> list[fx.Node]:
        """Users that read the value itself, not only its size."""
        return [u for u in node.users if u not in self.plain]


def live_at_cuts(rewired: Rewired, pieces: Sequence[Segment]) -> list[tuple[str, ...]]:
    """The live values at every cut: entry `i` lists what is alive before piece `i`.

    Streams come first, then grids. The last entry holds the model's results.
    """
    last_use = {name: index for index, piece in enumerate(pieces) for name in piece.inputs}
    last_use |= dict.fromkeys(rewired.body.returned, len(pieces))
    couplings = [piece for piece in pieces if isinstance(piece, Coupling)]
    grids = {piece.grid for piece in couplings}
    streams = {name for piece in couplings for name in (*piece.streams_in, *piece.streams_out)}
    alive: dict[str, None] = dict.fromkeys(rewired.signature.placeholders)
    cuts = [tuple(alive)]
    for index, piece in enumerate(pieces):
        alive |= dict.fromkeys(piece.outputs)
        alive = {name: None for name in alive if last_use.get(name, -1) > index}
        cuts.append(tuple(sorted(alive, key=lambda n: 0 if n in streams else 1 + (n not in grids))))
    return cuts
