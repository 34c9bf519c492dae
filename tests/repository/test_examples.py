"""Every example runs, and does what it says."""

from __future__ import annotations

import dataclasses
import importlib
import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from paths import ROOT
from safetensors.torch import load_file
from torch.utils.data import Subset

from revcompile.errors import InputError

EXAMPLES = ROOT / "examples"


@pytest.fixture(autouse=True)
def beside_the_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


def example(name: str) -> ModuleType:
    return importlib.import_module(name)


def test_train_compiled_learns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--epochs", "1", "--schedule", "cosine", "--out", str(tmp_path)]
    assert example("train_compiled").main(options) > 0.5
    printed = capsys.readouterr().out
    assert "ResNet: 4 stages, petra" in printed and "test accuracy" in printed
    assert "what to try next" in printed
    log = (tmp_path / "log.csv").read_text().splitlines()
    assert len(log) == 2 and log[0].startswith("epoch,train_loss")
    assert (tmp_path / "curves.svg").exists()
    assert load_file(tmp_path / "model.safetensors").keys()


@pytest.fixture
def few_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """160 of the digits, in place of all."""
    found = example("images").digits(None, 16)
    few = {"train": Subset(found.train, range(128)), "test": Subset(found.test, range(32))}
    made = dataclasses.replace(found, **few)
    monkeypatch.setitem(example("images").DATASETS, "digits", lambda *_: made)


SMALL = ["--model", "test_resnet", "--batch-size", "64", "--stages", "2"]


@pytest.mark.usefixtures("few_digits")
def test_a_training_goes_on_from_the_middle_of_an_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = example("train_compiled")
    common = [*SMALL, "--method", "backprop", "--epochs", "2"]

    def test_losses(*options: str) -> list[str]:
        module.main([*common, *options])
        rows = (Path(options[1]) / "log.csv").read_text().splitlines()[1:]
        return [row.split(",")[2] for row in rows]

    whole, stopped_in = test_losses("--out", str(tmp_path / "whole")), tmp_path / "stopped"
    step, steps = module.Trainer.step, list[int]()

    def taken_away(trainer: Any, *values: Any) -> Any:
        steps.append(len(steps))
        if len(steps) == 3:  # the first of two in the second epoch
            os.kill(os.getpid(), signal.SIGTERM)
        return step(trainer, *values)

    with monkeypatch.context() as patched:
        patched.setattr(module.Trainer, "step", taken_away)
        with pytest.raises(SystemExit) as stopped:
            module.main([*common, "--out", str(stopped_in)])
    assert stopped.value.code == 128 + signal.SIGTERM
    assert f"--resume goes on from {stopped_in}" in capsys.readouterr().out
    assert test_losses("--out", str(stopped_in), "--resume") == whole


@pytest.mark.parametrize(
    ("world", "signals", "seen"), [(1, [4], 4), (2, [4], 10), (2, [13], 15), (2, [], 15)]
)
def test_a_signal_is_answered_after_some_batches_or_the_last(
    world: int, signals: list[int], seen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", f"{world}")
    interrupts, batches, saved = example("interrupts"), list[int](), list[int]()
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) if signals else nullcontext():
        for batch in interrupts.until_stopped(range(1, 16), lambda: saved.append(len(batches))):
            batches.append(batch)
            if batch in signals:
                os.kill(os.getpid(), signal.SIGTERM)
    assert (len(batches), saved) == (seen, [seen] if signals else [])
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_second_ctrl_c_stops_at_once() -> None:
    # Of a process that a script has started in the background, SIGINT is ignored.
    ours, before = signal.default_int_handler, signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, ours)
    try:
        with pytest.raises(KeyboardInterrupt):
            for _ in example("interrupts").until_stopped(range(3), list):
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is ours
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "--data imagefolder: needs --data-dir"),
        (["--data-dir", "nowhere"], "--data imagefolder: .*No such file or directory"),
        (["--data-dir", "."], "train/ and val/ differ in their classes: b"),
    ],
)
def test_what_is_wrong_with_the_data_is_a_line(
    data: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("train/a", "train/b", "val/a"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "image.png").write_bytes(b"")
    with pytest.raises(InputError, match=message):
        example("train_compiled").main(["--data", "imagefolder", *data])


@pytest.mark.usefixtures("few_digits")
def test_compare_methods_draws_a_curve_for_each(tmp_path: Path) -> None:
    options = ["--methods", "petra", "petra:2", *SMALL, "--epochs", "1", "--out", str(tmp_path)]
    assert example("compare_methods").main(options).keys() == {"petra", "petra:2"}
    assert "petra:2" in (tmp_path / "curves.svg").read_text()


def test_finetune_vit_starts_where_the_original_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
def test_finetune_huggingface_by_its_trainer_and_with_adapters(
    language_model: str, tmp_path: Path
) -> None:
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
    argv = ["--model", language_model, "--lines", "24", "--out", str(tmp_path)]
    losses = example("finetune_accelerate").main(argv)
    assert losses[1] < losses[0] and (tmp_path / "config.json").exists()


@pytest.mark.slow
def test_finetune_accelerate_on_two_ranks(language_model: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--standalone", str(EXAMPLES / "finetune_accelerate.py")]
    command += ["--model", language_model, "--lines", "24", "--out", str(tmp_path)]
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


def test_inspect_stages_shows_a_model_from_all_sides(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--model", "test_resnet", "--stages", "4", "--stage", "1", "--block", "layer1.0"]
    folder = example("inspect_stages").main([*options, "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    assert "4 stages" in printed and "def forward" in printed and "layer1.0" in printed
    assert {file.name for file in folder.iterdir()} == {"net.svg", "net.html", "timeline.svg"}
