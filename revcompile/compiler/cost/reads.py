"""What a range of pieces reads from before it and leaves alive behind it, in bytes."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from revcompile.ir.program import Piece
from revcompile.ir.types import Coupling, TensorType

__all__ = ["Reads", "running", "runs_of", "size_at"]


class Reads:
    """Which values a range of pieces reads from before it, in bytes. Queries are bisections."""

    def __init__(
        self,
        pieces: Sequence[Piece],
        types: Mapping[str, Any],
        batch: int,
        bytes_each: int | None = None,
    ) -> None:
        names = {name for piece in pieces for name in (*piece.inputs, *piece.outputs)}
        size = {name: size_at(types.get(name), batch, bytes_each) for name in names}
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
        for _, first, behind in runs_of(pieces):
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
        others = {b, *segment.sides, *(segment.rearrange.sides if segment.rearrange else ())}
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
        self._sums = running([size for _, size in ordered])

    def below(self, place: int) -> int:
        """What counts at places before this one."""
        return self._sums[bisect_left(self._places, place)]


def running(numbers: Sequence[int]) -> list[int]:
    """Sums of the first 0, 1, 2, ... numbers."""
    return list(itertools.accumulate(numbers, initial=0))


def runs_of(pieces: Sequence[Piece]) -> list[tuple[bool, int, int]]:
    """Maximal runs of couplings and of opaque pieces: (reversible, start, end)."""
    found = []
    for reversible, run in itertools.groupby(enumerate(pieces), lambda item: item[1].reversible):
        places = [place for place, _ in run]
        found.append((reversible, places[0], places[-1] + 1))
    return found


def size_at(kind: Any, batch: int, bytes_each: int | None = None) -> int:
    """Bytes of a value at a batch size; of float32 with so many an element. Plain values: 0.

    With 0 bytes no floating number takes any.
    """
    total = 0
    for leaf in pytree.tree_leaves(kind, is_leaf=lambda x: isinstance(x, TensorType)):
        if isinstance(leaf, TensorType):
            takes = leaf.dtype.itemsize
            if bytes_each == 0 and leaf.dtype.is_floating_point:
                takes = 0
            elif bytes_each is not None and leaf.dtype == torch.float32:
                takes = bytes_each
            total += torch.Size(leaf.at(batch)).numel() * takes
    return total
