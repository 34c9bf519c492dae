"""Small models that tests train: batch norms, attention, dropout, skips, side inputs, ties.

Those that are only awkward to capture are in `zoo`.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# -- inputs ---------------------------------------------------------------------------------------


def images(size: int) -> tuple[Tensor, ...]:
    return (torch.randn(size, 3, 8, 8, dtype=torch.float64),)


def rows(size: int) -> tuple[Tensor, ...]:
    return (torch.randn(size, 7, dtype=torch.float64),)


def words(size: int) -> tuple[Tensor, ...]:
    return torch.randint(0, 11, (size, 4)), torch.rand(size, 1, 1, dtype=torch.float64)


# -- anything -------------------------------------------------------------------------------------


def module_of(forward: Callable[..., Any], **members: Any) -> Any:
    """A module with these members, whose forward pass is a function of it and its inputs."""
    made = type("Module", (nn.Module,), {"forward": forward})()
    for name, member in members.items():
        setattr(made, name, member)
    return made


# -- convolutions ---------------------------------------------------------------------------------


class BasicBlock(nn.Module):
    def __init__(self, before: int, width: int, normed: bool) -> None:
        super().__init__()
        stride, conv = width // before, functools.partial(nn.Conv2d, bias=False)
        self.conv1, self.bn1 = conv(before, width, 3, stride, 1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = conv(width, width, 3, 1, 1), nn.BatchNorm2d(width)
        self.short: nn.Module = nn.Identity()
        if stride > 1:
            self.short = conv(before, width, 1, stride)
        if stride > 1 and normed:
            self.short = nn.Sequential(self.short, nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Any:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(self.short(x) + y)


class ResNet(nn.Module):
    """Batch norms, post-activation blocks, and a transition in the middle."""

    def __init__(self, widths: Sequence[int] = (4, 4, 4, 8, 8), normed: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, widths[0], 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(widths[0])
        pairs = itertools.pairwise(widths)
        self.blocks = nn.Sequential(*(BasicBlock(a, b, normed) for a, b in pairs))
        self.fc = nn.Linear(widths[-1], 5)

    def forward(self, x: Tensor) -> Any:
        return self.fc(self.blocks(F.relu(self.bn(self.conv(x)))).mean((2, 3)))


# -- attention ------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int, drop: float = 0.2) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(drop)

    def attention(self, x: Tensor) -> Any:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4).unbind()
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.drop(self.out(mixed))

    def forward(self, x: Tensor) -> Any:
        x = x + self.attention(self.norm1(x))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class ViT(nn.Module):
    """Dropout everywhere; the class token is a parameter of the first stage."""

    def __init__(self, width: int = 8, depth: int = 3, drop: float = 0.2) -> None:
        super().__init__()
        self.patch, self.token = nn.Conv2d(3, width, 4, 4), nn.Parameter(torch.randn(1, 1, width))
        self.position, self.drop = nn.Parameter(torch.randn(1, 5, width)), nn.Dropout(drop / 2)
        self.blocks = nn.Sequential(*(Block(width, drop) for _ in range(depth)))
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


# -- residual blocks around anything --------------------------------------------------------------


class Residual(nn.Module):
    """`x + branch(x)`."""

    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch = branch

    def forward(self, x: Tensor) -> Any:
        return x + self.branch(x)


class Chain(nn.Module):
    """`x + block(x)`, block by block."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = x + block(x)
        return x


# -- perceptrons ----------------------------------------------------------------------------------


class Mlp(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Any:
        return self.down(torch.tanh(self.up(x)))


class Residuals(nn.Module):
    """A chain of blocks between a stem and a head, for what a test adds to it."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(7, 6), nn.Linear(6, 5)
        self.mlps = nn.ModuleList(Mlp() for _ in range(depth))

    def chain(self, x: Tensor) -> Tensor:
        for mlp in self.mlps:
            x = x + mlp(x)
        return x


class Returning(Residuals):
    """Several outputs while it trains, one otherwise."""

    def __init__(self) -> None:
        super().__init__(4)

    def forward(self, x: Tensor) -> Any:
        x = self.chain(self.stem(x))
        return {"logits": self.head(x), "hidden": x} if self.training else self.head(x)


class SharedLayer(nn.Module):
    """Two blocks call one layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(6, 3)
        self.mlps = nn.ModuleList(Mlp() for _ in range(2))

    def forward(self, x: Tensor) -> Any:
        for mlp in self.mlps:
            x = x + mlp(self.layer(x))
        return self.head(x)


class Skips(nn.Module):
    """A value of the first stage is read at the end; another chain begins after that."""

    def __init__(self) -> None:
        super().__init__()
        self.stem: nn.Module = nn.Linear(7, 6)
        self.down = nn.Linear(6, 6)
        self.first = nn.ModuleList(Mlp() for _ in range(4))
        self.merge = nn.Linear(12, 6)
        self.second = nn.ModuleList(Mlp() for _ in range(2))
        self.head = nn.Linear(6, 5)

    def between(self, x: Tensor) -> Any:
        skip = torch.sin(self.stem(x))
        x = self.down(skip)
        for mlp in self.first:
            x = x + mlp(x)
        x = torch.tanh(self.merge(torch.cat((x, skip), dim=-1)))
        for mlp in self.second:
            x = x + mlp(x)
        return x + skip

    def forward(self, x: Tensor) -> Any:
        return self.head(self.between(x))


class MaskedSkips(Skips):
    """A mask and plain data are read at the end, too."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Embedding(11, 6)

    def forward(self, words: Tensor, weight: Tensor) -> Any:  # type: ignore[override]
        return self.head((self.between(words) * weight * (words != 3).unsqueeze(-1)).mean(1))


class Arranged(nn.Module):
    """Blocks on images, then on tokens of the same elements: a coupling with a link."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, 2, 1)
        self.convs = nn.ModuleList(nn.Conv2d(6, 6, 3, padding=1) for _ in range(3))
        self.mlps = nn.ModuleList(Mlp() for _ in range(3))
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        for conv in self.convs:
            x = x + torch.tanh(conv(x))
        x = x.flatten(2).transpose(1, 2)
        for mlp in self.mlps:
            x = x + mlp(x)
        return self.head(x.mean(1))


class Dropped(nn.Module):
    """Dropout on images, if there are convolutions, and on tokens, which are views of images."""

    def __init__(self, convs: int = 2) -> None:
        super().__init__()
        self.stem, self.drop = nn.Conv2d(3, 4, 1), nn.Dropout(0.2)
        self.convs = nn.ModuleList(nn.Conv2d(4, 4, 1) for _ in range(convs))
        self.linears = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        for conv in self.convs:
            x = x + self.drop(torch.tanh(conv(x)))
        x = x.flatten(2).transpose(1, 2)
        for linear in self.linears:
            x = x + torch.tanh(linear(self.drop(x)))
        return x


class Gated(nn.Module):
    """A branch with a side input that has a gradient."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.mlp = Mlp(width)

    def forward(self, x: Tensor, gate: Tensor) -> Any:
        return x + self.mlp(x) * torch.sigmoid(gate)


class GatedWords(nn.Module):
    """Side inputs; the embedding is the head; two blocks far apart share a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.gate = nn.Linear(6, 6)
        blocks = [Gated() for _ in range(6)]
        blocks[4].mlp.up = blocks[1].mlp.up
        self.blocks = nn.ModuleList(blocks)

    def forward(self, words: Tensor, weight: Tensor) -> Any:
        x = self.embed(words)
        gate = self.gate(x) * weight
        for block in self.blocks:
            x = block(x, gate)
        return F.linear(x, self.embed.weight).mean(1)


class Offset(nn.Module):
    """Parameters of a sample's own shape are added to the stream."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.mlp, self.offset = Mlp(width), nn.Parameter(torch.zeros(1, width))

    def forward(self, x: Tensor) -> Any:
        return x + (self.mlp(x) + self.offset)


class Offsets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(7, 6), nn.Linear(6, 5)
        self.blocks = nn.Sequential(*(Offset() for _ in range(6)))

    def forward(self, x: Tensor) -> Any:
        return self.head(self.blocks(self.stem(x)))


# -- as pretrained models are ---------------------------------------------------------------------


class LoRA(nn.Module):
    """A frozen layer with an adapter of rank two, which starts with an effect."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.down = nn.Parameter(torch.full_like(inner.weight.T[:, :2], 0.1))
        self.up = nn.Parameter(torch.full_like(inner.weight.T[:2], 0.2))

    def forward(self, x: Tensor) -> Any:
        return self.inner(x) + x @ self.down @ self.up


class PreNorm(nn.Module):
    """Pre-norm blocks with dropout."""

    def __init__(self, width: int, depth: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.Dropout(dropout))
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)
