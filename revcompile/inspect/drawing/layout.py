"""Places for a graph's vertices: layers from top to bottom, few crossings, straight chains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from revcompile.inspect.drawing.graphs import Drawn
from revcompile.inspect.drawing.svg import width_of

__all__ = ["HEIGHT", "Placed", "placed"]

HEIGHT: Final = 24
_STEP: Final = 42
_APART: Final = 14.0
_THREAD: Final = 10.0
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
    """Where everything stands. An arrow past several layers has a place in each of them."""
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
    x = _settled(layers, widths, above, below)
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
    """Every arrow as vertices in neighbouring layers; those in between are new and thin."""
    chains = []
    for source, target in graph.arrows:
        chain = [source]
        for layer in range(graph.layers[source] + 1, graph.layers[target]):
            layers[layer].append(len(widths))
            chain.append(len(widths))
            widths.append(_THREAD)
        chains.append([*chain, target])
    return chains


def _settled(
    layers: Sequence[list[int]],
    widths: Sequence[float],
    above: Mapping[int, Sequence[int]],
    below: Mapping[int, Sequence[int]],
) -> dict[int, float]:
    """Order and place of every vertex in its layer: each goes to the middle of its neighbours."""
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
    """Put a layer's vertices where they want to be, as near as those beside them allow."""
    places: list[float] = []
    for before, vertex in zip([None, *row], row, strict=False):
        place = wanted[vertex]
        if before is not None:
            room = (widths[before] + widths[vertex]) / 2 + _APART
            place = max(place, places[-1] + room)
        places.append(place)
    # Pushed to the right only: back by what that was on average.
    drift = _mean([place - wanted[v] for place, v in zip(places, row, strict=True)], 0.0)
    x.update({vertex: place - drift for vertex, place in zip(row, places, strict=True)})


def _mean(values: Sequence[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise
