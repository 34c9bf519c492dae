"""The benchmark of whole models: its search, its verdicts, its variants."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.one_device import whole
from benchmarks.one_device.whole import OFF, ON, Setting, largest_batch, report, time_models

SETTING = Setting(torch.device("cpu"), "fp32", rounds=2, warmup=1)


@pytest.mark.parametrize("room", [0, 7, 8, 40, 1001])
def test_the_largest_batch_is_found(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def fits(net: nn.Module, plain: nn.Module, batch: int, setting: Setting) -> bool:
        tried.append(batch)
        return batch <= room

    monkeypatch.setattr(whole, "fits", fits)
    batch = largest_batch(nn.Identity(), nn.Identity(), SETTING)
    assert batch <= room < batch + max(8, batch // 16)
    assert len(tried) <= 16


def test_verdicts(capsys: pytest.CaptureFixture[str]) -> None:
    seconds = {"plain": [1.0, 1.0], "checkpoint": [1.3, 1.3], OFF: [1.4, 1.4], ON: [1.32, 1.32]}
    report("a", seconds, dict.fromkeys(seconds, 2**30))
    said = capsys.readouterr().out
    assert f"{ON}: 1.320 (meets the bar of 1.33) of plain, 1.015 (MISSES the bar of 1.0)" in said
    del seconds["checkpoint"]
    report("b", seconds, dict.fromkeys(seconds, 2**30), captured=True)
    assert "1.320 (MISSES the bar of 1.15) of plain" in capsys.readouterr().out


def test_every_variant_is_timed() -> None:
    (figures,) = time_models(["test_vit"], [2], SETTING)
    assert list(figures["seconds"]) == ["plain", "checkpoint", OFF, ON]
    assert figures["peaks"][OFF] < figures["peaks"]["plain"]
