"""The CIFAR-10 trainings go on from where they stopped, and see the images they should."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

import revcompile
from benchmarks.learning.cifar import Cifar, load
from benchmarks.learning.experiments import MUON, PARAMETERS_BUFFERED, TABLES, Experiment
from benchmarks.learning.mixed import rebuild_with_latest
from benchmarks.learning.results import gather
from benchmarks.learning.run import run
from benchmarks.learning.text import Training
from benchmarks.learning.text import load as load_text
from benchmarks.learning.text import run as run_text
from benchmarks.learning.workers import OutOfTime


@pytest.fixture(autouse=True)
def small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainings' logic is tested, not their models."""
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 2}
    monkeypatch.setattr(
        "benchmarks.learning.run.create",
        lambda _: timm.create_model("vit_tiny_patch16_224", num_classes=10, **sizes),
    )


@pytest.fixture
def data() -> Cifar:
    generator = torch.Generator().manual_seed(0)
    train, test = (
        torch.randint(0, 256, (n, 3, 32, 32), dtype=torch.uint8, generator=generator)
        for n in (16, 8)
    )
    return Cifar(train, torch.arange(16) % 10, test, torch.arange(8))


@pytest.mark.parametrize(
    ("method", "optimizer"), [("plain", "sgd"), ("backprop", "sgd"), ("backprop", "nadam")]
)
def test_a_stopped_training_goes_on(
    tmp_path: Path, data: Cifar, method: str, optimizer: str
) -> None:
    experiment = Experiment(
        method, epochs=2, batch=8, model="vit_tiny", stages=3, optimizer=optimizer
    )
    whole = run(experiment, data, tmp_path / "whole", math.inf)
    with pytest.raises(OutOfTime):
        run(experiment, data, tmp_path / "stopped", 0.0)
    resumed = run(experiment, data, tmp_path / "stopped", math.inf)
    assert [line["epoch"] for line in resumed] == [1, 2]
    for mine, other in zip(whole, resumed, strict=True):
        assert mine["train_loss"] == other["train_loss"]
        assert mine["test_accuracy"] == other["test_accuracy"]


def test_parameters_buffered_inputs_rebuilt_with_the_latest() -> None:
    """PETRA's Table 4, row 4."""
    torch.manual_seed(0)
    chain = nn.Sequential(*(Block() for _ in range(3))).double()
    net = revcompile.petrafy(chain, 3, torch.randn(2, 4, dtype=torch.double), check="off")
    experiment = Experiment(PARAMETERS_BUFFERED)
    found = {}
    for variant in ("delayed", "latest", "mixed"):
        method = "petra" if variant == "latest" else experiment.chosen
        trainer = copy.deepcopy(net).trainer(
            lambda p: torch.optim.SGD(p, lr=0.0), F.mse_loss, method=method, seed=0
        )
        first, stage, _ = (executor.stage for executor in trainer.executors)
        if variant == "mixed":
            rebuild_with_latest(stage)
        generator = torch.Generator().manual_seed(1)
        x, da, db = torch.randn(3, 2, 4, generator=generator, dtype=torch.double)
        entered = first.forward(0, {port.name: x for port in first.program.inputs})
        outputs = stage.forward(0, entered)
        with torch.no_grad(), stage.updating(stage.parameters):
            for parameter in stage.parameters.values():
                parameter.mul_(1.5)
        gradients = dict(zip(stage.program.outputs_with_grad, (da, db), strict=True))
        found[variant] = stage.differentiate(0, outputs, gradients)
    rebuilt, back, of_parameters = found["mixed"]
    assert_close(rebuilt, found["latest"][0])
    assert_close(back, found["delayed"][1])
    assert_close(of_parameters, found["delayed"][2])
    for kind in (0, 1, 2):
        with pytest.raises(AssertionError):
            assert_close(found["latest"][kind], found["delayed"][kind])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.f(x).tanh()


@pytest.mark.parametrize(
    "settings",
    [
        {"method": PARAMETERS_BUFFERED},
        {"method": "petra", "weights": "predicted", "optimizer": MUON, "rate": 0.01},
    ],
)
def test_a_training_runs(tmp_path: Path, data: Cifar, settings: dict[str, Any]) -> None:
    experiment = Experiment(epochs=1, batch=4, model="vit_tiny", stages=3, **settings)
    [line] = run(experiment, data, tmp_path, math.inf)
    assert math.isfinite(line["train_loss"])


def test_an_epoch_sees_every_image_once_shifted_or_flipped(data: Cifar) -> None:
    batches = list(data.epoch(4, seed=1, epoch=0))
    again = list(data.epoch(4, seed=1, epoch=0))
    other = list(data.epoch(4, seed=1, epoch=1))
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(batches, again, strict=True))
    assert not all(torch.equal(a, b) for (a, _), (b, _) in zip(batches, other, strict=True))
    labels = torch.cat([y for _, y in batches])
    assert torch.equal(labels.sort()[0], data.train_labels.sort()[0])
    rest = list(data.epoch(4, seed=1, epoch=0, skip=3))
    assert len(rest) == 1 and torch.equal(rest[0][0], batches[3][0])


def test_sheets_are_cut_into_images(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (12, 32, 32, 3), dtype=np.uint8)
    sheets = images.reshape(2, 2, 3, 32, 32, 3).swapaxes(2, 3).reshape(2, 64, 96, 3)
    for part in ("train", "test"):
        for number, sheet in enumerate(sheets):
            Image.fromarray(sheet).save(tmp_path / f"{part}_{number:02}.webp", lossless=True)
    np.savez(tmp_path / "labels.npz", train=np.arange(12), test=np.arange(12))
    found = load(tmp_path)
    assert np.array_equal(found.train.permute(0, 2, 3, 1).numpy(), images)
    assert found.test_labels.tolist() == list(range(12))


def test_experiments_of_a_table_have_names_of_their_own() -> None:
    for name, table in TABLES.items():
        experiments = list(table(2, 3))
        assert len({e.name for e in experiments}) == len(experiments), name
        assert all(e.method == "plain" or e.chosen for e in experiments)


def test_what_is_not_usual_for_a_model_stands_in_the_name() -> None:
    def setting(model: str, optimizer: str, stages: int) -> str:
        made = Experiment("petra", None, 4, model=model, optimizer=optimizer, stages=stages)
        return made.setting

    assert setting("vit_tiny", "nadam", 8) == "vit_tiny-petra-k4-nadam"
    assert setting("vit_tiny", "adamw", 4) == "vit_tiny-petra-k4-4stages"
    assert setting("resnet18", "adamw", 10) == "resnet18-petra-k4-adamw"
    assert setting("resnet18", "sgd", 10) == "resnet18-petra-k4"


def test_the_transformer_s_table() -> None:
    found = list(TABLES["transformer"](2, 3))
    assert len(found) == 16 and {e.seed for e in found} == {0, 1}
    assert [e.setting.removeprefix("vit_tiny-") for e in found[:5]] == [
        "petra_stashed-k4-delay-aware-adamw-lr0.0005-cosine",
        "petra-k8-4stages-of32-delay-aware-adamw-lr0.0005-cosine",
        "petra-k4-4stages-delay-aware-adamw-lr0.0005-cosine",
        "petra-k4-delay-aware-adamw-lr0.0005-cosine",
        "backprop-k4-lr0.0005-cosine",
    ]
    assert {(e.rate, e.weight_decay) for e in found} == {(5e-4, 0.05)}
    assert {(e.batch, e.accumulate) for e in found} == {(32, 8), (64, 4)}


def test_results_of_another_machine_count(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text('{"a": {"name": "a", "log": []}}')
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "result.json").write_text('{"name": "b", "log": []}')
    assert gather(tmp_path).keys() == {"a", "b"}
    (tmp_path / "b" / "result.json").unlink()
    assert gather(tmp_path).keys() == {"a", "b"}


def test_a_small_gpt_learns(tmp_path: Path) -> None:
    file = tmp_path / "input.txt"
    file.write_text("to be or not to be, that is the question. " * 300)
    text = load_text(file)
    row = Training("petra_stashed", "muon-feedback", 0.02, stages=3, updates=24, size="tiny")
    assert "(train" in run_text(row, text, tmp_path / row.name, math.inf)
    losses = [line["validation_loss"] for line in gather(tmp_path)[row.name]["log"]]
    assert len(losses) == 24
    assert losses[-1] < losses[0] - 0.1
