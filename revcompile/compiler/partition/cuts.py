"""What crosses a cut, and which parameters two sides of it share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx, nn

from revcompile.ir.module_tree import parameters_read
from revcompile.ir.ops import read_buffer, store_buffer
from revcompile.ir.program import Piece
from revcompile.ir.types import Coupling, Live, Rewired, Segment, TensorType

__all__ = ["crossing", "graphs_of", "parameter_names", "size_of", "updated_buffers"]


def crossing(rewired: Rewired, pieces: Sequence[Piece]) -> list[tuple[str, ...]]:
    """The live values at every cut: entry `i` lists what is alive before piece `i`.

    The last entry holds the model's results.
    """
    last_use: dict[str, int] = {}
    for index, piece in enumerate(pieces):
        for name in piece.inputs:
            last_use[name] = index
    for leaf in rewired.body.result:
        if isinstance(leaf, Live):
            last_use[leaf.name] = len(pieces)
    alive: dict[str, None] = dict.fromkeys(rewired.signature.placeholders)
    found = [tuple(alive)]
    for index, piece in enumerate(pieces):
        alive |= dict.fromkeys(piece.outputs)
        alive = {name: None for name in alive if last_use.get(name, -1) > index}
        found.append(tuple(alive))
    return found


def updated_buffers(pieces: Sequence[Piece]) -> dict[str, tuple[int, ...]]:
    """Buffers that graphs write to: name -> the pieces that read or write them."""
    users: dict[str, list[int]] = {}
    for index, piece in enumerate(pieces):
        for graph in graphs_of(piece.segment):
            for node in graph.nodes:
                if node.target in (read_buffer, store_buffer):
                    (buffer, *_) = node.all_input_nodes
                    users.setdefault(str(buffer.target), []).append(index)
    return {name: tuple(dict.fromkeys(found)) for name, found in users.items()}


def size_of(names: Sequence[str], types: Mapping[str, Any]) -> int:
    """Bytes of the values at the example's batch size."""
    kinds = (types.get(name) for name in names)
    return sum(k.nbytes() for k in kinds if isinstance(k, TensorType))


def graphs_of(segment: Segment) -> tuple[fx.Graph, ...]:
    """The graphs of a segment that compute with parameters."""
    return (segment.branch,) if isinstance(segment, Coupling) else (segment.graph,)


def parameter_names(
    graph: fx.Graph, root: nn.Module, names: Mapping[int, str] | None = None
) -> tuple[str, ...]:
    """Parameters a graph reads, each under the name it has first in the model.

    `names` maps `id(parameter)` to that name; it is worked out if not given.
    """
    known = names or {id(p): name for name, p in root.named_parameters()}
    return tuple(known[id(parameter)] for parameter in parameters_read(graph, root))
