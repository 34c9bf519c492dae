"""Hugging Face models, where transformers is installed (no weights are fetched)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers import gradients, worst

import revcompile
from benchmarks.compiler.architectures import ARCHITECTURES
from benchmarks.compiler.families import fixed_randomness
from benchmarks.compiler.huggingface import TOLERANCE, examine
from revcompile.errors import OriginalMethodError

pytest.importorskip("transformers")

FEW = ("gpt2", "llama", "bert", "opt")
"""Of each kind of block one, with two layers; all of them with four are `slow`."""
BLOCKS = {"gpt2": 8, "llama": 8, "bert": 8, "opt": 8, "vit": 8, "mamba": 4, "t5": 17}
ANEW = ("mamba",)
"""Python loops over the length there."""


def _check(name: str, row: dict[str, Any]) -> None:
    assert row["stages"] == 4
    assert row["captured_error"] <= TOLERANCE and row["gradient_error"] <= TOLERANCE
    assert row["lengths"] == ("anew" if name in ANEW else "free")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FEW)
def test_two_layers_at_two_lengths_in_four_stages(name: str) -> None:
    row = examine(name, layers=2)
    _check(name, row)
    assert row["couplings"] == 4


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_captured_at_two_lengths_and_trained_in_four_stages(name: str) -> None:
    row = examine(name)
    _check(name, row)
    assert row["couplings"] == BLOCKS.get(name, row["couplings"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "vit"])
def test_captured_and_reversible(name: str) -> None:
    torch.manual_seed(0)
    model: Any = ARCHITECTURES[name].build().double().train()
    fixed_randomness(model)
    inputs = ARCHITECTURES[name].inputs(2, 8)
    net = revcompile.reversify(model, None, inputs, check="full").train()
    assert len(net.rewired.couplings) == BLOCKS[name]
    reference = copy.deepcopy(net)
    reference.reversible = False
    assert worst(gradients(reference, **inputs), gradients(net, **inputs))[0] < 1e-10
    assert type(net(**inputs)) is type(model(**inputs))


@pytest.mark.filterwarnings("ignore")
def test_what_a_pretrained_model_shows_is_shown() -> None:
    model: Any = ARCHITECTURES["llama"].build(2)
    inputs = ARCHITECTURES["llama"].inputs(2, 8)
    net: Any = revcompile.reversify(model, None, inputs, check="off")
    assert net.config.to_dict() == model.config.to_dict() and net.config is not model.config
    assert (net.dtype, net.device) == (torch.float32, torch.device("cpu"))
    assert net.get_input_embeddings() is net.model.embed_tokens
    assert net.num_parameters() == model.num_parameters()
    assert net.generation_config.to_dict() == model.generation_config.to_dict()
    with pytest.raises(OriginalMethodError, match="generate calls the model with arguments"):
        net.generate(inputs["input_ids"], max_new_tokens=2)
    with pytest.raises(OriginalMethodError, match=r"sets model\.gradient_checkpointing"):
        net.gradient_checkpointing_enable()
    with pytest.raises(OriginalMethodError, match="resize_token_embeddings changes"):
        net.resize_token_embeddings(60)
    assert net.config.vocab_size == 50


@pytest.mark.filterwarnings("ignore")
def test_a_loss_the_model_returns_itself() -> None:
    model: Any = ARCHITECTURES["gpt2"].build(2).double().train()
    fixed_randomness(model)
    inputs = ARCHITECTURES["gpt2"].inputs(2, 8)
    inputs["labels"] = inputs["input_ids"]
    net = revcompile.reversify(model, None, inputs, policy="same_parameters").train()
    output = net(**inputs)
    output.loss.backward()
    expected = {n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None}
    net.zero_grad()
    net.reversible = False
    net(**inputs).loss.backward()
    have = {n: p.grad for n, p in net.named_parameters() if p.grad is not None}
    assert type(output) is type(model(**inputs)) and output.past_key_values is None
    assert worst(expected, have)[0] < 1e-10
