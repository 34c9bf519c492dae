"""The compiler's yardstick: what it makes of timm's models is what is written out in `models/`."""

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from helpers import gradients, worst
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

import revcompile
from models import revnet, vit


def randomised(model: nn.Module) -> nn.Module:
    """Every parameter and statistic its own random value: no zero or one to hide a mistake."""
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                nn.init.kaiming_uniform_(p)
            else:
                p.uniform_(0.5, 1.5)
        for name, buffer in model.named_buffers():
            if name.endswith("num_batches_tracked"):
                buffer.zero_()
            else:
                buffer.uniform_(0.5, 1.5)
    return model


def revnet_name(timm_name: str) -> str:
    """The name in `models.revnet` of a tensor of a rewired timm ResNet."""
    name = re.sub(r"^layer(\d)", lambda m: f"layers.{int(m[1]) - 1}", timm_name)
    name = re.sub(r"^(layers\.\d\.\d+)\.(conv|bn)", r"\1.branch.\2", name)
    return re.sub(r"downsample\.(\d)_copy", r"downsample_b.\1", name)


def vit_name(timm_name: str) -> str:
    """The name in `models.vit` of a tensor of a rewired timm ViT."""
    name = timm_name.replace("patch_embed.proj", "patch_embed")
    name = name.replace(".norm1", ".f.norm")
    name = name.replace(".norm2", ".g.norm")
    return name.replace(".attn", ".f").replace(".mlp", ".g")


def compare(
    net: nn.Module, reference: nn.Module, rename: Callable[[str], str], x: Tensor, training: bool
) -> None:
    """Same weights, same outputs, gradients and batch statistics."""
    state = {rename(name): tensor.clone() for name, tensor in net.state_dict().items()}
    reference.load_state_dict(state, strict=True, assign=True)
    have = gradients(net.train(training), x)
    have = {" ".join((k.split()[0], rename(k.split()[1]))): v for k, v in have.items()}
    deviation, where = worst(gradients(reference.train(training), x), have)
    assert deviation < 1e-10, where


@pytest.fixture(
    scope="module",
    params=["resnet18", pytest.param("resnet34", marks=pytest.mark.slow), "resnet50"],
)
def rewired_resnet(request: pytest.FixtureRequest) -> tuple[nn.Module, nn.Module, Tensor]:
    """A compiled timm ResNet, the RevNet it should be (still without weights), and images."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    with torch.device("meta"):
        model = timm.create_model(request.param, num_classes=7).double()
        reference = getattr(revnet, request.param.replace("res", "rev"))(num_classes=7).double()
    model = model.to_empty(device="cpu")
    return randomised(revcompile.reversify(model, x, policy="paper", check="off")), reference, x


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_compiled_resnets_are_petras_revnets(rewired_resnet: Any, training: bool) -> None:
    net, reference, x = rewired_resnet
    compare(net, reference, revnet_name, x, training)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_a_compiled_vit_is_rev_vit(training: bool) -> None:
    model = VisionTransformer(
        img_size=32, patch_size=8, embed_dim=48, depth=3, num_heads=3, num_classes=10
    ).double()
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    net = randomised(revcompile.reversify(model, x, policy="same_parameters"))
    reference = vit.RevViT(image=32, patch=8, width=48, depth=3, heads=3, num_classes=10)
    compare(net, reference.double(), vit_name, x, training)


def test_models_know_nothing_of_the_compiler() -> None:
    files = sorted(Path(revnet.__file__).parent.glob("*.py"))
    assert len(files) > 2
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [a.name for a in node.names] + [getattr(node, "module", None) or ""]
                assert not any(name.split(".")[0] == "revcompile" for name in names), file
