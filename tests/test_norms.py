"""Layer norms that give what autocast would make of their result, and the kernels for that."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import revcompile
from revcompile.norms import is_layer_norm, norm_as_read
from revcompile.runtime import reversible
from revcompile.runtime.narrow import narrowed
from tests.helpers import gradients


def _vit() -> nn.Module:
    model: nn.Module = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, embed_dim=24, num_heads=2
    )
    return model


def _swin() -> nn.Module:
    model: nn.Module = timm.create_model(
        "swin_tiny_patch4_window7_224", img_size=56, depths=(2, 2), num_heads=(1, 2), embed_dim=12
    )
    return model


def _replaced(net: revcompile.ReversibleModule) -> list[bool]:
    branches = [narrowed(coupling.branch, net) for coupling in net.rewired.couplings]
    return [any(n.target is norm_as_read for n in branch.nodes) for branch in branches]


@pytest.mark.parametrize(("make", "size"), [(_vit, 32), (_swin, 56)])
def test_no_bit_changes(
    make: Callable[[], nn.Module], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(2, 3, size, size)
    net = revcompile.reversify(make(), x, check="off").train()
    assert all(_replaced(net))
    twin = copy.deepcopy(net)
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients(net, x)
        monkeypatch.setattr(reversible, "narrowed", lambda graph, root: graph)
        expected = gradients(twin, x)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


class _Branch(nn.Module):
    """`x + layer(norm(x))`, or something else between the two."""

    def __init__(self, between: Callable[[Tensor], Tensor], norm: nn.Module | None = None) -> None:
        super().__init__()
        self.norm = norm or nn.LayerNorm(8)
        self.layer = nn.Linear(8, 8)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.layer(self.between(self.norm(x)))
        return x + self.layer(self.between(self.norm(x)))


class _Doubled(nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (_Branch(lambda x: x), True),
        (_Branch(lambda x: F.pad(x.roll(1, 0), (0, 0, 0, 2))[:, :4].contiguous()), False),
        (_Branch(lambda x: x.reshape(-1, 8).view(2, 4, 8)), True),
        (_Branch(lambda x: x.exp()), False),
        (_Branch(lambda x: x, nn.LayerNorm(8, elementwise_affine=False)), False),
        (_Branch(lambda x: x, _Doubled(8)), False),
    ],
    ids=["read at once", "cut", "rearranged", "computed with", "without weights", "no layer norm"],
)
def test_only_norms_that_are_merely_read_in_low_precision(model: nn.Module, expected: bool) -> None:
    net = revcompile.reversify(model, torch.randn(2, 4, 8), check="off")
    assert _replaced(net) == [expected] * 2


def test_a_hook_sees_its_norm_run() -> None:
    layer = nn.LayerNorm(4)
    assert is_layer_norm(layer)
    layer.register_forward_hook(lambda module, args, out: None)
    assert not is_layer_norm(layer)


def test_the_kernels_equal_torch() -> None:
    """In a process of its own: Triton decides on being imported whether it interprets."""
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-m", "tests.interpreted"], check=True, env=environment)
