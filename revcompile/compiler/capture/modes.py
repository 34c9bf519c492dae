"""One graph for train and eval mode.

Where the two traces have the same structure and differ in constants only (a dropout probability,
`training=`), the constants become `select(block.training, train, eval)`, with the flag of the
module whose forward made the node. If they differ in structure (auxiliary heads), two graphs stay.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import fx

from revcompile.ir.module_tree import child_path
from revcompile.ir.ops import select
from revcompile.ir.types import PATH, SOURCE, TYPE


def merge_modes(
    train: fx.Graph, evaluation: fx.Graph, readers: Collection[str] = ("",)
) -> fx.Graph | None:
    """A graph that serves both modes, or None if their structures differ.

    `readers` are the paths of the modules whose `training` was read while tracing.
    """
    if first_difference(train, evaluation):
        return None
    merged = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node, other in zip(train.nodes, evaluation.nodes, strict=True):
        copies[node] = merged.node_copy(node, copies.__getitem__)
        _select_constants(merged, copies[node], other, readers)
    return merged


def first_difference(train: fx.Graph, evaluation: fx.Graph) -> tuple[fx.Node, ...]:
    """The first pair of nodes in which the structures of two traces differ, or nothing."""
    twins: dict[fx.Node, fx.Node] = {}
    for a, b in zip(train.nodes, evaluation.nodes, strict=False):
        if a.op != b.op or a.target != b.target or not _same_inputs(a, b, twins):
            return a, b
        twins[a] = b
    return ()


def _same_inputs(a: fx.Node, b: fx.Node, twins: Mapping[fx.Node, fx.Node]) -> bool:
    """Whether the arguments of two nodes are equal, apart from plain constants."""
    (left_form, left), (right_form, right) = _flatten(a), _flatten(b)
    if left_form != right_form:
        return False
    return all(
        twins[x] is y if isinstance(x, fx.Node) else not isinstance(y, fx.Node)
        for x, y in zip(left, right, strict=True)
    )


def _flatten(node: fx.Node) -> tuple[Any, list[Any]]:
    """The nesting of a node's arguments, and its leaves."""
    ends: list[Any] = []

    def take(end: Any) -> None:
        ends.append(end)

    form = fx.node.map_aggregate(_arguments(node), take)
    return form, ends


def _arguments(node: fx.Node) -> Any:
    return node.args, dict(sorted(node.kwargs.items()))


def _owner(path: str, readers: Collection[str]) -> str:
    """The module whose flag decided: the node's own, or the nearest enclosing one that read its."""
    while path and path not in readers:
        path = path.rpartition(".")[0]
    return path


def flags_selected(graph: fx.Graph) -> set[str]:
    """Paths of the modules whose `training` flag the graph reads when it runs."""
    targets = (str(node.target) for node in graph.find_nodes(op="get_attr"))
    return {t.rpartition(".")[0] for t in targets if t.rpartition(".")[2] == "training"}


def _select_constants(
    graph: fx.Graph, node: fx.Node, other: fx.Node, readers: Collection[str]
) -> None:
    """Where `other` has another constant than `node`, choose between them at run time."""
    others = iter(_flatten(other)[1])

    def selected(train: Any) -> Any:
        evaluation = next(others)
        is_same = type(train) is type(evaluation) and train == evaluation
        if isinstance(train, fx.Node) or is_same:
            return train
        with graph.inserting_before(node):
            owner = _owner(node.meta.get(PATH) or "", readers)
            flag = graph.create_node("get_attr", child_path(owner, "training"))
            chosen = graph.call_function(select, (flag, train, evaluation))
        for made in (flag, chosen):
            made.meta.update({TYPE: None, PATH: node.meta.get(PATH), SOURCE: node.meta.get(SOURCE)})
        return chosen

    args, kwargs = fx.node.map_aggregate(_arguments(node), selected)
    node.args, node.kwargs = args, kwargs
