"""What disks and other processes do to checkpoints: a clear error, and the last good one stays."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from revcompile.errors import InputError
from revcompile.runtime.checkpoint.folder import Checkpoint, find_checkpoint, save_checkpoint


def put(folder: Path, step: int) -> Path:
    model = {"w": torch.full((500,), float(step)), "n": torch.tensor(step)}
    return save_checkpoint(folder, {"model": model, "step": step}, step=step)


def step_in(folder: Path) -> int:
    """The step that would be loaded, seen to be whole."""
    checkpoint = Checkpoint(find_checkpoint(folder))
    ((model, step),) = (tree.values() for tree in checkpoint.read(checkpoint.trees()))
    assert set(model["w"].tolist()) == {int(model["n"])} == {step}
    return int(step)


def test_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    place = put(tmp_path, 3)
    noticed = 0
    for file in sorted(place.iterdir()):
        content = file.read_bytes()
        for at in range(0, len(content), 29):
            changed = bytearray(content)
            changed[at] ^= 1 << at % 8
            file.write_bytes(changed)
            try:
                assert step_in(place) == 3  # else in white space
            except InputError:
                noticed += 1
        file.write_bytes(content)
    assert step_in(place) == 3
    assert noticed > 90


def hours(ahead: float) -> Callable[[], float]:
    return lambda: 1e9 + 3600 * ahead


def test_the_newest_is_the_last_one_whatever_the_clock_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step, clock in ((5, hours(0)), (6, hours(-9)), (2, hours(100)), (4, hours(-100))):
        monkeypatch.setattr(time, "time", clock)
        place = put(tmp_path, step)
        os.utime(place, (clock(), clock()))
        assert step_in(tmp_path) == step
