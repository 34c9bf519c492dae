"""What a rank does in the table of changes."""

from __future__ import annotations

from typing import Any


def changed(rank: int, options: dict[str, Any]) -> dict[Any, Any]:
    """Every row of the table, one after the other."""
    from tests.runtime.trainer import test_changes as table

    backend = options["backend"]
    found: dict[Any, Any] = {
        name: table.course(table.TABLE[name], backend) for name in table.ON_RANKS
    }
    for name in (None, *table.SETTINGS):
        row = None if name is None else table.TABLE[name]
        found["left out", name] = table.in_flight_on_ranks(row, backend)
    return found
