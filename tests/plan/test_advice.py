"""Attention, late gradients, and an optimizer that does not compensate: the trainer says so."""

import functools
import warnings
from typing import Any

import pytest
import torch
from nets import Chain
from torch import Tensor, nn
from torch.nn import functional as F
from training import Plain, fresh, settings_of

import revcompile
from revcompile.errors import RevcompileWarning
from revcompile.optim import DelayAwareMuon, ErrorFeedback, muon_groups
from revcompile.plan.learning import has_attention


class Attention(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.qkv = kind, nn.Linear(8, 24)
        self.drop, self.softmax = nn.Dropout(0.1), nn.Softmax(-1)
        self.module = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "module":
            return self.module(x, x, x, need_weights=False)[0]
        q, k, v = self.qkv(x).chunk(3, -1)
        if self.kind == "fused":
            return F.scaled_dot_product_attention(q, k, v)
        scores = q @ k.mT
        if self.kind == "layer":
            return torch.bmm(self.drop(self.softmax(scores)), v)
        if self.kind == "method":
            return self.drop(scores.float().softmax(-1)).to(v.dtype) @ v
        return scores.softmax(-1).sum(-1, keepdim=True) * v  # a softmax, but no attention


@functools.cache
def net(kind: str = "fused", stages: int = 4) -> revcompile.StagedModel:
    model = Chain(*(Attention(kind) for _ in range(stages)))
    return revcompile.petrafy(model, stages, torch.randn(2, 3, 8), check="off")


@pytest.mark.parametrize("kind", ["fused", "layer", "method", "module", "none"])
def test_attention_is_found_however_it_is_written(kind: str) -> None:
    two = net(kind, 2)
    graphs = [stage.graph for stage in two.stages]
    assert has_attention(graphs, two.model) == (kind != "none")


def advice(net: revcompile.StagedModel, optimizer: Any, **options: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        net.trainer(optimizer, F.mse_loss, **settings_of(**options))
    found = [w for w in caught if w.category is RevcompileWarning]
    assert all(w.filename == __file__ for w in found)
    return [str(w.message) for w in found]


def test_one_warning_names_the_remedies() -> None:
    (text,) = advice(net(), torch.optim.AdamW)
    assert "up to 3 updates late: expect" in text
    assert "muon_groups(model), or another optimizer of revcompile.optim (ErrorFeedback" in text
    assert "weights='stashed'" in text and "accumulation_steps=3" in text
    (text,) = advice(net(), torch.optim.AdamW, weights="stashed", in_flight_per_stage=2)
    assert "up to 6 updates" in text and "accumulation_steps=6" in text


def test_other_weights_in_backward_are_warned_of_unless_matrices_move_little() -> None:
    for weights in ("latest", "predicted"):
        (text,) = advice(net(), lambda p: DelayAwareMuon(p, max_drift=None), weights=weights)
        assert "Use revcompile.optim.DelayAwareMuon (not with max_drift=None)" in text
        assert not advice(net(), DelayAwareMuon, weights=weights)
    assert advice(net(), torch.optim.AdamW, weights="predicted")


@pytest.mark.parametrize("weights", ["latest", "predicted", "stashed"])
def test_above_seven_updates_no_optimizer_and_no_weights_are_a_remedy(weights: str) -> None:
    for optimizer in (torch.optim.AdamW, DelayAwareMuon):
        (text,) = advice(net(stages=5), optimizer, in_flight_per_stage=2, weights=weights)
        assert "up to 8 updates late" in text
        assert "Use fewer stages, or momentum 0.8 and learning rates times 2" in text
        assert "; or accumulation_steps=8" in text
        assert "'stashed'" not in text and "revcompile.optim" not in text


def test_no_warning_where_there_is_nothing_to_say() -> None:
    muon = {"param_groups": muon_groups(net().model)}
    assert not advice(net(), DelayAwareMuon, weights="stashed", **muon)
    assert not advice(net(), DelayAwareMuon, accumulation_steps=3, **muon)
    assert not advice(net(), lambda p: [ErrorFeedback(torch.optim.AdamW(p))], weights="stashed")
    assert not advice(net(), torch.optim.AdamW, accumulation_steps=3)
    assert not advice(net(), torch.optim.AdamW, method="1f1b")
    assert not advice(fresh(Plain), torch.optim.AdamW)
