"""Which kernels take the time of a step."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.autograd import DeviceType

from benchmarks.__main__ import main
from benchmarks.one_device.hotspots import STEPS, Spent, collected, hottest
from benchmarks.one_device.whole import OFF
from benchmarks.record import read


def test_a_models_trainings_side_by_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.json"
    given = ["--model", "test_vit", "--batch", "2", "--warmup", "1", "--profile", "3"]
    assert main(["run", "whole", *given, "--json", str(file)]) == 0
    (row,) = read(file)["rows"]
    assert list(row["spent"]) == ["plain", "checkpoint", OFF]
    plain, again, ours = (row["spent"][name] for name in row["spent"])
    layers = plain["aten::addmm"]["calls"]
    assert again["aten::addmm"]["calls"] > layers and ours["aten::addmm"]["calls"] > layers
    printed = capsys.readouterr().out
    steps = {
        way: {n: Spent(**one) for n, one in found.items()} for way, found in row["spent"].items()
    }
    assert all(name[:10] in printed for name in hottest(steps, 3))


def _event(name: str, kind: DeviceType, time: float) -> SimpleNamespace:
    return SimpleNamespace(
        key=name,
        device_type=kind,
        count=2 * STEPS,
        self_device_time_total=time * STEPS,
        self_cpu_time_total=7.0 * STEPS,
    )


def test_operations_are_not_counted_beside_the_kernels_they_start() -> None:
    events = [_event("aten::relu", DeviceType.CPU, 5.0), _event("relu<4>", DeviceType.CUDA, 5.0)]
    assert collected(events, True) == {"relu<4>": Spent(pytest.approx(5e-6), 2.0)}
    assert collected(events, False) == {"aten::relu": Spent(pytest.approx(7e-6), 2.0)}


def test_the_hottest_of_any_step() -> None:
    steps = {
        "one": {"a": Spent(3.0, 1), "b": Spent(1.0, 1)},
        "other": {"b": Spent(5.0, 1), "c": Spent(2.0, 1)},
    }
    assert hottest(steps, 2) == ["b", "a"]
