"""What residual networks of images are made of: stems, residual functions F, shortcuts P.

The same pieces stand in the one-stream models (`resnet`) and in the two-stream ones (`revnet`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = [
    "Basic",
    "Bottleneck",
    "Head",
    "Shape",
    "Stem",
    "StemKind",
    "ZeroPad",
    "conv",
    "initialise",
    "norm_relu",
    "pre_activation",
    "projection",
    "stages",
]

StemKind = Literal["imagenet", "cifar"]


def conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    """A convolution that keeps the image's size but for its stride; a norm supplies the bias."""
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)


def norm_relu(channels: int) -> nn.Sequential:
    """Batch norm and relu: `a(x)` of RevNet, Eq. 3."""
    return nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU())


class Stem(nn.Module):
    """From pixels to the first features.

    `imagenet` shrinks the image fourfold; `cifar` (3×3, no max-pooling) keeps its size.
    """

    def __init__(self, kind: StemKind, outputs: int) -> None:
        super().__init__()
        if kind not in ("imagenet", "cifar"):
            raise ValueError(f"stem: expected 'imagenet' or 'cifar', got {kind!r}")
        shrinks = kind == "imagenet"
        self.conv1 = conv(3, outputs, 7, stride=2) if shrinks else conv(3, outputs, 3)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1) if shrinks else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Features of an image."""
        out: Tensor = self.pool(F.relu(self.bn1(self.conv1(x))))
        return out


class Head(nn.Module):
    """Average over the image, then one linear layer. Pre-activation models normalise first."""

    def __init__(self, channels: int, num_classes: int, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.norm = norm or nn.Identity()
        self.fc = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the last features."""
        out: Tensor = self.fc(self.norm(x).mean((2, 3)))
        return out


@dataclass(frozen=True)
class Shape:
    """Channels in, channels out and stride of one residual block."""

    inputs: int
    outputs: int
    stride: int = 1

    @property
    def kept(self) -> bool:
        """Does the block's output look like its input, so that its shortcut is the identity?"""
        return self.inputs == self.outputs and self.stride == 1

    @property
    def after(self) -> Shape:
        """A block that keeps the shape this one has made."""
        return Shape(self.outputs, self.outputs)


def stages(stem: int, widths: Sequence[int], depths: Sequence[int]) -> Iterator[list[Shape]]:
    """The shapes of every stage's blocks: each stage but the first starts by halving the image.

    >>> [[(s.inputs, s.outputs, s.stride) for s in stage] for stage in stages(16, (16, 32), (1, 2))]
    [[(16, 16, 1)], [(16, 32, 2), (32, 32, 1)]]
    """
    inputs = stem
    for index, (width, depth) in enumerate(zip(widths, depths, strict=True)):
        first = Shape(inputs, width, stride=1 if index == 0 else 2)
        yield [first] + [first.after] * (depth - 1)
        inputs = width


class Basic(nn.Module):
    """F of ResNet-18 and -34: two 3×3 convolutions. `first` and `rest` are its two halves."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.conv1 = conv(shape.inputs, shape.outputs, 3, shape.stride)
        self.bn1 = nn.BatchNorm2d(shape.outputs)
        self.conv2 = conv(shape.outputs, shape.outputs, 3)
        self.bn2 = nn.BatchNorm2d(shape.outputs)

    def first(self, x: Tensor) -> Tensor:
        """The first convolution with its norm: already of the output's shape."""
        out: Tensor = self.bn1(self.conv1(x))
        return out

    def rest(self, first: Tensor) -> Tensor:
        """What follows `first`."""
        out: Tensor = self.bn2(self.conv2(F.relu(first)))
        return out

    def forward(self, x: Tensor) -> Tensor:
        """F(x), short of the activation that follows the sum."""
        return self.rest(self.first(x))


class Bottleneck(nn.Module):
    """F of ResNet-50: a 3×3 convolution on a quarter of the channels, between two 1×1 ones."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        narrow = shape.outputs // 4
        self.conv1 = conv(shape.inputs, narrow, 1)
        self.bn1 = nn.BatchNorm2d(narrow)
        self.conv2 = conv(narrow, narrow, 3, shape.stride)
        self.bn2 = nn.BatchNorm2d(narrow)
        self.conv3 = conv(narrow, shape.outputs, 1)
        self.bn3 = nn.BatchNorm2d(shape.outputs)

    def forward(self, x: Tensor) -> Tensor:
        """F(x), short of the activation that follows the sum."""
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        out: Tensor = self.bn3(self.conv3(x))
        return out


def pre_activation(shape: Shape, kernels: tuple[int, ...], bare: bool = False) -> nn.Sequential:
    """F of RevNet, Eq. 3: batch norm, relu and a convolution, once per kernel.

    Kernels `(3, 3)` make the basic function, `(1, 3, 1)` the bottleneck, a quarter as wide
    inside. A `bare` one starts with its convolution: right after the stem, which ends in a relu.
    """
    inside = shape.outputs // 4 if kernels == (1, 3, 1) else shape.outputs
    channels = [shape.inputs, *[inside] * (len(kernels) - 1), shape.outputs]
    layers: list[nn.Module] = []
    for index, kernel in enumerate(kernels):
        if index > 0 or not bare:
            layers.append(norm_relu(channels[index]))
        stride = shape.stride if index == 0 else 1
        layers.append(conv(channels[index], channels[index + 1], kernel, stride))
    return nn.Sequential(*layers)


def projection(shape: Shape) -> nn.Sequential:
    """P of ResNet v1: a 1×1 convolution and its norm."""
    return nn.Sequential(
        conv(shape.inputs, shape.outputs, 1, shape.stride), nn.BatchNorm2d(shape.outputs)
    )


class ZeroPad(nn.Module):
    """P without parameters: a smaller image, and zeros for the channels that are new.

    A pixel is the mean over a `window`: 1 takes every other pixel (ResNet, option A), the stride
    averages (RevNet).
    """

    def __init__(self, shape: Shape, window: int = 1) -> None:
        super().__init__()
        self.window, self.stride = window, shape.stride
        new = shape.outputs - shape.inputs
        self.before, self.behind = new // 2, new - new // 2

    def forward(self, x: Tensor) -> Tensor:
        """P(x)."""
        x = F.avg_pool2d(x, self.window, self.stride)
        return F.pad(x, (0, 0, 0, 0, self.before, self.behind))


@torch.no_grad()
def initialise(model: nn.Module) -> None:
    """He et al.'s start: convolutions that keep the variance of what flows back."""
    for module in model.modules():
        # On the meta device there is nothing to fill, and torch takes long to do so.
        if isinstance(module, nn.Conv2d) and not module.weight.is_meta:
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
