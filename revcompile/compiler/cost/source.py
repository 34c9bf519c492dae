"""Where costs come from: counted (analytic), measured, or numbers of the user's own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from revcompile.arguments import check_cost, number
from revcompile.compiler.cost.analytic import analytic_costs
from revcompile.compiler.cost.measured import measured_costs
from revcompile.errors import InputError
from revcompile.ir.types import Cost, Rewired, Segment

CostSource = str | Mapping[str, float]
""""analytic", "measured", or a number for each segment by name."""


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
            update of a segment together, in any unit.
    """
    check_cost(cost)
    analytic = analytic_costs(rewired, pieces, types)
    if cost == "analytic":
        return analytic
    if isinstance(cost, str):
        return measured_costs(rewired, pieces, types, analytic)
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
    given: Mapping[str, float],
) -> tuple[Cost, ...]:
    """The user's number of each segment, shared out to its pieces as their analytic work is."""
    names = [segment.name for segment in rewired.body.segments]
    missing = [name for name in names if name not in given]
    unknown = [name for name in given if name not in names]
    if unknown or missing:
        raise InputError(
            "cost: the given costs do not fit the model"
            + (f"; nothing is given for {', '.join(missing)}" if missing else "")
            + (f"; there is no {', '.join(unknown)}" if unknown else "")
            + ". Give one number for each segment"
        )
    numbers = {
        name: number("cost", name, given[name], "work is a number from 0 on", or_zero=True)
        for name in names
    }
    segments = _segments(rewired, pieces)
    # Pieces without any work share a segment evenly.
    work = [cost.forward + cost.backward or 1e-300 for cost in analytic]
    total = dict.fromkeys(names, 0.0)
    for segment, own in zip(segments, work, strict=True):
        total[segment] += own
    result = []
    for segment, cost, own in zip(segments, analytic, work, strict=True):
        share = numbers[segment] * own / total[segment]
        forward = cost.forward / own if cost.forward else 0.25
        result.append(replace(cost, forward=share * forward, backward=share * (1 - forward)))
    return tuple(result)


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
