"""Kernels for norms and sums that are read in low precision, on CUDA. Run with `pytest -m gpu`."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import ON_GPU, worst
from torch import Tensor, nn
from torch.nn import functional as F

import revcompile
from revcompile.kernels import exact_sum as grid
from revcompile.kernels.layer_norm import call_layer_norm, layer_norm
from tests.support.measuring import capture_step

pytestmark = ON_GPU

ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


class _Mlps(nn.Module):
    """Layer norms that linear layers read; streams of 2**21 elements and more."""

    def __init__(self, width: int = 256, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean(1))


class _Convs(nn.Module):
    """Branches that begin with a convolution, as a ResNet's do."""

    def __init__(self, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((2, 3)))


SHAPES = {_Mlps: (64, 128, 256), _Convs: (32, 64, 32, 32)}


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    yield
    torch.backends.cudnn.deterministic = before


def _net(kind: type[nn.Module], **options: Any) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(SHAPES[kind], device="cuda")
    # Streams come back to the bit but for the grid they were put on (2**-17) if branches do too.
    net = revcompile.reversify(kind().cuda(), x, check="off", tolerance=2e-5, **options)
    return net.train(), x


def _step(net: nn.Module, x: Tensor, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    _step_in_place(net, x, dtype)
    return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


# -- the kernels -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize(
    ("rows", "columns"), [(50000, 1024), (50000, 128), (20001, 96), (1111, 1000), (300, 4096)]
)
def test_norms_equal_torch(rows: int, columns: int, dtype: torch.dtype) -> None:
    x = (torch.randn(rows, columns, device="cuda") * 3 + 1).requires_grad_()
    layer = nn.LayerNorm(columns).cuda()
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    grad = torch.randn(rows, columns, device="cuda").to(dtype)
    given = (x, *layer.parameters())
    with torch.autocast("cuda", dtype):
        narrow, wide = call_layer_norm(layer, x), layer(x)
        again = layer_norm(x, layer.normalized_shape, layer.weight, layer.bias, layer.eps)
    assert narrow.dtype == dtype and wide.dtype == torch.float32
    assert torch.equal(narrow, again)
    assert torch.allclose(narrow.float(), wide, rtol=ROUNDING[dtype], atol=1e-5)
    assert float((narrow == wide.to(dtype)).float().mean()) > 0.99
    found = torch.autograd.grad(narrow, given, grad)
    wanted = torch.autograd.grad(wide.to(dtype), given, grad)
    names = ("x", "weight", "bias")
    of = [dict(zip(names, gradients, strict=True)) for gradients in (wanted, found)]
    deviation, where = worst(*of)
    assert deviation < 1e-4, where


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("is_minus", [False, True])
@torch.no_grad()
def test_a_sum_and_its_copy(
    dtype: torch.dtype, layout: torch.memory_format, is_minus: bool
) -> None:
    made = [torch.randn(64, 33, 31, 29, device="cuda") for _ in range(2)]
    stream, addend = (x.contiguous(memory_format=layout) for x in made)
    addend = addend.to(dtype)
    g = grid.make_grid(stream, addend.float())
    stream = grid.rounded(stream, g)
    want, _ = grid.add_or_subtract(stream, addend, g, is_minus, False)
    with torch.autocast("cuda", torch.bfloat16):
        total, copied = grid.add_or_subtract(stream, addend, g, is_minus, True)
        assert grid.add_or_subtract(stream, addend, g, is_minus, False)[1] is None
        assert grid.add_or_subtract(stream[:1], addend[:1], g, is_minus, True)[1] is None, (
            "too small"
        )
    assert copied is not None and copied.dtype == torch.bfloat16
    assert torch.equal(total, want) and torch.equal(copied, want.bfloat16())
    assert total.stride() == copied.stride() == stream.stride()
    assert grid.add_or_subtract(stream, addend, g, is_minus, True)[1] is None, "no autocast"


# -- whole steps -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(SHAPES))
def test_a_recorded_step(kind: type[nn.Module]) -> None:
    net, x = _net(kind)
    eager = copy.deepcopy(net)
    replay = capture_step(lambda: _step_in_place(net, x), net)
    for _ in range(2):
        x.copy_(torch.randn_like(x))
        replay()
        expected = _step(eager, x)
        found = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
        assert found.keys() == expected.keys()
        assert all(torch.equal(value, found[name]) for name, value in expected.items())


def _step_in_place(net: nn.Module, x: Tensor, dtype: torch.dtype = torch.bfloat16) -> None:
    net.zero_grad()
    with torch.autocast("cuda", dtype):
        loss = F.cross_entropy(net(x).float(), torch.zeros(len(x), device="cuda").long())
    loss.backward()
