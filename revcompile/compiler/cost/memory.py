"""How much memory a stage takes, in bytes, by the rules of our own runtime.

What a stage keeps for its backward pass is kept for every micro-batch in flight:

    keep       the stage keeps                                      and works on
    graph      all that autograd saved                              nothing more
    input      its inputs                                           its whole graph
    nothing    the inputs of each run of opaque pieces, and sides   the largest graph of a coupling
               of couplings that no later stage sends back          or of a run

At the last stage backward follows forward at once: with "nothing" its opaque runs keep their
graphs as well, all of them.

Beside the graph at work there are the gradients inside it, and, where a stage goes back piece by
piece, what it hands from one to the other. All that is measured in `benchmarks/stage_memory.py`.

Recorded rounds keep the same inputs and waiting messages, at fixed places. They add the batch that
enters and, in the memory of a CUDA graph, what a stage keeps of the newest micro-batch and the
messages it has just sent: one micro-batch of `buffers`, and `waiting`, once more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from revcompile.compiler.cost.reads import Reads, running, runs_of, size_at
from revcompile.ir.program import Partition, Piece
from revcompile.ir.types import TYPE, Cost, Coupling
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
    summing: int = 0
    """Gradients of one micro-batch on their way into the sums of several."""
    stashed: int = 0
    """Older versions of the parameters."""
    newest: int = 0
    """Where older ones are stashed: a copy of the version that the parameters still are."""
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
    ends: int = 0
    """Where kept graphs begin and end: inputs they have not saved, and outputs."""

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
    buffer_bytes: int | None = None,
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
        buffer_bytes=buffer_bytes,
        group=group,
        first_input_free=first_input_free,
    )
    return model.stage(index, 0, len(pieces))


class MemoryModel:
    """The memory of every stage that could be cut out of a row of pieces.

    `batch` is the size of a micro-batch, and `group` the number of them between two updates.
    `optimizer_copies` is 1 for SGD with momentum, 2 for Adam. Inputs of
    micro-batches that wait take `buffer_bytes` an element, if that is given; those of the one at
    work are in full precision. With 0 bytes they are elsewhere, but for the one that is to be at
    work next. Sides of couplings stay as they are. `first_input_free` says that
    the first stage can get its input from the dataset again. `lean` counts of a stage that keeps
    its inputs only those its gradients depend on: of a coupling `(a, b) -> (b, a + F(b))` alone
    that is `b`. Our runtime keeps both; the PETRA paper counts one. `low` is the precision of
    autocast: stages have their weights in it as well. Activations are counted as
    if there were no autocast.
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
        optimizer_copies: float = 1,
        buffer_bytes: int | None = None,
        group: int = 1,
        first_input_free: bool = True,
        lean: bool = False,
        low: torch.dtype | None = None,
    ) -> None:
        self.pieces = tuple(pieces)
        self.method = method
        self.stages = stages
        self.optimizer_copies = optimizer_copies
        self.first_input_free = first_input_free
        self.lean = lean
        self.low = low
        self._windows = [window(method, stages, j, group) for j in range(stages)]
        self._gathers = group > 1
        self._versions = [0] * stages
        if method.weights is Weights.STASHED:
            self._versions = [delay(method, stages, j, group) for j in range(stages)]
        self._weights = running([cost.weights for cost in costs])
        self._trained = running([cost.trained for cost in costs])
        self._saved = [cost.saved_at(batch) for cost in costs]
        self._shared = [cost.shared_at(batch) for cost in costs]
        self._unsaved = [cost.unsaved_at(batch) for cost in costs]
        self._alone = running(self._saved), running(self._shared)
        # Layers that rewiring has widened make more than the types in their graph say.
        self._passing = [
            max(_passing(piece, batch), cost.passing_at(batch))
            for piece, cost in zip(self.pieces, costs, strict=True)
        ]
        self._streams = [_stream(piece, types, batch) for piece in self.pieces]
        # The stream a branch reads has come back already, with the message or from behind.
        self._branches = [
            saved + max(passing - stream, 0)
            for saved, passing, stream in zip(
                self._saved, self._passing, self._streams, strict=True
            )
        ]
        self._runs = runs_of(self.pieces)
        self._reads = self._narrow = Reads(self.pieces, types, batch)
        self._is_away = buffer_bytes == 0
        if buffer_bytes is not None:
            self._narrow = Reads(self.pieces, types, batch, buffer_bytes)

    @classmethod
    def of(
        cls, partition: Partition, method: Method, stages: int | None = None, **options: Any
    ) -> MemoryModel:
        """The pieces of a partition, in a trainer, which keeps what it is fed."""
        parts = partition.parts
        return cls(
            [piece for part in parts for piece in part.pieces],
            partition.types,
            [cost for part in parts for cost in part.costs],
            method,
            stages or len(parts),
            first_input_free=False,
            **options,
        )

    def stage(self, index: int, start: int, end: int, keep: Keep | None = None) -> StageMemory:
        """The memory of stage `index` if it is `pieces[start:end]`.

        `keep` is what it keeps, if not what the method says.
        """
        keep = keep or self.method.keep
        weights = self._weights[end] - self._weights[start]
        trained = self._trained[end] - self._trained[start]
        buffers, working = self._activations(index, start, end, keep)
        return StageMemory(
            parameters=weights + self._low(weights),
            gradients=trained,
            optimizer=round(self.optimizer_copies * trained),
            summing=trained if self._gathers else 0,
            stashed=self._versions[index] * weights,
            newest=weights if self.method.weights is Weights.STASHED else 0,
            buffers=buffers,
            messages=self._messages(index, start, end, keep),
            working=working,
            waiting=self._waiting(index, end, keep),
            between=self._between_pieces(start, end, keep),
            ends=self._ends(index, start, end, keep),
        )

    def _low(self, weights: int) -> int:
        """Copies of float32 weights in the precision of autocast."""
        return weights * self.low.itemsize // 4 if self.low is not None else 0

    def read(self, index: int, start: int, end: int) -> int:
        """The inputs of a stage that its gradients depend on, for one micro-batch."""
        return self._reads.needed(start, end) - self._free(self._reads, index, start, end)

    def _activations(self, index: int, start: int, end: int, keep: Keep) -> tuple[int, int]:
        """Bytes kept from forward to backward, and bytes of the graph at work."""
        in_flight = self._windows[index]
        match keep:
            case Keep.GRAPH:
                return in_flight * self._graph(start, end), max(self._passing[start:end])
            case Keep.INPUT:
                kept, narrow = (
                    (reads.needed if self.lean else reads.inputs)(start, end)
                    - self._free(reads, index, start, end)
                    for reads in (self._reads, self._narrow)
                )
                return self._waiting_inputs(index, kept, narrow), self._at_work(start, end)
            case Keep.NOTHING:
                return self._between_couplings(index, start, end)

    def _between_couplings(self, index: int, start: int, end: int) -> tuple[int, int]:
        last = index == self.stages - 1
        sides = self._windows[index] * self._reads.sides(start, end)
        kept = narrow = working = graphs = 0
        for reversible, first, behind in self._runs_in(start, end):
            if reversible:
                working = max(working, graphs + max(self._branches[first:behind]))
                continue
            # Going back, the graphs of earlier runs are still there, those of later ones are not.
            working = max(working, graphs + self._at_work(first, behind))
            graphs += self._graph(first, behind) if last else 0
            kept += self._reads.inputs(first, behind)
            narrow += self._narrow.inputs(first, behind)
            kept -= self._free(self._reads, index, first, behind)
            narrow -= self._free(self._narrow, index, first, behind)
        return sides + self._waiting_inputs(index, kept, narrow), working

    def _waiting_inputs(self, index: int, kept: int, narrow: int) -> int:
        """Inputs of the micro-batch at work, and of those that wait in their buffers."""
        waiting = self._windows[index] - 1
        ahead = min(waiting, 1) * (kept - narrow) if self._is_away else 0
        return kept + waiting * narrow + ahead

    def _free(self, reads: Reads, index: int, start: int, end: int) -> int:
        return reads.given(start, end) if index == 0 and self.first_input_free else 0

    def _graph(self, start: int, end: int) -> int:
        """What autograd saves if these pieces are one graph."""
        saved, shared = self._alone
        return saved[end] - saved[start] - (shared[end] - shared[min(start + 1, end)])

    def _ends(self, index: int, start: int, end: int, keep: Keep) -> int:
        """Inputs that a kept graph has not saved, and its outputs.

        A coupling at the beginning saves the sum `a + F(b)`, if anything, but not `a`.
        """
        if keep is not Keep.GRAPH:
            return 0
        unread = self._reads.inputs(start, end) - self._reads.needed(start, end)
        inputs = max(unread, self._streams[start])
        return self._windows[index] * (inputs + self._unsaved[end - 1])

    def _at_work(self, start: int, end: int) -> int:
        """A graph and the gradients inside it; the inputs it saved are counted where kept."""
        graph, passing = self._graph(start, end), max(self._passing[start:end])
        return graph + max(passing - min(self._reads.needed(start, end), graph), 0)

    def _messages(self, index: int, start: int, end: int, keep: Keep) -> int:
        """A stage that ends in a coupling is sent its outputs back along with their gradients."""
        arriving = self._reads.crossing(start) if index > 0 else 0
        return arriving + (self._back(end, keep) if index < self.stages - 1 else 0)

    def _waiting(self, index: int, end: int, keep: Keep) -> int:
        """The next stage sends a micro-batch back this many rounds before this stage needs it."""
        if index == self.stages - 1:
            return 0
        return (self._windows[index] - self._windows[index + 1]) * self._back(end, keep)

    def _between_pieces(self, start: int, end: int, keep: Keep) -> int:
        """Where a stage goes back piece by piece, what it hands from one to the one before.

        A coupling hands on one stream and one gradient as they came, in the message at first.
        """
        if keep is not Keep.NOTHING:
            return 0
        reversible = [self.pieces[place].reversible for place in range(start, end)]
        found = 0
        for place in range(start + 1, end):
            if any(reversible[place - start - 1 : place - start + 1]):
                came = place == end - 1 and reversible[-1]
                found = max(found, self._back(place, keep) // (2 if came else 1))
        return found

    def _back(self, place: int, keep: Keep) -> int:
        """What comes back to the pieces before a place: a coupling needs its outputs' values."""
        rebuilds = keep is Keep.NOTHING and self.pieces[place - 1].reversible
        return (2 if rebuilds else 1) * self._reads.crossing(place)

    def _runs_in(self, start: int, end: int) -> list[tuple[bool, int, int]]:
        found = []
        for reversible, first, behind in self._runs:
            first, behind = max(first, start), min(behind, end)
            if first < behind:
                found.append((reversible, first, behind))
        return found


def _passing(piece: Piece, batch: int) -> int:
    """Gradients that exist at once inside a piece: of an operation's output and of its inputs."""
    segment = piece.segment
    graph = segment.graph
    size = {node: size_at(node.meta.get(TYPE), batch) for node in graph.nodes}
    return max(
        (size[n] + sum(size[i] for i in n.all_input_nodes) for n in graph.nodes if size[n]),
        default=0,
    )


def _stream(piece: Piece, types: Mapping[str, Any], batch: int) -> int:
    """The stream that a coupling's branch reads."""
    segment = piece.segment
    if not isinstance(segment, Coupling):
        return 0
    return size_at(types.get(segment.streams_in[1]), batch)
