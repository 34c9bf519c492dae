"""Stacks of residual blocks of one width, `x + F(x)` then `x + G(x)`, for all benchmarks."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

CLASSES = 10
HEAD_WIDTH = 64
PATCH = 16


@dataclass(frozen=True)
class Sizes:
    """Of one stack: `side` is the sequence length, or the edge of a square image."""

    depth: int
    width: int
    side: int
    batch: int


class Attention(nn.Module):
    """The first branch of a pre-norm transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // HEAD_WIDTH)
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """`(batch, tokens, width)` to the same."""
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm(x)).reshape(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v)
        out: Tensor = self.proj(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return out


def mlp(width: int) -> nn.Module:
    """The second branch of a pre-norm transformer block."""
    hidden = 4 * width
    return nn.Sequential(
        nn.LayerNorm(width), nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)
    )


def convs(width: int) -> nn.Module:
    """The branch of a pre-activation ResNet's basic block."""
    layers: list[nn.Module] = []
    for _ in range(2):
        conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        layers += [nn.BatchNorm2d(width), nn.ReLU(), conv]
    return nn.Sequential(*layers)


class Block(nn.Module):
    """Two residuals: `x + F(x)`, then `x + G(x)`."""

    def __init__(self, f: nn.Module, g: nn.Module) -> None:
        super().__init__()
        self.f, self.g = f, g

    def forward(self, x: Tensor) -> Tensor:
        """The same shape as `x`."""
        x = x + self.f(x)
        out: Tensor = x + self.g(x)
        return out


class Stack(nn.Module):
    """Stem, blocks, head. With `checkpointed` each block recomputes itself in backward."""

    def __init__(self, stem: nn.Module, blocks: list[Block], head: nn.Module) -> None:
        super().__init__()
        self.stem, self.head = stem, head
        self.blocks = nn.ModuleList(blocks)
        self.checkpointed = False

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        out: Tensor = self.head(x)
        return out


class MeanOfTokens(nn.Module):
    """Pools a sequence."""

    def forward(self, x: Tensor) -> Tensor:
        """`(batch, tokens, width)` to `(batch, width)`."""
        return x.mean(1)


def transformer_stack(depth: int, width: int) -> Stack:
    """Like a ViT after its patches are cut out."""
    blocks = [Block(Attention(width), mlp(width)) for _ in range(depth)]
    head = nn.Sequential(nn.LayerNorm(width), MeanOfTokens(), nn.Linear(width, CLASSES))
    return Stack(nn.Linear(PATCH, width), blocks, head)


def conv_stack(depth: int, width: int) -> Stack:
    """Like one level of a ResNet: two basic blocks make one block here."""
    blocks = [Block(convs(width), convs(width)) for _ in range(depth)]
    pool = nn.Sequential(nn.BatchNorm2d(width), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    head = nn.Sequential(pool, nn.Linear(width, CLASSES))
    return Stack(nn.Conv2d(3, width, 3, padding=1, bias=False), blocks, head)


KINDS: dict[str, Callable[[int, int], Stack]] = {
    "transformer": transformer_stack,
    "conv": conv_stack,
}


def batch_of(kind: str, sizes: Sizes, device: torch.device) -> tuple[Tensor, Tensor]:
    """Inputs and labels for a stack."""
    shape = (sizes.side, PATCH) if kind == "transformer" else (3, sizes.side, sizes.side)
    x = torch.randn(sizes.batch, *shape, device=device)
    return x, torch.randint(CLASSES, (sizes.batch,), device=device)
