"""Where costs come from: counted (analytic), measured, or numbers of the user's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from revcompile.arguments import check_cost, number
from revcompile.compiler.cost.analytic import analytic_costs
from revcompile.compiler.cost.measured import Clock, measured_costs
from revcompile.errors import InputError
from revcompile.ir.types import Cost, Rewired, Segment

CostSource = str | Mapping[str, float] | Callable[[str], float]
""""analytic", "measured", "replayed" (kernels alone, as captured steps on a GPU take them), or
numbers by name (a mapping or a function)."""


def segment_costs(rewired: Rewired) -> tuple[Cost, ...]:
    """Analytic cost of every segment in order. A parameter counts where it is used first."""
    pieces = rewired.body.segments
    return analytic_costs(rewired, pieces, rewired.body.types)


def piece_costs(
    rewired: Rewired,
    pieces: Sequence[Segment],
    types: Mapping[str, Any],
    cost: CostSource = "analytic",
) -> tuple[Cost, ...]:
    """Cost of every piece in order.

    Args:
        rewired: The model.
        pieces: Its segments, or parts of them.
        types: The type of every live value.
        cost: Where work comes from. Numbers of the user's own stand for forward, backward and
            update together, in any unit. They may be given for pieces, or for whole segments,
            whose parts then share them.
    """
    check_cost(cost)
    analytic = analytic_costs(rewired, pieces, types)
    if cost == "analytic":
        return analytic
    if isinstance(cost, str):
        return measured_costs(rewired, pieces, types, analytic, Clock(cost))
    return _given_costs(rewired, pieces, analytic, cost)


def sum_costs(costs: Sequence[Cost]) -> Cost:
    """Several pieces in a row as one.

    >>> parts = [Cost(1, 2, saved=30), Cost(10, 20, saved=40, shared=5)]
    >>> sum_costs(parts).saved
    65
    """
    first, *rest = costs
    return Cost(
        flops=sum(cost.flops for cost in costs),
        parameters=sum(cost.parameters for cost in costs),
        forward=math.fsum(cost.forward for cost in costs),
        backward=math.fsum(cost.backward for cost in costs),
        update=math.fsum(cost.update for cost in costs),
        saved=first.saved + sum(cost.saved - cost.shared for cost in rest),
        shared=first.shared,
        passing=max(cost.passing for cost in costs),
        unsaved=costs[-1].unsaved,
        weights=sum(cost.weights for cost in costs),
        trained=sum(cost.trained for cost in costs),
        batch=first.batch,
    )


def _given_costs(
    rewired: Rewired,
    pieces: Sequence[Segment],
    analytic: Sequence[Cost],
    given: Mapping[str, float] | Callable[[str], float],
) -> tuple[Cost, ...]:
    segments = _segments(rewired, pieces)
    work = [cost.forward + cost.backward for cost in analytic]
    segment_work: dict[str, float] = {}
    for segment, own in zip(segments, work, strict=True):
        segment_work[segment] = segment_work.get(segment, 0.0) + own
    numbers = _numbers([piece.name for piece in pieces], segments, given)
    result = []
    for piece, segment, cost, own in zip(pieces, segments, analytic, work, strict=True):
        number = numbers[piece.name]
        if number is None:
            number = numbers[segment]
            assert number is not None
            whole = segment_work[segment]
            number *= own / whole if whole else 1 / segments.count(segment)
        forward = cost.forward / own if own else 0.25
        result.append(replace(cost, forward=number * forward, backward=number * (1 - forward)))
    return tuple(result)


def _numbers(
    pieces: Sequence[str],
    segments: Sequence[str],
    given: Mapping[str, float] | Callable[[str], float],
) -> dict[str, float | None]:
    """The user's number of each name; None for pieces that only their segment has one for."""
    if not isinstance(given, Mapping):
        return {name: _valid(name, given(name)) for name in pieces}
    known = dict.fromkeys((*pieces, *segments))
    unknown = [name for name in given if name not in known]
    missing = [
        piece
        for piece, segment in zip(pieces, segments, strict=True)
        if piece not in given and segment not in given
    ]
    if unknown or missing:
        raise InputError(
            "cost: the given costs do not fit the model"
            + (f"; nothing is given for {', '.join(missing)}" if missing else "")
            + (f"; there is no {', '.join(unknown)}" if unknown else "")
            + ". Give one number for each piece, or for the segment it is a part of"
        )
    valid = {name: _valid(name, number) for name, number in given.items()}
    return {name: valid.get(name) for name in known}


def _valid(name: str, given: Any) -> float:
    return number("cost", name, given, "work is a number from 0 on", or_zero=True)


def _segments(rewired: Rewired, pieces: Sequence[Segment]) -> list[str]:
    """For every piece the segment it is, or is a part of: the first not complete before it."""
    made: set[str] = set()
    rest = list(rewired.body.segments)
    names = []
    for piece in pieces:
        while len(rest) > 1 and rest[0].outputs and made.issuperset(rest[0].outputs):
            rest.pop(0)
        names.append(rest[0].name)
        made.update(piece.outputs)
    return names
