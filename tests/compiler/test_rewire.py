"""rewire: the paper's counts, weights that carry over, and values that are what they were."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torchvision
from helpers import assert_exact, refuses
from nets import Chain, Mlp, Returning, module_of
from torch import Tensor, nn
from torch.nn import functional as F

import revcompile
from revcompile.compiler.capture import capture
from revcompile.compiler.find import find
from revcompile.compiler.rewire import rewire
from revcompile.compiler.verify import verify_rewired
from revcompile.errors import VerificationError
from revcompile.ir.policy import Policy
from revcompile.ir.types import Body, Rewired
from revcompile.ir.weight_expansion import WeightExpansion

PAPER = {"resnet18": (12.2, 10, 5), "resnet34": (22.3, 18, 13), "resnet50": (30.4, 18, 12)}


@pytest.mark.parametrize("library", ["timm", "torchvision"])
@pytest.mark.parametrize("name", PAPER)
def test_parameters_and_segments_of_the_paper(name: str, library: str) -> None:
    with torch.device("meta"):
        create = timm.create_model if library == "timm" else torchvision.models.get_model
        model = create(name)
        x = torch.randn(2, 3, 224, 224)
    net = revcompile.reversify(model, x)
    millions, segments, reversible = PAPER[name]
    assert round(sum(p.numel() for p in net.parameters()) / 1e6, 1) == millions
    assert len(net.rewired.body.segments) == segments
    assert len(net.rewired.couplings) == reversible
    assert net.rewired.body.segments[0].name == "stem"
    assert net.rewired.body.segments[-1].name == "head"


def small_resnet(name: str = "resnet50", **options: Any) -> nn.Module:
    """All kinds of blocks that timm's model has, but fewer and narrower."""
    sizes = {"channels": (64, 64, 64, 64)} if "v2" not in name else {}  # the stem has 64
    model: nn.Module = timm.create_model(
        name, num_classes=9, layers=(2, 2, 1, 1), **sizes, **options
    )
    return model


def test_a_state_dict_of_the_original_loads_strictly() -> None:
    x = torch.randn(2, 3, 64, 64)
    first, second = (small_resnet() for _ in range(2))
    net, want = revcompile.reversify(first, x), revcompile.reversify(second, x)
    net.load_state_dict(second.state_dict(), strict=True)
    for (name, have), (_, expected) in zip(
        net.state_dict().items(), want.state_dict().items(), strict=True
    ):
        assert torch.equal(have, expected), name
    net.load_state_dict(want.state_dict(), strict=True)


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "seresnet50", "regnety_002"])
def test_blocks_that_start_as_their_shortcuts_train(name: str) -> None:
    """timm starts the last norm of a branch as 0; a ReLU that moves behind it is flat there."""
    is_resnet = "resnet" in name
    model = small_resnet(name) if is_resnet else timm.create_model(name, num_classes=9)
    x = torch.randn(4, 3, 64, 64)
    net = revcompile.reversify(model, x)
    net(x).square().sum().backward()
    weights = {n: p for n, p in net.named_parameters() if p.dim() > 1}
    assert [n for n, p in weights.items() if p.grad is None or not p.grad.any()] == []
    woken = [
        n
        for n, (_, how) in net.rewired.weight_expansions.items()
        if how is WeightExpansion.REVIVE_ZERO_INIT
    ]
    assert woken
    for norm in woken:
        assert not model.get_parameter(norm).any(), "the user's model stays as it is"
        assert net.get_parameter(norm).eq(1).all()
    nn.init.zeros_(net.get_parameter(woken[0]))
    net.load_state_dict(copy.deepcopy(net.state_dict()))
    assert not net.get_parameter(woken[0]).any(), "a state of the net's own is taken as it is"
    net.load_state_dict({**net.state_dict(), **model.state_dict()})
    assert all(net.get_parameter(norm).eq(1).all() for norm in woken)


@pytest.mark.parametrize("policy", [policy.value for policy in Policy])
def test_a_pretrained_head_means_the_same_under_every_policy(policy: Any) -> None:
    model = chainless().double()
    x = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    net = revcompile.reversify(model, x, policy=policy)
    for mode in (True, False):
        model.train(mode), net.train(mode)
        assert torch.allclose(net(x), model(x), atol=1e-12)


def _slopes() -> nn.Module:
    return module_of(lambda self, x: F.prelu(x, self.slopes), slopes=nn.Parameter(torch.rand(8)))


class _Keyword(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(input=x)


class _Masked(nn.Conv2d):
    """The convolution of PixelCNN."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        mask = torch.ones_like(self.weight)
        mask[:, :, 1, 1:] = mask[:, :, 2:] = 0
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, self.weight * self.mask, self.bias)


class _Centered(nn.BatchNorm2d):
    """Reads all channels of a position."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) - x.mean(1, keepdim=True)


class _Scaled(nn.BatchNorm2d):
    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.register_buffer("scales", torch.rand(channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scales


class _Ends(nn.Module):
    """Branches that return zero, between a stem and a head."""

    def __init__(self, stem: list[nn.Module], branch: nn.Module, head: list[nn.Module]) -> None:
        super().__init__()
        self.stem, self.head = nn.Sequential(*stem), nn.Sequential(*head)
        self.f, self.g = copy.deepcopy(branch), copy.deepcopy(branch)
        for parameter in (*self.f.parameters(), *self.g.parameters()):
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.f(x)
        x = x + self.g(x)
        return self.head(x)


def chainless() -> _Ends:
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)]
    return _Ends([_conv(channels=3), nn.BatchNorm2d(8), nn.ReLU()], _conv(), head)


def _conv(kind: type[nn.Conv2d] = nn.Conv2d, channels: int = 8) -> nn.Conv2d:
    return kind(channels, 8, 3, padding=1)


ENDS = {
    "function with a slope per channel": lambda: (
        [_conv(channels=3), _slopes()],
        _conv(),
        [_slopes(), _conv()],
    ),
    "activation of a keyword": lambda: (
        [_conv(channels=3), _Keyword()],
        _conv(),
        [_Keyword(), _conv()],
    ),
    "masked convolution": lambda: ([_conv(_Masked, 3)], _conv(), [_conv(_Masked)]),
    "norm with a buffer": lambda: (
        [_conv(channels=3), _Scaled(8)],
        _conv(),
        [_Scaled(8), _conv()],
    ),
    "flattened tokens": lambda: (
        [nn.Linear(8, 8), nn.Flatten()],
        nn.Linear(192, 192),
        [nn.Linear(192, 2)],
    ),
}  # fmt: skip
"""Stems and heads that do not treat every channel alone, or not as torch's own layers do."""


@pytest.mark.parametrize("ends", ENDS)
def test_layers_at_the_ends_of_streams_are_widened_only_where_streams_stay_apart(ends: str) -> None:
    model = _Ends(*ENDS[ends]()).double().train()
    x = torch.randn(3, 3, 8, 8, dtype=torch.float64)
    net = revcompile.reversify(model, x)
    torch.testing.assert_close(net(x), model(x), rtol=0, atol=1e-12)


class _Padded(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, (1, 1, 1, 1)))


@pytest.mark.parametrize(("norm", "channels"), [(nn.BatchNorm2d, 16), (_Centered, 8)])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_subclasses_are_widened(device: str, norm: type[nn.BatchNorm2d], channels: int) -> None:
    with torch.device(device):
        model = _Ends([_Padded(3, 8, 3), norm(8)], _conv(), [_conv()])
        net = revcompile.reversify(model, torch.randn(2, 3, 8, 8))
    assert net.get_parameter("stem.0.weight").shape[0] == channels


def test_a_chain_goes_on_through_rearrangements_of_the_stream() -> None:
    def windows(self: Any, x: Tensor) -> Tensor:
        x = x + self.f(x)
        batch, channels, height, width = x.shape
        tokens = x.flatten(2).transpose(1, 2)
        tokens = tokens + self.g(tokens)
        x = tokens.transpose(1, 2).reshape(batch, channels, height, width)
        return x + self.f(x)

    model = module_of(windows, f=nn.Conv2d(4, 4, 1), g=nn.Linear(4, 4))
    rewired = revcompile.reversify(model, torch.randn(2, 4, 6, 6)).rewired
    first, second, third = rewired.couplings
    assert first.rearrange is None and second.rearrange is not None and third.rearrange is not None
    assert second.streams_in == first.streams_out and third.streams_in == second.streams_out


def test_the_verifier_names_what_is_missing() -> None:
    captured = capture(chainless(), torch.randn(2, 3, 8, 8))
    rewired = rewire(captured, find(captured), Policy.PAPER)
    segments = rewired.body.segments
    torn = Rewired(**{**vars(rewired), "body": Body(segments[1:], rewired.body.result, {})})
    refuses(VerificationError, "stem_0 is computed nowhere", verify_rewired, captured, torn)


def test_a_layer_is_as_wide_in_eval_mode_as_in_training() -> None:
    net, x = revcompile.reversify(Returning(), torch.randn(2, 7)), torch.randn(3, 7)
    assert net(x)["logits"].shape == net.eval()(x).shape == (3, 5)
    assert any("keep their widths" in note for note in net.rewired.notes)


def test_a_net_of_dense_layers_takes_inputs_of_any_rank() -> None:
    model = nn.Sequential(nn.Linear(4, 6), Chain(Mlp(), Mlp()), nn.Tanh(), nn.Linear(6, 5))
    net = revcompile.reversify(model, torch.randn(2, 4))
    assert net.get_parameter("3.weight").shape == (5, 12)
    x = torch.randn(3, 5, 4)
    torch.testing.assert_close(net(x), net(x.flatten(0, 1)).view(3, 5, 5))
    torch.testing.assert_close(net(x[0, 0]), net(x[0])[0])


class _Sided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f, self.g = nn.Linear(4, 4), nn.Linear(4, 4)

    def run(self, x: Tensor, side: Tensor) -> Tensor:
        x = x + torch.tanh(self.f(x)) * side
        return x + torch.tanh(self.g(x)) * side


NAMED: dict[str, Callable[..., Any]] = {
    "b": lambda self, x, b: self.run(x, b),
    "x_a": lambda self, x, x_a: self.run(x, x_a),
    "x_a_grid": lambda self, x, x_a_grid: self.run(x, x_a_grid),
    "add_1_fused": lambda self, x, add_1_fused: (self.run(h := self.run(x, x), add_1_fused), h),
    "add_b": lambda self, x, add_b: self.run(x, add_b),
    "key": lambda self, x, key: self.run(x, key),
    "self_": lambda self, x, self_: self.run(x, self_),
}


@pytest.mark.parametrize("name", NAMED)
def test_arguments_may_be_called_like_streams(name: str) -> None:
    model = type("Named", (_Sided,), {"forward": NAMED[name]})()
    example = torch.randn(3, 4), torch.randn(3, 4)
    net = revcompile.reversify(model, example, policy="pretrained").eval()
    torch.testing.assert_close(net(*example), model.eval()(*example))
    assert revcompile.petrafy(model, 2, example, policy="same_parameters").num_stages == 2


def test_a_layer_whose_weight_is_read_elsewhere_keeps_its_width() -> None:
    def second_reader(self: Any, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + torch.tanh(self.block(x))
        x = x + torch.tanh(self.block(x) * 0.5)
        return F.linear(x, self.stem.weight.T)

    model = module_of(second_reader, stem=nn.Linear(4, 6), block=nn.Linear(6, 6))
    net = revcompile.reversify(model, torch.randn(2, 4))
    assert net.stem.weight.shape == (6, 4)
    assert net(torch.randn(3, 4)).shape == (3, 4)


class Skips(nn.Module):
    """A stream, a second one that starts inside its blocks, and skips across both."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(7))
        self.head = nn.Linear(4, 2)

    def f(self, index: int, x: Tensor) -> Tensor:
        return torch.tanh(self.layers[index](x))


class SharedLayer(Skips):
    """The skip `x + ...` spans a block that the second stream reads as well."""

    def forward(self, x: Tensor) -> Tensor:
        a = x + self.f(0, x)
        b = a + self.f(1, a)
        c = x + torch.tanh(self.layers[2](x) * b)
        d = a + torch.tanh(self.layers[3](a) * b)
        e = c + self.f(4, c)
        e = e + self.f(5, e)
        return self.head(e + self.f(6, d) + a + e)


class LateStart(Skips):
    """A block starts from a value inside a block that ends after it."""

    def forward(self, x: Tensor) -> Tensor:
        a = x + self.f(0, x)
        b = a + torch.tanh(self.layers[1](a) * a)
        c = self.f(2, b * x.sigmoid())
        d = a + self.f(3, x) + x
        e = c + self.f(4, c)
        g = d + torch.tanh(self.layers[5](d) * c)
        return self.head(g + torch.tanh(self.layers[6](g) * e) + g)


class ReadFarAway(Skips):
    """Several regions and a block read the mean of one pair of streams; two chains start at `x`."""

    def forward(self, x: Tensor) -> Tensor:
        a = self.f(0, x * x.sigmoid()) + self.f(1, x) + x
        b = x + torch.tanh(self.layers[2](x) * x)
        c = b + torch.tanh(self.layers[3](b) * a)
        d = c + torch.tanh(self.layers[5](c) * (c + self.f(4, a) + a))
        e = d + torch.tanh(self.layers[6](d) * d)
        return self.head(e + d)


@pytest.mark.parametrize("policy", ["paper", "same_parameters"])
@pytest.mark.parametrize("kind", [SharedLayer, LateStart, ReadFarAway])
def test_skips_and_second_streams_are_exact(kind: type[nn.Module], policy: str) -> None:
    staged = revcompile.petrafy(
        kind().double(), 3, torch.randn(3, 4).double(), policy=policy, check="full"
    )
    net: Any = staged.model
    assert net.rewired.couplings
    assert_exact(net, torch.randn(5, 4).double())
