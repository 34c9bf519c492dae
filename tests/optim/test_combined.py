"""Several optimizers a stage: what each of them does alone, in one update, one checkpoint."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer
from training import SCHEDULES, Plain, batches, feed, fresh, same, seeded, several

from revcompile.optim import CombinedOptimizer


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
    for name, value in net.to_module().state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[name])


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
    with pytest.raises(ValueError, match="add parameter groups before"):
        combined.add_param_group({"params": [torch.zeros(2)]})
