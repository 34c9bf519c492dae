"""One graph for train and eval mode.

Where the two traces have the same shape and differ in constants only (a dropout probability,
`training=`), the constants become `select(self.training, train, eval)`. Where they differ in
structure (auxiliary heads) both graphs are kept.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from revcompile.ir import PATH, SOURCE, TYPE
from revcompile.ops import select

__all__ = ["first_difference", "merge_modes"]


def merge_modes(train: fx.Graph, evaluation: fx.Graph) -> fx.Graph | None:
    """A graph that serves both modes, or None if their structures differ."""
    train_nodes, eval_nodes = list(train.nodes), list(evaluation.nodes)
    if len(train_nodes) != len(eval_nodes):
        return None
    position = {n: i for i, n in enumerate(train_nodes)}
    other_position = {n: i for i, n in enumerate(eval_nodes)}
    differing: dict[fx.Node, fx.Node] = {}
    for a, b in zip(train_nodes, eval_nodes, strict=True):
        if a.op != b.op or a.target != b.target or a.kwargs.keys() != b.kwargs.keys():
            return None
        left = _numbered(a, position)
        right = _numbered(b, other_position)
        if left == right:
            continue
        if not _same_inputs(left, right):
            return None
        differing[a] = b
    merged = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in train_nodes:
        copies[node] = merged.node_copy(node, copies.__getitem__)
        if node in differing:
            _select_constants(merged, copies[node], differing[node])
    return merged


def first_difference(train: fx.Graph, evaluation: fx.Graph) -> tuple[fx.Node, ...]:
    """The first pair of nodes in which two traces part."""
    for a, b in zip(train.nodes, evaluation.nodes, strict=False):
        if a.op != b.op or a.target != b.target:
            return (a, b)
    return ()


def _numbered(node: fx.Node, position: dict[fx.Node, int]) -> Any:
    return fx.node.map_arg((node.args, node.kwargs), lambda n: _Input(position[n]))  # type: ignore[arg-type, return-value]


class _Input(int):
    """A reference to the n-th node, distinct from the constant n."""

    def __eq__(self, other: object) -> bool:
        return type(other) is _Input and int(self) == int(other)

    def __hash__(self) -> int:
        return int(self)


def _same_inputs(left: Any, right: Any) -> bool:
    """Equal but for plain constants."""
    if isinstance(left, _Input) or isinstance(right, _Input):
        return bool(left == right)
    if type(left) is type(right) and isinstance(left, (tuple, list)):
        return len(left) == len(right) and all(map(_same_inputs, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_same_inputs(left[k], right[k]) for k in left)
    return True


def _select_constants(graph: fx.Graph, node: fx.Node, other: fx.Node) -> None:
    def mixed(train: Any, evaluation: Any) -> Any:
        if isinstance(train, fx.Node) or (type(train) is type(evaluation) and train == evaluation):
            return train
        if isinstance(train, (tuple, list)) and isinstance(evaluation, (tuple, list)):
            return type(train)(map(mixed, train, evaluation))
        with graph.inserting_before(node):
            flag = graph.create_node("get_attr", "training")
            chosen = graph.call_function(select, (flag, train, evaluation))
        for made in (flag, chosen):
            made.meta.update({TYPE: None, PATH: node.meta.get(PATH), SOURCE: node.meta.get(SOURCE)})
        return chosen

    args = tuple(map(mixed, node.args, other.args))
    kwargs = {k: mixed(node.kwargs[k], other.kwargs[k]) for k in node.kwargs}
    node.args, node.kwargs = args, kwargs

