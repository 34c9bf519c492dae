"""A branch differentiated from its input as autocast gives it to the first layer."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import revcompile
from revcompile.runtime import reversible
from revcompile.tree import reads_cast
from tests.helpers import gradients


class _Widened(TorchDispatchMode):
    """Counts tensors of one shape that are turned from bfloat16 into float32."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and out.shape == self.shape:
            self.count += args[0].dtype == torch.bfloat16 and out.dtype == torch.float32
        return out


class _Stack(nn.Module):
    def __init__(self, first: type[nn.Module] = nn.Identity) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(first(), nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
            for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


X = torch.randn(2, 4, 5, 5, generator=torch.Generator().manual_seed(0))


def _differentiated(net: nn.Module) -> tuple[dict[str, Tensor], int]:
    with torch.autocast("cpu", torch.bfloat16), _Widened(X.shape) as widened:
        return gradients(net, X), widened.count


def test_gradients_are_widened_only_where_they_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    net = revcompile.reversify(_Stack(), X, check="off").train()
    twin = copy.deepcopy(net)
    found, widened = _differentiated(net)
    monkeypatch.setattr(reversible, "reads_cast", lambda graph, root: False)
    expected, before = _differentiated(twin)
    assert all(torch.equal(value, found[name]) for name, value in expected.items())
    assert widened == before - 3


def test_only_a_sole_reader_that_autocast_casts_for_counts() -> None:
    def first(model: nn.Module) -> bool:
        net = revcompile.reversify(model, X, check="off")
        return reads_cast(net.rewired.couplings[0].branch, net)

    assert first(_Stack())
    assert not first(_Stack(nn.ReLU))
    hooked = revcompile.reversify(_Stack(), X, check="off")
    hooked.get_submodule("blocks.0.1").register_forward_pre_hook(lambda layer, args: None)
    assert not reads_cast(hooked.rewired.couplings[0].branch, hooked)
