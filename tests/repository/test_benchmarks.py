"""Every benchmark runs in its smallest form, by the command that documents it.

Benchmarks import the tests' helpers, so tests import no benchmark: they run them by name.
"""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from paths import ROOT
from PIL import Image

STACK = ("--model", "conv-2x4", "--size", "8", "--batch", "2", "--stages", "2")
SMALLEST: dict[str, tuple[str, ...]] = {
    "accounting": (),
    "compiled": ("--device", "cpu", "--tiny", "--batch", "2", "--backend", "eager"),
    "coverage": ("test_resnet",),
    "engine": ("--device", "cpu", *STACK, "--steps", "1", "--rounds", "1", "--backends", "static"),
    "families": ("test_resnet", "--stages", "2"),
    "finetune": ("--device", "cpu", "--tiny", "--backend", "eager", "--models", "1B"),
    "frontier": ("--device", "cpu", "--tiny", "--batch", "2", "--models", "gpt", "--rounds", "1"),
    "huggingface": ("gpt2", "--stages", "2"),
    "late": ("--data", "text.txt", "--width", "8", "--context", "16", "--only", "stages=32"),
    "learning": ("deeper", "--data", "cifar", "--epochs", "1", "--seeds", "1", "--jobs", "1"),
    "memory": ("--depths", "1", "2", "--batch", "2", "--picture", "memory.svg"),
    "peers": (*STACK, "--rounds", "1", "--warmup", "0"),
    "pipelines": ("--blocks", "1", "--width", "64", "--tokens", "4", "--batch", "1"),
    "ranks": ("--device", "cpu", "--case", "conv-2x4:8:2:2", "--ranks", "2", "--steps", "2"),
    "stage_memory": STACK,
    "text": ("--data", "text.txt", "--size", "tiny", "--updates", "24", "--jobs", "1"),
    "whole": ("--model", "test_vit", "--batch", "2", "--rounds", "2", "--warmup", "1"),
}
MORE: dict[str, tuple[str, ...]] = {
    "compiled": ("--models", "resnet152", "gpt", "--rounds", "1"),
    "finetune": ("--tokens", "32", "--gib", "1"),
    "frontier": ("--backend", "aot_eager_decomp_partition", "--fractions", "0.5", "--points", "2"),
    "late": ("--updates", "2", "--device", "cpu"),
    "learning": ("--only", "resnet34-backprop-k4", "--out", "out", "--device", "cpu"),
    "pipelines": ("--accumulation-steps", "2", "--rounds", "1", "--model", "device"),
    "ranks": ("--rounds", "1", "--backends", "eager", "model-parallel", "torch-1f1b"),
    "text": ("--only", "backprop-muon-lr0.02", "--out", "out", "--device", "cpu"),
}


def run(name: str, monkeypatch: pytest.MonkeyPatch, *options: str) -> dict[str, Any]:
    """The rows that a benchmark writes."""
    monkeypatch.setattr(sys, "argv", [name, *options, "--json", "rows.json"])
    try:
        runpy.run_module(f"benchmarks.{name}", run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        assert not ended.code
    found: dict[str, Any] = json.loads(Path("rows.json").read_text())
    return found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a few images and a text to learn."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 300)
    cifar = tmp_path / "cifar"
    cifar.mkdir()
    for part in ("train", "test"):
        pixels = np.random.default_rng(0).integers(0, 256, (8 * 32, 32 * 32, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(cifar / f"{part}_00.webp", lossless=True)
    np.savez(cifar / "labels.npz", train=np.arange(256) % 10, test=np.arange(256) % 10)
    return tmp_path


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SMALLEST)
def test_its_smallest_form_runs(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run(name, monkeypatch, *SMALLEST[name], *MORE.get(name, ()))
    assert found["rows"] and found["torch"] == torch.__version__
    if name in ("compiled", "finetune", "frontier"):
        assert not [row for row in found["rows"] if row.get("failed")]
    if name == "frontier":
        run(name, monkeypatch, "--table", "--plot", "frontier.svg")
        assert "torch 0.5" in Path("frontier.svg").read_text()
        rows = run(name, monkeypatch, *SMALLEST[name], *MORE[name], "--dropout", "0.1")["rows"]
        bits = [
            row["same bits"] for row in rows if "reversify" in row["variant"] and "dropout" in row
        ]
        assert len(bits) > 6 and all(bits)
    if name == "peers":
        losses = {row["variant"]: row["loss"] for row in found["rows"] if "loss" in row}
        assert losses["checkpoint"] == losses["plain"]
        assert losses["petra, eager"] == pytest.approx(losses["reversify"], rel=1e-5)
    if name == "late":
        (row,) = run(name, monkeypatch, "--check")["rows"]
        assert row["difference"] < 1e-5
    if name == "text":
        ends = [found["rows"][0]["log"][index]["validation_loss"] for index in (0, -1)]
        assert ends[1] < ends[0] - 0.1


def test_every_benchmark_has_a_smallest_form() -> None:
    shared = {"__init__", "alone", "cifar", "figures", "harness", "models", "trainings"}
    assert {file.stem for file in (ROOT / "benchmarks").glob("*.py")} == {*SMALLEST, *shared}
