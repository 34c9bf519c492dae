"""The torch.export front end: its graphs must behave like modules."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers import gradients, worst
from torch import Tensor, nn
from torch.nn import functional as F

from revcompile.compiler.capture import capture
from revcompile.compiler.find import find
from revcompile.compiler.rewire import rewire
from revcompile.ir.policy import Policy
from revcompile.ir.types import Captured, Frontend
from revcompile.runtime.reversible.module import Reversible


class ConvBlocks(nn.Module):
    """Batch norms, in-place activations and dropout: everything an export writes down."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
            for _ in range(3)
        )
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + F.dropout(block(x), 0.2, self.training)
        return self.head(x.mean((2, 3)))


class Decoder(nn.Module):
    """Tied embedding, causal mask from `arange`, attention dropout, several outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 16)
        self.layers = nn.ModuleList(nn.ModuleList([nn.Linear(16, 48), nn.Linear(16, 16)])
                                    for _ in range(2))  # fmt: skip
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 13, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        x = self.embed(ids) * scale
        steps = torch.arange(ids.shape[1], device=ids.device)
        mask = steps[:, None] >= steps[None, :]
        for qkv, out in self.layers:
            q, k, v = qkv(self.norm(x)).chunk(3, -1)
            p = 0.1 if self.training else 0.0
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p)
            x = x + out(attended)
        return {"logits": self.head(x), "hidden": x}


MODELS: dict[str, tuple[type[nn.Module], Any]] = {
    "conv": (ConvBlocks, torch.randn(2, 3, 8, 8)),
    "decoder": (Decoder, torch.randint(0, 13, (2, 6))),
}


def _export(name: str) -> tuple[nn.Module, Any, Captured]:
    factory, x = MODELS[name]
    torch.manual_seed(0)
    model = factory()
    return model, x, capture(model, x, check="full", frontend=Frontend.EXPORT)


@pytest.mark.parametrize("name", MODELS)
def test_an_export_passes_the_full_check_in_both_modes(name: str) -> None:
    model, _, captured = _export(name)
    assert captured.frontend is Frontend.EXPORT and captured.eval_graph is None
    assert dict(captured.root.named_parameters()).keys() == dict(model.named_parameters()).keys()


@pytest.mark.parametrize(("name", "blocks"), [("conv", 3), ("decoder", 2)])
def test_an_exported_model_becomes_reversible(name: str, blocks: int) -> None:
    _, x, captured = _export(name)
    rewired = rewire(captured, find(captured), Policy())
    assert len(rewired.couplings) == blocks
    net = Reversible(rewired, tolerance=1e-9).double().train()
    x = x.double() if x.is_floating_point() else x
    reference = copy.deepcopy(net)
    reference.reversible = False
    for _ in range(2):
        assert worst(gradients(reference, x), gradients(net, x))[0] < 1e-10


def test_the_batch_norms_of_an_export_count_once_a_step() -> None:
    _, x, captured = _export("conv")
    net = Reversible(rewire(captured, find(captured), Policy())).train()
    for _ in range(3):
        net(x).sum().backward()
    assert int(net.get_buffer("blocks.0.1.num_batches_tracked")) == 3


def test_an_export_runs_under_autocast_and_asks_for_its_device() -> None:
    _, x, captured = _export("decoder")
    net = Reversible(rewire(captured, find(captured), Policy())).train()
    with torch.autocast("cpu", torch.bfloat16):
        net(x)["logits"].float().sum().backward()
    net.to("meta")
    assert net(x.to("meta"))["logits"].device.type == "meta"
