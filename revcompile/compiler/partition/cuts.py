"""What crosses a cut: live values, and the parameters and buffers that both sides use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx, nn

from revcompile.ir.module_tree import parameters_read
from revcompile.ir.ops import read_buffer, store_buffer
from revcompile.ir.types import Coupling, Live, Rewired, Segment, TensorType


def live_at_cuts(rewired: Rewired, pieces: Sequence[Segment]) -> list[tuple[str, ...]]:
    """The live values at every cut: entry `i` lists what is alive before piece `i`.

    Streams come first, then grids. The last entry holds the model's results.
    """
    last_use: dict[str, int] = {}
    for index, piece in enumerate(pieces):
        for name in piece.inputs:
            last_use[name] = index
    for leaf in rewired.body.result:
        if isinstance(leaf, Live):
            last_use[leaf.name] = len(pieces)
    couplings = [piece for piece in pieces if isinstance(piece, Coupling)]
    grids = {piece.grid for piece in couplings}
    streams = {name for piece in couplings for name in (*piece.streams_in, *piece.streams_out)}
    alive: dict[str, None] = dict.fromkeys(rewired.signature.placeholders)
    cuts = [tuple(alive)]
    for index, piece in enumerate(pieces):
        alive |= dict.fromkeys(piece.outputs)
        alive = {name: None for name in alive if last_use.get(name, -1) > index}
        cuts.append(tuple(sorted(alive, key=lambda n: 0 if n in streams else 1 + (n not in grids))))
    return cuts


def bytes_sent(
    names: Sequence[str], types: Mapping[str, Any], microbatch_size: int | None = None
) -> int:
    """Bytes of live values at a batch size, or at the example's."""
    kinds = (types.get(name) for name in names)
    return sum(kind.nbytes(microbatch_size) for kind in kinds if isinstance(kind, TensorType))


def shared_parameters(rewired: Rewired, pieces: Sequence[Segment]) -> dict[str, tuple[int, ...]]:
    """Parameters that several pieces read: name -> those pieces."""
    names = {id(p): name for name, p in rewired.root.named_parameters()}
    readers: dict[str, list[int]] = {}
    for index, piece in enumerate(pieces):
        for name in parameter_names(piece.graph, rewired.root, names):
            readers.setdefault(name, []).append(index)
    return {name: tuple(users) for name, users in readers.items() if len(users) > 1}


def written_buffers(pieces: Sequence[Segment]) -> dict[str, tuple[int, ...]]:
    """Buffers that graphs write to: name -> the pieces that read or write them."""
    users: dict[str, list[int]] = {}
    for index, piece in enumerate(pieces):
        for node in piece.graph.nodes:
            if node.target in (read_buffer, store_buffer):
                (buffer, *_) = node.all_input_nodes
                users.setdefault(str(buffer.target), []).append(index)
    return {name: tuple(dict.fromkeys(indices)) for name, indices in users.items()}


def parameter_names(
    graph: fx.Graph, root: nn.Module, names: Mapping[int, str] | None = None
) -> tuple[str, ...]:
    """Parameters a graph reads, each under the name it has first in the model.

    `names` maps `id(parameter)` to that name; it is computed if not given.
    """
    known = names or {id(p): name for name, p in root.named_parameters()}
    return tuple(known[id(parameter)] for parameter in parameters_read(graph, root))
