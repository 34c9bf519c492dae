"""What a rank does in the table of changes."""

from __future__ import annotations

from typing import Any


def changed(rank: int, options: dict[str, Any]) -> dict[Any, Any]:
    """Every row of the table, one after the other."""
    from tests.runtime.trainer import test_changes as table

    return {name: table.course(table.TABLE[name], options["backend"]) for name in table.ON_RANKS}
