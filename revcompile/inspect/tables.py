"""Tables for the terminal, drawn with rich."""

from __future__ import annotations

import io
import shutil
from collections.abc import Sequence
from typing import Final

from rich.console import Console, JustifyMethod
from rich.table import Table

from revcompile.ir.types import Cost, Coupling, Rewired, Segment, TensorType

__all__ = [
    "invertibility_table",
    "most_frequent_refusals",
    "refusals",
    "render",
    "summary_text",
]


def render(*parts: object) -> str:
    """Rich renderables as plain text, as wide as the terminal within reason."""
    width = max(80, min(120, shutil.get_terminal_size((100, 24)).columns))
    console = Console(width=width, record=True, file=io.StringIO(), force_terminal=False)
    for part in parts:
        console.print(part, highlight=False, markup=False)
    lines = console.export_text().rstrip().split("\n")
    return "\n".join(line.rstrip() for line in lines)


def summary_text(rewired: Rewired, costs: Sequence[Cost]) -> str:
    """The segments of a rewired model, their shares, and what stayed opaque and why."""
    flops = max(sum(cost.flops for cost in costs), 1)
    parameters = max(sum(cost.parameters for cost in costs), 1)
    table = Table(title=f"{rewired.name}: {len(rewired.body.segments)} segments")
    for column, side in _COLUMNS:
        table.add_column(column, justify=side, overflow="fold", no_wrap=column == "segment")
    inside = Cost(0, 0)
    for segment, cost in zip(rewired.body.segments, costs, strict=True):
        reversible = isinstance(segment, Coupling)
        if reversible:
            inside = Cost(inside.flops + cost.flops, inside.parameters + cost.parameters)
        table.add_row(
            segment.name,
            "reversible" if reversible else "opaque",
            f"{cost.parameters:,}",
            f"{100 * cost.flops / flops:.1f} %",
            _shape(rewired, segment),
            segment.kind.value if isinstance(segment, Coupling) else segment.reason,
        )
    totals = (
        f"reversible: {len(rewired.couplings)} blocks with "
        f"{100 * inside.parameters / parameters:.1f} % of {parameters:,} parameters and "
        f"{100 * inside.flops / flops:.1f} % of the forward FLOPs"
    )
    return render(table, totals, *refusals(rewired), *rewired.notes)


_COLUMNS: Final[tuple[tuple[str, JustifyMethod], ...]] = (
    ("segment", "left"),
    ("kind", "left"),
    ("parameters", "right"),
    ("FLOPs", "right"),
    ("gives", "left"),
    ("how or why", "left"),
)


def _shape(rewired: Rewired, segment: Segment) -> str:
    kind = rewired.body.types.get(segment.outputs[-1]) if segment.outputs else None
    return str(kind) if isinstance(kind, TensorType) else ""


def refusals(rewired: Rewired) -> list[str]:
    """Sums that were not rewired, those of one reason together."""
    return [f"not rewired: {where}: {reason}" for reason, where, _ in _by_reason(rewired)]


def most_frequent_refusals(rewired: Rewired, count: int) -> list[str]:
    """The reasons why most sums were not rewired, each with some of the places."""
    found = sorted(_by_reason(rewired), key=lambda entry: -entry[2])[:count]
    return [f"{where}: {reason}" for reason, where, _ in found]


def _by_reason(rewired: Rewired) -> list[tuple[str, str, int]]:
    """Every reason with its places in words, and how many there are."""
    places: dict[str, list[str]] = {}
    for refusal in rewired.refusals:
        places.setdefault(refusal.reason, []).append(refusal.path or "(top level)")
    return [
        (
            reason,
            ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else ""),
            len(paths),
        )
        for reason, paths in places.items()
    ]


def invertibility_table(errors: Sequence[tuple[str, float]], tolerance: float) -> str:
    """Reconstruction errors block by block."""
    table = Table(title=f"reconstruction error (tolerance {tolerance:.0e})")
    for column in ("block", "relative error", ""):
        table.add_column(column, overflow="fold")
    for name, error in errors:
        table.add_row(name, f"{error:.1e}", "ok" if error <= tolerance else "TOO LARGE")
    return render(table)
