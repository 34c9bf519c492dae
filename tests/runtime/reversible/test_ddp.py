"""A reversible module under DistributedDataParallel: two gloo ranks equal one with both batches."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed_worker import launch
from nets import Chain
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import revcompile


def _net() -> nn.Module:
    torch.manual_seed(0)
    model = Chain(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
    return revcompile.reversify(model.double(), torch.randn(2, 8).double()).train()


def _rank(rank: int, options: dict[str, Any]) -> dict[str, Tensor]:
    distributed.init_process_group("gloo")
    net = _net()
    wrapped = DistributedDataParallel(net)
    x = torch.arange(64, dtype=torch.float64).reshape(8, 8) / 64
    wrapped(x[rank::2]).pow(2).mean().backward()
    distributed.destroy_process_group()
    return {n: p.grad for n, p in net.named_parameters() if p.grad is not None}


@pytest.mark.filterwarnings("ignore")
def test_two_ranks_equal_one_with_the_joined_batch(tmp_path: Path) -> None:
    (found, _), codes = launch(tmp_path, 2, _rank)
    assert codes == [0, 0]
    net = copy.deepcopy(_net())
    x = torch.arange(64, dtype=torch.float64).reshape(8, 8) / 64
    net(x).pow(2).mean().backward()
    for name, parameter in net.named_parameters():
        assert torch.allclose(found[name], parameter.grad, atol=1e-12), name
