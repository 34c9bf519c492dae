"""Every example runs, and does what it says."""

import dataclasses
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers import cases, refuses
from paths import ROOT
from safetensors.torch import load_file
from torch.utils.data import Subset

from revcompile.errors import InputError

EXAMPLES = ROOT / "examples"


@pytest.fixture(autouse=True)
def beside_the_examples(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


def example(name: str) -> ModuleType:
    return importlib.import_module(name)


def test_train_compiled_learns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--epochs", "1", "--schedule", "cosine", "--out", str(tmp_path)]
    assert example("train_compiled").main(options) > 0.5
    printed = capsys.readouterr().out
    assert "ResNet: 4 stages, petra" in printed and "test accuracy" in printed
    assert "what to try next" in printed
    (row,) = (tmp_path / "log.jsonl").read_text().splitlines()
    assert json.loads(row)["test_accuracy"] > 0.5
    assert load_file(tmp_path / "model.safetensors").keys()


@pytest.fixture
def few_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """160 of the digits, in place of all."""
    found = example("images").digits(None, 16)
    few = {"train": Subset(found.train, range(128)), "test": Subset(found.test, range(32))}
    made = dataclasses.replace(found, **few)
    monkeypatch.setitem(example("images").DATASETS, "digits", lambda *_: made)


SMALL = ["--model", "test_resnet", "--batch-size", "8", "--stages", "2"]


@pytest.mark.usefixtures("few_digits")
def test_a_training_goes_on_from_the_middle_of_an_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = example("train_compiled")
    common = [*SMALL, "--method", "backprop", "--epochs", "2"]

    def test_losses(*options: str) -> list[float]:
        module.main([*common, *options])
        rows = (Path(options[1]) / "log.jsonl").read_text().splitlines()
        return [json.loads(row)["test_loss"] for row in rows]

    whole, stopped_in = test_losses("--out", str(tmp_path / "whole")), tmp_path / "stopped"
    step, steps = module.Trainer.step, list[int]()

    def taken_away(trainer: Any, *values: Any) -> Any:
        steps.append(len(steps))
        if len(steps) == 19:  # of sixteen an epoch; answered after the tenth of the second
            os.kill(os.getpid(), signal.SIGTERM)
        return step(trainer, *values)

    with monkeypatch.context() as patched:
        patched.setattr(module.Trainer, "step", taken_away)
        with pytest.raises(SystemExit) as stopped:
            module.main([*common, "--out", str(stopped_in)])
    assert stopped.value.code == 128 + signal.SIGTERM
    assert f"--resume goes on from {stopped_in}" in capsys.readouterr().out
    assert test_losses("--out", str(stopped_in), "--resume") == whole


@cases(
    "data, message",
    ([], "--data imagefolder: needs --data-dir"),
    (["--data-dir", "nowhere"], "--data imagefolder: .*No such file or directory"),
    (["--data-dir", "."], "train/ and val/ differ in their classes"),
)
def test_what_is_wrong_with_the_data_is_a_line(
    data: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("train/a", "train/b", "val/a"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "image.png").write_bytes(b"")
    refuses(InputError, message, example("train_compiled").main, ["--data", "imagefolder", *data])


def test_finetune_vit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = example("finetune_vit")
    found = module.digits(None, 32)
    few = {"train": Subset(found.train, range(320)), "test": Subset(found.test, range(160))}
    monkeypatch.setattr(module, "digits", lambda *_: dataclasses.replace(found, **few))
    before, after = module.main(["--epochs", "1", "--out", str(tmp_path)])
    assert 0.15 < before < after
    assert load_file(tmp_path / "finetuned.safetensors").keys() == (
        load_file(tmp_path / "pretrained.safetensors").keys()
    )


@pytest.fixture(scope="module")
def language_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder as `save_pretrained` writes it, of a model that has learnt a little."""
    pytest.importorskip("transformers")
    sys.path.insert(0, str(EXAMPLES))
    try:
        folder: Path = example("characters").pretrained(tmp_path_factory.mktemp("model"), 10)
    finally:
        sys.path.remove(str(EXAMPLES))
    return str(folder)


@pytest.mark.filterwarnings("ignore")
def test_finetune_huggingface_with_adapters(language_model: str, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(language_model)
    for options in ([], ["--lora"]):
        folder = tmp_path / f"out{len(options)}"
        argv = ["--model", language_model, "--steps", "20", "--out", str(folder), *options]
        before, after = example("finetune_huggingface").main(argv)
        assert after < before
    adapters = load_file(folder / "adapter_model.safetensors")
    assert {name.split(".")[-2] for name in adapters} == {"lora_A", "lora_B"}
    finetuned = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out0")
    assert type(finetuned) is type(model)
    characters = example("characters")
    batch = characters.padded(characters.lines()[-64:])
    with torch.no_grad():
        assert finetuned(**batch).loss < model(**batch).loss


@pytest.mark.filterwarnings("ignore")
def test_finetune_accelerate(language_model: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    argv = ["--model", language_model, "--lines", "80", "--out", str(tmp_path)]
    losses = example("finetune_accelerate").main(argv)
    assert losses[1] < losses[0] and (tmp_path / "config.json").exists()


@pytest.mark.slow
def test_finetune_accelerate_on_two_ranks(language_model: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--standalone", str(EXAMPLES / "finetune_accelerate.py")]
    command += ["--model", language_model, "--lines", "80", "--out", str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    losses = [float(line.split()[-1]) for line in ended.stdout.splitlines() if "loss" in line]
    assert len(losses) == 2 and losses[1] < losses[0]


@pytest.mark.filterwarnings("ignore")
def test_finetune_lightning(language_model: str, tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    argv = ["--model", language_model, "--steps", "6", "--out", str(tmp_path)]
    before, after = example("finetune_lightning").main(argv)
    assert after < before and (tmp_path / "config.json").exists()


@pytest.mark.slow
def test_train_compiled_reaches_its_accuracy(tmp_path: Path) -> None:
    assert example("train_compiled").main(["--out", str(tmp_path)]) > 0.95
