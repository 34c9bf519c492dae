"""How much memory a stage takes, in bytes, in our own runtime.

What a stage keeps for its backward pass is kept for every micro-batch in flight:

    keep       kept from forward to backward                        built in the backward pass
    graph      all that autograd saved                              nothing more
    input      its inputs                                           its whole graph
    nothing    the inputs of each run of opaque pieces, and sides   the largest graph of a coupling
               of couplings that no later stage sends back          or of a run

At the last stage backward follows forward at once: with "nothing" its opaque runs keep their
graphs as well, all of them.

Beside the graph being differentiated there are the gradients inside it, and, where a stage goes
backward piece by piece, what one piece hands to the one before. `benchmarks/stage_memory.py`
compares all of it with what is really allocated.

Captured steps keep the same inputs and messages, in static buffers. They add the batch that enters
and, in the memory of a CUDA graph, what a stage keeps of the newest micro-batch and the messages it
has just sent: one micro-batch of `buffers`, and `waiting`, once more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

from revcompile.compiler.cost.live_bytes import LiveBytes, prefix_sums, runs_of, size_at
from revcompile.compiler.cost.workload import Workload
from revcompile.compiler.gradient_paths import frozen_values, trained_parameters
from revcompile.ir.module_tree import parameters_read
from revcompile.ir.program import Partition, StageMemory
from revcompile.ir.types import TYPE, Cost, Coupling, Segment, TensorType
from revcompile.kernels.fixed_point import KEPT_BITS
from revcompile.schedule import Keep, Weights, delay, window


class MemoryModel:
    """The memory of every stage that could be cut out of a row of pieces.

    Activations are counted as if there were no autocast.

    Args:
        pieces: All pieces of the model in order.
        types: The type of every live value.
        costs: The cost of each piece.
        stages: How many stages the pieces are cut into.
        workload: Batch size, method, optimizer and precision.
        first_input_free: The first stage reads its input from the dataset again instead of keeping
            it. Our trainer keeps what it is fed.
        only_needed_inputs: Of a stage that keeps its inputs count only those its gradients depend
            on: of a coupling `(a, b) -> (b, a + F(b))` alone that is `b`. Our runtime keeps both;
            the PETRA paper counts one.
        frozen: How many pieces come before the first one that a gradient is computed for. Nothing
            is kept for their backward pass, or sent back to them.
    """

    def __init__(
        self,
        pieces: Sequence[Segment],
        types: Mapping[str, Any],
        costs: Sequence[Cost],
        stages: int,
        workload: Workload,
        *,
        first_input_free: bool = True,
        only_needed_inputs: bool = False,
        frozen: int = 0,
    ) -> None:
        self.pieces = tuple(pieces)
        self.stages = stages
        self.workload = workload
        self.first_input_free = first_input_free
        self.only_needed_inputs = only_needed_inputs
        self._frozen = frozen
        method, batch, accumulate = workload.method, workload.batch_size, workload.accumulate
        self._windows = [window(method, stages, j, accumulate) for j in range(stages)]
        self._delays = [delay(method, stages, j, accumulate) for j in range(stages)]
        self._weights = prefix_sums([cost.weights for cost in costs])
        self._trained = prefix_sums([cost.trained for cost in costs])
        self._saved = [cost.saved_at(batch) for cost in costs]
        self._shared = [cost.shared_at(batch) for cost in costs]
        self._unsaved = [cost.unsaved_at(batch) for cost in costs]
        self._saved_before = prefix_sums(self._saved)
        self._shared_before = prefix_sums(self._shared)
        # Layers that rewiring has widened make more than the types in their graph say.
        self._largest_op = [
            max(_operands(piece, batch), cost.passing_at(batch))
            for piece, cost in zip(self.pieces, costs, strict=True)
        ]
        self._streams = [_stream(piece, types, batch) for piece in self.pieces]
        self._lost_before = prefix_sums([_lost_bits(p, types, batch) for p in self.pieces])
        # The stream a branch reads is there already: from the message, or rebuilt by the next
        # coupling.
        self._branches = [
            saved + max(operands - stream, 0)
            for saved, operands, stream in zip(
                self._saved, self._largest_op, self._streams, strict=True
            )
        ]
        self._runs = runs_of(self.pieces)
        self._live = self._buffered = LiveBytes(self.pieces, types, batch)
        if workload.buffer_bytes is not None:
            self._buffered = LiveBytes(self.pieces, types, batch, workload.buffer_bytes)

    @classmethod
    def of(cls, partition: Partition, workload: Workload, stages: int | None = None) -> MemoryModel:
        """The pieces of a partition in our trainer, cut into `stages` (default: its own).

        What is trained is what requires a gradient now, not when the model was cut.
        """
        parts = partition.parts
        pieces = [piece for part in parts for piece in part.pieces]
        now = replace(partition, frozen=frozen_values(partition))
        frozen = takewhile(lambda piece: not any(map(now.requires_grad, piece.outputs)), pieces)
        costs = [cost for part in parts for cost in part.costs]
        return cls(
            pieces,
            partition.types,
            [
                replace(cost, trained=size)
                for cost, size in zip(costs, _trained(partition, pieces), strict=True)
            ],
            stages or len(parts),
            workload,
            first_input_free=False,
            frozen=len(list(frozen)),
        )

    def stage(self, index: int, start: int, end: int, keep: Keep | None = None) -> StageMemory:
        """The memory of stage `index` if it is `pieces[start:end]`.

        Args:
            index: Which stage it is: the earlier, the more micro-batches are in flight.
            start: Its first piece.
            end: The piece behind its last.
            keep: What it keeps; the default is what the method says.
        """
        workload, keep = self.workload, keep or self.workload.method.keep
        weights = self._weights[end] - self._weights[start]
        trained = self._trained[end] - self._trained[start]
        buffers, working = self._activations(index, start, end, keep)
        return StageMemory(
            parameters=weights + self._autocast_copy(weights),
            gradients=trained,
            optimizer=round(workload.optimizer_copies * trained),
            summing=trained if workload.accumulate > 1 else 0,
            stashed=self._stashed(index, trained),
            newest=self._newest(index, trained, keep),
            buffers=buffers,
            messages=self._messages(index, start, end, keep),
            working=working,
            waiting=self._waiting(index, end, keep),
            between=self._between_pieces(start, end, keep),
            ends=self._ends(index, start, end, keep),
        )

    def _stashed(self, index: int, trained: int) -> int:
        """What is kept of the weights of earlier updates."""
        is_stashed = self.workload.method.weights is Weights.STASHED
        return self._delays[index] * trained if is_stashed else 0

    def _newest(self, index: int, trained: int, keep: Keep) -> int:
        """A copy of the parameters beside stashed ones, or the predicted one."""
        if not self._delays[index]:
            return 0
        match self.workload.method.weights:
            case Weights.STASHED:
                return trained if keep is Keep.GRAPH else 0
            case Weights.PREDICTED:
                return trained
            case Weights.LATEST:
                return 0

    def _autocast_copy(self, weights: int) -> int:
        """A copy of float32 weights in the precision of autocast."""
        low = self.workload.autocast
        return weights * low.itemsize // 4 if low is not None else 0

    def read(self, index: int, start: int, end: int) -> int:
        """The inputs of a stage that its gradients depend on, for one micro-batch."""
        return self._live.needed(start, end) - self._free(self._live, index, start, end)

    def _activations(self, index: int, start: int, end: int, keep: Keep) -> tuple[int, int]:
        """Bytes kept from forward to backward, and of the graph being differentiated."""
        in_flight = self._windows[index]
        if end <= self._frozen:
            return 0, max(self._largest_op[start:end])
        match keep:
            case Keep.GRAPH:
                return in_flight * self._graph(start, end), max(self._largest_op[start:end])
            case Keep.INPUT:
                full, buffered = (
                    (live.needed if self.only_needed_inputs else live.inputs)(start, end)
                    - self._free(live, index, start, end)
                    for live in (self._live, self._buffered)
                )
                return self._kept_inputs(index, full, buffered), self._at_work(start, end)
            case Keep.NOTHING:
                return self._between_couplings(index, start, end)

    def _between_couplings(self, index: int, start: int, end: int) -> tuple[int, int]:
        last = index == self.stages - 1
        trained = max(start, self._frozen)
        lost = self._lost_before[end] - self._lost_before[trained]
        sides = self._windows[index] * (self._live.sides(trained, end) + lost)
        full = buffered = working = graphs = 0
        for reversible, first, behind in self._runs_in(start, end):
            if behind <= self._frozen:
                continue
            if reversible:
                first = max(first, trained)
                working = max(working, graphs + max(self._branches[first:behind]))
                continue
            # In the backward pass the graphs of earlier runs still exist, those of later ones not.
            working = max(working, graphs + self._at_work(first, behind))
            graphs += self._graph(first, behind) if last else 0
            full += self._live.inputs(first, behind) - self._free(self._live, index, first, behind)
            buffered += self._buffered.inputs(first, behind)
            buffered -= self._free(self._buffered, index, first, behind)
        return sides + self._kept_inputs(index, full, buffered), working

    def _kept_inputs(self, index: int, full: int, buffered: int) -> int:
        """Inputs of one micro-batch in full precision, and of the others as they are buffered."""
        return full + (self._windows[index] - 1) * buffered

    def _free(self, live: LiveBytes, index: int, start: int, end: int) -> int:
        return live.model_inputs(start, end) if index == 0 and self.first_input_free else 0

    def _graph(self, start: int, end: int) -> int:
        """What autograd saves if these pieces are one graph."""
        start = max(start, self._frozen)
        saved, shared = self._saved_before, self._shared_before
        return saved[end] - saved[start] - (shared[end] - shared[min(start + 1, end)])

    def _ends(self, index: int, start: int, end: int, keep: Keep) -> int:
        """Inputs that a kept graph has not saved, and its outputs.

        A coupling at the beginning saves the sum `a + F(b)`, if anything, but not `a`.
        """
        if keep is not Keep.GRAPH or end <= self._frozen:
            return 0
        start = max(start, self._frozen)
        unread = self._live.inputs(start, end) - self._live.needed(start, end)
        inputs = max(unread, self._streams[start])
        return self._windows[index] * (inputs + self._unsaved[end - 1])

    def _at_work(self, start: int, end: int) -> int:
        """A graph and the gradients inside it; the inputs it saved are counted as buffers."""
        graph, operands = self._graph(start, end), max(self._largest_op[start:end])
        return graph + max(operands - min(self._live.needed(start, end), graph), 0)

    def _messages(self, index: int, start: int, end: int, keep: Keep) -> int:
        """A stage that ends in a coupling is sent its outputs back along with their gradients."""
        arriving = self._live.crossing(start) if index > 0 else 0
        return arriving + (self._back(end, keep) if index < self.stages - 1 else 0)

    def _waiting(self, index: int, end: int, keep: Keep) -> int:
        """Messages for micro-batches that the next stage is done with and this one is not."""
        if index == self.stages - 1:
            return 0
        return (self._windows[index] - self._windows[index + 1]) * self._back(end, keep)

    def _between_pieces(self, start: int, end: int, keep: Keep) -> int:
        """Where the backward pass goes piece by piece, the most that is handed between two.

        A coupling hands on one stream and one gradient unchanged; behind the last piece those are
        still in the message, and counted there.
        """
        if keep is not Keep.NOTHING:
            return 0
        reversible = [piece.reversible for piece in self.pieces[start:end]]
        most = 0
        for cut in range(start + 1, end):
            if any(reversible[cut - start - 1 : cut - start + 1]):
                in_message = cut == end - 1 and reversible[-1]
                most = max(most, self._back(cut, keep) // (2 if in_message else 1))
        return most

    def _back(self, cut: int, keep: Keep) -> int:
        """What comes back across a cut: gradients, and before a coupling its outputs' values."""
        if cut <= self._frozen:
            return 0
        rebuilds = keep is Keep.NOTHING and self.pieces[cut - 1].reversible
        return (2 if rebuilds else 1) * self._live.crossing(cut)

    def _runs_in(self, start: int, end: int) -> list[tuple[bool, int, int]]:
        clipped = ((kind, max(first, start), min(last, end)) for kind, first, last in self._runs)
        return [(kind, first, last) for kind, first, last in clipped if first < last]


def _trained(partition: Partition, pieces: Sequence[Segment]) -> list[int]:
    """Bytes of the parameters that get a gradient; each counts where it is used first."""
    root, sizes = partition.rewired.root, []
    names = {*trained_parameters(partition.rewired)}
    left = {id(p) for name, p in root.named_parameters() if name in names}
    for piece in pieces:
        new = {id(p): p for p in parameters_read(piece.graph, root) if id(p) in left}
        left -= new.keys()
        sizes.append(sum(p.numel() * p.itemsize for p in new.values()))
    return sizes


def _operands(piece: Segment, batch: int) -> int:
    """Gradients that exist at once inside a piece: of an operation's output and of its inputs."""
    graph = piece.graph
    size = {node: size_at(node.meta.get(TYPE), batch) for node in graph.nodes}
    return max(
        (size[n] + sum(size[i] for i in n.all_input_nodes) for n in graph.nodes if size[n]),
        default=0,
    )


def _lost_bits(piece: Segment, types: Mapping[str, Any], batch: int) -> int:
    """Bytes that an averaged coupling keeps."""
    kind = types.get(piece.streams_out[1]) if isinstance(piece, Coupling) else None
    if not isinstance(piece, Coupling) or not isinstance(kind, TensorType):
        return 0
    elements = kind.nbytes(batch) // kind.dtype.itemsize
    return -(-KEPT_BITS * elements // 8) if piece.averaged else 0


def _stream(piece: Segment, types: Mapping[str, Any], batch: int) -> int:
    """The stream that a coupling's branch reads."""
    if not isinstance(piece, Coupling):
        return 0
    return size_at(types.get(piece.streams_in[1]), batch)
