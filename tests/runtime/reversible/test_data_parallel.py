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


def _sharded(kind: str, compiles: bool) -> Any:
    from torch.distributed.fsdp import fully_shard

    net = _net()
    if compiles and kind != "ddp, as a function":
        net.compile(backend="aot_eager")
    if "ddp" in kind:
        net = DistributedDataParallel(net)
        return torch.compile(net, backend="aot_eager") if "function" in kind else net
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
    for kind in options["kinds"]:
        net = _sharded(kind, options["compiles"])
        trained = _train(net, _inputs()[rank::2])
        found[kind] = {
            name.rpartition("module.")[2]: getattr(p, "full_tensor", p.detach)().detach()
            for name, p in trained.items()
        }
        assert ("compiled by aot_eager" in repr(net)) is options["compiles"]
        assert "failed" not in repr(net)
    distributed.destroy_process_group()
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
def test_two_ranks_equal_one_with_the_joined_batch(compiles: bool, tmp_path: Path) -> None:
    kinds = (*KINDS, "ddp, as a function") if compiles else KINDS
    found, _ = launch(tmp_path, 2, _rank, limit=300, kinds=kinds, compiles=compiles)
    expected = _train(_net(), _inputs())
    for kind in kinds:
        for name, parameter in expected.items():
            assert torch.allclose(found[kind][name], parameter, atol=1e-12), (kind, name)
