"""A program's graph in layers, every value below what it is computed from, and its layout.

Only tensors are drawn, not sizes, weights and bookkeeping. If there are still too many,
consecutive operations of one module become one vertex, which has a graph of its own.
"""

from __future__ import annotations

import builtins
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

import networkx as nx
from torch import fx

from revcompile.inspect.drawing.svg import width_of
from revcompile.inspect.formatting import listed
from revcompile.ir.coupling_ops import call_norm, plus
from revcompile.ir.types import PATH, TYPE, TensorType

MOST: Final = 24
"""Vertices that are still readable at a glance."""
_STILL: Final = 4
"""Times as many are drawn rather than one box that does not open."""
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
    inside: Drawn | None = None
    """The operations of a group."""


@dataclass(frozen=True)
class Drawn:
    """Vertices, the arrows between them by number, and each vertex' layer."""

    vertices: tuple[Vertex, ...]
    arrows: tuple[tuple[int, int], ...]
    layers: tuple[int, ...]
    carried: tuple[tuple[str, str], ...]
    """Of each arrow the types of its tensors, and which stream it is: "one", "two" or ""."""


def drawn_graph(graph: fx.Graph, most: int = MOST) -> Drawn:
    """The graph's vertices and arrows, about `most` vertices at the most."""
    shown = [node for node, is_tensor in _tensors(graph).items() if is_tensor]
    return _drawn(shown, _streams(graph), most)


def _drawn(nodes: Sequence[fx.Node], streams: Mapping[fx.Node, str], most: int) -> Drawn:
    shown = [
        replace(vertex, inside=_drawn(vertex.nodes, streams, most))
        if vertex.kind == "group" and len(vertex.nodes) < len(nodes)
        else vertex
        for vertex in _vertices(nodes, most)
    ]
    owner = {node: number for number, vertex in enumerate(shown) for node in vertex.nodes}
    passed: dict[tuple[int, int], dict[fx.Node, None]] = {}
    for node in owner:
        for source in node.all_input_nodes:
            if source in owner and owner[source] != owner[node]:
                passed.setdefault((owner[source], owner[node]), {})[source] = None
    arrows = sorted(passed)
    net = nx.DiGraph(arrows)
    net.add_nodes_from(range(len(shown)))
    layers = [0] * len(shown)
    for layer, members in enumerate(nx.topological_generations(net)):
        for member in members:
            layers[member] = layer
    carried = []
    for arrow in arrows:
        kinds = [kind for node in passed[arrow] if (kind := _type(node)) is not None]
        colours = {streams.get(node, "") for node in passed[arrow]}
        carried.append((listed(kinds), colours.pop() if len(colours) == 1 else ""))
    return Drawn(tuple(shown), tuple(arrows), tuple(layers), tuple(carried))


def _type(node: fx.Node) -> TensorType | None:
    """A value's type; a sum of couplings has that of the stream it is added to."""
    kind, first = node.meta.get(TYPE), node.args[0] if node.args else None
    if kind is None and node.target is plus and isinstance(first, fx.Node):
        return _type(first)
    return kind if isinstance(kind, TensorType) else None


def _streams(graph: fx.Graph) -> dict[fx.Node, str]:
    """The values of the two streams: what couplings add to, and their sums."""
    streams: dict[fx.Node, str] = {}
    begun = itertools.cycle(("one", "two"))
    for node in graph.nodes:
        if node.target is plus and isinstance(node.args[0], fx.Node):
            before = node.args[0]
            streams[node] = streams.setdefault(before, "") or next(begun)
            streams[before] = streams[node]
    return streams


def _vertices(shown: Sequence[fx.Node], most: int) -> list[Vertex]:
    """The tensors in order; merged by module, the innermost first, while too many."""
    runs = [[node] for node in shown]
    if len(shown) > most:
        places = _places(shown)
        deepest = max((len(place) for place in places if place), default=1)
        for depth in range(deepest, 0, -1):
            merged = _runs(shown, places, depth)
            if len(merged) == 1 and len(shown) <= _STILL * most:
                break  # all of one module: nothing would be left to see
            runs = merged
            if len(runs) <= most:
                break
    return [_group(run) for run in runs]


def _tensors(graph: fx.Graph) -> dict[fx.Node, bool]:
    """Which nodes are tensors of the micro-batch, and not sizes, weights or switches."""
    tensors: dict[fx.Node, bool] = {}
    for node in graph.nodes:
        if node.op == "output":
            tensors[node] = True
        elif node.op == "get_attr" or node.target is builtins.getattr:
            tensors[node] = False
        elif node.op == "placeholder" or TYPE in node.meta:
            tensors[node] = _has_tensor(node.meta.get(TYPE))
        else:
            tensors[node] = any(tensors[source] for source in node.all_input_nodes)
    return tensors


def _has_tensor(kind: Any) -> bool:
    if isinstance(kind, Mapping):
        kind = list(kind.values())
    if isinstance(kind, Sequence) and not isinstance(kind, str):
        return any(map(_has_tensor, kind))
    return isinstance(kind, TensorType)


def _places(nodes: Sequence[fx.Node]) -> list[tuple[str, ...]]:
    """Each node's module path; a node without one has that of the node before it."""
    places: list[tuple[str, ...]] = []
    for node in nodes:
        path = node.meta.get(PATH)
        before = places[-1] if places else ()
        places.append(tuple(path.split(".")) if path else before)
    return places


def _runs(
    nodes: Sequence[fx.Node], places: Sequence[tuple[str, ...]], depth: int
) -> list[list[fx.Node]]:
    """Consecutive operations that share the first `depth` names of their path.

    Being consecutive in the graph's own order, merging them cannot create a cycle.
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
    elif node.target is call_norm:  # its first argument is the layer
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
    operations = ", ".join(f"{n}× {name}" if n > 1 else name for name, n in counted)
    label = ".".join(same) or operation(run[0])
    return Vertex(f"{label} ({len(run)})", "group", f"{label}\n{operations}", tuple(run))


def _shared(paths: Sequence[Sequence[str]]) -> list[str]:
    """The names with which all paths begin."""
    together = zip(*paths, strict=False)
    return [names[0] for names in itertools.takewhile(lambda n: len(set(n)) == 1, together)]


def operation(node: fx.Node) -> str:
    """The name of what a node does, for labels and the search."""
    if isinstance(node.target, str):
        return node.target.rsplit(".", 1)[-1] if node.op == "call_module" else node.target
    return str(getattr(node.target, "__name__", node.target))


# -- layout ---------------------------------------------------------------------------------------

HEIGHT: Final = 24
_STEP: Final = 42
_APART: Final = 14.0
_THIN: Final = 10.0
_FONT: Final = 11.0
_SWEEPS: Final = 10


@dataclass(frozen=True)
class Placed:
    """Middles and widths of the vertices, and each arrow as a row of points."""

    width: int
    height: int
    boxes: tuple[tuple[int, int, int], ...]
    arrows: tuple[tuple[tuple[int, int], ...], ...]


def placed(graph: Drawn) -> Placed:
    """Places of vertices and arrows; an arrow past several layers has a place in each of them."""
    layers: list[list[int]] = [[] for _ in range(max(graph.layers, default=0) + 1)]
    for vertex, layer in enumerate(graph.layers):
        layers[layer].append(vertex)
    widths = [width_of(one.label, _FONT) + 16 for one in graph.vertices]
    chains = _chains(graph, layers, widths)
    above: dict[int, list[int]] = {}
    below: dict[int, list[int]] = {}
    for chain in chains:
        for source, target in pairwise(chain):
            above.setdefault(target, []).append(source)
            below.setdefault(source, []).append(target)
    x = _arranged(layers, widths, above, below)
    left = min((x[v] - widths[v] / 2 for v in x), default=0.0) - 8
    right = max((x[v] + widths[v] / 2 for v in x), default=0.0) + 8
    layer_of = {vertex: layer for layer, row in enumerate(layers) for vertex in row}
    point = {v: (round(x[v] - left), 20 + _STEP * layer_of[v]) for v in x}
    boxes = [(*point[v], round(widths[v])) for v in range(len(graph.vertices))]
    return Placed(
        round(right - left),
        _STEP * len(layers) + 4,
        tuple(boxes),
        tuple(tuple(point[v] for v in chain) for chain in chains),
    )


def _chains(graph: Drawn, layers: list[list[int]], widths: list[float]) -> list[list[int]]:
    """Every arrow as vertices in neighbouring layers: new thin ones in the layers it passes."""
    chains = []
    for source, target in graph.arrows:
        chain = [source]
        for layer in range(graph.layers[source] + 1, graph.layers[target]):
            layers[layer].append(len(widths))
            chain.append(len(widths))
            widths.append(_THIN)
        chains.append([*chain, target])
    return chains


def _arranged(
    layers: Sequence[list[int]],
    widths: Sequence[float],
    above: Mapping[int, Sequence[int]],
    below: Mapping[int, Sequence[int]],
) -> dict[int, float]:
    """Place every vertex at the mean of its neighbours, sweeping down and up by turns."""
    x: dict[int, float] = {}
    for row in layers:
        _spread(row, {v: float(i) for i, v in enumerate(row)}, widths, x)
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        for row in layers if down else reversed(layers):
            near = above if down else below
            wanted = {v: _mean([x[n] for n in near.get(v, ())], x[v]) for v in row}
            row.sort(key=lambda v: wanted[v])
            _spread(row, wanted, widths, x)
    return x


def _spread(
    row: Sequence[int],
    wanted: Mapping[int, float],
    widths: Sequence[float],
    x: dict[int, float],
) -> None:
    """Place a layer's vertices as near to their wanted places as their widths allow."""
    places: list[float] = []
    for before, vertex in zip([None, *row], row, strict=False):
        place = wanted[vertex]
        if before is not None:
            apart = (widths[before] + widths[vertex]) / 2 + _APART
            place = max(place, places[-1] + apart)
        places.append(place)
    # Vertices were pushed to the right only: move all back by the average push.
    drift = _mean([place - wanted[v] for place, v in zip(places, row, strict=True)], 0.0)
    x.update({vertex: place - drift for vertex, place in zip(row, places, strict=True)})


def _mean(values: Sequence[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise
