"""Hugging Face models, where transformers is installed (no weights are fetched)."""

import copy
import inspect
import io
import pickle
import types
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import gradients, worst
from torch import Tensor

import revcompile
from revcompile.errors import OriginalMethodError, RevcompileWarning
from tests.support.architectures import ARCHITECTURES
from tests.support.comparing import TOLERANCE, examine_transformer

pytestmark = pytest.mark.skipif(
    find_spec("transformers") is None, reason="needs transformers, whose import takes seconds"
)

FEW = ("gpt2", "llama", "bert", "opt")
"""Of each kind of block one, with two layers; all of them with four are `slow`."""
BLOCKS = {"gpt2": 8, "llama": 8, "bert": 8, "opt": 8, "vit": 8, "mamba": 4, "t5": 20}
FIXED = ("mamba",)
"""Python loops over the length there."""


def _check(name: str, row: dict[str, Any]) -> None:
    assert row["stages"] == 4
    assert row["captured_error"] <= TOLERANCE and row["gradient_error"] <= TOLERANCE
    assert row["lengths"] == ("fixed" if name in FIXED else "free")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FEW)
def test_two_layers_at_two_lengths_in_four_stages(name: str) -> None:
    row = examine_transformer(name, layers=2)
    _check(name, row)
    assert row["couplings"] == 4


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_captured_at_two_lengths_and_trained_in_four_stages(name: str) -> None:
    row = examine_transformer(name)
    _check(name, row)
    assert row["couplings"] == BLOCKS.get(name, row["couplings"])


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
    with pytest.warns(RevcompileWarning, match="gradient_checkpointing_enable has no effect"):
        net.gradient_checkpointing_enable()
    with pytest.raises(OriginalMethodError, match="resize_token_embeddings may compute"):
        net.resize_token_embeddings(60)
    assert net.config.vocab_size == 50


@pytest.mark.filterwarnings("ignore")
def test_a_changed_configuration_is_seen() -> None:
    import transformers

    class Scaled(transformers.GPT2LMHeadModel):
        def forward(self, input_ids: Tensor) -> Any:
            return super().forward(input_ids).logits * self.config.factor

    torch.manual_seed(0)
    small: Any = {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 20, "factor": 2.0}
    model = Scaled(transformers.GPT2Config(**small)).eval()
    ids = torch.arange(8).view(2, 4)
    net: Any = revcompile.reversify(model, ids, policy="pretrained").eval()
    first = net(ids)
    net.config.factor = 3.0
    torch.testing.assert_close(net(ids), 1.5 * first)
    net.config = copy.deepcopy(net.config)
    net.config.factor = 5.0
    torch.testing.assert_close(net(ids), 2.5 * first)


@pytest.mark.filterwarnings("ignore")
def test_what_trainers_change_captures_nothing_again(tmp_path: Path) -> None:
    model: Any = ARCHITECTURES["llama"].build(1)
    inputs = ARCHITECTURES["llama"].inputs(2, 8)
    inputs["labels"] = inputs["input_ids"]
    net: Any = revcompile.reversify(model, None, inputs, policy="pretrained", check="off").train()
    net(**inputs)
    own = type(net).forward
    # As accelerate does, which keeps the forward it wraps.
    net._original_forward = net.forward
    net.forward = types.MethodType(lambda self, **kwargs: own(self, **kwargs), net)
    net.save_pretrained(tmp_path)
    net.config.use_cache = not net.config.use_cache
    for count in (None, 7, 9, torch.tensor(11)):
        loss = net(**inputs, num_items_in_batch=count).loss
        if count is not None:
            torch.testing.assert_close(loss * count, net(**inputs).loss * 14, atol=0.1, rtol=0.1)
    assert len(net._cases._cases) == 2  # with and without the count
    net.eval(), model.eval()
    with torch.no_grad():
        have, want = net(**inputs, num_items_in_batch=3), model(**inputs, num_items_in_batch=3)
        call = {"output_attentions": True, "use_cache": False}
        net(**inputs, **call)  # computed by the original's forward
    torch.testing.assert_close(have.loss, want.loss)


@pytest.mark.filterwarnings("ignore")
def test_a_pipeline_trains_on_after_its_model_was_saved(tmp_path: Path) -> None:
    model: Any = ARCHITECTURES["llama"].build(1)
    inputs = ARCHITECTURES["llama"].inputs(2, 8)
    inputs["labels"] = inputs["input_ids"]
    net: Any = revcompile.petrafy(model, 2, None, inputs, policy="pretrained", check="off")
    trainer = net.trainer(lambda p: torch.optim.SGD(p, lr=0.1))
    trainer.step(inputs)
    net.save_pretrained(tmp_path)
    trainer.step(inputs)
    trainer.flush()


def _grouped(**options: Any) -> Any:
    """A Llama whose heads share keys and values, and that caches them by default."""
    import transformers

    torch.manual_seed(0)
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 0}
    config = transformers.LlamaConfig(vocab_size=50, **small, **heads, **options)
    assert config.use_cache
    return transformers.LlamaForCausalLM(config)


def _call(samples: int, length: int, *arguments: str) -> dict[str, Any]:
    """The arguments of a call in training."""
    ids = 3 + torch.arange(samples * length).view(samples, length) % 47
    mask = torch.arange(length) < length - torch.arange(samples)[:, None]
    halves = torch.arange(length) % (length // 2)
    call = {"input_ids": ids, "labels": ids.masked_fill(~mask, -100)}
    others = {
        "attention_mask": mask.long(),
        "num_items_in_batch": mask.sum(),
        "position_ids": halves.expand(samples, length),
    }
    return call | {name: others[name] for name in arguments}


def test_a_model_is_of_its_original_s_class_and_takes_what_trainers_pass() -> None:
    model = _grouped().double().train()
    net: Any = revcompile.reversify(model, None, _call(2, 8, "attention_mask"), policy="pretrained")
    assert isinstance(net, type(model))
    assert isinstance(net, revcompile.ReversibleModule)
    for each in (net, copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert inspect.signature(each.forward) == inspect.signature(model.forward)
    assert inspect.signature(type(net).forward) == inspect.signature(type(model).forward)
    assert len(net.rewired.couplings) == 2 and type(copy.deepcopy(net)) is type(net)
    for call in (
        _call(2, 8, "attention_mask"),
        _call(3, 11, "attention_mask", "num_items_in_batch"),  # the Trainer's
        _call(2, 8, "position_ids"),  # two packed sequences
        _call(1, 9),
    ):
        found = gradients(net, **call)
        net.reversible = False
        assert worst(gradients(net, **call), found)[0] < 1e-10
        net.reversible = True
        with torch.no_grad():
            want = model.eval()(**call, use_cache=False)
            have = net.eval()(**call, output_hidden_states=None)
        assert torch.equal(want.loss, have.loss) and torch.equal(want.logits, have.logits)
        net.train()
    with torch.no_grad():  # in eval mode, a call of any other kind is the original's
        call = {"input_ids": call["input_ids"], "use_cache": True}
        assert net.eval()(**call).past_key_values.get_seq_length() == 9
        kept = io.BytesIO()
        torch.save(net, kept)
        again = torch.load(io.BytesIO(kept.getvalue()), weights_only=False)
        assert torch.equal(again(**call).logits, model(**call).logits)


@pytest.mark.skipif(find_spec("accelerate") is None, reason="needs accelerate")
def test_a_net_that_accelerate_unwraps_runs_its_own_forward() -> None:
    import accelerate

    call = _call(2, 8)
    net: Any = revcompile.reversify(_grouped(), None, call).eval()
    want = net(**call).logits
    prepared = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    try:
        again = prepared.unwrap_model(prepared.prepare_model(net), keep_fp32_wrapper=False)
        assert torch.equal(again(**call).logits, want)
    finally:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
