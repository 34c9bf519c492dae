"""Tables for the terminal, drawn with rich."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from revcompile.ir import Coupling, Rewired, TensorType

__all__ = ["invertibility_table", "summary_text"]


def render(*parts: object, width: int = 110) -> str:
    """Rich renderables as plain text."""
    console = Console(width=width, record=True, file=io.StringIO(), force_terminal=False)
    for part in parts:
        console.print(part)
    return console.export_text().rstrip()


def summary_text(rewired: Rewired) -> str:
    """The segments of a rewired model, what stayed opaque, and why."""
    table = Table(title=f"{rewired.name}: {len(rewired.body.segments)} segments")
    for column in ("segment", "kind", "gives", "note"):
        table.add_column(column)
    for segment in rewired.body.segments:
        kind = rewired.body.types.get(segment.outputs[-1]) if segment.outputs else None
        shape = str(kind) if isinstance(kind, TensorType) else ""
        if isinstance(segment, Coupling):
            table.add_row(segment.name, "reversible", shape, segment.kind.value)
        else:
            table.add_row(segment.name, "opaque", shape, segment.reason)
    return render(table)


def invertibility_table(errors: Sequence[tuple[str, float]], tolerance: float) -> str:
    """Reconstruction errors block by block."""
    table = Table(title=f"reconstruction error (tolerance {tolerance:.0e})")
    for column in ("block", "relative error", ""):
        table.add_column(column)
    for name, error in errors:
        table.add_row(name, f"{error:.1e}", "ok" if error <= tolerance else "TOO LARGE")
    return render(table)
