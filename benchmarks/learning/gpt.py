"""A small character-level GPT, which language model benchmarks train."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Sizes:
    """Of a GPT."""

    blocks: int = 12
    width: int = 384
    heads: int = 6
    context: int = 256


SIZES = {"char": Sizes(), "wide": Sizes(12, 768, 12, 512), "tiny": Sizes(4, 32, 2, 16)}


class Attention(nn.Module):
    """Causal self-attention behind a layer norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """`(batch, tokens, width)` to the same."""
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        mixed = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        out: Tensor = self.proj(mixed.transpose(1, 2).flatten(-2))
        return out


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """`(batch, tokens, width)` to the same."""
        x = x + self.attention(x)
        out: Tensor = x + self.mlp(x)
        return out


class GPT(nn.Module):
    """Characters to logits of the next ones."""

    def __init__(self, vocabulary: int, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, sizes.width)
        self.positions = nn.Parameter(torch.zeros(sizes.context, sizes.width))
        self.blocks = nn.Sequential(*(Block(sizes.width, sizes.heads) for _ in range(sizes.blocks)))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, vocabulary, bias=False)
        self.apply(self._initialise)
        for block in self.blocks:
            for last in (block.attention.proj, block.mlp[-1]):
                nn.init.normal_(last.weight, std=0.02 / math.sqrt(2 * sizes.blocks))

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """`(batch, tokens)` to `(batch, tokens, vocabulary)`."""
        x = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def next_character_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Cross entropy in nats a character."""
    return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())
