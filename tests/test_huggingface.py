"""Hugging Face models, where transformers is installed (no weights are fetched)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import revcompile
from tests.helpers import gradients, worst

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 50}


def _model(name: str) -> Any:
    t = transformers
    if name == "gpt2":
        config = t.GPT2Config(n_layer=3, n_embd=32, n_head=2, vocab_size=50, n_positions=32)
        model = t.GPT2LMHeadModel(config)
    elif name == "llama":
        model = t.LlamaForCausalLM(
            t.LlamaConfig(num_hidden_layers=3, num_key_value_heads=2, **SMALL)
        )
    elif name == "bert":
        model = t.BertModel(t.BertConfig(num_hidden_layers=2, **SMALL))
    else:
        config = t.ViTConfig(num_hidden_layers=2, image_size=32, patch_size=8, **SMALL)
        model = t.ViTModel(config)
    model.config.use_cache = False
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "blocks"), [("gpt2", 6), ("llama", 6), ("bert", 4), ("vit", 4)])
def test_captured_and_reversible(name: str, blocks: int) -> None:
    torch.manual_seed(0)
    model = _model(name).double().train()
    if name == "vit":
        x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    else:
        x = torch.randint(0, 50, (2, 10))
    net = revcompile.reversify(model, x, check="full").train()
    assert len(net.rewired.couplings) == blocks
    reference = copy.deepcopy(net)
    reference.reversible = False
    assert worst(gradients(reference, x), gradients(net, x))[0] < 1e-10
    assert type(net(x)) is type(model(x))
