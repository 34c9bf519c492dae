"""A reversible module under DDP and FSDP2: two gloo ranks equal one with both batches."""

from pathlib import Path
from typing import Any

import pytest
import torch
from distributed_worker import launch
from nets import ViT, images
from torch import Tensor, distributed
from torch.nn.parallel import DistributedDataParallel

import revcompile

KINDS = ("ddp", "whole", "blocks", "layers")


def _net() -> Any:
    torch.manual_seed(0)
    model = ViT(drop=0.0).double()  # a block is an inlined module of two couplings
    return revcompile.reversify(model, images(2), check="off").train()


def _sharded(kind: str) -> Any:
    from torch.distributed.fsdp import fully_shard

    net = _net()
    if kind == "ddp":
        return DistributedDataParallel(net)
    if kind == "layers":
        for layer in (net.head, *(block.up for block in net.blocks)):
            fully_shard(layer)
    if kind != "whole":
        for module in (net.patch, *net.blocks):
            fully_shard(module)
    return fully_shard(net, reshard_after_forward=True)


def _inputs() -> Tensor:
    return torch.arange(8 * 192, dtype=torch.float64).view(8, 3, 8, 8).cos()


def _train(net: Any, x: Tensor) -> dict[str, Tensor]:
    """Two updates, the second after two backward passes; the weights afterwards."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for passes in (1, 2):
        for _ in range(passes):
            net(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(net.named_parameters())


def _rank(rank: int, options: dict[str, Any]) -> dict[str, dict[str, Tensor]]:
    distributed.init_process_group("gloo")
    found = {}
    for kind in KINDS:
        trained = _train(_sharded(kind), _inputs()[rank::2])
        found[kind] = {
            name.removeprefix("module."): getattr(p, "full_tensor", p.detach)().detach()
            for name, p in trained.items()
        }
    distributed.destroy_process_group()
    return found


@pytest.mark.filterwarnings("ignore")
def test_two_ranks_equal_one_with_the_joined_batch(tmp_path: Path) -> None:
    found, _ = launch(tmp_path, 2, _rank)
    expected = _train(_net(), _inputs())
    for kind in KINDS:
        for name, parameter in expected.items():
            assert torch.allclose(found[kind][name], parameter, atol=1e-12), (kind, name)
