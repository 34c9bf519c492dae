"""Momentum for late gradients: what it is at no delay, and what delay does to it."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer
from torch.testing import assert_close
from training import SCHEDULES, Plain, batches, drained, feed, fresh, same, seeded, several

from revcompile.optim import DelayAwareMuon, DelayAwareSGD
from revcompile.optim.combined import CombinedOptimizer
from revcompile.schedule import choose, mean_delay

DELAYS = (0.0, 0.75, 1.0, 2.25, 9.0)


def _parameters(count: int = 3) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(2, count, dtype=torch.float64)) for _ in range(count)]


def _gradients(step: int, params: list[nn.Parameter]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in params]


def _follow(optimizer: Optimizer, params: list[nn.Parameter], steps: int) -> list[Tensor]:
    for step in range(steps):
        for p, grad in zip(params, _gradients(step, params), strict=True):
            p.grad = grad
        optimizer.step()
    return [p.detach() for p in params]


def test_without_delay_it_is_nesterov_momentum() -> None:
    params = _parameters()
    twins = copy.deepcopy(params)
    groups = [{"params": params[:1], "weight_decay": 0.0}, {"params": params[1:]}]
    others = [{"params": twins[:1], "weight_decay": 0.0}, {"params": twins[1:]}]
    found = _follow(DelayAwareSGD(groups, 0.1, 0.8, weight_decay=0.1), params, 60)
    torchs = SGD(others, 0.1, 0.8, nesterov=True, weight_decay=0.1)
    assert_close(found, _follow(torchs, twins, 60), rtol=0, atol=1e-13)


@pytest.mark.parametrize("make", [DelayAwareSGD, DelayAwareMuon])
def test_means_of_low_precision_parameters_do_not_freeze(make: Callable[..., Any]) -> None:
    """A mean over 820 updates moves by less than bfloat16 can tell."""
    found = {}
    for dtype in (torch.bfloat16, torch.float32):
        p = nn.Parameter(torch.zeros(1, dtype=dtype))
        optimizer = make([p], lr=0.0)
        optimizer.delay = 9.0
        for step in range(1500):
            p.grad = torch.full_like(p, 1.0 if step < 500 else -1.0)
            optimizer.step()
        names = ("momentum_buffer", "exp_avg")
        found[dtype] = next(v for k, v in optimizer.state[p].items() if k in names)
        assert p.dtype == dtype
    assert found[torch.bfloat16].item() < 0
    assert_close(found[torch.bfloat16], found[torch.float32])


@pytest.mark.parametrize("delay", DELAYS)
def test_the_step_goes_where_the_mean_will_be(delay: float) -> None:
    """Against the formulas, number by number."""
    params = _parameters()
    expected = [p.detach().clone() for p in params]
    means = [torch.zeros_like(p) for p in expected]
    for step in range(100):
        rate = 1 / min(10 + step, 10 * (1 + delay**2))
        for p, mean, grad in zip(expected, means, _gradients(step, params), strict=True):
            before = mean.clone()
            mean += rate * (grad - mean)
            # One update moves the mean by rate (g - before); `delay` of them as far again.
            ahead = (mean - before) / rate * (1 - rate)
            p -= 0.1 / (1 - 0.9) * (mean + min(rate * (1 + 1.25 * delay), 1) * ahead)
    optimizer = DelayAwareSGD(params, 0.1)
    optimizer.delay = delay
    assert_close(_follow(optimizer, params, 100), expected, rtol=0, atol=1e-11)


def test_a_step_as_it_is_recorded_is_the_same() -> None:
    """With counters and learning rate as tensors."""
    rate = torch.tensor(0.1, dtype=torch.float64)
    params = _parameters()
    twins = copy.deepcopy(params)
    optimizers = DelayAwareSGD(params, 0.1), DelayAwareSGD(twins, rate, capturable=True)
    for optimizer in optimizers:
        optimizer.delay = 1.5
    found = [
        _follow(optimizer, p, 40) for optimizer, p in zip(optimizers, (params, twins), strict=True)
    ]
    assert_close(*found, rtol=0, atol=1e-12)


# -- in a pipeline -------------------------------------------------------------------------------


def test_every_stage_knows_its_delay() -> None:
    net = fresh(Plain, 4)
    made: list[Any] = []

    def factory(params: Any) -> Optimizer:
        made.append(DelayAwareSGD(params, 0.1))
        return made[-1]

    trainer = net.trainer(factory, F.cross_entropy, accumulation_steps=2)
    method = choose("petra")
    assert [o.delay for o in made] == [mean_delay(method, 4, j, 2) for j in range(4)]
    assert [o.delay for o in made] == [1.5, 1.0, 0.5, 0.0]
    drained(trainer, batches(8))
    made.clear()
    later = net.trainer(factory, F.cross_entropy, accumulation_steps=2, method="backprop")
    later.load_state_dict(trainer.state_dict())
    assert [o.delay for o in made] == [0.0] * 4, "a checkpoint brings no delay of its own"
    feed(later, batches(4))


# -- several optimizers a stage: each does what it does alone, in one update, one checkpoint -------


def test_without_delay_each_does_what_it_does_alone() -> None:
    data = batches(6)
    net = fresh(Plain, 1)
    model = net.to_module().train()
    trainer = net.trainer(
        several,
        F.cross_entropy,
        method="backprop",
        clip_grad_norm=0.5,
        lr_schedule=SCHEDULES["lambda"],
    )
    feed(trainer, data)
    alone = several(model.parameters())
    schedules = list(map(SCHEDULES["lambda"], alone))
    for inputs, target in data:
        F.cross_entropy(model(inputs), target).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for optimizer, schedule in zip(alone, schedules, strict=True):
            optimizer.step(), optimizer.zero_grad(), schedule.step()
    torch.testing.assert_close(net.to_module().state_dict(), model.state_dict())


def test_a_state_dict_reaches_all_of_them() -> None:
    model, other = seeded(Plain), seeded(Plain)
    combined, loaded = (CombinedOptimizer(several(m.parameters())) for m in (model, other))

    def step(optimizer: Optimizer, net: nn.Module) -> None:
        for p in net.parameters():
            p.grad = p.detach().sin()
        optimizer.step()

    step(combined, model)
    combined.param_groups[1]["lr"] = 0.5
    loaded.load_state_dict(copy.deepcopy(combined.state_dict()))
    other.load_state_dict(model.state_dict())
    step(combined, model), step(loaded, other)
    assert same(dict(model.state_dict()), dict(other.state_dict()))
    assert loaded.optimizers[1].param_groups[0]["lr"] == 0.5
    with pytest.raises(ValueError, match="before training"):
        combined.add_param_group({"params": [torch.zeros(2)]})
