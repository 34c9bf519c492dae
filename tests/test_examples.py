"""Every example runs, and does what it says."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_train_compiled_learns(capsys: pytest.CaptureFixture[str]) -> None:
    assert _load("train_compiled").main(["--epochs", "2"]) > 0.9
    printed = capsys.readouterr().out
    assert "4 stages, 1 reversible" in printed and "test accuracy" in printed


@pytest.mark.slow
def test_train_compiled_reaches_its_accuracy() -> None:
    assert _load("train_compiled").main([]) > 0.95


@pytest.mark.slow
def test_train_compiled_with_a_transformer() -> None:
    argv = ["--model", "vit_tiny_patch16_224", "--lr", "0.02", "--epochs", "3"]
    assert _load("train_compiled").main(argv) > 0.3
