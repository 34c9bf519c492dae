"""balance: the best partition, compared with all partitions there are."""

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction

import pytest

from revcompile.compiler.partition.balance import balance, largest
from revcompile.errors import InputError

Ends = tuple[int, ...]


def partitions(items: int, parts: int) -> Iterator[Ends]:
    for cuts in itertools.combinations(range(1, items), parts - 1):
        yield (*cuts, items)


def spans(ends: Ends) -> list[tuple[int, int, int]]:
    """(part, start, end) of every part."""
    return [(part, *span) for part, span in enumerate(itertools.pairwise((0, *ends)))]


def exact(costs: Sequence[float], ends: Ends, last: Sequence[float] | None = None) -> Fraction:
    """Largest sum of a part in exact arithmetic."""
    final = costs if last is None else last
    sums = []
    for part, start, end in spans(ends):
        used = final if part == len(ends) - 1 else costs
        sums.append(sum(map(Fraction, used[start:end]), Fraction(0)))
    return max(sums)


class Case:
    """A random problem, and its solution by looking at every partition."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.items = rng.randint(1, 9)
        self.parts = rng.randint(1, self.items)
        kinds: list[Callable[[], float]] = [
            rng.random,
            lambda: float(rng.randint(0, 4)),
            lambda: rng.choice([0.1, 0.2, 0.3, 1e-17]),
            lambda: rng.random() ** 8 * 1e6,
        ]
        draw = rng.choice(kinds)
        self.costs = [draw() for _ in range(self.items)]
        self.last = [draw() for _ in range(self.items)] if rng.random() < 0.4 else None
        triples = list(itertools.product(range(self.parts), *[range(self.items + 1)] * 2))
        share = rng.choice([0.1, 0.5])
        self.refused = {t for t in triples if rng.random() < share} if rng.random() < 0.5 else None
        self.prices = (
            {t: float(rng.randint(-2, 5)) for t in triples} if rng.random() < 0.5 else None
        )
        pairs = [(rng.randrange(self.items), rng.randrange(self.items)) for _ in range(2)]
        self.no_cut = pairs[: rng.choice([0, 0, 1, 2])]

    def solve(self) -> Ends | None:
        refused, prices = self.refused, self.prices
        return balance(
            self.costs,
            self.parts,
            last=self.last,
            allowed=None if refused is None else lambda *part: part not in refused,
            penalty=None if prices is None else lambda *part: prices[part],
            no_cut=self.no_cut,
        )

    def legal(self, ends: Ends) -> bool:
        if self.refused is not None and not self.refused.isdisjoint(spans(ends)):
            return False
        return not any(min(p) < cut <= max(p) for p in self.no_cut for cut in ends[:-1])

    def value(self, ends: Ends) -> tuple[Fraction, float]:
        price = 0.0 if self.prices is None else sum(self.prices[part] for part in spans(ends))
        return exact(self.costs, ends, self.last), price

    def best(self) -> tuple[Fraction, float] | None:
        legal = filter(self.legal, partitions(self.items, self.parts))
        return min(map(self.value, legal), default=None)


@pytest.mark.parametrize("start", range(0, 2000, 200))
def test_no_partition_is_better(start: int) -> None:
    for seed in range(start, start + 200):
        case = Case(seed)
        ends, best = case.solve(), case.best()
        if ends is None:
            assert best is None, seed
        else:
            assert ends in partitions(case.items, case.parts), seed
            assert case.legal(ends), seed
            assert case.value(ends) == best, seed


def test_the_random_cases_are_of_every_kind() -> None:
    cases = [Case(seed) for seed in range(2000)]
    kinds = {
        (c.last is None, c.refused is None, c.prices is None, not c.no_cut, c.best() is None)
        for c in cases
    }
    # Nothing can be refused without a refusal or a pair: 8 * 4 kinds, less those 4.
    assert len(kinds) == 16 + 16 - 4


def test_as_many_parts_as_items() -> None:
    assert balance([3, 0, 7], 3) == (1, 2, 3)
    assert balance([3, 0, 7], 3, no_cut=[(0, 1)]) is None


def test_one_part() -> None:
    assert balance([3, 0, 7], 1) == (3,)
    assert balance([3, 0, 7], 1, allowed=lambda part, start, end: end < 3) is None


def test_items_without_cost_still_make_nonempty_parts() -> None:
    ends = balance([0.0] * 7, 4)
    assert ends in set(partitions(7, 4))


def test_a_huge_item_stands_alone() -> None:
    costs = [1.0] * 20 + [1000.0] + [1.0] * 20
    ends = balance(costs, 5)
    assert ends is not None
    assert largest(costs, ends) == 1000
    assert {20, 21} <= set(ends)


def test_an_item_too_dear_for_any_part_but_the_last() -> None:
    # Item 3 costs nothing in the last part only: all cuts must come before it.
    costs, last = [1, 1, 1, 100, 1, 1], [1, 1, 1, 0, 1, 1]
    assert balance(costs, 4, last=last) == (1, 2, 3, 6)


def test_an_even_share_beyond_the_bound_is_not_taken() -> None:
    # The last part is cheap, so what is left after the first seems more than the others can hold.
    costs, last = [0, 20, 2, 20, 5], [2, 2, 1, 9, 2]
    ends = balance(costs, 3, last=last)
    assert ends is not None
    assert largest(costs, ends, last) == 20


def test_floats_are_summed_exactly() -> None:
    assert 1e16 + 1.0 == 1e16, "in floating point"
    assert balance([1e16, 1.0, 1.0, 1e16], 2) == (2, 4)
    assert balance([1.0, 1e16, 1e16, 1.0, 1.0], 2) == (2, 5)
    assert balance([1.0, 1.0, 1e16, 1e16, 1.0], 2) == (3, 5)


def test_penalty_never_buys_a_larger_part() -> None:
    def dear(part: int, start: int, end: int) -> float:
        return 1000.0 if end == 2 else 0.0

    assert balance([1, 1, 1, 1], 2, penalty=dear) == (2, 4)
    assert balance([2, 1, 0, 2, 1], 2, penalty=dear) == (3, 5)


def test_without_a_penalty_allowed_parts_are_even() -> None:
    costs = [8, 1, 1, 1, 1, 1, 1]
    assert balance(costs, 3, allowed=lambda part, start, end: True) == (1, 4, 7)


def bounded(costs: Sequence[float], bound: Fraction) -> int:
    """Fewest parts whose sums are less than `bound`: fill each as far as it goes."""
    parts, filled = 1, Fraction(0)
    for cost in map(Fraction, costs):
        filled += cost
        if filled >= bound:
            parts, filled = parts + 1, cost
    return parts


def test_a_thousand_items_in_a_hundred_parts() -> None:
    rng = random.Random(0)
    costs = [rng.lognormvariate(0, 1) for _ in range(1000)]
    ends = balance(costs, 100)
    assert ends is not None
    assert len(ends) == 100
    assert ends[-1] == 1000
    assert all(start < end for _, start, end in spans(ends))
    found = exact(costs, ends)
    assert max(costs) < found, "else the bound check below would be void"
    assert bounded(costs, found) > 100
    # Windows grow towards the first part; a cut costs what a table says.
    prices = [rng.random() for _ in range(1001)]
    limited = balance(
        costs,
        100,
        allowed=lambda part, start, end: (end - start) * (100 - part) <= 900,
        penalty=lambda part, start, end: prices[end],
    )
    assert limited is not None
    assert all((end - start) * (100 - part) <= 900 for part, start, end in spans(limited))
    assert exact(costs, limited) >= found


def test_largest() -> None:
    assert largest([1, 2, 3], (1, 3)) == 5
    assert largest([1, 2, 3], (1, 3), last=[1, 0, 0]) == 1


@pytest.mark.parametrize(
    ("costs", "parts", "options", "message"),
    [
        ([1, 2], 3, {}, r"parts=3, but there are 2 items .* use parts <= 2"),
        ([1, 2], 0, {}, "parts=0; ask for at least 1"),
        ([1, -2], 1, {}, r"costs\[1\]=-2; costs are finite and >= 0"),
        ([math.nan], 1, {}, r"costs\[0\]=nan"),
        ([1, 2], 1, {"last": [1, math.inf]}, r"last\[1\]=inf"),
        ([1, 2], 1, {"last": [1]}, "2 costs, but 1 costs for the last part"),
        ([1, 2], 1, {"no_cut": [(0, 2)]}, r"no_cut=\(0, 2\), but items are 0 to 1"),
    ],
)
def test_what_cannot_be_balanced_is_refused(
    costs: list[float], parts: int, options: dict[str, list[float]], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        balance(costs, parts, **options)  # type: ignore[arg-type]
