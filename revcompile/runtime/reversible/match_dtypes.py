"""Programs whose type-strict operations get tensors of one type under autocast.

Residual streams are float32 where the original model's may be in low precision. Most operations
take both; `index_add`, `scatter` and their like demand one type of the tensor and of what is
written into it. There the second is given the type of the first. Where they agree nothing happens.
"""

from __future__ import annotations

from typing import Any, Final

from torch import fx

from revcompile.ir.ops import matching

__all__ = ["matched"]

_SOURCES: Final = {
    "index_add": (3, "source"),
    "index_copy": (3, "source"),
    "index_put": (2, "values"),
    "index_reduce": (3, "source"),
    "masked_scatter": (2, "source"),
    "scatter": (3, "src"),
    "scatter_add": (3, "src"),
    "scatter_reduce": (3, "src"),
}
"""Where a strict operation has the tensor that must be of the type of its first."""


def matched(graph: fx.Graph) -> fx.Graph:
    """A copy of a program with those operations changed; the program itself if it has none."""
    if not any(_name(node) in _SOURCES for node in graph.nodes):
        return graph
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    for node in list(copy.nodes):
        if _name(node) in _SOURCES:
            _match(node)
    return copy


def _name(node: fx.Node) -> str:
    if node.op == "call_method":
        return str(node.target).removesuffix("_")
    target: Any = node.target
    name = str(getattr(target, "__name__", "")) if node.op == "call_function" else ""
    return name.partition(".")[0].removesuffix("_")


def _match(node: fx.Node) -> None:
    place, keyword = _SOURCES[_name(node)]
    arguments: list[Any] = list(node.args)
    first = arguments[0] if arguments else node.kwargs.get("input")
    source = arguments[place] if len(arguments) > place else node.kwargs.get(keyword)
    if not isinstance(first, fx.Node) or not isinstance(source, fx.Node):
        return
    with node.graph.inserting_before(node):
        same = node.graph.call_function(matching, (source, first))
    if len(arguments) > place:
        arguments[place] = same
        node.args = tuple(arguments)
    else:
        node.kwargs = {**node.kwargs, keyword: same}
