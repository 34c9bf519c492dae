"""PETRA's RevNets: a ResNet v1 on two streams.

The stem is twice as wide and split into two streams, and the head reads both. Every branch is as
wide as the ResNet's.

>>> net = revnet18(num_classes=10)
>>> net(torch.randn(2, 3, 32, 32)).shape
torch.Size([2, 10])
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Pair = tuple[Tensor, Tensor]


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    """A convolution that changes the image's size only by its stride; a norm supplies the bias."""
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)


class Basic(nn.Module):
    """F of ResNet-18 and -34: two 3×3 convolutions. `first` and `rest` are its two halves."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = _conv(inputs, outputs, 3, stride), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = _conv(outputs, outputs, 3), nn.BatchNorm2d(outputs)

    def first(self, x: Tensor) -> Tensor:
        """The first convolution with its norm; the result already has the output's shape."""
        out: Tensor = self.bn1(self.conv1(x))
        return out

    def rest(self, first: Tensor) -> Tensor:
        """The layers after `first`."""
        out: Tensor = self.bn2(self.conv2(F.relu(first)))
        return out

    def forward(self, x: Tensor) -> Tensor:
        """F(x), without the activation that follows the sum."""
        return self.rest(self.first(x))


class Bottleneck(nn.Module):
    """F of ResNet-50: a 3×3 convolution on a quarter of the channels, between two 1×1 ones."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        narrow = outputs // 4
        self.conv1, self.bn1 = _conv(inputs, narrow, 1), nn.BatchNorm2d(narrow)
        self.conv2, self.bn2 = _conv(narrow, narrow, 3, stride), nn.BatchNorm2d(narrow)
        self.conv3, self.bn3 = _conv(narrow, outputs, 1), nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        """F(x), without the activation that follows the sum."""
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        out: Tensor = self.bn3(self.conv3(x))
        return out


Branch = type[Basic] | type[Bottleneck]


class Coupling(nn.Module):
    """`(a, b) -> (b, a + relu(F(b)))`, PETRA Fig. 2: the activation after the sum joins F."""

    def __init__(self, branch: Branch, channels: int) -> None:
        super().__init__()
        self.branch = branch(channels, channels, 1)

    def forward(self, a: Tensor, b: Tensor) -> Pair:
        """The next pair of streams."""
        return b, a + F.relu(self.branch(b))


class Transition(nn.Module):
    """`(a, b) -> (s(b), P(a) + relu(F(b)))`: two streams of another shape.

    In a basic block, `s(b)` is the first half of F. A bottleneck is narrow inside; there, `s` is a
    projection like P.
    """

    def __init__(self, branch: Branch, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()

        def projection() -> nn.Module:
            return nn.Sequential(_conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))

        self.branch = branch(inputs, outputs, stride)
        self.downsample = projection()
        self.downsample_b = projection() if branch is Bottleneck else None

    def forward(self, a: Tensor, b: Tensor) -> Pair:
        """Two streams of the next stage."""
        if self.downsample_b is not None:
            return self.downsample_b(b), self.downsample(a) + F.relu(self.branch(b))
        assert isinstance(self.branch, Basic)
        first = self.branch.first(b)
        return first, self.downsample(a) + F.relu(self.branch.rest(first))


class RevNet(nn.Module):
    """A stem split into two streams, blocks from pair to pair, a head that reads both streams."""

    def __init__(self, branch: Branch, depths: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = _conv(3, 2 * 64, 7, stride=2), nn.BatchNorm2d(2 * 64)
        self.layers, width = nn.ModuleList(), 64
        for index, depth in enumerate(depths):
            inputs, width = width, (64 if branch is Basic else 256) << index
            first: nn.Module = Coupling(branch, width)
            if inputs != width:
                first = Transition(branch, inputs, width, 1 if index == 0 else 2)
            rest = (Coupling(branch, width) for _ in range(depth - 1))
            self.layers.append(nn.ModuleList([first, *rest]))
        self.fc = nn.Linear(2 * width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of a batch of images."""
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, stride=2, padding=1)
        a, b = x.chunk(2, dim=1)
        for block in (block for layer in self.layers for block in layer):  # type: ignore[attr-defined]
            a, b = block(a, b)
        out: Tensor = self.fc(torch.cat((a, b), dim=1).mean((2, 3)))
        return out


def revnet18(num_classes: int = 1000) -> RevNet:
    """12.2 M parameters (PETRA, Table 2)."""
    return RevNet(Basic, (2, 2, 2, 2), num_classes)


def revnet34(num_classes: int = 1000) -> RevNet:
    """22.3 M parameters (PETRA, Table 2)."""
    return RevNet(Basic, (3, 4, 6, 3), num_classes)


def revnet50(num_classes: int = 1000) -> RevNet:
    """30.4 M parameters (PETRA, Table 2)."""
    return RevNet(Bottleneck, (3, 4, 6, 3), num_classes)
