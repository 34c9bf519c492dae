"""Tensors that forward makes, or finds in attributes, are values of the graph and no buffers."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed_worker import launch
from torch import Tensor, distributed, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from revcompile import petrafy, reversify


class Block(nn.Module):
    """Its constants depend on the length, exceed float16, and one is an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)
        self.table = torch.linspace(0.1, 1e5, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x) * 1e-3 * torch.tensor(1e5) / 100 + self.table * 1e-5
        return x + self.linear(h.to(x.dtype)) * torch.tensor(int(x.shape[1]) ** -0.5)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 2


class Traced(nn.Module):
    """A leaf module, because of the function; an attempt to trace it has met a constant."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = Double.apply(x * torch.tensor(3.0))
        return result


def made() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Traced(), nn.Linear(6, 8), Block(), Block())


def tokens(length: int, batch: int = 4) -> Tensor:
    return torch.randn(batch, length, 6, generator=torch.Generator().manual_seed(length))


# -- cases ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["same_parameters", "pretrained"])
def test_each_case_reads_its_own_constants(policy: Any) -> None:
    net = reversify(made(), tokens(5), policy=policy)
    for length in (5, 9, 3, 9, 5):
        fresh = reversify(made(), tokens(length), policy=policy)
        if policy == "pretrained":  # in training it draws
            net.eval(), fresh.eval()
        assert torch.equal(net(tokens(length)), fresh(tokens(length))), length


def test_stages_read_constants_of_their_own_cases() -> None:
    net = petrafy(made(), 2, tokens(5))
    trainer = net.trainer(lambda p: torch.optim.SGD(p, lr=0.0), F.mse_loss, method="backprop")
    for length in (5, 9, 5):
        x, y = tokens(length), torch.zeros(4, length, 8)
        expected = F.mse_loss(reversify(made(), x).eval()(x), y).item()
        assert trainer.evaluate([(x, y)]).loss == pytest.approx(expected)
    for stage, count in zip(net.to_pipeline_stages(), (0, 0), strict=True):
        assert len(list(stage.buffers())) == count


# -- no buffers -----------------------------------------------------------------------------------


def test_an_average_takes_no_notice_of_other_cases() -> None:
    net = reversify(made(), tokens(5))
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    state = net.state_dict()
    for length in (5, 9):
        net(tokens(length))
        average.update_parameters(net)
    assert not list(net.buffers()) and net.state_dict().keys() == state.keys()
    for length in (9, 3):
        torch.testing.assert_close(average(tokens(length)), net(tokens(length)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_cast_module_computes_as_the_cast_original(dtype: torch.dtype) -> None:
    model = made().eval()
    net = reversify(model, tokens(5), policy="pretrained").eval()
    expected = copy.deepcopy(model).to(dtype)(tokens(5).to(dtype))
    assert expected.isfinite().all()
    assert torch.equal(net.to(dtype)(tokens(5).to(dtype)), expected)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_a_copy_has_constants_of_its_own(how: Any) -> None:
    net = reversify(made(), tokens(5))
    expected = {length: net(tokens(length)) for length in (9, 5)}
    twin = how(net)
    with torch.no_grad():
        for value in vars(net).values():
            if isinstance(value, Tensor):
                value.zero_()
    for length, result in expected.items():
        assert torch.equal(twin(tokens(length)), result)


# -- devices --------------------------------------------------------------------------------------


def test_constants_keep_their_values_while_the_module_is_on_the_meta_device() -> None:
    net = reversify(made(), tokens(5))
    weights, expected = copy.deepcopy(net.state_dict()), net(tokens(5))
    net.to("meta").to_empty(device="cpu").load_state_dict(weights)
    assert torch.equal(net(tokens(5)), expected)


def test_a_module_that_was_captured_on_the_meta_device() -> None:
    with torch.device("meta"):
        model, x = made(), torch.empty(4, 5, 6)
    plain = made()
    for block in (*model[2:], *plain[2:]):
        block.table = torch.tensor(2.0)
    net = reversify(model, x).to_empty(device="cpu")
    expected = reversify(plain, tokens(5))
    net.load_state_dict(expected.state_dict())
    for length in (5, 9):
        assert torch.equal(net(tokens(length)), expected(tokens(length)))


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["to", "fully_shard"])
def test_constants_follow_to_another_device(how: str, tmp_path: Path) -> None:
    net = reversify(made(), tokens(5))
    expected = {length: net(tokens(length)) for length in (5, 9)}
    if how == "to":
        net.cuda()
    else:
        from torch.distributed.fsdp import fully_shard

        store = f"file://{tmp_path / 'store'}"
        distributed.init_process_group("nccl", init_method=store, rank=0, world_size=1)
        fully_shard(net)
    try:
        for length, result in expected.items():
            found = net(tokens(length).cuda())
            torch.testing.assert_close(found.cpu(), result, rtol=1e-4, atol=1e-4)
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()


def _rank(rank: int, options: dict[str, Any]) -> list[Tensor]:
    """Outputs for several lengths; before, each rank has seen a length of its own."""
    distributed.init_process_group("gloo")
    net: Any = reversify(made(), tokens(5))
    net(tokens((9, 3)[rank]))
    if options["kind"] == "ddp":
        net = DistributedDataParallel(net)
    else:
        from torch.distributed.fsdp import fully_shard

        net = fully_shard(net)
    results = []
    for length in (3, 9, 5, 4):
        out = net(tokens(length))
        out.square().mean().backward()
        results.append(out.detach())
    distributed.destroy_process_group()
    return results


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_ranks_that_have_seen_other_lengths(kind: str, tmp_path: Path) -> None:
    for results in launch(tmp_path, 2, _rank, kind=kind):
        for length, result in zip((3, 9, 5, 4), results, strict=True):
            expected = reversify(made(), tokens(length))(tokens(length))
            torch.testing.assert_close(result, expected)
