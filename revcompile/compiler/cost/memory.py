"""How much memory a stage takes, in bytes, by the rules of our own runtime.

What a stage keeps for its backward pass is kept for every micro-batch in flight:

    keep       the stage keeps                                      and works on
    graph      all that autograd saved                              nothing more
    input      its inputs                                           its whole graph
    nothing    the inputs of each run of opaque pieces, and sides   the largest graph of a coupling
               of couplings that no later stage sends back          or of a run

At the last stage backward follows forward at once: with "nothing" its opaque runs keep their
graphs as well, all of them.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch.utils import _pytree as pytree

from revcompile.ir import TYPE, Cost, Coupling, TensorType
from revcompile.program import Piece
from revcompile.schedule import Keep, Method, Weights, delay, window

__all__ = ["MemoryModel", "StageMemory", "stage_memory"]


@dataclass(frozen=True)
class StageMemory:
    """What one stage holds at its peak, in bytes.

    >>> StageMemory(parameters=100, gradients=100, optimizer=100, buffers=700).total
    1000
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    stashed: int = 0
    """Older versions of the parameters."""
    buffers: int = 0
    """Kept from forward to backward, for all micro-batches in flight."""
    messages: int = 0
    """What arrives while the stage computes: a forward message and a backward message."""
    working: int = 0
    """The graph being differentiated, with the gradients on their way through it."""
    waiting: int = 0
    """Backward messages of micro-batches that the next stage is done with and this one is not."""
    between: int = 0
    """Values and gradients on their way back from one piece of the stage to the one before."""

    @property
    def total(self) -> int:
        """All of it."""
        return sum(getattr(self, field.name) for field in fields(self))


def stage_memory(
    pieces: Sequence[Piece],
    index: int,
    stages: int,
    method: Method,
    types: Mapping[str, Any],
    costs: Sequence[Cost],
    *,
    batch: int,
    optimizer_copies: int = 1,
    buffer_dtype: torch.dtype | None = None,
    group: int = 1,
    first_input_free: bool = True,
) -> StageMemory:
    """The memory of one stage made of these pieces; see `MemoryModel` for the options."""
    model = MemoryModel(
        pieces,
        types,
        costs,
        method,
        stages,
        batch=batch,
        optimizer_copies=optimizer_copies,
        buffer_dtype=buffer_dtype,
        group=group,
        first_input_free=first_input_free,
    )
    return model.stage(index, 0, len(pieces))


class MemoryModel:
    """The memory of every stage that could be cut out of a row of pieces.

    `batch` is the size of a micro-batch, and `group` the number of them between two updates.
    `optimizer_copies` is 1 for SGD with momentum, 2 for Adam. With a `buffer_dtype`, micro-batches
    that wait are kept in it; the one at work is in full precision. `first_input_free` says that
    the first stage can get its input from the dataset again. `lean` counts of a stage that keeps
    its inputs only those its gradients depend on: of a coupling `(a, b) -> (b, a + F(b))` alone
    that is `b`. Our runtime keeps both; the PETRA paper counts one.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        types: Mapping[str, Any],
        costs: Sequence[Cost],
        method: Method,
        stages: int,
        *,
        batch: int,
        optimizer_copies: int = 1,
        buffer_dtype: torch.dtype | None = None,
        group: int = 1,
        first_input_free: bool = True,
        lean: bool = False,
    ) -> None:
        self.pieces = tuple(pieces)
        self.method = method
        self.stages = stages
        self.optimizer_copies = optimizer_copies
        self.first_input_free = first_input_free
        self.lean = lean
        self._windows = [window(method, stages, j, group) for j in range(stages)]
        self._versions = [0] * stages
        if method.weights is Weights.STASHED:
            self._versions = [delay(method, stages, j, group) for j in range(stages)]
        self._weights = _running([cost.weights for cost in costs])
        self._trained = _running([cost.trained for cost in costs])
        self._saved = [cost.saved_at(batch) for cost in costs]
        self._shared = [cost.shared_at(batch) for cost in costs]
        self._alone = _running(self._saved), _running(self._shared)
        self._passing = [_passing(piece, batch) for piece in self.pieces]
        # The stream a branch reads has come back already, with the message or from behind.
        self._branches = [
            saved + max(passing - _stream(piece, types, batch), 0)
            for saved, passing, piece in zip(self._saved, self._passing, self.pieces, strict=True)
        ]
        self._runs = _runs(self.pieces)
        self._reads = _Reads(self.pieces, types, batch, None)
        self._narrow = self._reads
        if buffer_dtype is not None:
            self._narrow = _Reads(self.pieces, types, batch, buffer_dtype)

    def stage(self, index: int, start: int, end: int) -> StageMemory:
        """The memory of stage `index` if it is `pieces[start:end]`."""
        weights = self._weights[end] - self._weights[start]
        trained = self._trained[end] - self._trained[start]
        buffers, working = self._activations(index, start, end)
        return StageMemory(
            parameters=weights,
            gradients=trained,
            optimizer=self.optimizer_copies * trained,
            stashed=self._versions[index] * weights,
            buffers=buffers,
            messages=self._messages(index, start, end),
            working=working,
            waiting=self._waiting(index, end),
            between=self._between_pieces(start, end),
        )

    def read(self, index: int, start: int, end: int) -> int:
        """The inputs of a stage that its gradients depend on, for one micro-batch."""
        return self._reads.needed(start, end) - self._free(self._reads, index, start, end)

    def _activations(self, index: int, start: int, end: int) -> tuple[int, int]:
        """Bytes kept from forward to backward, and bytes of the graph at work."""
        in_flight = self._windows[index]
        passing = max(self._passing[start:end])
        match self.method.keep:
            case Keep.GRAPH:
                return in_flight * self._graph(start, end), passing
            case Keep.INPUT:
                kept, narrow = (
                    (reads.needed if self.lean else reads.inputs)(start, end)
                    - self._free(reads, index, start, end)
                    for reads in (self._reads, self._narrow)
                )
                return kept + (in_flight - 1) * narrow, self._graph(start, end) + passing
            case Keep.NOTHING:
                return self._between_couplings(index, start, end)

    def _between_couplings(self, index: int, start: int, end: int) -> tuple[int, int]:
        last = index == self.stages - 1
        kept = self._reads.sides(start, end)
        narrow = self._narrow.sides(start, end)
        working = graphs = 0
        for reversible, first, behind in self._runs_in(start, end):
            if reversible:
                working = max(working, *self._branches[first:behind])
                continue
            graph = self._graph(first, behind) + max(self._passing[first:behind])
            graphs, working = (graphs + graph, working) if last else (0, max(working, graph))
            kept += self._reads.inputs(first, behind)
            narrow += self._narrow.inputs(first, behind)
            kept -= self._free(self._reads, index, first, behind)
            narrow -= self._free(self._narrow, index, first, behind)
        waiting = self._windows[index] - 1
        return kept + waiting * narrow, working + graphs

    def _free(self, reads: _Reads, index: int, start: int, end: int) -> int:
        return reads.given(start, end) if index == 0 and self.first_input_free else 0

    def _graph(self, start: int, end: int) -> int:
        """What autograd saves if these pieces are one graph."""
        saved, shared = self._alone
        return saved[end] - saved[start] - (shared[end] - shared[min(start + 1, end)])

    def _messages(self, index: int, start: int, end: int) -> int:
        """A stage that ends in a coupling is sent its outputs back along with their gradients."""
        arriving = self._reads.crossing(start) if index > 0 else 0
        return arriving + (self._back(end) if index < self.stages - 1 else 0)

    def _waiting(self, index: int, end: int) -> int:
        """The next stage sends a micro-batch back this many rounds before this stage needs it."""
        if index == self.stages - 1:
            return 0
        return (self._windows[index] - self._windows[index + 1]) * self._back(end)

    def _between_pieces(self, start: int, end: int) -> int:
        """Where a stage goes back piece by piece, what it hands from one to the one before.

        A coupling hands on one stream and one gradient as they came, in the message at first.
        """
        if self.method.keep is not Keep.NOTHING:
            return 0
        reversible = [self.pieces[place].reversible for place in range(start, end)]
        found = 0
        for place in range(start + 1, end):
            if any(reversible[place - start - 1 : place - start + 1]):
                came = place == end - 1 and reversible[-1]
                found = max(found, self._back(place) // (2 if came else 1))
        return found

    def _back(self, place: int) -> int:
        """What comes back to the pieces before a place: a coupling needs its outputs' values."""
        rebuilds = self.method.keep is Keep.NOTHING and self.pieces[place - 1].reversible
        return (2 if rebuilds else 1) * self._reads.crossing(place)

    def _runs_in(self, start: int, end: int) -> list[tuple[bool, int, int]]:
        found = []
        for reversible, first, behind in self._runs:
            first, behind = max(first, start), min(behind, end)
            if first < behind:
                found.append((reversible, first, behind))
        return found


class _Reads:
    """Which values a range of pieces reads from before it, in bytes. Queries are bisections."""

    def __init__(
        self,
        pieces: Sequence[Piece],
        types: Mapping[str, Any],
        batch: int,
        dtype: torch.dtype | None,
    ) -> None:
        names = {name for piece in pieces for name in (*piece.inputs, *piece.outputs)}
        size = {name: _size(types.get(name), batch, dtype) for name in names}
        made = {name for piece in pieces for name in piece.outputs}
        read = {name for piece in pieces for name in piece.inputs}
        self._sides = _Sides(pieces, size)
        # A value nobody reads is a result, or meant for pieces that are not here.
        leaving = sum(size[name] for name in made - read)
        ahead: dict[str, tuple[float, float]] = {}
        self._crossing = [leaving]
        self._inputs, self._needed, self._given = ([_Steps(())] for _ in range(3))
        for place in reversed(range(len(pieces))):
            _step_back(ahead, place, pieces[place])
            leaving -= sum(size[name] for name in pieces[place].outputs if name not in read)
            self._crossing.append(leaving + sum(size[name] for name in ahead))
            first = [(reads[0], size[name]) for name, reads in ahead.items()]
            needed = [(reads[1], size[name]) for name, reads in ahead.items()]
            given = [(reads[0], size[name]) for name, reads in ahead.items() if name not in made]
            self._inputs.append(_Steps(first))
            self._needed.append(_Steps(needed))
            self._given.append(_Steps(given))
        for found in (self._crossing, self._inputs, self._needed, self._given):
            found.reverse()

    def inputs(self, start: int, end: int) -> int:
        """What the pieces read of values made before them."""
        return self._inputs[start].below(end)

    def needed(self, start: int, end: int) -> int:
        """What their gradients depend on of that, if they are differentiated as one."""
        return self._needed[start].below(end)

    def given(self, start: int, end: int) -> int:
        """What the pieces read of the model's own inputs, made by no piece."""
        return self._given[start].below(end)

    def sides(self, start: int, end: int) -> int:
        """Sides of couplings that nobody behind the pieces reads."""
        return self._sides.kept(start, end)

    def crossing(self, place: int) -> int:
        """What is alive before a piece."""
        return self._crossing[place]


class _Sides:
    """Side values of couplings: a stage keeps those that do not come back from the next one."""

    def __init__(self, pieces: Sequence[Piece], size: Mapping[str, int]) -> None:
        self._size = size
        self._read_by: list[tuple[int, str]] = []
        self._last: dict[str, int] = {}
        self._made: dict[str, int] = {}
        self._opaque: dict[str, list[int]] = {}
        for place, piece in enumerate(pieces):
            segment = piece.segment
            self._last |= dict.fromkeys(piece.inputs, place)
            self._made |= dict.fromkeys(piece.outputs, place)
            if isinstance(segment, Coupling):
                self._read_by += [(place, name) for name in segment.sides if size[name]]
            else:
                for name in segment.inputs:
                    self._opaque.setdefault(name, []).append(place)
        self._begins = [0] * len(pieces)
        for _, first, behind in _runs(pieces):
            self._begins[first:behind] = [first] * (behind - first)

    def kept(self, start: int, end: int) -> int:
        """Bytes of the sides that `pieces[start:end]` keeps for them alone."""
        first = bisect_left(self._read_by, (start, ""))
        behind = bisect_left(self._read_by, (end, ""))
        names = {name for _, name in self._read_by[first:behind]}
        return sum(self._size[name] for name in names if self._is_kept(name, start, end))

    def _is_kept(self, name: str, start: int, end: int) -> bool:
        if self._last[name] >= end:
            return False
        made = self._made.get(name, -1)
        # An opaque run that reads the value from outside keeps it already.
        return not any(
            start <= place < end and made < max(start, self._begins[place])
            for place in self._opaque.get(name, ())
        )


def _step_back(ahead: dict[str, tuple[float, float]], place: int, piece: Piece) -> None:
    """Take one more piece into account: `ahead` knows where each value is read next.

    With it goes how far a stage must reach for its gradients to depend on the value: the sum
    `a + F(b)` hands gradients on to `a` unchanged, whatever `a` is.
    """
    segment = piece.segment
    wanted = dict.fromkeys(piece.inputs, float(place))
    if isinstance(segment, Coupling):
        a, b = segment.streams_in
        others = {b, *segment.sides, *(segment.link.sides if segment.link else ())}
        if a not in others:
            wanted[a] = ahead.get(segment.streams_out[1], (math.inf, math.inf))[1]
    for name in piece.outputs:
        ahead.pop(name, None)
    for name, needed in wanted.items():
        later = ahead.get(name, (math.inf, math.inf))[1]
        ahead[name] = float(place), min(needed, later)


class _Steps:
    """A sum of sizes, each of which counts from a place on.

    >>> _Steps([(3, 10), (1, 5)]).below(3), _Steps([(3, 10), (1, 5)]).below(4)
    (5, 15)
    """

    def __init__(self, entries: Iterable[tuple[float, int]]) -> None:
        ordered = sorted(entries)
        self._places = [place for place, _ in ordered]
        self._sums = _running([size for _, size in ordered])

    def below(self, place: int) -> int:
        """What counts at places before this one."""
        return self._sums[bisect_left(self._places, place)]


def _passing(piece: Piece, batch: int) -> int:
    """Gradients that exist at once inside a piece: of an operation's output and of its inputs."""
    segment = piece.segment
    graph = segment.branch if isinstance(segment, Coupling) else segment.graph
    size = {node: _size(node.meta.get(TYPE), batch, None) for node in graph.nodes}
    return max(
        (size[n] + sum(size[i] for i in n.all_input_nodes) for n in graph.nodes if size[n]),
        default=0,
    )


def _stream(piece: Piece, types: Mapping[str, Any], batch: int) -> int:
    """The stream that a coupling's branch reads."""
    segment = piece.segment
    named = isinstance(segment, Coupling)
    return _size(types.get(segment.streams_in[1]), batch, None) if named else 0


def _running(numbers: Sequence[int]) -> list[int]:
    """Sums of the first 0, 1, 2, ... numbers."""
    return list(itertools.accumulate(numbers, initial=0))


def _runs(pieces: Sequence[Piece]) -> list[tuple[bool, int, int]]:
    """Maximal runs of couplings and of opaque pieces: (reversible, start, end)."""
    found = []
    for reversible, run in itertools.groupby(enumerate(pieces), lambda item: item[1].reversible):
        places = [place for place, _ in run]
        found.append((reversible, places[0], places[-1] + 1))
    return found


def _size(kind: Any, batch: int, dtype: torch.dtype | None) -> int:
    """Bytes of a value at a batch size; floating ones in `dtype`, if given. Plain values: 0."""
    total = 0
    for leaf in pytree.tree_leaves(kind, is_leaf=lambda x: isinstance(x, TensorType)):
        if isinstance(leaf, TensorType):
            narrow = dtype is not None and leaf.dtype.is_floating_point
            itemsize = dtype.itemsize if narrow and dtype else leaf.dtype.itemsize
            total += torch.Size(leaf.at(batch)).numel() * itemsize
    return total
