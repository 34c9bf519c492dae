"""Random numbers saved instead of drawn again, as in a step captured as a CUDA graph."""

import pytest
import timm
import torch
from helpers import assert_exact
from torch import Tensor
from torch.nn import functional as F

import revcompile
from revcompile.runtime.reversible import replay
from revcompile.runtime.reversible.replay import Masks


def _drawn(x: Tensor) -> Tensor:
    noise = x.new_empty(len(x), 1).bernoulli_(0.5)
    return x * noise + torch.rand_like(x) + torch.randn(3, 4)


def test_a_second_run_gets_the_numbers_of_the_first() -> None:
    masks, x = Masks(), torch.randn(3, 4)
    with masks:
        first = _drawn(x)
    with masks.replay():
        second = _drawn(x)
    assert torch.equal(first, second)
    assert not torch.equal(first, _drawn(x))


def test_what_a_kernel_keeps_to_itself_is_refused() -> None:
    x = torch.randn(2, 1, 4, 8)
    with Masks():
        F.scaled_dot_product_attention(x, x, x)
        with pytest.raises(revcompile.RevcompileError, match="native_dropout, whose random"):
            torch.native_dropout(x, 0.5, True)


def test_gradients_of_a_recorded_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, depth=3, drop_path_rate=0.5
    )
    x = torch.randn(4, 3, 32, 32, dtype=torch.float64)
    net = revcompile.reversify(model.double(), x, check="off").train()
    monkeypatch.setattr(replay, "is_capturing", lambda device: True)
    assert_exact(net, x)
