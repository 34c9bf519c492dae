"""Where costs come from: counted (analytic), measured, or given by the user."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
    groups: Sequence[Sequence[Segment]],
    types: Mapping[str, Any],
    cost: CostSource = "analytic",
) -> tuple[Cost, ...]:
    """Cost of every piece in order.

    Args:
        rewired: The model.
        groups: The pieces of each of its segments.
        types: The type of every live value.
        cost: Where work comes from. A user's number is for forward, backward and update of a
            segment together, in any unit.
    """
    check_cost(cost)
    pieces = [piece for group in groups for piece in group]
    analytic = analytic_costs(rewired, pieces, types)
    if cost == "analytic":
        return analytic
    if isinstance(cost, str):
        return measured_costs(rewired, pieces, types, analytic)
    return tuple(_given_costs(rewired, groups, analytic, cost))


def sum_costs(costs: Sequence[Cost]) -> Cost:
    """The cost of consecutive pieces as one piece.

    >>> parts = [Cost(1, 2, saved=30), Cost(10, 20, saved=40, shared=5)]
    >>> sum_costs(parts).saved
    65
    """
    first, *rest = costs
    summed = {name: sum(getattr(cost, name) for cost in costs) for name in vars(first)}
    shared = {"shared": first.shared, "batch": first.batch, "unsaved": costs[-1].unsaved}
    saved = first.saved + sum(cost.saved - cost.shared for cost in rest)
    passing = max(cost.passing for cost in costs)
    return Cost(**summed | shared | {"saved": saved, "passing": passing})


def _given_costs(
    rewired: Rewired,
    groups: Sequence[Sequence[Segment]],
    analytic: Sequence[Cost],
    given: Mapping[str, float],
) -> Iterator[Cost]:
    """The user's cost of each segment, divided among its pieces by their analytic work."""
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
    rest = iter(analytic)
    for name, group in zip(names, groups, strict=True):
        of_user = number("cost", name, given[name], "work is a number from 0 on", or_zero=True)
        costs = [next(rest) for _ in group]
        # Pieces without any work share a segment evenly.
        work = [cost.forward + cost.backward or 1e-300 for cost in costs]
        for cost, own in zip(costs, work, strict=True):
            forward = cost.forward / own if cost.forward else 0.25
            share = of_user * own / sum(work)
            yield replace(cost, forward=share * forward, backward=share * (1 - forward))
