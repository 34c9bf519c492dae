"""Kernels for batch norms with their ReLU, on CUDA. Run with `pytest -m gpu`."""

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from helpers import ON_GPU, worst
from torch import Tensor, nn
from torch.nn import functional as F

import revcompile
from revcompile.kernels import batch_norm as batchnorms
from revcompile.kernels import triton_batch_norm as batch_kernels
from revcompile.kernels.autocast import MIN_ELEMENTS
from revcompile.kernels.batch_norm import bn_relu
from tests.kernels.test_batchnorms import _Convs
from tests.support.measuring import capture_step

pytestmark = ON_GPU

ROUNDING = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
LAST = torch.channels_last


@pytest.fixture(autouse=True)
def _as_if_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batchnorms, "MIN_ELEMENTS_UNCAPTURED", MIN_ELEMENTS)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each is asked for."""
    counts: Counter[str] = Counter()

    def counting(name: str) -> Any:
        function = getattr(batch_kernels, name)

        def call(*args: Any) -> Any:
            counts[name] += 1
            return function(*args)

        return call

    assert all(batch_kernels.works_on(torch.device("cuda", 0), dtype) for dtype in ROUNDING)
    for name in ("bn_relu_forward", "bn_relu_backward"):
        monkeypatch.setattr(batch_kernels, name, counting(name))
    return counts


@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize(
    "shape",
    [(64, 64, 56, 56), (64, 256, 28, 28), (63, 1024, 14, 14), (33, 2048, 7, 9), (9, 200, 41, 43)],
)
def test_they_equal_torch(
    shape: tuple[int, ...], dtype: torch.dtype, counted: Counter[str]
) -> None:
    torch.manual_seed(0)
    levels = 5 * torch.randn(shape[1], device="cuda")[:, None, None]
    x = (torch.randn(shape, device="cuda") * 3 + levels).to(dtype, memory_format=LAST)
    norm = nn.BatchNorm2d(shape[1]).cuda()
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    twin = copy.deepcopy(norm)
    x.requires_grad_()
    found, wide = bn_relu(norm, None, x), x.detach().float().requires_grad_()
    expected = F.relu(twin(wide))
    assert found.dtype == dtype and found.stride() == x.stride()
    assert torch.allclose(found.float(), expected, rtol=ROUNDING[dtype], atol=1e-4)
    for have, want in zip(norm.buffers(), twin.buffers(), strict=True):
        assert torch.allclose(have, want, rtol=1e-4, atol=1e-5)
    grad = torch.randn_like(found)
    wanted = torch.autograd.grad(expected, (wide, *twin.parameters()), grad.float())
    of_x, *of_parameters = torch.autograd.grad(found, (x, *norm.parameters()), grad)
    # Next to zero a ReLU may decide otherwise, so a few elements may be anything.
    error = (of_x.float() - wanted[0]).abs()
    is_off = error > ROUNDING[dtype] * wanted[0].abs() + 1e-3 * wanted[0].abs().max()
    assert float(is_off.float().mean()) < 1e-5
    for have, want in zip(of_parameters, wanted[1:], strict=True):
        assert torch.allclose(have, want, atol=1e-2 * float(want.abs().max()))
    assert counted == {"bn_relu_forward": 1, "bn_relu_backward": 1}


def _net(**options: Any) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(32, 64, 32, 32, device="cuda").to(memory_format=LAST)
    model = _Convs(4, 64).cuda()
    net = revcompile.reversify(model, x, check="off", tolerance=2e-5, **options)
    return net.train().to(memory_format=LAST), x


def _step(net: nn.Module, x: Tensor) -> None:
    net.zero_grad()
    with torch.autocast("cuda", torch.bfloat16):
        loss = net(x).square().mean()
    loss.backward()


def _gradients(net: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


def test_a_recorded_step() -> None:
    net, x = _net()
    net.tolerance = None
    replay = capture_step(lambda: _step(net, x), net)
    eager = copy.deepcopy(net)
    replay()
    _step(eager, x)
    deviation, where = worst(_gradients(eager), _gradients(net))
    assert deviation < 1e-2, where
    for have, want in zip(net.buffers(), eager.buffers(), strict=True):
        assert torch.allclose(have, want, rtol=1e-5, atol=1e-6)
