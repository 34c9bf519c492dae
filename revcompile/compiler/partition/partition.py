"""partition: pieces and their costs -> stages whose largest is as small as it can be.

Whole segments are tried first. Opaque segments are torn only where there are fewer segments
than stages, or where that makes the largest stage noticeably smaller.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import networkx as nx

from revcompile.compiler.cost import How, MemoryModel, piece_costs, sum_costs
from revcompile.compiler.partition.balance import balance, largest
from revcompile.compiler.partition.cuts import (
    crossing,
    graphs_of,
    parameter_names,
    size_of,
    updated_buffers,
)
from revcompile.compiler.partition.pieces import torn_pieces, whole_pieces
from revcompile.errors import InputError
from revcompile.ir.program import Part, Partition, Piece
from revcompile.ir.types import Cost, Rewired
from revcompile.schedule import Method, Tie

__all__ = ["Limits", "partition"]

TEARING_GAIN: Final = 1.05
"""Tear opaque segments if whole ones make the largest stage this much larger."""
TYING_LOSS: Final = 1.1
"""Keep tied parameters together if that makes the largest stage at most this much larger."""


@dataclass(frozen=True)
class Limits:
    """What a device can hold: `memory` bytes, at `batch` samples a micro-batch.

    `group` is the number of micro-batches between two updates.
    """

    memory: int
    batch: int
    optimizer_copies: int = 1
    group: int = 1


@dataclass(frozen=True)
class _Items:
    """Pieces in a row with all that deciding on cuts needs."""

    pieces: tuple[Piece, ...]
    costs: tuple[Cost, ...]
    types: Mapping[str, Any]
    alive: Sequence[tuple[str, ...]]
    shared: Mapping[str, tuple[int, ...]]
    """Parameters that several pieces read: name -> those pieces."""
    updated: Mapping[str, tuple[int, ...]]
    """Buffers that the model writes to: name -> the pieces that read or write them."""


def partition(
    rewired: Rewired,
    stages: int,
    method: Method,
    *,
    how: How = "analytic",
    limits: Limits | None = None,
) -> Partition:
    """Cut a rewired model into `stages` stages whose work, by what `method` keeps, is balanced."""
    whole = whole_pieces(rewired.body)
    groups, new_types = torn_pieces(rewired, whole)
    torn = tuple(itertools.chain(*groups))
    types = {**rewired.body.types, **new_types}
    _enough(rewired, stages, torn)
    finest = _items(rewired, torn, types, piece_costs(rewired, torn, types, how))
    _refuse_written_parameters(rewired, finest)
    chosen, ends = finest, _solve(finest, stages, method, limits)
    if stages <= len(whole) and len(whole) < len(torn):
        rest = iter(finest.costs)
        costs = tuple(sum_costs([next(rest) for _ in group]) for group in groups)
        coarse = _items(rewired, whole, types, costs)
        found = _solve(coarse, stages, method, limits)
        bound = TEARING_GAIN * _worst(finest, ends, method) if ends else math.inf
        if found and _worst(coarse, found, method) <= bound:
            chosen, ends = coarse, found
    if ends is None:
        _refuse_updated_buffers(rewired, finest, stages, method, limits)
        raise InputError(_does_not_fit(rewired, finest, stages, method, limits))
    return _assemble(rewired, chosen, ends, method)


def _enough(rewired: Rewired, stages: int, pieces: Sequence[Piece]) -> None:
    if stages < 1:
        raise InputError(f"petrafy: num_stages={stages}; a model has at least 1 stage")
    if stages <= len(pieces):
        return
    blocks = sum(piece.reversible for piece in pieces)
    shown = ", ".join(piece.name for piece in pieces[:40]) + (", ..." if len(pieces) > 40 else "")
    raise InputError(
        f"petrafy: num_stages={stages}, but {rewired.name} has {len(pieces)} pieces that can stand "
        f"alone ({blocks} of them reversible blocks); use num_stages <= {len(pieces)}. "
        f"The pieces are: {shown}"
    )


def _items(
    rewired: Rewired,
    pieces: tuple[Piece, ...],
    types: Mapping[str, Any],
    costs: tuple[Cost, ...],
) -> _Items:
    alive, shared = crossing(rewired, pieces), _shared(rewired, pieces)
    return _Items(pieces, costs, types, alive, shared, updated_buffers(pieces))


def _shared(rewired: Rewired, pieces: Sequence[Piece]) -> dict[str, tuple[int, ...]]:
    names = {id(p): name for name, p in rewired.root.named_parameters()}
    readers: dict[str, list[int]] = {}
    for index, piece in enumerate(pieces):
        for graph in graphs_of(piece.segment):
            for name in parameter_names(graph, rewired.root, names):
                readers.setdefault(name, []).append(index)
    return {name: tuple(found) for name, found in readers.items() if len(found) > 1}


# -- deciding -------------------------------------------------------------------------------------


def _solve(
    items: _Items, stages: int, method: Method, limits: Limits | None
) -> tuple[int, ...] | None:
    """The ends of the stages; pieces that share parameters stay together if that costs little."""
    together: list[tuple[int, int]] = [
        pair for users in items.updated.values() for pair in itertools.pairwise(users)
    ]
    best = _balanced(items, stages, method, limits, together)
    if best is None:
        return None
    bound = TYING_LOSS * _worst(items, best, method)
    sharing = nx.Graph()
    for readers in items.shared.values():
        nx.add_path(sharing, readers)
    for component in nx.connected_components(sharing):
        wanted = [*together, *itertools.pairwise(sorted(component))]
        ends = _balanced(items, stages, method, limits, wanted)
        if ends is not None and _worst(items, ends, method) <= bound:
            best, together = ends, wanted
    return best


def _balanced(
    items: _Items,
    stages: int,
    method: Method,
    limits: Limits | None,
    together: Sequence[tuple[int, int]],
) -> tuple[int, ...] | None:
    def sent(part: int, start: int, end: int) -> float:
        return 0.0 if end == len(items.pieces) else float(size_of(items.alive[end], items.types))

    return balance(
        _work(items, method),
        stages,
        last=_work(items, method, is_last=True),
        allowed=_fits(items, stages, method, limits),
        penalty=sent,
        together=together,
    )


def _work(items: _Items, method: Method, *, is_last: bool = False) -> list[float]:
    return [
        piece.work(cost, method.keep, is_last)
        for piece, cost in zip(items.pieces, items.costs, strict=True)
    ]


def _worst(items: _Items, ends: Sequence[int], method: Method) -> float:
    return largest(_work(items, method), ends, last=_work(items, method, is_last=True))


def _fits(
    items: _Items, stages: int, method: Method, limits: Limits | None
) -> Callable[[int, int, int], bool] | None:
    if limits is None:
        return None
    model = _memory(items, stages, method, limits)
    return lambda part, start, end: model.stage(part, start, end).total <= limits.memory


def _memory(items: _Items, stages: int, method: Method, limits: Limits) -> MemoryModel:
    return MemoryModel(
        items.pieces,
        items.types,
        items.costs,
        method,
        stages,
        batch=limits.batch,
        optimizer_copies=limits.optimizer_copies,
        group=limits.group,
        first_input_free=False,  # the trainer keeps what it is fed
    )


def _refuse_written_parameters(rewired: Rewired, items: _Items) -> None:
    """Parameters have versions in stages: only updates change them."""
    parameters = dict(rewired.root.named_parameters(remove_duplicate=False))
    written = [name for name in items.updated if name in parameters]
    if written:
        raise InputError(
            f"petrafy: the forward pass of {rewired.name} writes into its parameter {written[0]}; "
            "do that after an update (trainer.step), or keep such values in a buffer"
        )


def _refuse_updated_buffers(
    rewired: Rewired, items: _Items, stages: int, method: Method, limits: Limits | None
) -> None:
    """A buffer is read and written in one stage: elsewhere its contents would be out of date."""
    if not items.updated or _balanced(items, stages, method, limits, ()) is None:
        return
    name = max(items.updated, key=lambda n: items.updated[n][-1] - items.updated[n][0])
    first, *_, last = (items.pieces[i].name for i in items.updated[name])
    raise InputError(
        f"petrafy: the forward pass of {rewired.name} writes into its buffer {name}, which is used "
        f"from {first} to {last}; all of that must be one stage, which leaves no cut into {stages} "
        "stages. Use fewer stages, or update the buffer where its contents are computed"
    )


def _does_not_fit(
    rewired: Rewired, items: _Items, stages: int, method: Method, limits: Limits | None
) -> str:
    assert limits is not None, "only a memory limit can rule out every partition"
    model = _memory(items, stages, method, limits)
    ends = _balanced(items, stages, method, None, ())
    assert ends is not None
    needs = [model.stage(j, a, b).total for j, (a, b) in enumerate(_ranges(ends))]
    worst = max(range(stages), key=needs.__getitem__)
    listed = ", ".join(f"{need / 2**30:.2f}" for need in needs)
    return (
        f"petrafy: {rewired.name} does not fit {stages} devices of {limits.memory / 2**30:.2f} GiB "
        f"at {limits.batch} samples a micro-batch: balanced by work its stages need {listed} GiB "
        f"(stage {worst} the most), and no other cut fits either. Use more stages, a smaller "
        "micro-batch, or a larger memory limit"
    )


# -- assembling -----------------------------------------------------------------------------------


def _ranges(ends: Sequence[int]) -> list[tuple[int, int]]:
    return list(itertools.pairwise((0, *ends)))


def _assemble(rewired: Rewired, items: _Items, ends: Sequence[int], method: Method) -> Partition:
    parts = tuple(
        Part(
            index=index,
            pieces=items.pieces[start:end],
            inputs=items.alive[start],
            outputs=items.alive[end],
            costs=items.costs[start:end],
        )
        for index, (start, end) in enumerate(_ranges(ends))
    )
    return Partition(rewired, parts, items.types, _ties(items, ends), method.keep)


def _ties(items: _Items, ends: Sequence[int]) -> dict[Tie, tuple[str, ...]]:
    """Parameters read by more than one stage; the earliest stage owns each."""
    home = [j for j, (start, end) in enumerate(_ranges(ends)) for _ in range(start, end)]
    ties: dict[Tie, tuple[str, ...]] = {}
    for name, readers in items.shared.items():
        owner, *holders = sorted({home[reader] for reader in readers})
        for holder in holders:
            ties[Tie(owner, holder)] = (*ties.get(Tie(owner, holder), ()), name)
    return ties
