"""A reversible module under DistributedDataParallel: two gloo ranks equal one with both batches."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed_worker import launch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import revcompile


class Stack(nn.Module):
    """Linear residual blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x


def _net() -> nn.Module:
    torch.manual_seed(0)
    return revcompile.reversify(Stack().double(), torch.randn(2, 8).double()).train()


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
