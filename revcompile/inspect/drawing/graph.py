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
from statistics import fmean
from typing import Any, Final

import networkx as nx
from torch import fx

from revcompile.inspect.drawing.svg import width_of
from revcompile.inspect.formatting import common_start, listed
from revcompile.ir.coupling_ops import call_norm, plus
from revcompile.ir.types import PATH, TYPE, TensorType, types_in

MOST: Final = 24
"""The most vertices that are readable at a glance."""
_STILL: Final = 4
"""Up to this many times the limit, nodes of one module are not merged into a single vertex."""
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
    """Vertices, and arrows by the numbers of the two vertices they connect.

    Each arrow has the types of its tensors, and its stream: "one", "two" or "".
    """

    vertices: tuple[Vertex, ...]
    arrows: Mapping[tuple[int, int], tuple[str, str]]


def drawn_graph(graph: fx.Graph, most: int = MOST) -> Drawn:
    """The graph's vertices and arrows, merged until there are about `most` vertices."""
    shown = [node for node, is_tensor in _tensors(graph).items() if is_tensor]
    return _drawn(shown, _streams(graph), most)


def _drawn(nodes: Sequence[fx.Node], streams: Mapping[fx.Node, str], most: int) -> Drawn:
    shown = [
        replace(vertex, inside=_drawn(vertex.nodes, streams, most))
        if vertex.kind == "group" and len(vertex.nodes) < len(nodes)
        else vertex
        for vertex in map(_vertex, _runs(nodes, most))
    ]
    owner = {node: number for number, vertex in enumerate(shown) for node in vertex.nodes}
    passed: dict[tuple[int, int], dict[fx.Node, None]] = {}
    for node in owner:
        for source in node.all_input_nodes:
            if source in owner and owner[source] != owner[node]:
                passed.setdefault((owner[source], owner[node]), {})[source] = None
    arrows = {}
    for arrow, sources in sorted(passed.items()):
        kinds = [kind for node in sources if (kind := _type(node)) is not None]
        colours = {streams.get(node, "") for node in sources}
        arrows[arrow] = listed(kinds), colours.pop() if len(colours) == 1 else ""
    return Drawn(tuple(shown), arrows)


def _type(node: fx.Node) -> TensorType | None:
    """A value's type; the sum of a coupling has the type of its first summand, a stream."""
    kind, first = node.meta.get(TYPE), node.args[0] if node.args else None
    if kind is None and node.target is plus and isinstance(first, fx.Node):
        return _type(first)
    return kind if isinstance(kind, TensorType) else None


def _streams(graph: fx.Graph) -> dict[fx.Node, str]:
    """The values of the two streams: what couplings add to, and their sums."""
    streams: dict[fx.Node, str] = {}
    begun = itertools.cycle(("one", "two"))
    for node in graph.nodes:
        if node.target is plus and isinstance(before := node.args[0], fx.Node):
            streams[before] = streams[node] = streams.get(before) or next(begun)
    return streams


def _tensors(graph: fx.Graph) -> dict[fx.Node, bool]:
    """For each node, whether it is a tensor of the micro-batch, not a size, weight or switch."""
    tensors: dict[fx.Node, bool] = {}
    for node in graph.nodes:
        if node.op == "output":
            tensors[node] = True
        elif node.op == "get_attr" or node.target is builtins.getattr:
            tensors[node] = False
        elif node.op == "placeholder" or TYPE in node.meta:
            tensors[node] = bool(types_in(node.meta.get(TYPE)))
        else:
            tensors[node] = any(tensors[source] for source in node.all_input_nodes)
    return tensors


def _runs(nodes: Sequence[fx.Node], most: int) -> list[list[fx.Node]]:
    """The nodes in order, merged by module, the innermost first, while there are too many.

    Only consecutive nodes are merged, which cannot create a cycle. A node without a module path
    counts as part of the module of the node before it.
    """
    runs = [[node] for node in nodes]
    places: dict[fx.Node, list[str]] = {}
    before: list[str] = []
    for node in nodes:
        path = str(node.meta.get(PATH) or "")
        before = places[node] = path.split(".") if path else before
    depth = max(map(len, places.values()), default=0)
    while len(runs) > most and depth:

        def key(node: fx.Node, depth: int = depth) -> Any:
            return node.op if node.op in ("placeholder", "output") else places[node][:depth]

        merged = [list(run) for _, run in itertools.groupby(nodes, key)]
        if len(merged) == 1 and len(nodes) <= _STILL * most:
            break  # all nodes are of one module: a single vertex would show nothing
        runs, depth = merged, depth - 1
    return runs


def _vertex(run: Sequence[fx.Node]) -> Vertex:
    first, nodes = run[0], tuple(run)
    if len(run) > 1 and first.op == "placeholder":
        return Vertex(f"{len(run)} inputs", "input", "\n".join(n.name for n in run), nodes)
    if len(run) > 1:
        paths = (str(node.meta[PATH]).split(".") for node in run if node.meta.get(PATH))
        counted = Counter(map(operation, run)).most_common(_SHOWN)
        operations = ", ".join(f"{n}× {name}" if n > 1 else name for name, n in counted)
        label = ".".join(common_start(paths)) or operation(first)
        return Vertex(f"{label} ({len(run)})", "group", f"{label}\n{operations}", nodes)
    path, type_ = first.meta.get(PATH), first.meta.get(TYPE)
    kind, label = _KINDS.get(first.op, "function"), operation(first)
    if first.op == "call_module":
        label = str(first.target)
    elif first.target is call_norm:  # its first argument is the layer
        kind, label = "module", str(path)
    about = (first.name, label, operation(first), path, type_ if types_in(type_) else None)
    return Vertex(label, kind, "\n".join(dict.fromkeys(str(a) for a in about if a)), nodes)


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
_SWEEPS: Final = 11


def layout(graph: Drawn) -> list[Any]:
    """Width, height, boxes and arrows in pixels, as plain values.

    A box has the coordinates of the middle of its top line, its width, label, kind and tooltip, and
    the layout of its group or None. An arrow has a list of coordinates, the types it carries, its
    stream, and whether its source reads no tensor of these types.
    """
    net = nx.DiGraph(list(graph.arrows))
    net.add_nodes_from(range(len(graph.vertices)))
    layers = [list(row) for row in nx.topological_generations(net)]
    level = {vertex: number for number, row in enumerate(layers) for vertex in row}
    widths = dict(enumerate(width_of(one.label, _FONT) + 16 for one in graph.vertices))
    chains = {}
    for source, target in graph.arrows:
        # An arrow that passes layers gets a thin vertex in each of them.
        thin = range(len(widths), len(widths) + level[target] - level[source] - 1)
        chains[source, target] = chain = [source, *thin, target]
        net.remove_edge(source, target)
        nx.add_path(net, chain)
        widths |= dict.fromkeys(thin, _THIN)
        for number, vertex in enumerate(thin, level[source] + 1):
            level[vertex] = number
            layers[number].append(vertex)
    x = _places(net, layers, widths)
    left = min(x[v] - widths[v] / 2 for v in x) - 8
    right = max(x[v] + widths[v] / 2 for v in x) + 8
    point = {v: (round(x[v] - left), 20 + _STEP * level[v]) for v in x}
    boxes = []
    for vertex, one in enumerate(graph.vertices):
        inside = None if one.inside is None else layout(one.inside)
        about = one.label, one.kind, one.about, inside
        boxes.append([*point[vertex], round(widths[vertex]), *about])
    read = {(target, shape) for (_, target), (shape, _) in graph.arrows.items()}
    arrows = [
        [
            [value for vertex in chains[arrow] for value in point[vertex]],
            *carried,
            (arrow[0], carried[0]) not in read,
        ]
        for arrow, carried in graph.arrows.items()
    ]
    return [round(right - left), _STEP * len(layers) + 4, boxes, arrows]


def _places(
    net: nx.DiGraph, layers: Sequence[list[int]], widths: Mapping[int, float]
) -> dict[int, float]:
    """Place every vertex at the mean of its neighbours, in alternating sweeps down and up."""
    x: dict[int, float] = {}
    for sweep in range(_SWEEPS):
        near, rows = (net.succ, layers[::-1]) if sweep % 2 else (net.pred, layers)
        for row in rows:
            wanted = {
                vertex: fmean(x[other] for other in near[vertex])
                if near[vertex]
                else x.get(vertex, float(place))
                for place, vertex in enumerate(row)
            }
            row.sort(key=wanted.__getitem__)
            places = [wanted[row[0]]]
            for before, vertex in itertools.pairwise(row):
                apart = (widths[before] + widths[vertex]) / 2 + _APART
                places.append(max(wanted[vertex], places[-1] + apart))
            # Vertices were pushed to the right only: move all back by the average push.
            push = fmean(p - wanted[v] for p, v in zip(places, row, strict=True))
            x |= {vertex: place - push for vertex, place in zip(row, places, strict=True)}
    return x
