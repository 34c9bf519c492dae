"""Searches of graphs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

_Node = TypeVar("_Node", bound=Hashable)


def reached(
    starts: Iterable[_Node], following: Callable[[_Node], Iterable[_Node]]
) -> dict[_Node, None]:
    """All nodes that can be reached from `starts`, including these, each once.

    >>> list(reached([1], {1: [2, 3], 2: [3], 3: [1], 4: [1]}.__getitem__))
    [1, 2, 3]
    """
    found = dict.fromkeys(starts)
    work = list(found)
    for node in work:
        new = dict.fromkeys(other for other in following(node) if other not in found)
        found |= new
        work += new
    return found
