"""policy="pretrained" in stages: every method, the original in eval mode, weights stashed."""

import functools
from typing import Any

import pytest
import torch
from helpers import worst
from nets import Arranged, PreNorm
from torch import Tensor, nn
from torch.nn import functional as F
from training import plain_sgd, rebuilt_errors, trained

import revcompile
from revcompile.errors import InputError, NonFiniteError

WIDTH = 8


@functools.cache
def batches(count: int = 5) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    sizes = [4, 4, 3, 5, 4][:count]
    return [(torch.randn(n, 3, WIDTH).double(), torch.randn(n, 3, 3).double()) for n in sizes]


def staged(dtype: torch.dtype = torch.float64, **options: Any) -> revcompile.StagedModel:
    torch.manual_seed(0)
    model, x = PreNorm(WIDTH, 6).to(dtype), torch.randn(4, 3, WIDTH, dtype=dtype)
    return revcompile.petrafy(model, 3, x, policy="pretrained", **({"check": "off"} | options))


def weights_after(method: str, **options: Any) -> dict[str, Tensor]:
    net = staged()
    trained(net, batches(), method=method, seed=3, **options)
    return dict(net.to_module().named_parameters())


def test_rebuilding_equals_keeping_graphs_and_recomputing() -> None:
    with torch.no_grad():
        assert worst(weights_after("backprop"), weights_after("reversible_backprop"))[0] < 1e-10
        stashed = weights_after("petra")
        assert worst(weights_after("pipedream"), stashed)[0] < 1e-10
        assert worst(weights_after("petra", weights="stashed"), stashed)[0] == 0


def test_captured_steps_are_the_same_training() -> None:
    torch.manual_seed(1)
    xs, ys = torch.randn(11, 4, 3, WIDTH).double(), torch.randn(11, 4, 3, 3).double()
    found = []
    for backend in ("eager", "static"):
        net = staged()
        trainer = net.trainer(plain_sgd, F.mse_loss, backend=backend, seed=3)
        for x, y in zip(xs, ys, strict=True):
            trainer.step(x, y)
        assert trainer._runner.is_active == (backend == "static")
        trainer.flush()
        found.append({name: p.detach() for name, p in net.to_module().named_parameters()})
    assert worst(*found)[0] == 0


@pytest.mark.parametrize("backend", ["eager", "static"])
def test_streams_that_grow_too_large_are_an_error_that_says_what_to_do(backend: Any) -> None:
    net = staged(torch.float32)
    trainer = net.trainer(plain_sgd, F.mse_loss, backend=backend)
    x, y = (tensor.float() for tensor in batches()[0])
    for _ in range(9):
        trainer.step(x, y)
    assert trainer._runner.is_active == (backend == "static")
    trainer.flush()
    with torch.no_grad():
        for parameter in net.model.parameters():
            parameter.mul_(1e4)
    with pytest.raises(NonFiniteError, match=r"(?s)loss.*a stream may also have grown.*leaf_modul"):
        for _ in range(5):
            trainer.step(x, y)


def test_the_original_is_evaluated_and_comes_back() -> None:
    net = staged(torch.float32)
    trainer = net.trainer(plain_sgd, F.mse_loss)
    x, y = (tensor.float() for tensor in batches()[0])
    trainer.step(x, y)
    trainer.flush()
    original = net.to_original().eval()
    assert type(original) is PreNorm
    assert trainer.evaluate([(x, y)]).loss == F.mse_loss(original(x), y).item()
    assert torch.equal(net.to_module().eval()(x), original(x))


def test_streams_are_rebuilt_to_the_bit_and_few_bits_are_kept() -> None:
    net = staged(torch.float32)
    for cast in (None, torch.bfloat16):
        trainer = net.trainer(plain_sgd, F.mse_loss, autocast=cast)
        errors = rebuilt_errors(trainer)
        for x, y in batches():
            trainer.step(x.float(), y.float())
        trainer.flush()
        assert all({*errors[stage]} == {0.0} for stage in (1, 2))
    net.microbatch_size = 4
    kept, elements = net.facts()[1].memory.buffers, 4 * 3 * WIDTH
    assert kept == 2 * 2 * elements // 2  # two blocks, two micro-batches in flight


@pytest.mark.parametrize("weights", ["latest", "predicted"])
def test_other_weights_than_those_of_forward_are_refused(weights: Any) -> None:
    with pytest.raises(InputError, match="multiply that difference in every block"):
        staged().trainer(plain_sgd, F.mse_loss, weights=weights)


def test_rearranged_streams() -> None:
    x = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    revcompile.petrafy(Arranged().double(), 2, x, policy="pretrained", check="full")


class PartlyDetached(nn.Module):
    """Every second branch has no gradients, or all have none behind a head that reads no graph."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.blocks = way, nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = OfDetached(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            if index % 2 and self.way == "no_grad":
                with torch.no_grad():
                    addend = torch.tanh(block(x))
            else:
                addend = torch.tanh(block(x))
            x = x + (addend.detach() if index % 2 and self.way == "detach" else addend)
        return self.head(x) if self.way == "head" else x


class OfDetached(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.detach())


@pytest.mark.parametrize("way", ["detach", "no_grad", "head"])
@pytest.mark.parametrize("stages", [1, 2])
def test_branches_without_gradients(way: str, stages: int) -> None:
    model, x = PartlyDetached(way).double(), torch.randn(4, 8, dtype=torch.float64)
    options: Any = {"policy": "pretrained", "check": "full", "leaf_modules": [OfDetached]}
    net = revcompile.petrafy(model, stages, x, **options)
    trained(net, [(x, x)] * 3)
