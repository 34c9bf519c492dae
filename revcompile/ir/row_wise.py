"""Which part of a branch treats every token by itself, so that it can run for some at a time."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from revcompile.ir.module_tree import called_module
from revcompile.ir.ops import attribute

_OF_ELEMENTS: Final[frozenset[Any]] = frozenset(
    (
        *("add", "div", "float", "mul", "pow", "rsqrt", "sqrt", "square", "sub", "to"),
        *(operator.add, operator.mul, operator.neg, operator.pow, operator.sub, operator.truediv),
        *(torch.add, torch.div, torch.mul, torch.pow, torch.rsqrt, torch.sqrt, torch.square),
        *(torch.sub, torch.sigmoid, torch.tanh, F.silu, F.gelu, F.relu),
    )
)
"""Methods by name, and functions."""
_LAYERS: Final = (nn.Linear, nn.SiLU, nn.GELU, nn.ReLU, nn.Identity)
_NORMS: Final = (nn.LayerNorm, nn.RMSNorm)
_LEADING: Final = slice(None, -1)


class RowWisePart:
    """The steps of a branch that compute a row from the same row of the branch's input.

    A row is what has the same place in all dimensions but the last, or, if there are views, in the
    first ones, which views keep.
    """

    def __init__(self, graph: fx.Graph, root: nn.Module) -> None:
        self.graph, self._root, self.b = graph, root, next(iter(graph.nodes))
        self._rank: dict[fx.Node, int] = {self.b: 0}
        """Of `b` and of each step: 0 if it is that of `b`, else as a view says."""
        self.row_dims: int | None = None
        """How many dimensions all views keep; None if there is no view."""
        for node in graph.nodes:
            if self.b.op == "placeholder" and self._is_step(node):
                self._rank[node] = self._rank_of(node)
            elif self._reads_leading_sizes(node):
                node.args = self.b, "shape"  # the same, whether of all rows or of a chunk

    @property
    def steps(self) -> list[fx.Node]:
        return list(self._rank)[1:]

    def _is_step(self, node: fx.Node) -> bool:
        sources = [source for source in node.all_input_nodes if source in self._rank]
        if not sources:
            return False
        if node.op == "call_module":
            layer: Any = called_module(node, self._root)
            is_norm = type(layer) in _NORMS and len(layer.normalized_shape) == 1
            is_known = (is_norm or type(layer) in _LAYERS) and "forward" not in vars(layer)
            return is_known and len(node.args) == 1 and not node.kwargs
        if node.op not in ("call_method", "call_function"):
            return False
        if node.target in ("view", "reshape"):
            return self._kept_dims(node) > 0
        if node.target in ("mean", torch.mean):
            settings = (*node.args[1:], *node.kwargs.values())
            return settings in ((-1, True), ((-1,), True), ([-1], True))
        is_same_rank = len({self._rank[source] for source in sources}) == 1
        others = [source for source in node.all_input_nodes if source not in self._rank]
        return node.target in _OF_ELEMENTS and is_same_rank and all(map(self._is_given, others))

    def _is_given(self, node: fx.Node) -> bool:
        """Is it a vector of the module tree, or the dtype of a step?"""
        if node.op == "get_attr":
            value = attribute(self._root, str(node.target))
            return isinstance(value, Tensor) and bool(value.ndim <= 1)
        return (
            node.target is getattr and node.args[0] in self._rank and str(node.args[1]) == "dtype"
        )

    def _rank_of(self, node: fx.Node) -> int:
        if node.target not in ("view", "reshape"):
            return max(self._rank.get(source, 0) for source in node.all_input_nodes)
        kept = self._kept_dims(node)
        self.row_dims = min(kept, self.row_dims or kept)
        return len(_sizes(node))

    def _kept_dims(self, view: fx.Node) -> int:
        """How many leading dimensions are those of `b`, if numbers follow; else 0."""
        sizes = _sizes(view)
        kept = 0
        while kept < len(sizes) and self._is_leading_size(sizes[kept], kept):
            kept += 1
        is_whole = len(sizes) > kept and all(isinstance(size, int) for size in sizes[kept:])
        return kept if is_whole else 0

    def _is_leading_size(self, size: Any, dim: int) -> bool:
        if not isinstance(size, fx.Node) or size.target is not operator.getitem:
            return False
        leading: Any = size.args[0]
        shape = leading.args[0] if _is_leading(leading) else None
        is_of_b = isinstance(shape, fx.Node) and shape.args == (self.b, "shape")
        return is_of_b and isinstance(size.args[1], int) and size.args[1] == dim

    def _reads_leading_sizes(self, node: fx.Node) -> bool:
        if node.target is not getattr or node.args[1] != "shape":
            return False
        source: Any = node.args[0]
        return self._rank.get(source) == 0 and all(map(_is_leading, node.users))

    def results(self) -> list[fx.Node]:
        """Those steps that the rest of the graph reads."""
        return [s for s in self.steps if not all(map(self._is_inside, s.users))]

    def _is_inside(self, node: fx.Node) -> bool:
        is_read = node.target is getattr and all(map(self._is_inside, node.users))
        return node in self._rank or is_read

    def as_graph(self, results: Sequence[fx.Node]) -> fx.Graph:
        """The steps as a graph of their own, a function of `b`."""
        inner = fx.Graph()
        known = {self.b: inner.placeholder("b")}

        def copied(node: fx.Node) -> fx.Node:
            if node not in known:
                known[node] = inner.node_copy(node, copied)
            return known[node]

        inner.output(tuple(map(copied, results)))
        return inner

    def replace(self, results: Sequence[fx.Node], function: Callable[..., Any]) -> None:
        with self.graph.inserting_before(self.steps[0]):
            call = self.graph.call_function(function, (self.b,))
            for i, result in enumerate(results):
                value = self.graph.call_function(operator.getitem, (call, i))
                value.meta = dict(result.meta)
                result.replace_all_uses_with(value)
        for node in reversed(list(self.graph.nodes)):
            is_left = node.op == "get_attr" or node.target is getattr or node in self.steps
            if is_left and not node.users:
                self.graph.erase_node(node)


def _sizes(view: fx.Node) -> Sequence[Any]:
    given = view.args[1:]
    return given[0] if len(given) == 1 and isinstance(given[0], (tuple, list)) else given


def _is_leading(node: Any) -> bool:
    """Is it `shape[:-1]`?"""
    return (
        isinstance(node, fx.Node) and node.target is operator.getitem and node.args[1] == _LEADING
    )
