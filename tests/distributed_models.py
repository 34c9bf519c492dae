"""Small models for the tests of several ranks: batch norm, dropout, tied weights."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class BasicBlock(nn.Module):
    def __init__(self, before: int, width: int) -> None:
        super().__init__()
        step, conv = width // before, functools.partial(nn.Conv2d, bias=False)
        self.conv1, self.bn1 = conv(before, width, 3, step, 1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = conv(width, width, 3, 1, 1), nn.BatchNorm2d(width)
        self.short = conv(before, width, 1, step) if step > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Any:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(self.short(x) + y)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        sizes = ((4, 4), (4, 4), (4, 8), (8, 8))
        self.blocks = nn.Sequential(*(BasicBlock(*size) for size in sizes))
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Any:
        return self.fc(self.blocks(F.relu(self.bn(self.conv(x)))).mean((2, 3)))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.2)

    def attention(self, x: Tensor) -> Any:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        weights = (q @ k.transpose(1, 2)).softmax(-1)
        return self.drop(self.out(weights @ v))

    def forward(self, x: Tensor) -> Any:
        x = x + self.attention(self.norm1(x))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class ViT(nn.Module):
    """Dropout everywhere; the class token is a parameter of the first stage."""

    def __init__(self, width: int = 8, depth: int = 3) -> None:
        super().__init__()
        self.patch, self.token = nn.Conv2d(3, width, 4, 4), nn.Parameter(torch.randn(1, 1, width))
        self.position, self.drop = nn.Parameter(torch.randn(1, 5, width)), nn.Dropout(0.1)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Any:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(x.shape[0], -1, -1), x), 1)
        return self.head(self.norm(self.blocks(self.drop(x + self.position)))[:, 0])


class Words(nn.Module):
    """The embedding is the head: the first and the last stage share it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.Sequential(*(Block(8) for _ in range(3)))

    def forward(self, words: Tensor) -> Tensor:
        return F.linear(self.blocks(self.embed(words)), self.embed.weight).mean(1)


MODELS: Final[dict[str, Callable[[], nn.Module]]] = {
    "resnet": ResNet,
    "vit": ViT,
    "words": Words,
    "wide": functools.partial(ViT, 512, 4),
}
