"""A raw trace made comparable and complete: no dead code, and `no_grad` said in the graph."""

from __future__ import annotations

from typing import Final

from torch import fx

from revcompile.compiler.capture.memory import WRITES
from revcompile.compiler.capture.side_effects import eliminate_dead_code, is_effect
from revcompile.ir.types import TYPE, TensorType

__all__ = ["NO_GRAD", "detach_no_grad", "tidy"]

NO_GRAD: Final = "revcompile_no_grad"
"""`node.meta` key: was the node made where gradients are off?"""


def tidy(graph: fx.Graph) -> None:
    """Drop what was only looked at, and fetch attributes where they are first needed.

    Two modes that compute the same then have the same graph, whatever they asked on the way.
    """
    eliminate_dead_code(graph)
    placed: set[fx.Node] = set()
    for user in list(graph.nodes):
        for source in user.all_input_nodes:
            if source.op == "get_attr" and source not in placed:
                placed.add(source)
                user.prepend(source)


def detach_no_grad(graph: fx.Graph) -> None:
    """Values made under `no_grad` pass no gradient: say so in the graph."""
    for node in list(graph.nodes):
        if not node.meta.get(NO_GRAD):
            continue
        if is_effect(node):
            for source in node.all_input_nodes:
                if source is not node.args[0] and isinstance(source.meta[TYPE], TensorType):
                    _detach(graph, source, node, [node])
        outside = [u for u in node.users if not u.meta.get(NO_GRAD)]
        if outside and node.op != "get_attr" and isinstance(node.meta[TYPE], TensorType):
            _detach(graph, node, node.next, outside)


def _detach(graph: fx.Graph, node: fx.Node, before: fx.Node, users: list[fx.Node]) -> None:
    with graph.inserting_before(before):
        detached = graph.call_method("detach", (node,))
    detached.meta.update(node.meta)
    detached.meta[WRITES] = frozenset()
    for user in users:
        user.replace_input_with(node, detached)
