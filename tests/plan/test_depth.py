"""The benchmark of memory and time against depth."""

from __future__ import annotations

import argparse

import pytest

from benchmarks.one_device.depth import CPU, Point, measure, report


def test_verdicts(capsys: pytest.CaptureFixture[str]) -> None:
    report("bad", [Point(10, 100, 1.0), Point(20, 106, 2.5)])
    report("good", [Point(10, 100, 1.0), Point(20, 104, 2.0)])
    bad, good = capsys.readouterr().out.split("good")
    assert bad.count("MISSES") == 2 and good.count("meets") == 2


def test_a_deeper_stack_takes_no_more_memory() -> None:
    args = argparse.Namespace(device="cpu", dtype="bf16", overlap="off", rounds=2)
    shallow, deep = (measure(depth, CPU, args) for depth in (2, 6))
    assert deep.peak == pytest.approx(shallow.peak, rel=0.001)
