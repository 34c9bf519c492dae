"""partition: pieces and their costs -> stages, with the largest stage as small as possible.

Whole segments are tried first. Opaque segments are split only where there are fewer segments than
stages, or where that makes the largest stage noticeably smaller.
"""

from __future__ import annotations

import functools
import itertools
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import networkx as nx

from revcompile.compiler.cost import CostSource, MemoryModel, Workload, piece_costs, sum_costs
from revcompile.compiler.cost.memory import size_at
from revcompile.compiler.dataflow import live_at_cuts
from revcompile.compiler.partition.balance import balance, largest
from revcompile.compiler.partition.pieces import split_pieces, whole_pieces
from revcompile.errors import InputError
from revcompile.ir.module_tree import parameter_names
from revcompile.ir.program import Part, Partition
from revcompile.ir.types import Cost, Rewired, Segment
from revcompile.schedule import Keep, Tie
from revcompile.units import format_size

SPLITTING_GAIN: Final = 1.05
"""Split opaque segments if whole ones make the largest stage larger by more than this factor."""
TYING_LOSS: Final = 1.1
"""Keep tied parameters in one stage if the largest stage grows by at most this factor."""


@dataclass(frozen=True)
class Pieces:
    """The segments of a model, whole and cut as finely as possible, and the costs of the parts."""

    rewired: Rewired
    whole: tuple[Segment, ...]
    groups: tuple[tuple[Segment, ...], ...]
    types: Mapping[str, Any]
    costs: tuple[Cost, ...]

    @classmethod
    def of(cls, rewired: Rewired, cost: CostSource = CostSource.ANALYTIC) -> Pieces:
        """`cost`: where the work of a piece comes from."""
        whole = whole_pieces(rewired.body)
        groups, new_types = split_pieces(rewired, whole)
        types = {**rewired.body.types, **new_types}
        return cls(rewired, whole, groups, types, piece_costs(rewired, groups, types, cost))


def partition(
    pieces: Pieces,
    stages: int,
    workload: Workload,
    *,
    memory_budget: int | None = None,
    keeps: Sequence[Keep] | None = None,
) -> Partition:
    """Cut a rewired model into stages of balanced work.

    Args:
        pieces: The model.
        stages: How many stages to cut it into.
        workload: How the model will be trained, which decides its memory.
        memory_budget: Bytes a stage may hold at its peak.
        keeps: What each stage keeps, which decides how much it recomputes. Default: what the
            method of the workload says.

    Raises:
        InputError: There are too few pieces, or no cut fits the budget.
    """
    rewired, whole, split = pieces.rewired, pieces.whole, tuple(itertools.chain(*pieces.groups))
    _check_count(rewired, stages, split)
    keeps = tuple(keeps or [workload.method.keep] * stages)

    def row_of(row: tuple[Segment, ...], costs: tuple[Cost, ...]) -> _Row:
        return _Row(rewired, row, costs, pieces.types, keeps, workload, memory_budget)

    finest = row_of(split, pieces.costs)
    chosen, ends = finest, finest.cut()
    if stages <= len(whole) and len(whole) < len(split):
        rest = iter(finest.costs)
        sums = (sum_costs([next(rest) for _ in group]) for group in pieces.groups)
        coarse = row_of(whole, tuple(sums))
        coarse_ends = coarse.cut()
        bound = SPLITTING_GAIN * largest(finest.works, ends) if ends else math.inf
        if coarse_ends and largest(coarse.works, coarse_ends) <= bound:
            chosen, ends = coarse, coarse_ends
    if ends is None:
        raise InputError(_does_not_fit(finest))
    return _assemble(chosen, ends)


def assign_contiguous(partition: Partition, ranks: int) -> list[int]:
    """The rank of every stage if each rank has consecutive stages, balanced by work."""
    work = [math.fsum(partition.works(part)) for part in partition.parts]
    ends = balance([work] * ranks)
    assert ends is not None
    return [bisect_right(ends, stage) for stage in range(len(work))]


# -- deciding -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Row:
    """Consecutive pieces, and everything needed to decide where to cut them."""

    rewired: Rewired
    pieces: tuple[Segment, ...]
    costs: tuple[Cost, ...]
    types: Mapping[str, Any]
    keeps: tuple[Keep, ...]
    """What each stage keeps."""
    workload: Workload
    memory_budget: int | None

    @functools.cached_property
    def live(self) -> Sequence[tuple[str, ...]]:
        """Values that are alive before each piece, and the model's results."""
        return live_at_cuts(self.rewired, self.pieces)

    @functools.cached_property
    def traffic(self) -> Sequence[float]:
        """For each cut, the bytes that a stage ending there sends; 0 after the last piece."""
        batch = self.rewired.batch
        return [*(bytes_sent(live, self.types, batch) for live in self.live[:-1]), 0.0]

    @functools.cached_property
    def shared(self) -> Mapping[str, tuple[int, ...]]:
        """Parameters that several pieces read: name -> those pieces."""
        readers: dict[str, list[int]] = {}
        for index, piece in enumerate(self.pieces):
            for name in parameter_names(piece.graph, self.rewired.root):
                readers.setdefault(name, []).append(index)
        return {name: tuple(users) for name, users in readers.items() if len(users) > 1}

    @functools.cached_property
    def memory(self) -> MemoryModel:
        """What any stage of the row would hold in our trainer."""
        whole = _assemble(self, [len(self.pieces)])
        return MemoryModel(whole, self.workload, len(self.keeps))

    def needs(self, stage: int, start: int, end: int) -> int:
        """Bytes that a stage holds if it is `pieces[start:end]`."""
        return self.memory.stage(stage, start, end, self.keeps[stage]).total

    @functools.cached_property
    def works(self) -> list[list[float]]:
        """Work of each piece in each stage."""
        priced = list(zip(self.pieces, self.costs, strict=True))
        kinds = [(keep, stage == len(self.keeps) - 1) for stage, keep in enumerate(self.keeps)]
        rows = {kind: [piece.work(cost, *kind) for piece, cost in priced] for kind in {*kinds}}
        return [rows[kind] for kind in kinds]

    def cut(self) -> tuple[int, ...] | None:
        """The ends of the stages; pieces that share parameters share a stage if it costs little."""
        best, no_cut = self.balanced(), list[tuple[int, int]]()
        if best is None:
            return None
        bound = TYING_LOSS * largest(self.works, best)
        sharing = nx.Graph()
        for readers in self.shared.values():
            nx.add_path(sharing, readers)
        for component in nx.connected_components(sharing):
            tied = [*no_cut, *itertools.pairwise(sorted(component))]
            ends = self.balanced(tied)
            if ends is not None and largest(self.works, ends) <= bound:
                best, no_cut = ends, tied
        return best

    def balanced(
        self, no_cut: Sequence[tuple[int, int]] = (), *, any_memory: bool = False
    ) -> tuple[int, ...] | None:
        """The ends of the stages: least work of the largest stage, then least traffic."""
        budget = None if any_memory else self.memory_budget

        def fits(stage: int, start: int, end: int) -> bool:
            return budget is None or self.needs(stage, start, end) <= budget

        allowed = None if budget is None else fits
        return balance(self.works, allowed=allowed, traffic=self.traffic, no_cut=no_cut)


# -- refusing -------------------------------------------------------------------------------------


def _check_count(rewired: Rewired, stages: int, pieces: Sequence[Segment]) -> None:
    if stages <= len(pieces):
        return
    blocks = sum(piece.reversible for piece in pieces)
    shown = ", ".join(piece.name for piece in pieces[:40]) + (", ..." if len(pieces) > 40 else "")
    advice = f"; use num_stages <= {len(pieces)}. The pieces are: {shown}" if pieces else ""
    raise InputError(
        f"petrafy: num_stages={stages}, but {rewired.name} has {len(pieces)} pieces that can stand "
        f"alone ({blocks} of them reversible blocks){advice}"
    )


def _does_not_fit(row: _Row) -> str:
    budget = row.memory_budget
    assert budget is not None, "only a memory budget can rule out every partition"
    ends = row.balanced(any_memory=True)
    assert ends is not None
    needs = [row.needs(stage, *pieces) for stage, pieces in enumerate(_ranges(ends))]
    worst = needs.index(max(needs))
    listed = ", ".join(map(format_size, needs))
    return (
        f"petrafy: {row.rewired.name} does not fit {len(needs)} devices of {format_size(budget)} "
        f"at {row.workload.microbatch_size} samples a micro-batch: balanced by work its stages "
        f"need {listed} (stage {worst} the most), and no other cut fits either. Use more stages, a "
        "smaller microbatch_size, or a larger memory_budget"
    )


# -- assembling -----------------------------------------------------------------------------------


def _ranges(ends: Sequence[int]) -> list[tuple[int, int]]:
    return list(itertools.pairwise((0, *ends)))


def _assemble(row: _Row, ends: Sequence[int]) -> Partition:
    parts = tuple(
        Part(
            index=index,
            pieces=row.pieces[start:end],
            inputs=row.live[start],
            outputs=row.live[end],
            costs=row.costs[start:end],
        )
        for index, (start, end) in enumerate(_ranges(ends))
    )
    return Partition(row.rewired, parts, row.types, _ties(row, ends), row.keeps)


def _ties(row: _Row, ends: Sequence[int]) -> dict[Tie, tuple[str, ...]]:
    """Parameters read by more than one stage; the earliest stage owns each."""
    stage_of = [j for j, (start, end) in enumerate(_ranges(ends)) for _ in range(start, end)]
    ties: dict[Tie, tuple[str, ...]] = {}
    for name, readers in row.shared.items():
        owner, *holders = sorted({stage_of[reader] for reader in readers})
        for holder in holders:
            ties[Tie(owner, holder)] = (*ties.get(Tie(owner, holder), ()), name)
    return ties


# -- what crosses a cut ---------------------------------------------------------------------------


def bytes_sent(names: Sequence[str], types: Mapping[str, Any], microbatch_size: int) -> int:
    """Bytes of live values at a batch size."""
    return sum(size_at(types.get(name), microbatch_size) for name in names)
