"""The benchmark of memory and time against depth."""

from __future__ import annotations

import pytest

from benchmarks.depth import CPU, Point, exponent, measure, parse_args, report


def test_exponents_of_known_growth() -> None:
    depths = [12, 24, 96]
    assert exponent(depths, [7.0, 7.0, 7.0]) == pytest.approx(0.0)
    assert exponent(depths, [2.0 * d for d in depths]) == pytest.approx(1.0)
    assert exponent(depths, [0.5 * d**2 for d in depths]) == pytest.approx(2.0)


def test_verdicts(capsys: pytest.CaptureFixture[str]) -> None:
    report("bad", [Point(10, 100, 1.0), Point(20, 106, 2.5)])
    report("good", [Point(10, 100, 1.0), Point(20, 104, 2.0)])
    bad, good = capsys.readouterr().out.split("good")
    assert bad.count("MISSES") == 2 and good.count("meets") == 2


def test_a_deeper_stack_takes_no_more_memory() -> None:
    args = parse_args(["--rounds", "2"])
    shallow, deep = (measure(depth, CPU, args) for depth in (2, 6))
    assert deep.peak == pytest.approx(shallow.peak, rel=0.001)
