"""Models are captured as they are defined, whatever modes of torch are on around the call."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from helpers import saved_bytes
from torch import Tensor, nn

import revcompile
from revcompile.errors import RevcompileWarning

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).tanh()) * (1.0 if x.shape[1] < 5 else 0.5)


class Net(nn.Module):
    """Four blocks, which are captured again for five tokens and more."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x).mean(1))


class ReadsAutocast(Net):
    def forward(self, x: Tensor) -> Tensor:
        scale = 2.0 if torch.is_autocast_enabled("cpu") else 1.0
        return super().forward(x) * scale


def reversible(model: nn.Module, length: int = 4) -> Any:
    return revcompile.reversify(model, torch.randn(2, length, WIDTH), policy="pretrained").train()


def autocast() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16)


MODES = {"autocast": autocast, "inference mode": torch.inference_mode, "no_grad": torch.no_grad}


@pytest.mark.parametrize("mode", MODES)
def test_compiled_in_a_mode(mode: str) -> None:
    model = Net()
    with MODES[mode]():
        net = reversible(model)
        x = torch.randn(2, 4, WIDTH)
    assert len(net.rewired.couplings) == 4
    with autocast():
        assert saved_bytes(net, x.clone()) == saved_bytes(reversible(model), x.clone())


@pytest.mark.parametrize("mode", MODES)
def test_captured_again_in_a_mode(mode: str) -> None:
    model = Net()
    net, known = reversible(model), reversible(model, length=6)
    x = torch.randn(3, 6, WIDTH)
    with MODES[mode]():
        net(x)
        made_inside = torch.randn(3, 6, WIDTH)
        net(made_inside)
    for around in (nullcontext, autocast):
        with around():
            assert saved_bytes(net, x) == saved_bytes(known, x) < saved_bytes(model, x) / 3
    assert len(net._cases._cases) == 2
    net.eval(), model.eval()
    torch.testing.assert_close(net(x), model(x))
    assert "captured again" not in net.summary()


def test_hooks_for_saved_tensors_do_not_see_a_capture() -> None:
    net, x = reversible(Net()), torch.randn(2, 5, WIDTH)
    assert saved_bytes(net, x) == saved_bytes(net, x)


@pytest.mark.filterwarnings("default")
def test_a_forward_that_reads_autocast_is_computed_as_it_says_and_the_cost_is_told() -> None:
    model = ReadsAutocast()
    net, x = reversible(model), torch.randn(2, 4, WIDTH)
    with autocast():
        with pytest.warns(RevcompileWarning, match="0 of 4 blocks are reversible where torch.is_a"):
            net(x)
        net.eval(), model.eval()
        torch.testing.assert_close(net(x), model(x), atol=0.05, rtol=0)
    assert "captured again: 0 of 4 blocks are reversible" in net.summary()
    torch.testing.assert_close(net(x), model(x))
