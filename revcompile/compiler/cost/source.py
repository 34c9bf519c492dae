"""Where costs come from: counted (analytic), or measured."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any

from revcompile.compiler.cost.analytic import analytic_costs
from revcompile.compiler.cost.measured import measured_costs
from revcompile.ir.types import Cost, Rewired, Segment


class CostSource(enum.Enum):
    """How the work of a piece is estimated."""

    ANALYTIC = "analytic"
    """FLOPs and bytes, counted."""
    MEASURED = "measured"
    """Timed on the model's device."""


def segment_costs(rewired: Rewired) -> tuple[Cost, ...]:
    """Analytic cost of every segment in order. A parameter counts where it is used first."""
    pieces = rewired.body.segments
    return analytic_costs(rewired, pieces, rewired.body.types)


def piece_costs(
    rewired: Rewired,
    groups: Sequence[Sequence[Segment]],
    types: Mapping[str, Any],
    cost: CostSource = CostSource.ANALYTIC,
) -> tuple[Cost, ...]:
    """Cost of every piece in order.

    Args:
        rewired: The model.
        groups: The pieces of each of its segments.
        types: The type of every live value.
        cost: Where work comes from.
    """
    pieces = [piece for group in groups for piece in group]
    analytic = analytic_costs(rewired, pieces, types)
    if cost is CostSource.MEASURED:
        return measured_costs(rewired, pieces, types, analytic)
    return analytic


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
