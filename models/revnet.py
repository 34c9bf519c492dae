"""RevNets: residual networks on two streams, of which all blocks but a few can be run backwards.

`revnet18`, `revnet34` and `revnet50` are PETRA's: a ResNet v1 whose stem is twice as wide and
split into two streams, and whose head reads both. Every branch is as wide as the ResNet's.
`revnet38`, `revnet110`, `revnet164` and `revnet104` are those of the RevNet paper's Table 2, with
pre-activation branches, each on half of the table's channels.

>>> net = revnet18(num_classes=10, stem="cifar")
>>> net(torch.randn(2, 3, 32, 32)).shape
torch.Size([2, 10])
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.branches import (
    Basic,
    Bottleneck,
    Head,
    Shape,
    Stem,
    StemKind,
    ZeroPad,
    conv,
    initialise,
    norm_relu,
    pre_activation,
    projection,
    stages,
)
from models.reversible import Coupling, Pair, RevBlock

__all__ = [
    "BasicTransition",
    "BottleneckTransition",
    "RevNet",
    "RevTransition",
    "revnet18",
    "revnet34",
    "revnet38",
    "revnet50",
    "revnet104",
    "revnet110",
    "revnet164",
]


class RevNet(nn.Module):
    """A stem split into two streams, blocks from pair to pair, a head that reads both streams."""

    def __init__(self, stem: Stem, layers: list[list[nn.Module]], head: Head) -> None:
        super().__init__()
        self.stem = stem
        self.layers = nn.ModuleList(nn.ModuleList(blocks) for blocks in layers)
        self.head = head
        initialise(self)

    @property
    def blocks(self) -> list[nn.Module]:
        """Every block between stem and head, in order."""
        return [
            block for layer in self.layers if isinstance(layer, nn.ModuleList) for block in layer
        ]

    def forward(self, x: Tensor) -> Tensor:
        """Logits of a batch of images."""
        a, b = self.stem(x).chunk(2, dim=1)
        for block in self.blocks:
            a, b = block(a, b)
        out: Tensor = self.head(torch.cat((a, b), dim=1))
        return out


class BasicTransition(nn.Module):
    """`(a, b) -> (s(b), P(a) + relu(F(b)))`: `s(b)` is the first half of F, at no extra cost."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.branch = Basic(shape)
        self.downsample = projection(shape)

    def forward(self, a: Tensor, b: Tensor) -> Pair:
        """Two streams of the next stage."""
        first = self.branch.first(b)
        return first, self.downsample(a) + F.relu(self.branch.rest(first))


class BottleneckTransition(nn.Module):
    """`(a, b) -> (P'(b), P(a) + relu(F(b)))`: F is narrow inside, so each stream is projected."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.branch = Bottleneck(shape)
        self.downsample = projection(shape)
        self.downsample_b = projection(shape)

    def forward(self, a: Tensor, b: Tensor) -> Pair:
        """Two streams of the next stage."""
        return self.downsample_b(b), self.downsample(a) + F.relu(self.branch(b))


def _petra(
    branch: type[Basic] | type[Bottleneck],
    transition: type[BasicTransition] | type[BottleneckTransition],
    depths: tuple[int, ...],
    num_classes: int,
    stem: StemKind,
) -> RevNet:
    widths = (64, 128, 256, 512) if branch is Basic else (256, 512, 1024, 2048)

    def block(shape: Shape) -> nn.Module:
        return Coupling(branch(shape), nn.ReLU()) if shape.kept else transition(shape)

    layers = [[block(shape) for shape in stage] for stage in stages(64, widths, depths)]
    return RevNet(Stem(stem, 2 * 64), layers, Head(2 * widths[-1], num_classes))


def revnet18(num_classes: int = 1000, stem: StemKind = "imagenet") -> RevNet:
    """12.2 M parameters (PETRA, Table 2)."""
    return _petra(Basic, BasicTransition, (2, 2, 2, 2), num_classes, stem)


def revnet34(num_classes: int = 1000, stem: StemKind = "imagenet") -> RevNet:
    """22.3 M parameters (PETRA, Table 2)."""
    return _petra(Basic, BasicTransition, (3, 4, 6, 3), num_classes, stem)


def revnet50(num_classes: int = 1000, stem: StemKind = "imagenet") -> RevNet:
    """30.4 M parameters (PETRA, Table 2)."""
    return _petra(Bottleneck, BottleneckTransition, (3, 4, 6, 3), num_classes, stem)


class RevTransition(nn.Module):
    """`y1 = P1(x1) + F(x2)`, `y2 = P2(x2) + G(y1)`: a `RevBlock` that changes the shape."""

    def __init__(self, f: nn.Module, g: nn.Module, p1: nn.Module, p2: nn.Module) -> None:
        super().__init__()
        self.f, self.g, self.p1, self.p2 = f, g, p1, p2

    def forward(self, x1: Tensor, x2: Tensor) -> Pair:
        """Two streams of the next stage."""
        y1 = self.p1(x1) + self.f(x2)
        y2 = self.p2(x2) + self.g(y1)
        return y1, y2


def _rev_shortcut(shape: Shape, kernels: tuple[int, ...]) -> nn.Module:
    """P of the RevNet paper: without parameters in basic blocks, a bare 1×1 in bottlenecks."""
    if kernels == (3, 3):
        return ZeroPad(shape, window=shape.stride)
    return conv(shape.inputs, shape.outputs, 1, shape.stride)


def _gomez(
    kernels: tuple[int, ...],
    channels: tuple[int, ...],
    depths: tuple[int, ...],
    num_classes: int,
    stem: StemKind,
) -> RevNet:
    """`channels` are Table 2's: of both streams together; a bottleneck's are those inside it.

    The stem is as wide as the first group, and its streams are half of it each.
    """
    widening = 4 if kernels == (1, 3, 1) else 1
    widths = [count * widening // 2 for count in channels]

    def block(shape: Shape, bare: bool) -> nn.Module:
        f = pre_activation(shape, kernels, bare)
        g = pre_activation(shape.after, kernels)
        if shape.kept:
            return RevBlock(f, g)
        return RevTransition(f, g, _rev_shortcut(shape, kernels), _rev_shortcut(shape, kernels))

    layers = [
        [block(shape, bare=stage == place == 0) for place, shape in enumerate(shapes)]
        for stage, shapes in enumerate(stages(channels[0] // 2, widths, depths))
    ]
    both = 2 * widths[-1]
    return RevNet(Stem(stem, channels[0]), layers, Head(both, num_classes, norm_relu(both)))


def revnet38(num_classes: int = 10) -> RevNet:
    """0.46 M parameters, as many as ResNet-32 (RevNet, Table 2); CIFAR."""
    return _gomez((3, 3), (32, 64, 112), (3, 3, 3), num_classes, "cifar")


def revnet110(num_classes: int = 10) -> RevNet:
    """1.73 M parameters, as many as ResNet-110 (RevNet, Table 2); CIFAR."""
    return _gomez((3, 3), (32, 64, 128), (9, 9, 9), num_classes, "cifar")


def revnet164(num_classes: int = 10) -> RevNet:
    """1.75 M parameters, a little more than ResNet-164 (RevNet, Table 2); CIFAR."""
    return _gomez((1, 3, 1), (32, 64, 128), (9, 9, 9), num_classes, "cifar")


def revnet104(num_classes: int = 1000) -> RevNet:
    """45.4 M parameters, a little more than ResNet-101; ImageNet.

    Table 2 says 45.2 M. Its channels and units, by the rules that give every other count of the
    table to the last printed digit, make 45.4 M.
    """
    return _gomez((1, 3, 1), (128, 256, 512, 832), (2, 2, 11, 2), num_classes, "imagenet")
