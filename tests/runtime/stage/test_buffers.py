"""How inputs wait for their backward pass: in how many bits, and where."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from training import plain_sgd, same, through_a_file, weights

import revcompile
from revcompile.errors import InputError
from revcompile.runtime.executor.captured import fusion, static_transport
from revcompile.runtime.executor.captured.fusion import FusedOps
from revcompile.runtime.executor.captured.graphs import EagerReplay
from revcompile.runtime.executor.captured.pipeline import StaticPipeline
from revcompile.runtime.executor.captured.static_transport import StaticTransport
from revcompile.runtime.executor.transport import MessageKind
from revcompile.runtime.stage import static_buffers
from revcompile.runtime.stage.activations import (
    Buffers,
    OffloadedTensor,
    PinnedPool,
    Scaled,
    compress,
    decompress,
)
from revcompile.runtime.trainer.core import Trainer
from revcompile.staged import StagedModel
from tests.runtime.executor.test_captured import FULL, even, is_active, made, odd

FP8: Final = torch.float8_e4m3fn
CPU: Final = torch.device("cpu")


# -- eight bits -----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_eight_bits_keep_four_of_a_number(size: float) -> None:
    """Relative to the number itself, down to 2^-6 / 448 of the largest; below, to that one."""
    torch.manual_seed(0)
    value = size * torch.randn(4000) * torch.exp2(torch.linspace(-20, 0, 4000))
    packed = compress(value, FP8)
    assert isinstance(packed, Scaled) and packed.values.dtype == FP8
    unit = value.abs().max() / 448
    error = (decompress(packed) - value).abs()
    normal = value.abs() > 1.01 * unit * 2**-6
    assert 0.1 < normal.float().mean() < 0.9
    assert float((error / value.abs())[normal].max()) <= 2**-4
    assert float(error[~normal].max()) <= 1.01 * unit * 2**-10


def test_nothing_and_what_is_not_finite_survive_eight_bits() -> None:
    assert same(decompress(compress(torch.zeros(5), FP8)), torch.zeros(5))
    tiny = torch.full((3,), 1e-42)
    assert float((decompress(compress(tiny, FP8)) - tiny).abs().max()) <= float(tiny[0])
    for bad in (torch.inf, torch.nan):
        assert not decompress(compress(torch.tensor([1.0, bad]), FP8)).isfinite().all()


# -- training -------------------------------------------------------------------------------------


def kept(trainer: Trainer, stage: int = 0) -> list[Any]:
    return [held.kept[0] for held in trainer.executors[stage].stage.in_flight.values()]


@pytest.mark.parametrize("accumulate", [1, 3])
def test_captured_steps_keep_eight_bits_too(accumulate: int) -> None:
    found = []
    for backend in ("eager", "static"):
        net, trainer = made(backend, dtype=torch.float32, buffers=FP8, accumulate=accumulate)
        data = [(x.float(), y) for x, y in even(2 * FULL)]
        losses = [trainer.step(*batch).loss for batch in data[:-3]]
        trainer.step(odd()[0].float(), odd()[1])
        losses += [trainer.step(*batch).loss for batch in data[-3:]]
        found.append((losses, weights(net)))
        trainer.state_dict()
        assert {type(value) for value in kept(trainer)} == {Scaled}
    assert same(*found)
    plain, reference = made("eager", dtype=torch.float32, accumulate=accumulate)
    for batch in data[:5]:
        reference.step(*batch)
    assert not same(weights(plain), found[0][1])


@pytest.mark.parametrize(
    ("backend", "buffers"),
    [
        ("eager", torch.bfloat16),
        ("eager", Buffers(FP8, offload=True)),
        ("eager", "offload"),
        ("static", FP8),
    ],
)
def test_checkpoints_hold_what_waits(tmp_path: Path, backend: str, buffers: Any) -> None:
    data = [(x.float(), y) for x, y in even(2 * FULL)]

    def begun() -> Trainer:
        trainer = made(backend, dtype=torch.float32, buffers=buffers)[1]
        return shelved(trainer) if "offload" in str(buffers) else trainer

    trainer, first, second = begun(), begun(), begun()
    for batch in data[:FULL]:
        trainer.step(*batch)
    first.load_state_dict(through_a_file(trainer.state_dict()))
    second.load(trainer.save(tmp_path))
    for one in (trainer, first, second):
        for batch in data[FULL:]:
            one.step(*batch)
        one.flush()
    assert same(first.model.state_dict(), trainer.model.state_dict())
    assert same(second.model.state_dict(), trainer.model.state_dict())


@pytest.mark.parametrize("after", [None, torch.float16, FP8])
@pytest.mark.parametrize("before", [None, torch.bfloat16, FP8])
def test_a_run_goes_on_with_other_buffers(before: Any, after: Any) -> None:
    """What is in flight has been rounded already."""
    data = [(x.float(), y) for x, y in even(FULL)]
    found = []
    for buffers in (before, after):
        _, first = made("eager", dtype=torch.float32, buffers=before)
        for batch in data:
            first.step(*batch)
        net, second = made("eager", dtype=torch.float32, buffers=buffers)
        second.load_state_dict(through_a_file(first.state_dict()))
        second.flush()
        found.append(weights(net))
    assert same(*found)


class Mixed(nn.Module):
    """A transition in the middle, between couplings."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.middle, self.head = nn.Linear(5, 8), nn.Linear(8, 64), nn.Linear(64, 3)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = torch.tanh(self.middle(x + torch.tanh(self.first(x))))
        return self.head(x + torch.tanh(self.second(x)))


def test_inputs_of_what_is_not_reversible_wait_wherever_it_is_in_a_stage() -> None:
    net = revcompile.petrafy(Mixed(), 2, torch.zeros(4, 5), check="off")
    assert len(net.partition.parts[0].pieces) > 2
    trainer = net.trainer(plain_sgd, F.cross_entropy, buffers=torch.bfloat16)
    trainer.step(torch.randn(4, 5), torch.zeros(4, dtype=torch.long))
    stage = trainer.executors[0].stage
    (held,) = stage.in_flight.values()
    found = [value for value in held.kept if isinstance(value, Tensor)]
    assert sorted(value.shape[1] for value in found) == [5, 8, 8]  # before stem and transition
    assert {value.dtype for value in found} == {torch.bfloat16}


# -- messages -------------------------------------------------------------------------------------


def test_gradients_are_sent_in_fewer_bits_and_values_are_not() -> None:
    data = [(x.float(), y) for x, y in even(2 * FULL)]
    found = []
    for backend in ("eager", "static"):
        net, trainer = made(backend, dtype=torch.float32, messages=torch.bfloat16)
        for batch in data:
            trainer.step(*batch)
        assert is_active(trainer) == (backend == "static")
        trainer.runner.leave(trainer.schedule, trainer.transport)
        back = [m for queue in trainer.transport.queues.values() for m in queue if m.gradients]
        assert {t.dtype for m in back for t in m.gradients.values()} == {torch.bfloat16}
        values = [t for m in back for t in m.values.values() if t is not None]
        assert {t.dtype for t in values} == {torch.float32}
        trainer.flush()
        found.append(weights(net))
    assert same(*found)
    net, trainer = made("eager", dtype=torch.float32)
    for batch in data:
        trainer.step(*batch)
    trainer.flush()
    exact = weights(net)
    assert not same(exact, found[0])
    for name, value in exact.items():
        torch.testing.assert_close(found[0][name], value, rtol=0.02, atol=0.02)
    with pytest.raises(InputError, match=r"messages=torch\.float16"):
        made("eager", messages=torch.float16)


class Convolved(nn.Module):
    """Shortcuts, one of them projected."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 4, 1), nn.Linear(8, 3)
        self.first, self.second = nn.Conv2d(4, 4, 1), nn.Conv2d(8, 8, 1)
        self.down = nn.Sequential(nn.Conv2d(4, 8, 2, 2), nn.ReLU(), nn.Conv2d(8, 8, 1))
        self.shortcut = nn.Conv2d(4, 8, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + torch.relu(self.first(x))
        x = self.down(x) + self.shortcut(x)
        x = x + torch.relu(self.second(x))
        return self.head(x.mean((2, 3)))


def _compiled(order: str) -> tuple[dict[str, Tensor], Trainer]:
    """Weights after some captured steps with compiled programs; what waits is with the trainer."""
    torch.manual_seed(0)
    net = revcompile.petrafy(Convolved(), 5, torch.zeros(4, 3, 4, 4), check="off")
    trainer = net.trainer(
        *(plain_sgd, F.cross_entropy),
        order=order,
        autocast=torch.bfloat16,
        buffers=torch.bfloat16,
        messages=torch.bfloat16,
        backend="static",
    )
    runner = trainer.runner
    runner._pipeline = StaticPipeline(
        *(trainer.executors, runner._loss_head, trainer.schedule, EagerReplay()),
        fused=FusedOps(lambda function: function),
    )
    generator = torch.Generator().manual_seed(1)
    for _ in range(12 if order == "1f1b" else 24):
        x = torch.randn(4, 3, 4, 4, generator=generator)
        trainer.step(x, torch.zeros(4, dtype=torch.long))
    assert runner.is_active
    runner.leave(trainer.schedule, trainer.transport)
    return weights(net), trainer


@pytest.mark.parametrize("order", ["1f1b", "paper"])
def test_what_was_rounded_is_sent_and_read_as_it_is_stored(
    order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be rounded again for the layers that read it, to the same numbers."""
    found = []
    for reads in (True, False):
        if not reads:
            monkeypatch.setattr(fusion, "_as_stored", lambda node: node)
            monkeypatch.setattr(fusion, "with_copy", lambda value, copy: value)
        trained, trainer = _compiled(order)
        sent = trainer.transport.queues[2, 1, MessageKind.DY][0].values.values()
        assert {value.dtype for value in sent} == {torch.bfloat16}
        found.append(trained)
    assert same(*found)


@pytest.mark.parametrize("order", ["1f1b", "paper"])
def test_messages_are_computed_where_they_wait(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of streams and of gradients, and kept values that are handed on, are not copied."""
    copied: list[int] = []

    def copy_tensors(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        copied[-1] += sum(a.numel() for a, b in pairs if a is not b)
        static_buffers.copy_tensors(pairs)

    monkeypatch.setattr(static_transport, "copy_tensors", copy_tensors)
    found = []
    for is_direct in (True, False):
        if not is_direct:
            monkeypatch.setattr(StaticTransport, "buffers", lambda *_: ({}, {}))
        copied.append(0)
        found.append(_compiled(order)[0])
    assert same(*found)
    assert copied[0] < 0.7 * copied[1]


# -- what is learned ------------------------------------------------------------------------------


def digits() -> tuple[Tensor, Tensor]:
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return torch.tensor(images, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]


def narrow() -> nn.Module:
    """No shortcut, and too few features for the last stage alone to learn from."""
    sizes = [(64, 6), (6, 6), (6, 6)]
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(*s), nn.Tanh()) for s in sizes), nn.Linear(6, 10)
    )


def test_digits_are_learned_with_inputs_in_eight_bits() -> None:
    images, labels = digits()
    reached = []
    for buffers in (None, FP8):
        torch.manual_seed(0)
        net = revcompile.petrafy(narrow(), 4, images[:2], check="off")
        adam = functools.partial(torch.optim.AdamW, lr=5e-3)
        trainer = net.trainer(adam, F.cross_entropy, buffers=buffers)
        losses = []
        for start in range(0, 1500 * 3, 50):
            at = torch.arange(start, start + 50) % 1500
            losses.append(trainer.step(images[at], labels[at]).loss)
        reached.append(sum(losses[-30:]) / 30)
    plain, rounded = reached
    assert plain < 1.9 and rounded == pytest.approx(plain, abs=0.05)


# -- the host's memory ----------------------------------------------------------------------------


def shelved(trainer: Trainer) -> Trainer:
    """As on a GPU: inputs really go and come back."""
    for executor in trainer.executors:
        executor.stage.activations.pool = PinnedPool(CPU)
    return trainer


@pytest.mark.parametrize("settings", [{}, {"accumulate": 3}, {"method": "dsp"}, {"order": "paper"}])
def test_what_is_away_comes_back_as_it_was(settings: dict[str, Any]) -> None:
    found = []
    for buffers in (None, "offload"):
        net, trainer = made("eager", buffers=buffers, **settings)
        if buffers:
            shelved(trainer)
        losses = [trainer.step(*batch).loss for batch in [*even(FULL), odd(), *even(FULL)]]
        if buffers:
            assert [type(value) for value in kept(trainer)][-1] is OffloadedTensor
        trainer.flush()
        found.append((losses, weights(net)))
    assert same(*found)


def test_memory_for_what_is_away_is_used_again() -> None:
    trainer = shelved(made("eager", buffers="offload")[1])
    counts = []
    for batch in even(20):
        trainer.step(*batch)
        counts.append(trainer.executors[0].stage.activations.pool.buffers)
    assert counts[:4] == [1, 2, 3, 3] and set(counts[2:]) == {3}


def test_what_is_due_next_is_on_its_way() -> None:
    trainer = shelved(made("eager", buffers="offload", order="paper")[1])
    for batch in even(9):
        trainer.step(*batch)
    assert [away.back is not None for away in kept(trainer)] == [True, False, False, False]


def test_pinned_buffers_are_lent_once() -> None:
    pool = PinnedPool(CPU)
    first, second = pool.put(torch.ones(3)), pool.put(torch.zeros(3))
    assert same(pool.take(first), torch.ones(3))
    back = pool.take(second)
    del first, second
    assert pool.buffers == 2
    pool.put(torch.full((3,), 7.0)), pool.put(torch.full((3,), 7.0))
    assert pool.buffers == 2 and same(back, torch.zeros(3))
    pool.put((torch.ones(3), torch.ones(2, 3).t()))
    assert pool.buffers == 3


def test_nothing_is_moved_on_the_cpu() -> None:
    _, trainer = made("eager", buffers="offload")
    trainer.step(*even(1)[0])
    assert isinstance(kept(trainer)[0], Tensor)
    assert trainer.executors[0].stage.activations.pool is None


def test_captured_steps_keep_everything_in_place() -> None:
    with pytest.warns(UserWarning, match="offload' moves inputs to the host"):
        _, trainer = made("static", buffers="offload")
    for batch in even(FULL + 1):
        trainer.step(*batch)
    assert not is_active(trainer)


@pytest.mark.parametrize("given", [torch.float32, torch.float8_e5m2, torch.int8, "disk"])
def test_other_buffers_do_not_exist(given: Any) -> None:
    with pytest.raises(InputError, match=f"buffers={given!r}; use torch.bfloat16"):
        made("eager", buffers=given)


@pytest.mark.gpu
@pytest.mark.parametrize("order", ["1f1b", "paper"])
def test_what_goes_to_the_host_comes_back_as_it_was(order: str) -> None:
    def trained(buffers: Any) -> tuple[StagedModel, list[int]]:
        torch.manual_seed(0)
        net = revcompile.petrafy(wide().cuda(), 4, torch.zeros(8, 256).cuda(), check="off")
        trainer = net.trainer(plain_sgd, F.mse_loss, buffers=buffers, backend="eager", order=order)
        held = []
        for _ in range(12):
            x = torch.randn(4096, 256, device="cuda")
            trainer.step(x, x[:, :8])
            x.fill_(torch.nan)  # it has been copied by then
            torch.cuda.synchronize()
            held.append(torch.cuda.memory_allocated())
        trainer.flush()
        return net, held

    (plain, more), (net, less) = trained(torch.bfloat16), trained(Buffers(torch.bfloat16, True))
    assert same(weights(net), weights(plain))
    assert less[-1] < more[-1]


def wide() -> nn.Module:
    """No shortcut: every stage keeps its input."""
    layers = [layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(256, 8))
