"""Batch norms and the ReLU after them as one: which ones are, and what comes of it."""

import copy
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import noting
from nets import module_of
from torch import Tensor, nn
from torch.nn import functional as F
from training import trained

import revcompile
from revcompile.ir.precision_rewrites import fuse_bn_relu
from revcompile.kernels import batch_norm as batchnorms
from revcompile.kernels.batch_norm import bn_relu

LAST = torch.channels_last


def _bn_relu_forward(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, running: Any, known: Any
) -> tuple[Tensor, Tensor, Tensor]:
    mean, variance, momentum = running or (None, None, 0.0)
    given = x, weight, bias, mean, variance, True, momentum, eps
    out, means, scales = torch.native_batch_norm(*given)
    if known is not None:
        assert torch.equal(means, known[0]) and torch.equal(scales, known[1])
    return out.relu(), means, scales


def _bn_relu_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor, means: Tensor, scales: Tensor
) -> tuple[Tensor, ...]:
    value = (x.float() - means[:, None, None]) * (scales * weight)[:, None, None]
    grad = grad * (value + bias[:, None, None] > 0)
    given = grad, x, weight, None, None, means, scales, True, 1e-5
    found: tuple[Tensor, ...] = torch.ops.aten.native_batch_norm_backward(*given, [True] * 3)
    return found


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of the kernels, which are torch's own functions here."""
    asked: list[str] = []
    stand_in = SimpleNamespace(
        bn_relu_forward=noting(asked, _bn_relu_forward, " as known"),
        bn_relu_backward=noting(asked, _bn_relu_backward),
        works_on=lambda device, dtype: True,
    )
    monkeypatch.setattr(batchnorms, "_kernels", lambda: stand_in)
    monkeypatch.setattr(batchnorms, "_pays", lambda *given: True)
    return asked


def _conv(width: int, size: int) -> nn.Conv2d:
    """Without bias, whose gradient before a norm is nothing but noise."""
    return nn.Conv2d(width, width, size, padding=size // 2, bias=False)


class _Convs(nn.Module):
    """Residual blocks as a ResNet has them: two norms with a ReLU, the second behind the sum."""

    def __init__(self, depth: int = 3, width: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                *(_conv(width, 3), nn.BatchNorm2d(width), nn.ReLU()),
                *(_conv(width, 1), nn.BatchNorm2d(width)),
            )
            for _ in range(depth)
        )
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.relu(x + block(x))
        return x


def test_a_frozen_norm_can_be_differentiated_twice(kernels: list[str]) -> None:
    x = torch.randn(2, 8, 6, 6).to(memory_format=LAST).bfloat16().requires_grad_()
    norm = nn.BatchNorm2d(8).requires_grad_(False)
    loss = bn_relu(norm, None, x).float().square().sum()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    gradient.float().square().sum().backward()
    assert "bn_relu_forward" in kernels and x.grad is not None and bool(x.grad.any())


def test_what_there_is_no_kernel_for(kernels: list[str]) -> None:
    x = torch.randn(2, 8, 6, 6).to(memory_format=LAST).bfloat16()
    layer, relu = nn.BatchNorm2d(8), nn.ReLU()
    watched = nn.BatchNorm2d(8)
    watched.register_forward_hook(lambda *_: None)
    looked_at = nn.ReLU()
    looked_at.register_forward_pre_hook(lambda *_: None)
    for norm, act, given in (
        (layer, relu, x.float()),
        (layer, relu, x.contiguous()),
        (nn.BatchNorm2d(8).eval(), relu, x),
        (nn.BatchNorm2d(8, affine=False), relu, x),
        (nn.BatchNorm2d(8, momentum=None), relu, x),
        (nn.BatchNorm2d(8).double(), relu, x.double()),
        (watched, relu, x),
        (layer, looked_at, x),
    ):
        twin = copy.deepcopy(norm)
        assert torch.equal(bn_relu(norm, act, given), F.relu(twin(given)))
        assert all(map(torch.equal, norm.buffers(), twin.buffers()))
    assert not kernels
    bn_relu(layer, None, x)
    bn_relu(nn.BatchNorm2d(8, track_running_stats=False), None, x)
    assert kernels == ["bn_relu_forward"] * 2


# -- which pairs -----------------------------------------------------------------------------------


def _pair(read: Callable[..., Tensor], norm: nn.Module) -> nn.Module:
    """`x + conv(read(self, norm(conv(x))))`."""
    members = {"conv": nn.Conv2d(8, 8, 1), "norm": norm, "relu": nn.ReLU(), "read": read}
    return module_of(
        lambda self, x: x + self.conv(self.read(self, self.norm(self.conv(x)))), **members
    )


class _Named(nn.BatchNorm2d):
    pass


PAIRS: list[tuple[str, Callable[..., Tensor], nn.Module, bool]] = [
    ("a layer", lambda self, x: self.relu(x), nn.BatchNorm2d(8), True),
    ("F.relu", lambda self, x: F.relu(x), nn.BatchNorm2d(8), True),
    ("torch.relu", lambda self, x: torch.relu(x), nn.BatchNorm2d(8), True),
    ("another", lambda self, x: F.gelu(x), nn.BatchNorm2d(8), False),
    ("read twice", lambda self, x: self.relu(x) + x, nn.BatchNorm2d(8), False),
    ("no batch norm", lambda self, x: self.relu(x), nn.GroupNorm(2, 8), False),
    ("somebody's own", lambda self, x: self.relu(x), _Named(8), False),
]


@pytest.mark.parametrize(
    ("read", "norm", "expected"), [case[1:] for case in PAIRS], ids=[case[0] for case in PAIRS]
)
def test_pairs_that_are_fused(read: Callable[..., Tensor], norm: nn.Module, expected: bool) -> None:
    net = revcompile.reversify(_pair(read, norm), torch.randn(2, 8, 6, 6), check="off")
    (coupling,) = net.rewired.couplings
    before = str(coupling.branch)
    joined = [node.target is bn_relu for node in fuse_bn_relu(coupling.branch, net).nodes]
    assert joined.count(True) == expected
    assert str(coupling.branch) == before


@pytest.mark.parametrize("backend", ["eager", "static"])
def test_stages_move_running_statistics_once(
    backend: Any, kernels: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, target = torch.randn(2, 8, 6, 6).to(memory_format=LAST), torch.randn(2, 8, 6, 6)
    net = revcompile.petrafy(_Convs().to(memory_format=LAST), 2, x, check="off")
    settings, found = {"autocast": torch.bfloat16, "backend": backend}, []
    small_steps = partial(torch.optim.SGD, lr=0.01)
    for is_on in (True, False):
        monkeypatch.setattr(batchnorms, "_pays", lambda *given, is_on=is_on: is_on)
        trainer = trained(copy.deepcopy(net), [(x, target)] * 6, small_steps, **settings)
        found.append(dict(trainer.model.state_dict()))
    assert kernels.count("bn_relu_forward") == 2 * kernels.count("bn_relu_backward") == 2 * 6 * 6
    assert [found[0][name] for name in found[0] if "num_batches" in name] == [6] * 6
    for name, value in found[1].items():
        assert torch.allclose(found[0][name], value, atol=1e-2), name
