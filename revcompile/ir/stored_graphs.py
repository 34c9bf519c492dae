"""Graphs as rows of plain values, which pickle can store.

torch pickles a graph node by node, each inside the one before: long graphs exceed the recursion
limit. Some functions (`F.max_pool2d`, operators of `torch.ops`) are not found by the name under
which pickle stores them.
"""

from __future__ import annotations

import functools
import importlib
import sys
from typing import Any, NamedTuple

import torch
from torch import fx


class StoresGraphs:
    """A class whose instances hold graphs as attributes, and can be pickled."""

    def __getstate__(self) -> dict[str, Any]:
        own = vars(self).items()
        return {n: _rows(value) if isinstance(value, fx.Graph) else value for n, value in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        given = state.items()
        vars(self).update({n: _graph(v) if isinstance(v, _Rows) else v for n, v in given})


class _Rows(NamedTuple):
    """For each node its name, op, target, arguments, type and metadata."""

    nodes: list[tuple[Any, ...]]


class _Index(NamedTuple):
    """A node, by its position."""

    position: int


class _Function(NamedTuple):
    """A function, by a module and a path in it."""

    module: str
    path: str


def _rows(graph: fx.Graph) -> _Rows:
    position = {node: _Index(index) for index, node in enumerate(graph.nodes)}

    def row(node: fx.Node) -> tuple[Any, ...]:
        given: Any = fx.node.map_arg((node.args, node.kwargs), position.__getitem__)
        return node.name, node.op, _named(node.target), *given, node.type, dict(node.meta)

    return _Rows([row(node) for node in graph.nodes])


def _graph(rows: _Rows) -> fx.Graph:
    graph, nodes = fx.Graph(), list[fx.Node]()

    def filled(given: Any) -> Any:
        if isinstance(given, _Index):
            return nodes[given.position]
        if isinstance(given, tuple):
            items = map(filled, given)
            return type(given)(*items) if hasattr(given, "_fields") else tuple(items)
        if isinstance(given, list):
            return list(map(filled, given))
        if isinstance(given, dict):
            return {key: filled(value) for key, value in given.items()}
        if isinstance(given, slice):
            return slice(filled(given.start), filled(given.stop), filled(given.step))
        return given

    for name, op, target, args, kwargs, kind, meta in rows.nodes:
        node = graph.create_node(op, _resolved(target), filled(args), filled(kwargs), name, kind)
        node.meta.update(meta)
        nodes.append(node)
    return graph


def _named(target: Any) -> Any:
    """A function that pickle would not find, by its name; any other target itself."""
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return _Function("torch", f"ops.{target}")
    module, name = (str(getattr(target, key, "")) for key in ("__module__", "__name__"))
    is_local = "<locals>" in str(getattr(target, "__qualname__", ""))
    is_found = getattr(sys.modules.get(module), name, None) is target
    return _Function(module, name) if is_local and is_found else target


def _resolved(target: Any) -> Any:
    if not isinstance(target, _Function):
        return target
    names = target.path.split(".")
    return functools.reduce(getattr, names, importlib.import_module(target.module))
