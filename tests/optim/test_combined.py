"""Several optimizers a stage: what each of them does alone, in one update, one checkpoint."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer, lr_scheduler
from training import Plain, batches, feed, fresh, same, seeded

from revcompile.optim import CombinedOptimizer, ErrorFeedback


def both(parameters: Any) -> list[Optimizer]:
    """SGD for matrices, AdamW for everything else."""
    given = list(parameters)
    matrices, rest = ([p for p in given if (p.ndim == 2) is kind] for kind in (True, False))
    return [ErrorFeedback(SGD(matrices, lr=0.05, momentum=0.9)), AdamW(rest, lr=0.01)]


def falling(optimizer: Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.ExponentialLR(optimizer, 0.9)


def test_without_delay_each_does_what_it_does_alone() -> None:
    data = batches(6)
    net = fresh(Plain, 1)
    model = net.to_module().train()
    trainer = net.trainer(
        both, F.cross_entropy, method="backprop", clip_grad_norm=0.5, lr_schedule=falling
    )
    feed(trainer, data)
    alone = both(model.parameters())
    schedules = list(map(falling, alone))
    for inputs, target in data:
        F.cross_entropy(model(inputs), target).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for optimizer, schedule in zip(alone, schedules, strict=True):
            optimizer.step(), optimizer.zero_grad(), schedule.step()
    for name, value in net.to_module().state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[name])


def test_a_state_dict_reaches_all_of_them() -> None:
    model, other = seeded(Plain), seeded(Plain)
    combined, loaded = (CombinedOptimizer(both(m.parameters())) for m in (model, other))

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
    with pytest.raises(ValueError, match="add parameter groups before"):
        combined.add_param_group({"params": [torch.zeros(2)]})
