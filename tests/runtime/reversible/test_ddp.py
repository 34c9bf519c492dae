"""A reversible module under DistributedDataParallel: two gloo ranks equal one with both batches."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.multiprocessing.spawn import spawn
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


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2
    )
    net = _net()
    wrapped = DistributedDataParallel(net)
    x = torch.arange(64, dtype=torch.float64).reshape(8, 8) / 64
    wrapped(x[rank::2]).pow(2).mean().backward()
    if rank == 0:
        torch.save({n: p.grad for n, p in net.named_parameters()}, f"{folder}/gradients.pt")
    distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
def test_two_ranks_equal_one_with_the_joined_batch(tmp_path: Path) -> None:
    spawn(_rank, (str(tmp_path),), nprocs=2)
    found = torch.load(tmp_path / "gradients.pt", weights_only=True)
    net = copy.deepcopy(_net())
    x = torch.arange(64, dtype=torch.float64).reshape(8, 8) / 64
    net(x).pow(2).mean().backward()
    for name, parameter in net.named_parameters():
        assert torch.allclose(found[name], parameter.grad, atol=1e-12), name
