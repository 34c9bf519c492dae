"""Bytes of live values: what a range of pieces reads from before it, and what crosses a cut."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from revcompile.ir.types import Coupling, Segment, TensorType


class LiveBytes:
    """Bytes that any range `pieces[start:end]` reads, and that cross any cut.

    Partitioning asks about very many ranges: everything is summed up once, and a query is a
    bisection.

    Args:
        pieces: All pieces of the model in order.
        types: The type of every live value.
        batch_size: Samples a micro-batch.
        buffer_bytes: As `size_at` takes it.
    """

    def __init__(
        self,
        pieces: Sequence[Segment],
        types: Mapping[str, Any],
        batch_size: int,
        buffer_bytes: int | None = None,
    ) -> None:
        names = {name for piece in pieces for name in (*piece.inputs, *piece.outputs)}
        size = {name: size_at(types.get(name), batch_size, buffer_bytes) for name in names}
        made = {name for piece in pieces for name in piece.outputs}
        read = {name for piece in pieces for name in piece.inputs}
        self._sides = _Sides(pieces, size)
        # A value nobody reads is a result, or read by pieces that are not in this row.
        leaving = sum(size[name] for name in made - read)
        next_use: dict[str, tuple[float, float]] = {}
        self._crossing = [leaving]
        self._inputs, self._needed, self._model_inputs = ([_CountedFrom(())] for _ in range(3))
        for index in reversed(range(len(pieces))):
            _step_back(next_use, index, pieces[index])
            leaving -= sum(size[name] for name in pieces[index].outputs if name not in read)
            self._crossing.append(leaving + sum(size[name] for name in next_use))
            reads = [(first, size[name]) for name, (first, _) in next_use.items()]
            needs = [(needed, size[name]) for name, (_, needed) in next_use.items()]
            own = [(first, size[n]) for n, (first, _) in next_use.items() if n not in made]
            self._inputs.append(_CountedFrom(reads))
            self._needed.append(_CountedFrom(needs))
            self._model_inputs.append(_CountedFrom(own))
        for by_start in (self._crossing, self._inputs, self._needed, self._model_inputs):
            by_start.reverse()

    def inputs(self, start: int, end: int) -> int:
        """What the pieces read of values made before them."""
        return self._inputs[start].before(end)

    def needed(self, start: int, end: int) -> int:
        """Of that, what their gradients depend on if they are differentiated as one."""
        return self._needed[start].before(end)

    def model_inputs(self, start: int, end: int) -> int:
        """What the pieces read of the model's own inputs, made by no piece."""
        return self._model_inputs[start].before(end)

    def sides(self, start: int, end: int) -> int:
        """Sides of the pieces' couplings that no later piece reads."""
        return self._sides.kept(start, end)

    def crossing(self, cut: int) -> int:
        """What is alive just before piece `cut`."""
        return self._crossing[cut]


class _Sides:
    """Side values of couplings: a stage keeps those that the next stage does not send back."""

    def __init__(self, pieces: Sequence[Segment], size: Mapping[str, int]) -> None:
        self._size = size
        self._by_reader: list[tuple[int, str]] = []  # sorted: index of the coupling, side
        self._last_use: dict[str, int] = {}
        self._made_by: dict[str, int] = {}
        self._opaque_readers: dict[str, list[int]] = {}
        for index, piece in enumerate(pieces):
            self._last_use |= dict.fromkeys(piece.inputs, index)
            self._made_by |= dict.fromkeys(piece.outputs, index)
            if isinstance(piece, Coupling):
                self._by_reader += [(index, name) for name in piece.sides if size[name]]
            else:
                for name in piece.inputs:
                    self._opaque_readers.setdefault(name, []).append(index)
        self._run_start = [0] * len(pieces)
        for _, first, behind in runs_of(pieces):
            self._run_start[first:behind] = [first] * (behind - first)

    def kept(self, start: int, end: int) -> int:
        """Bytes of the sides that `pieces[start:end]` keeps for its couplings alone."""
        first = bisect_left(self._by_reader, (start, ""))
        behind = bisect_left(self._by_reader, (end, ""))
        names = {name for _, name in self._by_reader[first:behind]}
        return sum(self._size[name] for name in names if self._is_kept(name, start, end))

    def _is_kept(self, name: str, start: int, end: int) -> bool:
        if self._last_use[name] >= end:
            return False
        made = self._made_by.get(name, -1)
        # An opaque run that reads the value from outside keeps it already.
        return not any(
            start <= reader < end and made < max(start, self._run_start[reader])
            for reader in self._opaque_readers.get(name, ())
        )


def _step_back(next_use: dict[str, tuple[float, float]], index: int, piece: Segment) -> None:
    """Extend `next_use` by the piece before.

    For each value that is alive before piece `index`, `next_use` holds two pieces: the first that
    reads it, and the first that must be in a stage for the stage's gradients to depend on it. They
    differ because the sum `a + F(b)` hands gradients on to `a` unchanged, whatever `a` is.
    """
    needs = dict.fromkeys(piece.inputs, float(index))
    if isinstance(piece, Coupling):
        a, b = piece.streams_in
        others = {b, *piece.sides, *(piece.rearrange.sides if piece.rearrange else ())}
        if a not in others:
            needs[a] = next_use.get(piece.streams_out[1], (math.inf, math.inf))[1]
    for name in piece.outputs:
        next_use.pop(name, None)
    for name, needed in needs.items():
        later = next_use.get(name, (math.inf, math.inf))[1]
        next_use[name] = float(index), min(needed, later)


class _CountedFrom:
    """A sum of sizes, each of which counts from a piece on.

    >>> sizes = _CountedFrom([(3, 10), (1, 5)])
    >>> sizes.before(3), sizes.before(4)
    (5, 15)
    """

    def __init__(self, entries: Iterable[tuple[float, int]]) -> None:
        ordered = sorted(entries)
        self._pieces = [piece for piece, _ in ordered]
        self._sums = prefix_sums([size for _, size in ordered])

    def before(self, end: int) -> int:
        """Sizes that count from a piece before `end`."""
        return self._sums[bisect_left(self._pieces, end)]


def prefix_sums(numbers: Sequence[int]) -> list[int]:
    """Sums of the first 0, 1, 2, ... numbers."""
    return list(itertools.accumulate(numbers, initial=0))


def runs_of(pieces: Sequence[Segment]) -> list[tuple[bool, int, int]]:
    """Maximal runs of couplings and of opaque pieces: (reversible, start, end)."""
    runs, start = [], 0
    for reversible, run in itertools.groupby(pieces, lambda piece: piece.reversible):
        end = start + len(list(run))
        runs.append((reversible, start, end))
        start = end
    return runs


def size_at(kind: Any, batch_size: int, buffer_bytes: int | None = None) -> int:
    """Bytes of a value of this type at a batch size. Values that are no tensors take none.

    `buffer_bytes` is what an element of a float32 tensor takes, if not 4.
    """
    total = 0
    for leaf in pytree.tree_leaves(kind, is_leaf=lambda x: isinstance(x, TensorType)):
        if isinstance(leaf, TensorType):
            itemsize = leaf.dtype.itemsize
            if buffer_bytes is not None and leaf.dtype == torch.float32:
                itemsize = buffer_bytes
            total += torch.Size(leaf.at(batch_size)).numel() * itemsize
    return total
