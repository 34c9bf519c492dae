"""Steps as CUDA graphs train as eager steps do. Run with `pytest -m gpu`."""

import gc
import warnings
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
from helpers import ON_GPU
from torch import Tensor, nn
from torch.nn import functional as F
from training import Net, adam, fresh, momentum, settings_of, weights

import revcompile
from revcompile.errors import NonFiniteError, RevcompileWarning
from revcompile.runtime.executor import captured_steps
from revcompile.runtime.trainer.trainer import Trainer
from revcompile.staged import StagedModel
from tests.runtime.executor.test_captured import SETTINGS as ON_CPU
from tests.runtime.executor.test_captured import Branching, Loose, Selecting, even, stem
from tests.runtime.executor.test_updates import CASES, OPTIMIZERS, assert_alike
from tests.runtime.executor.test_updates import trained as trained_with

pytestmark = ON_GPU


def net_and_trainer(
    backend: str, make: Any = Loose, dtype: torch.dtype = torch.float64, **settings: Any
) -> tuple[StagedModel, Trainer]:
    net = fresh(make, dtype=dtype)
    net.model.cuda()
    settings = {"optimizer": momentum, "loss": F.cross_entropy, **settings}
    return net, net.trainer(backend=backend, **settings_of(**settings))


def trained(backend: str, **settings: Any) -> tuple[list[float], dict[str, Tensor], Trainer]:
    net, trainer = net_and_trainer(backend, **settings)
    losses = [trainer.step(*batch).loss for batch in even(40)]
    trainer.flush()
    return losses, weights(net), trainer


def off_by(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return max(float((a[n].double() - b[n].double()).abs().max()) for n in a)


SETTINGS: dict[str, dict[str, Any]] = {
    **{name: settings for name, settings in ON_CPU.items() if "dtype" not in settings},
    "steps without updates": {"in_flight_per_stage": 2, "accumulation_steps": 2},
    "predicted": {"weights": "predicted"},
}


class Small(nn.Module):
    """Convolutions, batch norms and shortcuts, in the memory format that suits them."""

    def __init__(self) -> None:
        super().__init__()
        # Folded where it is compiled.
        self.stem = nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32))
        self.blocks = nn.ModuleList(self.block() for _ in range(3))
        self.head = nn.Linear(32, 3)
        self.to(memory_format=torch.channels_last)

    @staticmethod
    def block() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()
        )

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((2, 3)))


KEPT: dict[str, Any] = {"memory_budget": "auto"}


def convolved(backend: str, **settings: Any) -> list[float]:
    torch.manual_seed(0)
    x = torch.randn(8, 3, 16, 16, device="cuda").to(memory_format=torch.channels_last)
    net = revcompile.petrafy(Small().cuda(), 4, x, check="off")
    settings["autocast"] = torch.bfloat16
    trainer = net.trainer(momentum, F.cross_entropy, backend=backend, **settings)
    y = torch.arange(8, device="cuda") % 3
    losses = [trainer.step(x.roll(step, 0), y.roll(step, 0)).loss for step in range(30)]
    assert trainer._runner.is_replaying == (backend != "eager")
    return losses


@pytest.mark.parametrize("settings", [{}, KEPT], ids=str)
@pytest.mark.parametrize("backend", ["cudagraphs", "inductor"])
def test_convolutions_in_bfloat16(backend: str, settings: dict[str, Any]) -> None:
    losses = convolved("eager", **settings)
    assert losses[-1] < 0.5 * losses[0]
    assert convolved(backend, **settings) == pytest.approx(losses, abs=0.03)


@pytest.mark.parametrize("backend", ["eager", "cudagraphs"])
def test_pinned_memory_may_be_refilled_after_a_step(backend: str) -> None:
    """What the GPU has to do first lasts longer than the host takes for a step."""
    losses, expected, _ = trained(backend)
    net, trainer = net_and_trainer(backend)
    inputs, target = (tensor.pin_memory() for tensor in even(1)[0])
    found = []
    for batch in even(40):
        inputs.copy_(batch[0])
        target.copy_(batch[1])
        torch.cuda._sleep(50_000_000)
        found.append(trainer.step(inputs, target))
        inputs.fill_(torch.nan)
        target.fill_(0)
    trainer.flush()
    assert [metrics.loss for metrics in found] == pytest.approx(losses, rel=1e-9)
    assert off_by(weights(net), expected) < 1e-9


@pytest.mark.parametrize("staying", [{0, 2}, {1}, {0, 1, 2}], ids=str)
def test_stages_with_large_tensors_stay_on_the_current_stream(
    monkeypatch: pytest.MonkeyPatch, staying: set[int]
) -> None:
    losses = convolved("eager")
    monkeypatch.setattr(captured_steps, "large_stages", lambda *_: staying)
    assert convolved("cudagraphs") == pytest.approx(losses, abs=1e-3)


@pytest.mark.parametrize("name", SETTINGS)
def test_the_same_training_as_eager(name: str) -> None:
    losses, after, _ = trained("eager", **SETTINGS[name])
    found, there, trainer = trained("cudagraphs", **SETTINGS[name])
    assert max(abs(a - b) for a, b in zip(losses, found, strict=True)) < 1e-6
    assert off_by(after, there) < 1e-6
    assert trainer._runner.is_on


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_are_restored_where_a_batch_was_bad(name: str, case: str) -> None:
    found = trained_with(name, "cudagraphs", case, "cuda")
    assert_alike(found, trained_with(name, "eager", case, "cuda"), 1e-7)


def test_leaving_and_coming_back() -> None:
    found = []
    for backend in ("eager", "cudagraphs"):
        net, trainer = net_and_trainer(backend, optimizer=adam, accumulation_steps=2)
        data = even(60)
        odd = (data[0][0][:3], data[0][1][:3])
        for batch in [*data[:20], odd, *data[20:35]]:
            trainer.step(*batch)
        state = trainer.state_dict()
        for batch in data[35:45]:
            trainer.step(*batch)
        trainer.load_state_dict(state)
        trainer.flush()
        for batch in data[45:]:
            trainer.step(*batch)
        trainer.flush()
        found.append(weights(net))
    assert off_by(*found) < 1e-6


def test_kept_graphs_whatever_comes_in_between() -> None:
    """An odd batch, an evaluation, a flush, weights that move: graphs go back as they were made."""
    found = []
    for backend in ("eager", "cudagraphs"):
        net, trainer = net_and_trainer(backend, **KEPT)
        data, told, replayed = even(80), [], []
        for index, (x, y) in enumerate(data):
            if index in (25, 27, 45):
                told.append(trainer.step(x[:3], y[:3]).loss)
            if index == 35:
                told.append(trainer.evaluate(data[:2]).loss)
            if index == 50:
                trainer.flush()
            if index == 70:
                trainer.flush()
                weight = trainer.model.get_parameter("stem.weight")
                weight.data = weight.data.clone()
            told.append(trainer.step(x, y).loss)
            replayed.append(trainer._runner.is_replaying)
        trainer.flush()
        if backend == "cudagraphs":
            assert [replayed[index] for index in (24, 44, 49, 69, 70)] == [*(True,) * 4, False]
        found.append((told, weights(net)))
    assert found[1][0] == pytest.approx(found[0][0], abs=1e-6)
    assert off_by(found[0][1], found[1][1]) < 1e-6


def test_a_bad_batch_moves_nothing_where_graphs_are_kept() -> None:
    found = []
    for backend in ("eager", "cudagraphs"):
        net, trainer = net_and_trainer(backend, **KEPT)
        for index, (x, y) in enumerate(even(50)):
            with suppress(NonFiniteError):
                trainer.step(x * torch.nan if index in (3, 31) else x, y)
        with suppress(NonFiniteError):
            trainer.flush()
        found.append(weights(net))
    assert off_by(*found) < 1e-6


def test_a_loss_that_waits_for_the_device_is_not_captured() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target) * (float(output.detach().sum()) != 1e9)

    _, trainer = net_and_trainer("cudagraphs", loss=loss)
    with pytest.warns(UserWarning, match="one action at a time"):
        found = [trainer.step(*batch).loss for batch in even(40)]
    assert found == pytest.approx(trained("eager")[0], abs=1e-6)


@pytest.mark.parametrize("layer", [Branching, Selecting])
def test_kept_graphs_that_depend_on_the_data_are_not_captured(layer: type[nn.Module]) -> None:
    found = []
    for backend in ("eager", "cudagraphs"):
        net, trainer = net_and_trainer(backend, stem(layer), **KEPT)
        for batch in even(40):
            with warnings.catch_warnings():  # that its steps are run one action at a time
                warnings.simplefilter("ignore", RevcompileWarning)
                trainer.step(*batch)
        trainer.flush()
        found.append(weights(net))
    assert off_by(*found) < 1e-6


@pytest.mark.parametrize("fails", [True, False], ids=["failed", "captured"])
def test_a_capture_whose_first_kernels_are_late(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """On a busy GPU the kernels with which a capture begins may run after all that follows it."""
    begin: Any = torch.cuda.CUDAGraph.capture_begin

    def slow_begin(graph: Any, *args: Any, **kwargs: Any) -> None:
        torch.cuda._sleep(10**8)
        begin(graph, *args, **kwargs)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if fails and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("not in a capture")
        return F.cross_entropy(output, target)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", slow_begin)
    _, trainer = net_and_trainer("cudagraphs", loss=loss)
    with pytest.warns(UserWarning, match="one action at a time") if fails else nullcontext():
        found = [trainer.step(*batch).loss for batch in even(40)]
    assert trainer._runner.is_on != fails
    assert found == pytest.approx(trained("eager")[0], abs=1e-6)


@pytest.mark.parametrize("settings", [{}, KEPT], ids=str)
def test_the_driver_is_asked_for_no_memory_once_steps_are_captured(
    settings: dict[str, Any],
) -> None:
    _, trainer = net_and_trainer("cudagraphs", **settings)
    data = [(x.cuda(), y.cuda()) for x, y in even(8)]
    for index in range(30):
        trainer.step(*data[index % 8])
    gc.collect()  # trainers of other tests, in reference cycles
    before = torch.cuda.memory_stats()
    for index in range(100):
        trainer.step(*data[index % 8])
    after = torch.cuda.memory_stats()
    for key in ("num_device_alloc", "num_device_free", "reserved_bytes.all.allocated"):
        assert before[key] == after[key]
    assert before["allocated_bytes.all.current"] == after["allocated_bytes.all.current"]


@pytest.mark.parametrize("settings", [{}, KEPT], ids=str)
def test_branches_in_low_precision(settings: dict[str, Any]) -> None:
    found = []
    for backend in ("eager", "cudagraphs"):
        how = {"dtype": torch.float32, "autocast": torch.bfloat16, **settings}
        _, trainer = net_and_trainer(backend, **how)
        data = [(x.float(), y) for x, y in even(40)]
        steps = [trainer.step(*batch) for batch in data]
        assert trainer._runner.is_active == (backend == "cudagraphs")
        found.append([metrics.loss for metrics in steps])
    assert found[1] == pytest.approx(found[0], rel=2e-2)


@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_parameters_that_stages_share(accumulation_steps: int) -> None:
    found = []
    for backend in ("eager", "cudagraphs"):
        net, trainer = net_and_trainer(backend, Net, accumulation_steps=accumulation_steps)
        for steps in (14, 11, 15):
            for batch in even(steps):
                trainer.step(*batch)
            assert trainer._runner.is_active == (backend == "cudagraphs")
            trainer.flush()
        found.append(weights(net))
    assert off_by(*found) < 1e-6
