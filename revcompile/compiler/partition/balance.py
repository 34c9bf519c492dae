"""balance: cut a row of items into parts whose largest part is as small as possible.

Dynamic programming over the ends of parts, `parts * n**2` steps of numpy. It first minimises the
largest sum, then the traffic among all partitions that reach this minimum. Costs are estimates, so
sums count as equal if they differ by rounding only.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Allowed = Callable[[int, int, int], bool]
Array = NDArray[Any]

_ROUNDING: Final = 1 + 1e-9


def balance(
    costs: Sequence[Sequence[float]],
    *,
    allowed: Allowed | None = None,
    traffic: Sequence[float] | None = None,
    no_cut: Sequence[tuple[int, int]] = (),
) -> tuple[int, ...] | None:
    """Cut a row of items into contiguous parts whose largest sum of costs is least.

    Args:
        costs: For each part, the cost of each item in it, 0 or more. No part is empty.
        allowed: `allowed(part, start, end)` says whether a part may be `start` to `end`. It is
            called for parts that are not much larger than those of the best partition.
        traffic: The cost of ending a part at each position. Among all best partitions, one with the
            least total is chosen. Default: the most even partition, by least squares.
        no_cut: Pairs of items that no cut may separate.

    Returns:
        The end of each part, or None if no partition is allowed.

    >>> balance([[1, 2, 3, 4, 5]] * 2)
    (3, 5)
    >>> balance([[1, 2, 3, 4, 5], [1, 1, 1, 1, 1]])
    (2, 5)
    >>> balance([[1, 2, 3, 4, 5]] * 2, no_cut=[(2, 3)])
    (4, 5)
    """
    sums = {row: _sums(row, no_cut) for row in {*map(tuple, costs)}}
    spans = [sums[tuple(row)] for row in costs]
    bound, _ = _solve(spans, math.inf, None)
    if allowed is not None:
        allowed, most = functools.cache(allowed), max(map(sum, costs))
        # A little slack is nearly always enough, and the calls of `allowed` grow with it.
        limit, step = bound, bound / 64 or most / 64
        while (found := _solve(spans, limit, allowed)[0]) == math.inf and limit < most:
            limit, step = limit + step, 2 * step
        bound = found
    if bound == math.inf:
        return None
    return _solve(spans, bound, allowed, lambda sums: sums**2 if traffic is None else traffic)[1]


def largest(costs: Sequence[Sequence[float]], ends: Sequence[int]) -> float:
    """The sum of the costs of the largest part.

    >>> largest([[1, 2, 3, 4, 5]] * 2, (3, 5))
    9.0
    """
    parts = zip(costs, pairwise((0, *ends)), strict=True)
    return max(math.fsum(row[start:end]) for row, (start, end) in parts)


def _sums(costs: Sequence[float], no_cut: Sequence[tuple[int, int]]) -> Array:
    """`sums[start, end]` is the sum of items `start` to `end`; inf where that cannot be a part."""
    sums = np.full((len(costs) + 1, len(costs) + 1), math.inf)
    for start in range(len(costs)):
        sums[start, start + 1 :] = np.cumsum(costs[start:])
    for pair in no_cut:
        sums[min(pair) + 1 : max(pair) + 1] = math.inf
        sums[:, min(pair) + 1 : max(pair) + 1] = math.inf
    return sums


def _solve(
    spans: Sequence[Array],
    bound: float,
    allowed: Allowed | None,
    weights: Callable[[Array], Any] | None = None,
) -> tuple[float, tuple[int, ...]]:
    """Find the partition within a bound that has the least largest sum or, given weights, total.

    Returns this minimum (inf if there is no partition), and the end of each part.
    """
    best = np.full(len(spans[0]), math.inf)
    best[0] = 0.0
    origins = []
    for part, sums in enumerate(spans):
        is_part = (sums <= bound * _ROUNDING) & np.isfinite(best)[:, None] & np.isfinite(sums)
        if allowed is not None:
            for start, end in np.argwhere(is_part).tolist():
                is_part[start, end] = allowed(part, start, end)
        reached = (
            np.maximum(best[:, None], sums) if weights is None else best[:, None] + weights(sums)
        )
        reached = np.where(is_part, reached, math.inf)
        origins.append(reached.argmin(axis=0))
        best = reached.min(axis=0)
    ends = [len(best) - 1]
    for origin in reversed(origins[1:]):
        ends.append(int(origin[ends[-1]]))
    return float(best[-1]), tuple(reversed(ends))
