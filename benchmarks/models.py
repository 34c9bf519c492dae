"""The models that benchmarks train: any of timm's, or a stack of equal blocks, on images."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import timm
import torch
from torch import Tensor, nn

from examples.recipe import small_stem
from revcompile.errors import InputError
from tests.support.stacks import KINDS, Stack

STACK = re.compile(r"(\w+)-(\d+)x(\d+)")
"""Kind, depth and width."""
TOKENS = 8
"""Patches along a side of an image, for a stack of transformer blocks."""


@dataclass(frozen=True)
class Case:
    """What is trained: a model's name, the side of its images in pixels, and the micro-batch."""

    model: str
    size: int
    batch: int
    classes: int = 10

    @classmethod
    def parse(cls, text: str) -> Case:
        """Read `model:pixels:batch`.

        >>> Case.parse("resnet18:64:16")
        Case(model='resnet18', size=64, batch=16, classes=10)
        """
        model, size, batch = text.split(":")
        return cls(model, int(size), int(batch))

    def create(self) -> nn.Module:
        """The model, always with the same weights."""
        return create(self.model, self.size, self.classes)

    def data(self, device: torch.device | str = "cpu", seed: int = 0) -> tuple[Tensor, Tensor]:
        """A micro-batch, always the same for a seed."""
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(self.batch, 3, self.size, self.size, generator=generator)
        y = torch.randint(0, self.classes, (self.batch,), generator=generator)
        return x.to(device), y.to(device)

    def __str__(self) -> str:
        return f"{self.model}, {self.size} px, batch {self.batch}"


def create(name: str, size: int, classes: int = 10, *, small: bool = False) -> nn.Module:
    """A model for images of `size` pixels, always with the same weights.

    `name` is timm's, or a stack of blocks: `transformer-12x128` has 12 blocks of width 128,
    `conv-6x32` has 6 of width 32. `small` gives a ResNet a first layer for small images.
    """
    torch.manual_seed(0)
    if match := STACK.fullmatch(name):
        return _stack(match[1], int(match[2]), int(match[3]), size, classes)
    if not timm.is_model(name):
        kinds = " or ".join(f"{kind}-12x64" for kind in KINDS)
        raise InputError(f"no model {name!r}; use a name of timm's, or a stack such as {kinds}")
    model: Any = timm.create_model(name, num_classes=classes)
    own = model.pretrained_cfg.get("input_size", (3, size, size))[-1]
    if size != own and hasattr(model, "set_input_size"):  # transformers are built for one size
        model.set_input_size(img_size=size)
    if small:
        small_stem(model)
    made: nn.Module = model
    return made


class Patches(nn.Module):
    """Cuts an image into tokens."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        side = size // TOKENS
        self.conv = nn.Conv2d(3, width, side, side)

    def forward(self, x: Tensor) -> Tensor:
        """`(batch, 3, size, size)` to `(batch, tokens, width)`."""
        out: Tensor = self.conv(x).flatten(2).transpose(1, 2)
        return out


def _stack(kind: str, depth: int, width: int, size: int, classes: int) -> Stack:
    if kind not in KINDS:
        raise InputError(f"no stack of {kind!r} blocks; there are {', '.join(KINDS)}")
    stack = KINDS[kind](depth, width)
    if kind == "transformer":
        stack.stem = Patches(size, width)
    assert isinstance(stack.head, nn.Sequential)
    stack.head[-1] = nn.Linear(width, classes)
    return stack


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """The same optimizer for all."""
    return torch.optim.SGD(parameters, lr=1e-4, momentum=0.9, fused=True)
