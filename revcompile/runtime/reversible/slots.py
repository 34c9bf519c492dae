"""Entries of modules' dicts: compared all at once, and replaced for a while."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from itertools import repeat
from operator import is_
from typing import Any

Slot = tuple[dict[str, Any], str]
"""A dict of a module (`_parameters`, `_buffers`, `__dict__`) and a key."""


class Column:
    """Entries of dicts, read without a loop in Python: every block does that in every call.

    Args:
        missing: What is read where there is no entry.
    """

    def __init__(self, slots: Iterable[Slot], missing: Any = None) -> None:
        self._slots, self._missing = tuple(slots), missing
        self._owners = [owner for owner, _ in self._slots]
        self._names = [name for _, name in self._slots]

    def read(self) -> list[Any]:
        return list(map(dict.get, self._owners, self._names, repeat(self._missing)))

    def holds(self, values: Sequence[Any]) -> bool:
        """Are the entries these very objects?"""
        return all(
            map(is_, map(dict.get, self._owners, self._names, repeat(self._missing)), values)
        )

    def different(self, values: Sequence[Any]) -> Sequence[tuple[Slot, Any]]:
        """The slots that hold something else now, each with its entry of `values`."""
        if self.holds(values):
            return ()
        each = zip(self._slots, self.read(), values, strict=True)
        return [(slot, value) for slot, current, value in each if current is not value]


class filled(AbstractContextManager[None]):
    """Slots with other contents. Not a generator: it is entered for every block."""

    __slots__ = ("_before", "_contents")

    def __init__(self, contents: Sequence[tuple[Slot, Any]]) -> None:
        self._contents = contents

    def __enter__(self) -> None:
        self._before = [(slot, slot[0].get(slot[1])) for slot, _ in self._contents]
        for (owner, name), value in self._contents:
            owner[name] = value

    def __exit__(self, *_: Any) -> None:
        for (owner, name), value in self._before:
            owner[name] = value
