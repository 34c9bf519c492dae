"""Weights trained for one function are not loaded into another without a word."""

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import cases, refuses
from torch import nn

import revcompile
from revcompile.errors import InputError, RevcompileWarning

X = torch.randn(3, 8)
OTHER = "saved with policy='paper', but this .* policy='pretrained'"


def _model() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.TransformerEncoderLayer(8, 2, 8, 0.0, norm_first=True) for _ in range(2))
    return nn.Sequential(*layers)


def _net(policy: Any) -> Any:
    return revcompile.reversify(_model(), X[None], policy=policy, check="off")


def _through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@cases("of", lambda net: net, copy.deepcopy, lambda net: torch.optim.swa_utils.AveragedModel(net))
def test_a_state_dict_of_another_function_is_refused(of: Any) -> None:
    trained, other = of(_net("paper")), of(_net("pretrained"))
    state = _through_a_file(trained.state_dict())
    refuses(InputError, OTHER, other.load_state_dict, state)
    trained.load_state_dict(state)
    of(_net("paper")).load_state_dict(other.state_dict())  # the original's weights, to train anew
    plain = _model()
    _net("paper").load_state_dict(plain.state_dict())
    plain.load_state_dict(_net("pretrained").state_dict())


def test_a_file_of_weights_names_their_policy(tmp_path: Path) -> None:
    paper, pretrained = (
        revcompile.petrafy(_model(), 2, X[None], policy=policy, check="off")
        for policy in ("paper", "pretrained")
    )
    file = paper.save_weights(tmp_path / "weights.safetensors")
    paper.load_weights(file)
    refuses(InputError, OTHER, pretrained.load_weights, file)
    paper.load_weights(pretrained.save_weights(tmp_path / "others.safetensors"))


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings")
def test_a_saved_transformer_names_its_policy(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=9, num_hidden_layers=2, **sizes))
    kwargs = {"input_ids": torch.arange(8).view(2, 4)}

    def made(model: Any, policy: Any = None) -> Any:
        return revcompile.reversify(model, None, kwargs, policy=policy, check="off")

    net = made(model)
    with pytest.warns(RevcompileWarning, match="policy='paper', and LlamaForCausalLM computes ano"):
        net.save_pretrained(tmp_path / "paper")
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "paper")
    with torch.no_grad():
        loaded.model.norm.weight[0] = 2.0  # as training would
    again = made(loaded)
    assert again.rewired.policy.value == "paper"
    again.load_state_dict(net.state_dict())
    assert torch.equal(again.eval()(**kwargs).logits, net.eval()(**kwargs).logits)
    refuses(InputError, "trained with policy='paper'", made, loaded, "pretrained")
    made(model, "pretrained").save_pretrained(tmp_path / "pretrained")
    assert "revcompile" not in (tmp_path / "pretrained" / "config.json").read_text()
