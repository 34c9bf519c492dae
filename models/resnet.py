"""ResNets with one stream: those the reversible ones are compared with.

ResNet-20 to -110 for CIFAR and ResNet-18/34/50/101 with a stem for either (He et al. 2015), and
the pre-activation ResNet-32/110/164/101 of the RevNet paper's Table 2.

>>> sum(p.numel() for p in resnet20().parameters())
269722
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

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

__all__ = [
    "ResNet",
    "Residual",
    "preact_resnet32",
    "preact_resnet101",
    "preact_resnet110",
    "preact_resnet164",
    "resnet18",
    "resnet20",
    "resnet32",
    "resnet34",
    "resnet44",
    "resnet50",
    "resnet56",
    "resnet101",
    "resnet110",
]


class Residual(nn.Module):
    """`x -> activation(P(x) + F(x))`; pre-activation blocks have no activation after the sum."""

    def __init__(
        self,
        branch: nn.Module,
        downsample: nn.Module | None = None,
        activation: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.branch = branch
        self.downsample = downsample or nn.Identity()
        self.activation = activation or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        out: Tensor = self.activation(self.downsample(x) + self.branch(x))
        return out


class ResNet(nn.Module):
    """Stem, stages of residual blocks, head."""

    def __init__(self, stem: Stem, layers: list[list[Residual]], head: Head) -> None:
        super().__init__()
        self.stem = stem
        self.layers = nn.Sequential(*(nn.Sequential(*blocks) for blocks in layers))
        self.head = head
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of a batch of images."""
        out: Tensor = self.head(self.layers(self.stem(x)))
        return out


def _post_activation(
    branch: Callable[[Shape], nn.Module],
    shortcut: Callable[[Shape], nn.Module],
    widths: tuple[int, ...],
    depths: tuple[int, ...],
    num_classes: int,
    stem: StemKind,
) -> ResNet:
    """He et al. 2015: the activation comes after the sum."""
    first = 16 if len(widths) == 3 else 64

    def block(shape: Shape) -> Residual:
        return Residual(branch(shape), None if shape.kept else shortcut(shape), nn.ReLU())

    layers = [[block(shape) for shape in stage] for stage in stages(first, widths, depths)]
    return ResNet(Stem(stem, first), layers, Head(widths[-1], num_classes))


def _cifar(depth: int, num_classes: int) -> ResNet:
    blocks = (depth - 2) // 6
    return _post_activation(Basic, ZeroPad, (16, 32, 64), (blocks,) * 3, num_classes, "cifar")


def resnet20(num_classes: int = 10) -> ResNet:
    """0.27 M parameters; CIFAR."""
    return _cifar(20, num_classes)


def resnet32(num_classes: int = 10) -> ResNet:
    """0.46 M parameters; CIFAR."""
    return _cifar(32, num_classes)


def resnet44(num_classes: int = 10) -> ResNet:
    """0.66 M parameters; CIFAR."""
    return _cifar(44, num_classes)


def resnet56(num_classes: int = 10) -> ResNet:
    """0.85 M parameters; CIFAR."""
    return _cifar(56, num_classes)


def resnet110(num_classes: int = 10) -> ResNet:
    """1.7 M parameters; CIFAR."""
    return _cifar(110, num_classes)


_BASIC = partial(_post_activation, Basic, projection, (64, 128, 256, 512))
_BOTTLENECK = partial(_post_activation, Bottleneck, projection, (256, 512, 1024, 2048))


def resnet18(num_classes: int = 1000, stem: StemKind = "imagenet") -> ResNet:
    """11.7 M parameters."""
    return _BASIC((2, 2, 2, 2), num_classes, stem)


def resnet34(num_classes: int = 1000, stem: StemKind = "imagenet") -> ResNet:
    """21.8 M parameters."""
    return _BASIC((3, 4, 6, 3), num_classes, stem)


def resnet50(num_classes: int = 1000, stem: StemKind = "imagenet") -> ResNet:
    """25.6 M parameters."""
    return _BOTTLENECK((3, 4, 6, 3), num_classes, stem)


def resnet101(num_classes: int = 1000, stem: StemKind = "imagenet") -> ResNet:
    """44.5 M parameters."""
    return _BOTTLENECK((3, 4, 23, 3), num_classes, stem)


def _pre_activation(
    kernels: tuple[int, ...],
    widths: tuple[int, ...],
    depths: tuple[int, ...],
    num_classes: int,
    stem: StemKind,
) -> ResNet:
    """RevNet, Eqs. 2 and 3: nothing comes after the sum. Shortcuts are projected in bottlenecks."""
    basic = kernels == (3, 3)
    first = 16 if stem == "cifar" else 64

    def block(shape: Shape, bare: bool) -> Residual:
        branch = pre_activation(shape, kernels, bare)
        if shape.kept:
            return Residual(branch)
        if basic:
            return Residual(branch, ZeroPad(shape, window=shape.stride))
        return Residual(branch, conv(shape.inputs, shape.outputs, 1, shape.stride))

    layers = [
        [block(shape, bare=stage == place == 0) for place, shape in enumerate(shapes)]
        for stage, shapes in enumerate(stages(first, widths, depths))
    ]
    return ResNet(Stem(stem, first), layers, Head(widths[-1], num_classes, norm_relu(widths[-1])))


def preact_resnet32(num_classes: int = 10) -> ResNet:
    """0.46 M parameters (RevNet, Table 2); CIFAR."""
    return _pre_activation((3, 3), (16, 32, 64), (5, 5, 5), num_classes, "cifar")


def preact_resnet110(num_classes: int = 10) -> ResNet:
    """1.73 M parameters (RevNet, Table 2); CIFAR."""
    return _pre_activation((3, 3), (16, 32, 64), (18, 18, 18), num_classes, "cifar")


def preact_resnet164(num_classes: int = 10) -> ResNet:
    """1.70 M parameters (RevNet, Table 2); CIFAR."""
    return _pre_activation((1, 3, 1), (64, 128, 256), (18, 18, 18), num_classes, "cifar")


def preact_resnet101(num_classes: int = 1000) -> ResNet:
    """44.5 M parameters (RevNet, Table 2); ImageNet."""
    widths = (256, 512, 1024, 2048)
    return _pre_activation((1, 3, 1), widths, (3, 4, 23, 3), num_classes, "imagenet")
