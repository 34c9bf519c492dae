"""balance: the best partition, compared with all partitions there are."""

import itertools
import random
from collections.abc import Callable, Iterator

import pytest

from revcompile.compiler.partition.balance import balance, largest

Ends = tuple[int, ...]


def partitions(items: int, parts: int) -> Iterator[Ends]:
    for cuts in itertools.combinations(range(1, items), parts - 1):
        yield (*cuts, items)


def spans(ends: Ends) -> list[tuple[int, int, int]]:
    """(part, start, end) of every part."""
    return [(part, *span) for part, span in enumerate(itertools.pairwise((0, *ends)))]


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
        row = [draw() for _ in range(self.items)]
        self.alike = rng.random() < 0.6
        self.costs = [row if self.alike else [draw() for _ in row] for _ in range(self.parts)]
        triples = list(itertools.product(range(self.parts), *[range(self.items + 1)] * 2))
        share = rng.choice([0.1, 0.5])
        self.refused = {t for t in triples if rng.random() < share} if rng.random() < 0.5 else None
        prices = [float(rng.randint(0, 5)) for _ in range(self.items + 1)]
        self.prices = prices if rng.random() < 0.5 else None
        pairs = [(rng.randrange(self.items), rng.randrange(self.items)) for _ in range(2)]
        self.no_cut = pairs[: rng.choice([0, 0, 1, 2])]

    def solve(self) -> Ends | None:
        refused = self.refused
        return balance(
            self.costs,
            allowed=None if refused is None else lambda *part: part not in refused,
            traffic=self.prices,
            no_cut=self.no_cut,
        )

    def legal(self, ends: Ends) -> bool:
        if self.refused is not None and not self.refused.isdisjoint(spans(ends)):
            return False
        return not any(min(p) < cut <= max(p) for p in self.no_cut for cut in ends[:-1])

    def value(self, ends: Ends) -> tuple[float, float]:
        price = 0.0 if self.prices is None else sum(self.prices[end] for end in ends)
        return largest(self.costs, ends), price

    def best(self) -> tuple[float, float] | None:
        """The least largest sum, and the least price of partitions that have it."""
        values = [self.value(e) for e in partitions(self.items, self.parts) if self.legal(e)]
        least = min((size for size, _ in values), default=None)
        if least is None:
            return None
        return least, min(price for size, price in values if size <= least * (1 + 1e-9))


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
            assert case.value(ends) == pytest.approx(best, rel=1e-8), seed


def test_sums_that_differ_by_rounding_are_equal() -> None:
    assert 0.1 + 0.2 > 0.3
    assert balance([[0.3, 0.1, 0.2, 0.0]] * 3, traffic=[0, 0, 5, 0, 0]) == (1, 3, 4)
