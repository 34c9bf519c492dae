"""Entries of modules' dicts, replaced for a while."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

Slot = tuple[dict[str, Any], str]
"""A dict of a module (`_parameters`, `_buffers`, `__dict__`) and a key."""


@contextmanager
def filled(contents: Sequence[tuple[Slot, Any]]) -> Iterator[None]:
    """Slots with other contents."""
    before = [(slot, slot[0].get(slot[1])) for slot, _ in contents]
    try:
        for (owner, name), value in contents:
            owner[name] = value
        yield
    finally:
        for (owner, name), value in before:
            owner[name] = value
