"""How much memory a stage takes, in bytes, in our own runtime.

What a stage keeps for its backward pass is kept for every micro-batch in flight:

    keep       kept from forward to backward                        built in the backward pass
    graph      all that autograd saved                              nothing more
    input      its inputs                                           its whole graph
    nothing    the inputs of each run of opaque pieces, and sides   the largest graph of a coupling
               of couplings that no later stage sends back          or of a run

At the last stage backward follows forward at once: with "nothing", all of its opaque runs keep
their graphs as well.

The graph being differentiated comes with the gradients inside it. Where a stage goes backward piece
by piece, there are also the values that one piece hands to the piece before it.
`benchmarks/stage_memory.py` compares these numbers with the memory that is really allocated.

Captured steps keep the same inputs and messages, in static buffers. In addition they hold the input
batch and, in the memory of a CUDA graph, what a stage keeps of the newest micro-batch and the
messages it has just sent: one more micro-batch of `buffers`, and `waiting` once more.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from revcompile.compiler.dataflow import live_at_cuts
from revcompile.compiler.gradient_paths import frozen_values, trained_parameters
from revcompile.ir.module_tree import parameters_read
from revcompile.ir.program import Partition, StageMemory
from revcompile.ir.types import TYPE, Coupling, Segment, TensorType, types_in
from revcompile.kernels.fixed_point import KEPT_BITS
from revcompile.schedule import Keep, Method, Weights, delay, window


@dataclass(frozen=True)
class Workload:
    """How a model will be trained, as far as its memory and time depend on it.

    Args:
        method: The training method; it says how many micro-batches are in flight and what stages
            keep of them.
        microbatch_size: Samples per micro-batch.
        accumulation_steps: Micro-batches per update.
        optimizer_copies: Numbers of optimizer state per parameter: SGD with momentum 1, Adam 2.
        buffer_bytes: Bytes per element of a float32 input while it is kept for the backward pass
            (2 in bfloat16); None keeps it as it is.
        autocast: The dtype of autocast; stages have a copy of their weights in it.
    """

    method: Method
    microbatch_size: int
    accumulation_steps: int = 1
    optimizer_copies: float = 1.0
    buffer_bytes: int | None = None
    autocast: torch.dtype | None = None


class MemoryModel:
    """The memory of any stage that could be cut out of the pieces of a partition.

    Activations are counted as if there were no autocast. Trained parameters are those that require
    a gradient now, not when the model was cut.

    Args:
        partition: All pieces of the model in order, with their costs.
        workload: Batch size, method, optimizer and precision.
        stages: How many stages the pieces are cut into; by default as many as the partition has.
    """

    def __init__(self, partition: Partition, workload: Workload, stages: int | None = None) -> None:
        pieces = [piece for part in partition.parts for piece in part.pieces]
        costs = [cost for part in partition.parts for cost in part.costs]
        self.pieces, self.workload = tuple(pieces), workload
        self.stages = stages or len(partition.parts)
        types, batch = partition.types, workload.microbatch_size
        now = replace(partition, frozen=frozen_values(partition))
        is_trained = [any(map(now.requires_grad, piece.outputs)) for piece in pieces]
        self._frozen = [*is_trained, True].index(True)
        """How many pieces come before the first one that a gradient is computed for. Nothing is
        kept for their backward pass, or sent back to them."""
        self._costs = [
            replace(cost.at(batch), trained=trained)
            for cost, trained in zip(costs, _trained(partition, pieces), strict=True)
        ]
        low, live = workload.buffer_bytes, live_at_cuts(partition.rewired, self.pieces)
        self._size = {name: size_at(kind, batch) for name, kind in types.items()}
        self._kept_size = {name: size_at(kind, batch, low) for name, kind in types.items()}
        self._crossing = [self._sum(alive) for alive in live]
        self._sent = [*map(frozenset[str], live[:-1]), frozenset[str]()]
        """For each cut, the values that a stage ending there sends; none after the last piece."""
        # Layers that rewiring has widened return larger values than the types in their graph say.
        self._largest_op = [
            max(_operands(piece, batch), cost.passing)
            for piece, cost in zip(self.pieces, self._costs, strict=True)
        ]
        couplings = [piece if isinstance(piece, Coupling) else None for piece in self.pieces]
        self._stream = [self._size[c.streams_in[1]] if c else 0 for c in couplings]
        """Bytes of the stream that each coupling's branch reads; 0 for other pieces."""
        self._lost = [_lost_bits(c, types, batch) if c else 0 for c in couplings]

    def stage(self, index: int, start: int, end: int, keep: Keep | None = None) -> StageMemory:
        """The memory of stage `index` if it is `pieces[start:end]`.

        Args:
            index: Which stage it is: the earlier, the more micro-batches are in flight.
            start: Its first piece.
            end: The piece after its last.
            keep: What it keeps; the default is what the method says.
        """
        workload, method = self.workload, self.workload.method
        keep = keep or method.keep
        weights = sum(cost.weights for cost in self._costs[start:end])
        trained = sum(cost.trained for cost in self._costs[start:end])
        late = delay(method, self.stages, index, workload.accumulation_steps)
        has_copy = late and (
            method.weights is Weights.PREDICTED
            or (method.weights is Weights.STASHED and keep is Keep.GRAPH)
        )
        low = workload.autocast
        in_flight, is_last = self._window(index), index == self.stages - 1
        waiting = 0 if is_last else in_flight - self._window(index + 1)
        back = 0 if is_last else self._back(end, keep)
        kept, working, ends = self._activations(index, start, end, keep)
        return StageMemory(
            parameters=weights + (weights * low.itemsize // 4 if low is not None else 0),
            gradients=trained,
            optimizer=round(workload.optimizer_copies * trained),
            summing=trained if workload.accumulation_steps > 1 else 0,
            stashed=late * trained if method.weights is Weights.STASHED else 0,
            newest=trained if has_copy else 0,
            buffers=kept,
            messages=(self._crossing[start] if index else 0) + back,
            working=working,
            waiting=waiting * back,
            between=self._between_pieces(start, end) if keep is Keep.NOTHING else 0,
            ends=in_flight * ends,
        )

    def _window(self, index: int) -> int:
        return window(self.workload.method, self.stages, index, self.workload.accumulation_steps)

    # -- activations ------------------------------------------------------------------------------

    def _activations(self, index: int, start: int, end: int, keep: Keep) -> tuple[int, int, int]:
        """Three numbers of bytes: kept from forward to backward, in the graph being differentiated,
        and of inputs and outputs of a kept graph (`_ends`).
        """
        first, in_flight = max(start, self._frozen), self._window(index)
        most = max(self._largest_op[start:end])
        if first >= end:
            return 0, most, 0
        if keep is Keep.GRAPH:
            return in_flight * self._graph(first, end), most, self._ends(first, end)
        if keep is Keep.INPUT:
            return self._kept(index, self._inputs(start, end)), self._at_work(start, end), 0
        lost = sum(self._lost[first:end])
        sides = in_flight * (self._sum(self._sides(first, end)) + lost)
        kept = working = graphs = 0
        for reversible, begin, behind in self._runs(start, end):
            if behind <= first:
                continue
            if reversible:
                branches = map(self._branch, range(max(begin, first), behind))
                working = max(working, graphs + max(branches))
                continue
            # During backward the graphs of earlier runs still exist; those of later runs do not.
            working = max(working, graphs + self._at_work(begin, behind))
            graphs += self._graph(begin, behind) if index == self.stages - 1 else 0
            kept += self._kept(index, self._inputs(begin, behind))
        return sides + kept, working, 0

    def _kept(self, index: int, names: Iterable[str]) -> int:
        """Bytes of inputs: one micro-batch in full precision, the others as they are buffered."""
        names = set(names)
        others = (self._window(index) - 1) * sum(self._kept_size.get(name, 0) for name in names)
        return self._sum(names) + others

    def _graph(self, start: int, end: int) -> int:
        """What autograd saves if these pieces are one graph."""
        start = max(start, self._frozen)
        shared = sum(cost.shared for cost in self._costs[start + 1 : end])
        return sum(cost.saved for cost in self._costs[start:end]) - shared

    def _branch(self, index: int) -> int:
        """The graph of a coupling's branch, and the gradients inside it.

        The stream that it reads exists already: it was in the message, or the next coupling has
        rebuilt it.
        """
        return self._costs[index].saved + max(self._largest_op[index] - self._stream[index], 0)

    def _at_work(self, start: int, end: int) -> int:
        """A graph and the gradients inside it; the inputs it saved are counted as buffers."""
        graph, operands = self._graph(start, end), max(self._largest_op[start:end])
        return graph + max(operands - min(self._sum(self._needed(start, end)), graph), 0)

    def _ends(self, start: int, end: int) -> int:
        """Inputs that a kept graph has not saved, and its outputs.

        A coupling at the beginning saves the sum `a + F(b)`, if anything, but not `a`.
        """
        unread = self._inputs(start, end) - self._needed(start, end)
        return max(self._sum(unread), self._stream[start]) + self._costs[end - 1].unsaved

    # -- between pieces ---------------------------------------------------------------------------

    def _between_pieces(self, start: int, end: int) -> int:
        """The most bytes handed from piece to piece where the backward pass goes piece by piece.

        A coupling hands on one stream and one gradient unchanged. If it is the last piece, they are
        still in the message and are counted there.
        """
        most = 0
        for cut in range(start + 1, end):
            if self.pieces[cut - 1].reversible or self.pieces[cut].reversible:
                in_message = cut == end - 1 and self.pieces[cut].reversible
                most = max(most, self._back(cut, Keep.NOTHING) // (2 if in_message else 1))
        return most

    def _back(self, cut: int, keep: Keep) -> int:
        """Bytes sent back across a cut: gradients and, to a coupling, the values of its outputs."""
        if cut <= self._frozen:
            return 0
        rebuilds = keep is Keep.NOTHING and self.pieces[cut - 1].reversible
        return (2 if rebuilds else 1) * self._crossing[cut]

    # -- values that enter a range of pieces ------------------------------------------------------

    def _sum(self, names: Iterable[str]) -> int:
        """Bytes of live values. Grids are one number each and count as nothing."""
        return sum(self._size.get(name, 0) for name in names)

    def _inputs(self, start: int, end: int) -> set[str]:
        """The values that the pieces read and that earlier pieces made."""
        pieces = self.pieces[start:end]
        read = {name for piece in pieces for name in piece.inputs}
        return read.difference(*(piece.outputs for piece in pieces))

    def _needed(self, start: int, end: int) -> set[str]:
        """The inputs that gradients depend on if the pieces are differentiated as one graph.

        The sum `a + F(b)` hands gradients on to `a` unchanged, whatever the value of `a`. Gradients
        depend on `a` only through a later piece that reads the sum.
        """
        needed: set[str] = set()
        for piece in reversed(self.pieces[start:end]):
            names = set(piece.inputs)
            if isinstance(piece, Coupling):
                (a, b), total = piece.streams_in, piece.streams_out[1]
                if a not in (b, *piece.all_sides) and total not in needed:
                    names.discard(a)
            needed = (needed - {*piece.outputs}) | names
        return needed

    def _sides(self, start: int, end: int) -> set[str]:
        """Side values that are kept for couplings alone: no later stage reads them and sends them
        back, and no opaque run keeps them as its input.
        """
        couplings = [p for p in self.pieces[start:end] if isinstance(p, Coupling)]
        names = {name for coupling in couplings for name in coupling.sides}
        for reversible, begin, behind in self._runs(start, end):
            names -= set() if reversible else self._inputs(begin, behind)
        return names - self._sent[end]

    def _runs(self, start: int, end: int) -> Iterator[tuple[bool, int, int]]:
        """Maximal runs of couplings and of opaque pieces: (reversible, start, end)."""
        for reversible, run in itertools.groupby(
            self.pieces[start:end], lambda piece: piece.reversible
        ):
            begin, start = start, start + len(list(run))
            yield reversible, begin, start


def size_at(kind: Any, microbatch_size: int, buffer_bytes: int | None = None) -> int:
    """Bytes of a value of this type at a batch size. Values other than tensors take none.

    `buffer_bytes` is what an element of a float32 tensor takes, if not 4.
    """
    total = 0
    for tensor in types_in(kind):
        is_buffered = buffer_bytes is not None and tensor.dtype == torch.float32
        itemsize = buffer_bytes if is_buffered else tensor.dtype.itemsize
        total += tensor.nbytes(microbatch_size) // tensor.dtype.itemsize * (itemsize or 0)
    return total


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
    """The most bytes of gradients at once inside a piece: of an operation's output and inputs."""
    graph = piece.graph
    size = {node: size_at(node.meta.get(TYPE), batch) for node in graph.nodes}
    return max(
        (size[n] + sum(size[i] for i in n.all_input_nodes) for n in graph.nodes if size[n]),
        default=0,
    )


def _lost_bits(coupling: Coupling, types: Mapping[str, Any], batch: int) -> int:
    """Bytes of the lost bits that an averaged coupling keeps; 0 for other couplings."""
    kind = types.get(coupling.streams_out[1])
    if not coupling.averaged or not isinstance(kind, TensorType):
        return 0
    return -(-KEPT_BITS * (kind.nbytes(batch) // kind.dtype.itemsize) // 8)
