"""`torch.set_default_dtype` is the caller's: it changes no counter, flag or buffer of ours."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import cases
from torch import Tensor, nn
from training import Plain, adam, batches, feed, fresh, momentum, same, trainer_of, weights

from revcompile.losses import linear_cross_entropy
from revcompile.optim import DelayAwareMuon, DelayAwareSGD, ErrorFeedback


@pytest.fixture(params=[torch.bfloat16, torch.float64], ids=str)
def set_default(request: pytest.FixtureRequest) -> Iterator[Callable[[], None]]:
    yield lambda: torch.set_default_dtype(request.param)
    torch.set_default_dtype(torch.float32)


def aware(parameters: Any) -> torch.optim.Optimizer:
    return ErrorFeedback(torch.optim.AdamW(parameters, lr=0.01))


SETTINGS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": momentum},
    "clipped": {"optimizer": adam, "accumulation_steps": 3, "clip_grad_norm": 0.1},
    "stashed, delay-aware": {"optimizer": aware, "method": "petra_stashed"},
    "backprop, bfloat16": {"optimizer": adam, "method": "backprop", "autocast": torch.bfloat16},
}


@cases("settings", *SETTINGS.values(), ids=list(SETTINGS))
@pytest.mark.parametrize("backend", ["eager", "static"])
def test_trainers(set_default: Callable[[], None], backend: str, settings: Any) -> None:
    data = batches(14, dtype=torch.float32)

    def run() -> Any:
        net = fresh(Plain, 3, torch.float32)
        trainer = trainer_of(net, **settings, backend=backend)
        losses = feed(trainer, [batch for batch in data if len(batch[0]) == 4])
        trainer.flush()
        return losses, trainer.pop_mean_loss(), trainer.evaluate(data).loss, weights(net)

    expected = run()
    set_default()
    assert same(run(), expected)


def test_a_mean_over_many_micro_batches(set_default: Callable[[], None]) -> None:
    def run() -> Any:
        net = fresh(Plain, 2, torch.float32)
        trainer = trainer_of(net, method="backprop", accumulation_steps=300)
        feed(trainer, batches(300, dtype=torch.float32))
        return weights(net)

    expected = run()
    set_default()
    assert same(run(), expected)


@cases("make", DelayAwareSGD, DelayAwareMuon, lambda p: ErrorFeedback(adam(p)))
def test_optimizers_count_beyond_256(set_default: Callable[[], None], make: Any) -> None:
    def run() -> Tensor:
        weight = nn.Parameter(torch.ones(2, 2, dtype=torch.float32))
        optimizer = make([weight], lr=1e-2) if isinstance(make, type) else make([weight])
        optimizer.delay = 2.0
        for _ in range(300):
            weight.grad = weight.detach().clone()
            optimizer.step()
        return weight.detach()

    expected = run()
    set_default()
    assert same(run(), expected)


def test_the_loss_in_chunks_keeps_its_dtype(set_default: Callable[[], None]) -> None:
    hidden, weight = (torch.ones(3, 2, dtype=torch.float32) for _ in range(2))
    set_default()
    loss = linear_cross_entropy(hidden, weight, torch.tensor([0, 1, 2]))
    assert loss.dtype == torch.float32
