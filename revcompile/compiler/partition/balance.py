"""balance: cut a row of items into parts so that the largest part is as small as can be.

Exact, also for floats: all costs are scaled to whole numbers first (a float is a fraction whose
denominator is a power of two), and compared as such. Pure Python: this file knows numbers only.

How: for a bound on the largest part, a greedy walk from the left says how far each part can reach,
one from the right how far it must. The smallest bound at which they meet is the answer, found by
bisection. With `allowed` or `penalty` the parts are chosen by dynamic programming, only over the
ends between the two walks.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise

from revcompile.errors import InputError

Allowed = Callable[[int, int, int], bool]
Penalty = Callable[[int, int, int], float]


def balance(
    costs: Sequence[float],
    parts: int,
    *,
    last: Sequence[float] | None = None,
    allowed: Allowed | None = None,
    penalty: Penalty | None = None,
    no_cut: Sequence[tuple[int, int]] = (),
) -> tuple[int, ...] | None:
    """Cut a row of items into contiguous parts whose largest sum of costs is least.

    Args:
        costs: The cost of each item.
        parts: How many parts; none is empty.
        last: What the items cost in the last part, if not the same.
        allowed: `allowed(part, start, end)` says whether a part may be `start` to `end`.
        penalty: Among all best partitions, the total of `penalty(part, start, end)` is least.
        no_cut: Pairs of items that no cut may separate.

    `allowed` and `penalty` may be any functions, so they are called for every part within the
    bound: few when the parts can be even, up to `parts * n**2 / 2` when one item outweighs all
    others or nothing is allowed.

    Returns:
        The end of each part, or None if no partition is allowed.

    >>> balance([1, 2, 3, 4, 5], 2)
    (3, 5)
    >>> balance([1, 2, 3, 4, 5], 2, last=[1, 1, 1, 1, 1])
    (2, 5)
    >>> balance([1, 2, 3, 4, 5], 2, no_cut=[(2, 3)])
    (4, 5)
    """
    _check(costs, parts, last, no_cut)
    row = _row(costs, parts, costs if last is None else last, no_cut)
    if row is None:
        return None
    bound = _least_bound(row)
    if allowed is None and penalty is None:
        return row.in_items(_walk(row, bound))
    if allowed is not None:
        least = _least_allowed(row, bound, allowed)
        if least is None:
            return None
        bound = least
    return row.in_items(_cheapest(row, bound, allowed, penalty))


def largest(
    costs: Sequence[float], ends: Sequence[int], last: Sequence[float] | None = None
) -> float:
    """Sum of the largest part.

    >>> largest([1, 2, 3, 4, 5], (3, 5))
    9.0
    """
    *parts, (start, end) = pairwise((0, *ends))
    final = math.fsum((costs if last is None else last)[start:end])
    return max(final, *(math.fsum(costs[start:end]) for start, end in parts), 0.0)


def _check(
    costs: Sequence[float],
    parts: int,
    last: Sequence[float] | None,
    no_cut: Sequence[tuple[int, int]],
) -> None:
    if parts < 1:
        raise InputError(f"balance: parts={parts}; ask for at least 1")
    if parts > len(costs):
        raise InputError(
            f"balance: parts={parts}, but there are {len(costs)} items and no part may be empty; "
            f"use parts <= {len(costs)}"
        )
    if last is not None and len(last) != len(costs):
        raise InputError(f"balance: {len(costs)} costs, but {len(last)} costs for the last part")
    for name, values in (("costs", costs), ("last", last or ())):
        for item, value in enumerate(values):
            if not 0 <= value < math.inf:
                raise InputError(f"balance: {name}[{item}]={value}; costs are finite and >= 0")
    for pair in no_cut:
        if not all(0 <= item < len(costs) for item in pair):
            raise InputError(f"balance: no_cut={pair}, but items are 0 to {len(costs) - 1}")


@dataclass(frozen=True)
class _Row:
    """The items as atoms: items that no cut may separate are one. All sums are whole numbers.

    `cuts[i]` is the first item of atom i; `body[i]` and `tail[i]` are the sums of all atoms before
    i, in any part and in the last one.
    """

    parts: int
    cuts: list[int]
    body: list[int]
    tail: list[int]

    @property
    def atoms(self) -> int:
        return len(self.cuts) - 1

    def in_items(self, ends: Sequence[int]) -> tuple[int, ...]:
        """Ends of parts counted in items, from ends counted in atoms."""
        return tuple(self.cuts[end] for end in ends)


def _row(
    costs: Sequence[float],
    parts: int,
    last: Sequence[float],
    no_cut: Sequence[tuple[int, int]],
) -> _Row | None:
    joined = [0] * (len(costs) + 1)
    for pair in no_cut:
        # +1 where a range without cuts begins, -1 where it ends.
        joined[min(pair) + 1] += 1
        joined[max(pair) + 1] -= 1
    cuts = [cut for cut, depth in enumerate(accumulate(joined)) if depth == 0]
    if len(cuts) - 1 < parts:
        return None
    exact = [Fraction(value) for value in (*costs, *last)]
    scale = math.lcm(*(value.denominator for value in exact))
    whole = [value.numerator * (scale // value.denominator) for value in exact]
    body = list(accumulate(whole[: len(costs)], initial=0))
    tail = list(accumulate(whole[len(costs) :], initial=0))
    return _Row(parts, cuts, [body[cut] for cut in cuts], [tail[cut] for cut in cuts])


def _least_bound(row: _Row) -> int:
    """The least bound on a part's sum that some partition keeps, whatever is allowed."""
    low, high = 0, max(row.body[-1], row.tail[-1])
    while low < high:
        middle = (low + high) // 2
        if _ranges(row, middle) is None:
            low = middle + 1
        else:
            high = middle
    return low


def _ranges(row: _Row, bound: int) -> list[tuple[int, int]] | None:
    """First and last possible end of every part, in atoms; None if the bound cannot be kept.

    Costs are not negative, so every end in between is possible too: from the left because the
    part before may end anywhere up to its own last end, from the right likewise.
    """
    atoms, inner = row.atoms, row.parts - 1
    far = [0]
    for _ in range(inner):
        far.append(bisect_right(row.body, row.body[far[-1]] + bound) - 1)
    far = [*far[1:], atoms]
    for part in reversed(range(inner)):
        far[part] = min(far[part], far[part + 1] - 1)  # the next one has an atom too
    begin = far[-2] if inner else 0
    if far[0] < 1 or row.tail[-1] - row.tail[begin] > bound:
        return None
    near: list[int] = []
    start = bisect_left(row.tail, row.tail[-1] - bound)
    for part in reversed(range(inner)):
        near.append(max(start, part + 1))
        start = bisect_left(row.body, row.body[near[-1]] - bound)
    return list(zip([*reversed(near), atoms], far, strict=True))


def _walk(row: _Row, bound: int) -> list[int]:
    """A partition within the bound, each part as near to an even share as the rest permits."""
    ranges = _ranges(row, bound)
    assert ranges is not None
    ends: list[int] = []
    start = 0
    for part, (near, far) in enumerate(ranges):
        left = row.body[-1] - row.body[start]
        share = bisect_right(row.body, row.body[start] + left // (row.parts - part)) - 1
        reach = bisect_right(row.body, row.body[start] + bound) - 1
        start = min(max(share, near, start + 1), max(reach, near), far)
        ends.append(start)
    return ends


def _least_allowed(row: _Row, bound: int, allowed: Allowed) -> int | None:
    """The least bound kept by some partition all of whose parts are allowed."""
    most = max(row.body[-1], row.tail[-1])
    step = max(1, bound // 64)
    while True:
        # Nearly always a little slack is enough, and the work grows with the slack.
        least = _bottleneck(row, bound, allowed)
        if least is not None or bound >= most:
            return least
        bound = min(most, bound + step)
        step *= 2


def _bottleneck(row: _Row, bound: int, allowed: Allowed) -> int | None:
    """Least largest sum of allowed parts, if it is within the bound."""
    ranges = _ranges(row, bound)
    assert ranges is not None
    best = {0: 0}
    for part, (near, far) in enumerate(ranges):
        sums = row.tail if part == row.parts - 1 else row.body
        reached: dict[int, int] = {}
        for start, before in best.items():
            for end in range(max(near, start + 1), far + 1):
                size = sums[end] - sums[start]
                if size > bound:
                    break
                worst = max(before, size)
                if worst < reached.get(end, bound + 1) and allowed(
                    part, row.cuts[start], row.cuts[end]
                ):
                    reached[end] = worst
        best = reached
    return best.get(row.atoms)


def _cheapest(row: _Row, bound: int, allowed: Allowed | None, penalty: Penalty | None) -> list[int]:
    """The partition of least total penalty within a bound that can be kept.

    Without a penalty, the one of least squares: the most even.
    """
    ranges = _ranges(row, bound)
    assert ranges is not None
    best: dict[int, float] = {0: 0}
    came: list[dict[int, int]] = []
    for part, (near, far) in enumerate(ranges):
        sums = row.tail if part == row.parts - 1 else row.body
        reached: dict[int, float] = {}
        origin: dict[int, int] = {}
        for start, before in best.items():
            for end in range(max(near, start + 1), far + 1):
                size = sums[end] - sums[start]
                if size > bound:
                    break
                first, after = row.cuts[start], row.cuts[end]
                total = before + (size * size if penalty is None else penalty(part, first, after))
                if end in reached and total >= reached[end]:
                    continue
                if allowed is None or allowed(part, first, after):
                    reached[end], origin[end] = total, start
        best = reached
        came.append(origin)
    ends = [row.atoms]
    for origin in reversed(came[1:]):
        ends.append(origin[ends[-1]])
    return ends[::-1]
