"""A program's graph in layers: every value below what it is computed from.

Sizes, weights and bookkeeping are left out, tensors stay. Where that is still too much to look
at, operations in a row that come from one module are drawn as one.
"""

from __future__ import annotations

import builtins
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import networkx as nx
from torch import fx

from revcompile.ir.stage_ops import normalised
from revcompile.ir.types import PATH, TYPE, TensorType

__all__ = ["MOST", "Drawn", "Vertex", "drawn_graph", "vertices"]

MOST: Final = 48
"""Vertices that can be taken in at a glance."""
_SHOWN: Final = 8
_KINDS: Final = {"placeholder": "input", "output": "output", "call_module": "module"}


@dataclass(frozen=True)
class Vertex:
    """One operation, or several of one module."""

    label: str
    kind: str
    """input, output, module, function or group."""
    about: str
    nodes: tuple[fx.Node, ...]


@dataclass(frozen=True)
class Drawn:
    """Vertices, the arrows between them by number, and each vertex' layer."""

    vertices: tuple[Vertex, ...]
    arrows: tuple[tuple[int, int], ...]
    layers: tuple[int, ...]


def drawn_graph(graph: fx.Graph, most: int = MOST) -> Drawn:
    """The graph's vertices and arrows, at most about so many, each with its layer."""
    found = vertices(graph, most)
    owner = {node: number for number, one in enumerate(found) for node in one.nodes}
    arrows = {
        (owner[source], owner[node])
        for node in owner
        for source in node.all_input_nodes
        if source in owner and owner[source] != owner[node]
    }
    net = nx.DiGraph(sorted(arrows))
    net.add_nodes_from(range(len(found)))
    layers = [0] * len(found)
    for layer, members in enumerate(nx.topological_generations(net)):
        for member in members:
            layers[member] = layer
    return Drawn(tuple(found), tuple(sorted(arrows)), tuple(layers))


def vertices(graph: fx.Graph, most: int = MOST) -> list[Vertex]:
    """The graph's tensors, in order; as modules, from the innermost outwards, if there are many."""
    shown = [node for node, carries in _carriers(graph).items() if carries]
    if len(shown) <= most:
        return [_single(node) for node in shown]
    places = _places(shown)
    deepest = max((len(place) for place in places if place), default=1)
    runs: list[list[fx.Node]] = []
    for depth in range(deepest, 0, -1):
        runs = _runs(shown, places, depth)
        if len(runs) <= most:
            break
    return [_group(run) for run in runs]


def _carriers(graph: fx.Graph) -> dict[fx.Node, bool]:
    """Which nodes are about tensors of the micro-batch, rather than sizes, weights or switches."""
    found: dict[fx.Node, bool] = {}
    for node in graph.nodes:
        if node.op == "output":
            found[node] = True
        elif node.op == "get_attr" or node.target is builtins.getattr:
            found[node] = False
        elif node.op == "placeholder" or TYPE in node.meta:
            found[node] = _has_tensor(node.meta.get(TYPE))
        else:
            found[node] = any(found[source] for source in node.all_input_nodes)
    return found


def _has_tensor(kind: Any) -> bool:
    if isinstance(kind, Mapping):
        kind = list(kind.values())
    if isinstance(kind, Sequence) and not isinstance(kind, str):
        return any(map(_has_tensor, kind))
    return isinstance(kind, TensorType)


def _places(nodes: Sequence[fx.Node]) -> list[tuple[str, ...]]:
    """Each node's module path; what has none belongs to what stands before it."""
    places: list[tuple[str, ...]] = []
    for node in nodes:
        path = node.meta.get(PATH)
        before = places[-1] if places else ()
        places.append(tuple(path.split(".")) if path else before)
    return places


def _runs(
    nodes: Sequence[fx.Node], places: Sequence[tuple[str, ...]], depth: int
) -> list[list[fx.Node]]:
    """Operations in a row that agree in the first `depth` names of their path.

    Rows of a graph's own order: drawn as one, they cannot make a circle.
    """
    runs: list[list[fx.Node]] = []
    last: object = None
    for node, place in zip(nodes, places, strict=True):
        key = node.op if node.op in ("placeholder", "output") else place[:depth]
        if key != last:
            runs.append([])
        runs[-1].append(node)
        last = key
    return runs


def _single(node: fx.Node) -> Vertex:
    path, type_ = node.meta.get(PATH), node.meta.get(TYPE)
    kind, label = _KINDS.get(node.op, "function"), operation(node)
    if node.op == "call_module":
        label = str(node.target)
    elif node.target is normalised:
        # A layer that a step calls: batch norms.
        kind, label = "module", str(path)
    about = (node.name, label, operation(node), path, type_ if _has_tensor(type_) else None)
    lines = dict.fromkeys(str(line) for line in about if line)
    return Vertex(label, kind, "\n".join(lines), (node,))


def _group(run: Sequence[fx.Node]) -> Vertex:
    if len(run) == 1:
        return _single(run[0])
    if run[0].op == "placeholder":
        about = "\n".join(node.name for node in run)
        return Vertex(f"{len(run)} inputs", "input", about, tuple(run))
    paths = [str(node.meta[PATH]).split(".") for node in run if node.meta.get(PATH)]
    same = _shared(paths)
    counted = Counter(map(operation, run)).most_common(_SHOWN)
    said = ", ".join(f"{n}× {name}" if n > 1 else name for name, n in counted)
    label = ".".join(same) or operation(run[0])
    return Vertex(f"{label} ({len(run)})", "group", f"{label}\n{said}", tuple(run))


def _shared(paths: Sequence[Sequence[str]]) -> list[str]:
    """The names with which all paths begin."""
    found = []
    for names in zip(*paths, strict=False):
        if len(set(names)) > 1:
            break
        found.append(names[0])
    return found


def operation(node: fx.Node) -> str:
    """What a node does, as a word to look for."""
    if isinstance(node.target, str):
        return node.target.rsplit(".", 1)[-1] if node.op == "call_module" else node.target
    return str(getattr(node.target, "__name__", node.target))
