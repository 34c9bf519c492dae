"""policy="pretrained" on models of timm and transformers: eval mode is the original (docs)."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from helpers import assert_exact
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import revcompile
from revcompile.errors import InputError, OriginalMethodError
from tests.support.architectures import ARCHITECTURES

VISION: dict[str, tuple[str, dict[str, Any], int]] = {
    "vit": ("vit_tiny_patch16_224", {"img_size": 32, "patch_size": 8, "depth": 4}, 32),
    "deit": ("deit_tiny_distilled_patch16_224", {"img_size": 32, "patch_size": 8, "depth": 4}, 32),
    "convnext": ("convnext_atto", {"depths": (2, 2, 2, 2)}, 32),
    "swin": (
        "swin_tiny_patch4_window7_224",
        {"img_size": 56, "depths": (2, 2), "num_heads": (2, 4), "embed_dim": 24},
        56,
    ),
    "mixer": ("mixer_s32_224", {"img_size": 64}, 64),
}
LANGUAGE = ("gpt2", "llama", "qwen3", "gemma2", "bert", "opt")
FAST = ("vit", "gpt2")


def _models() -> list[Any]:
    names = (*VISION, *LANGUAGE)
    return [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in names]


def _built(name: str) -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Any]]:
    torch.manual_seed(0)
    if name in VISION:
        architecture, options, size = VISION[name]
        model: Any = timm.create_model(architecture, num_classes=10, **options)
        args: tuple[Tensor, ...] = (torch.randn(2, 3, size, size),)
        kwargs: dict[str, Any] = {}
    else:
        pytest.importorskip("transformers")
        model, args = ARCHITECTURES[name].build(2), ()
        kwargs = ARCHITECTURES[name].inputs(2, 8)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms and biases as if trained
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model, args, kwargs


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", _models())
def test_eval_mode_is_the_original(name: str) -> None:
    model, args, kwargs = _built(name)
    net = revcompile.reversify(model, args or None, kwargs, policy="pretrained", check="off")
    assert len(net.rewired.couplings) >= 4
    with torch.no_grad():
        expected, found = model.eval()(*args, **kwargs), net.eval()(*args, **kwargs)
        restored = net.to_original()(*args, **kwargs)
    outputs = map(pytree.tree_leaves, (expected, found, restored))
    for want, have, again in zip(*outputs, strict=True):
        if isinstance(want, Tensor):
            assert torch.equal(want, have) and torch.equal(want, again)
    net = net.double().train()
    args = tuple(x.double() for x in args)
    assert_exact(net, *args, **kwargs)


@pytest.mark.filterwarnings("ignore")
def test_stages_of_a_model_that_returns_its_own_loss() -> None:
    model, _, kwargs = _built("gpt2")
    model = model.eval().double()
    with pytest.raises(InputError, match=r"returns no loss of its own.*'labels': labels"):
        net = revcompile.petrafy(model, 2, None, kwargs, policy="pretrained", check="off")
        net.trainer(lambda p: torch.optim.SGD(p, lr=0.1), None)
    kwargs["labels"] = kwargs["input_ids"]
    net = revcompile.petrafy(model, 2, None, kwargs, policy="pretrained", check="off")
    trainer = net.trainer(lambda p: torch.optim.SGD(p, lr=0.1), None)
    want = model(**kwargs).loss.item()
    assert trainer.evaluate([kwargs]).loss == want
    trainer.step(kwargs)
    trainer.flush()
    assert trainer.evaluate([kwargs]).loss != want
    trained = net.to_original().eval()
    assert trainer.evaluate([kwargs]).loss == trained(**kwargs).loss.item()


@pytest.mark.filterwarnings("ignore")
def test_methods_of_the_original_work_in_eval_mode(tmp_path: Path) -> None:
    built, _, kwargs = _built("gpt2")
    model: Any = built.eval()
    net: Any = revcompile.reversify(model, None, kwargs, policy="pretrained", check="off")
    ids = kwargs["input_ids"]
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    options["attention_mask"] = torch.ones_like(ids)
    with pytest.raises(OriginalMethodError, match=r"or call net.eval\(\) first"):
        net.train().generate(ids, **options)
    assert torch.equal(net.eval().generate(ids, **options), model.generate(ids, **options))
    net.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    assert torch.equal(loaded(**kwargs).logits, net(**kwargs).logits)
