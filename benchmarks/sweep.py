"""Runs of a benchmark for each value of an option, and how time and memory grow with it."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.harness import exponent, mib, show
from benchmarks.registry import Benchmark, Row
from revcompile.errors import InputError

__all__ = ["Growth", "growth", "swept"]


@dataclass(frozen=True)
class Growth:
    """One variant over a sweep: a figure at every value, and the power it grows with."""

    variant: str
    values: tuple[int, ...]
    figures: tuple[float | None, ...]

    @property
    def exponent(self) -> float | None:
        """None if there are not two figures to compare."""
        pairs = [(v, f) for v, f in zip(self.values, self.figures, strict=True) if f]
        return exponent(*zip(*pairs, strict=True)) if len(pairs) > 1 else None


def swept(benchmark: Benchmark, args: argparse.Namespace) -> Iterator[Row]:
    """The rows of all runs, each with what was swept; then tables of growth."""
    for option, values in [_read(benchmark, text) for text in args.sweep]:
        rows: list[Row] = []
        for value in values:
            varied = copy.copy(args)
            setattr(varied, option, value)
            for row in benchmark.run(varied):
                rows.append({**row, "sweep": option, "value": value})
                yield rows[-1]
        for title, of, unit in (
            ("step time", seconds_of, lambda s: f"{1e3 * s:.2f} ms"),
            ("memory", bytes_of, mib),
        ):
            _print(f"{title} against {option}", growth(rows, values, of), values, unit)


def growth(
    rows: Sequence[Row], values: Sequence[int], of: Callable[[Row], float | None]
) -> list[Growth]:
    """A figure of every variant over the values of a sweep."""
    growths = []
    for variant in dict.fromkeys(row["variant"] for row in rows):
        at = {row["value"]: of(row) for row in rows if row["variant"] == variant}
        growths.append(Growth(variant, tuple(values), tuple(at.get(value) for value in values)))
    return growths


def seconds_of(row: Row) -> float | None:
    """The median of a row's rounds."""
    return median(row["seconds"]) if row.get("seconds") else None


def bytes_of(row: Row) -> float | None:
    """A row's memory; None where it was not measured."""
    return row.get("bytes") or None


def _print(
    title: str,
    growths: Sequence[Growth],
    values: Sequence[int],
    unit: Callable[[float], str],
) -> None:
    rows = []
    for growth in growths:
        if not any(growth.figures):
            continue
        power = growth.exponent
        shown = [unit(figure) if figure else "–" for figure in growth.figures]
        rows.append((growth.variant, *shown, "–" if power is None else f"{power:.2f}"))
    if rows:
        show(title, ("variant", *map(str, values), "exponent"), rows)


def _read(benchmark: Benchmark, text: Sequence[str]) -> tuple[str, list[int]]:
    option, *values = text
    if option not in benchmark.sweeps:
        raise InputError(
            f"--sweep {option}: {benchmark.name} can be swept over {', '.join(benchmark.sweeps)}"
        )
    if len(set(values)) < 2 or not all(value.isdigit() and int(value) for value in values):
        raise InputError(
            f"--sweep {option} {' '.join(values)}: two or more different whole numbers from 1 on "
            f"are needed; for example --sweep {option} 2 4 8"
        )
    return option, [int(value) for value in values]
