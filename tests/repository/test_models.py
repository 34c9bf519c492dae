"""The reference models: the papers' counts, exact inverses, and the compiler's yardstick."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import timm
import torch
from helpers import gradients, worst
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

import revcompile
from models import resnet, revnet, vit
from models.branches import Basic, Bottleneck, Shape, pre_activation
from models.reversible import Coupling, RevBlock


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


MILLIONS: list[tuple[Callable[..., nn.Module], tuple[int, ...], str]] = [
    # PETRA, table 2
    *((revnet.revnet18, (), "12.2"), (revnet.revnet34, (), "22.3"), (revnet.revnet50, (), "30.4")),
    # He et al., 2015
    *((resnet.resnet20, (), "0.27"), (resnet.resnet32, (), "0.46"), (resnet.resnet44, (), "0.66")),
    *((resnet.resnet56, (), "0.85"), (resnet.resnet110, (), "1.73")),
    # the RevNet paper, table 2: CIFAR-10, CIFAR-100, ImageNet (it prints 45.2 for the last)
    *((resnet.preact_resnet32, (10,), "0.46"), (resnet.preact_resnet32, (100,), "0.47")),
    *((revnet.revnet38, (10,), "0.46"), (revnet.revnet38, (100,), "0.48")),
    *((resnet.preact_resnet110, (10,), "1.73"), (resnet.preact_resnet110, (100,), "1.73")),
    *((revnet.revnet110, (10,), "1.73"), (revnet.revnet110, (100,), "1.74")),
    *((resnet.preact_resnet164, (10,), "1.70"), (resnet.preact_resnet164, (100,), "1.73")),
    *((revnet.revnet164, (10,), "1.75"), (revnet.revnet164, (100,), "1.79")),
    *((resnet.preact_resnet101, (), "44.5"), (revnet.revnet104, (), "45.428072")),
]


def test_models_have_the_parameters_of_their_papers() -> None:
    for make, classes, millions in MILLIONS:
        with torch.device("meta"):
            count = parameters(make(*classes)) / 1e6
        assert f"{count:.{len(millions.partition('.')[2])}f}" == millions, make


@pytest.mark.parametrize("name", ["resnet18", "resnet34", "resnet50", "resnet101"])
def test_resnets_are_as_large_as_those_of_timm(name: str) -> None:
    with torch.device("meta"):
        assert parameters(getattr(resnet, name)()) == parameters(timm.create_model(name))


def test_rev_vit_is_as_large_as_the_plain_one() -> None:
    with torch.device("meta"):
        plain = timm.create_model("vit_tiny_patch16_224")
        assert parameters(vit.rev_vit()) == parameters(plain)
        # Concatenated streams double the head's weights and the norm before it.
        extra = 192 * 1000 + 2 * 192
        assert parameters(vit.rev_vit(fuse="concat")) == parameters(plain) + extra


@pytest.mark.parametrize(
    "make",
    [
        lambda: revnet.revnet18(stem="mnist"),
        lambda: vit.rev_vit(fuse="sum"),
        lambda: vit.rev_vit(image=30, patch=8),
        lambda: vit.rev_vit(width=50, heads=4),
    ],
)
def test_what_cannot_be_built_is_a_clear_error(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(ValueError, match=r"expected .* got"):
        make()


REVERSIBLE = {
    "basic, petra": lambda: Coupling(Basic(Shape(8, 8)), nn.ReLU()),
    "bottleneck, petra": lambda: Coupling(Bottleneck(Shape(8, 8)), nn.ReLU()),
    "basic, revnet": lambda: RevBlock(*(pre_activation(Shape(8, 8), (3, 3)) for _ in "fg")),
    "bare, revnet": lambda: RevBlock(
        pre_activation(Shape(8, 8), (3, 3), bare=True), pre_activation(Shape(8, 8), (3, 3))
    ),
    "bottleneck, revnet": lambda: RevBlock(*(pre_activation(Shape(8, 8), (1, 3, 1)) for _ in "fg")),
    "transformer": lambda: RevBlock(vit.Attention(8, 2), vit.Mlp(8)),
}


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", REVERSIBLE)
def test_blocks_run_backwards(name: str, training: bool) -> None:
    block = randomised(REVERSIBLE[name]().double()).train(training)
    shape = (2, 5, 8) if name == "transformer" else (2, 8, 6, 6)
    x1, x2 = torch.randn(2, *shape, dtype=torch.float64)
    y1, y2 = block(x1, x2)
    assert not torch.allclose(y2, x1) and not torch.allclose(y2, x2)
    back = block.inverse(y1, y2)
    for want, have in zip((x1, x2), back, strict=True):
        assert torch.allclose(want, have, rtol=0, atol=1e-10)


# The yardstick: what the compiler makes of timm's models is what is written out here.


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
    name = re.sub(r"^(conv1|bn1)", r"stem.\1", timm_name)
    name = re.sub(r"^fc", "head.fc", name)
    name = re.sub(r"^layer(\d)", lambda m: f"layers.{int(m[1]) - 1}", name)
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
    return randomised(revcompile.reversify(model, x, check="off")), reference, x


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_compiled_resnets_are_petras_revnets(
    rewired_resnet: tuple[nn.Module, nn.Module, Tensor], training: bool
) -> None:
    net, reference, x = rewired_resnet
    compare(net, reference, revnet_name, x, training)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_a_compiled_vit_is_rev_vit(training: bool) -> None:
    model = VisionTransformer(
        img_size=32, patch_size=8, embed_dim=48, depth=3, num_heads=3, num_classes=10
    ).double()
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    net = randomised(revcompile.reversify(model, x, policy="same_parameters"))
    reference = vit.rev_vit(image=32, patch=8, width=48, depth=3, heads=3, num_classes=10)
    compare(net, reference.double(), vit_name, x, training)


def test_models_know_nothing_of_the_compiler() -> None:
    files = sorted(Path(revnet.__file__).parent.glob("*.py"))
    assert len(files) > 3
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [a.name for a in node.names] + [getattr(node, "module", None) or ""]
                assert not any(name.split(".")[0] == "revcompile" for name in names), file
