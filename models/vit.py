"""Rev-ViT: a vision transformer on two streams, every block of which can be run backwards.

Both streams start as the embedded patches. Attention on the second is added to the first, the MLP
on the first to the second; what the head reads is their mean, which adds no parameter to a plain
ViT, or both next to each other.

>>> net = rev_vit(image=32, patch=8, width=48, depth=3, heads=3, num_classes=10)
>>> net(torch.randn(2, 3, 32, 32)).shape
torch.Size([2, 10])
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.reversible import RevBlock

__all__ = ["Attention", "FuseKind", "Mlp", "RevViT", "rev_vit"]

FuseKind = Literal["mean", "concat"]
_EPS = 1e-6  # of layer norms: the ViT paper's, not torch's


class Attention(nn.Module):
    """F of a transformer: normalise, then every token looks at every other."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"heads: expected a divisor of width={width}, got {heads}")
        self.heads = heads
        self.norm = nn.LayerNorm(width, eps=_EPS)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """F(x), of the tokens' own shape `(batch, tokens, width)`."""
        query, key, value = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm(x)).chunk(3, dim=2)
        )
        found = F.scaled_dot_product_attention(query, key, value)
        out: Tensor = self.proj(found.transpose(1, 2).flatten(2))
        return out


class Mlp(nn.Module):
    """G of a transformer: normalise, then each token by itself through a wider layer."""

    def __init__(self, width: int, ratio: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=_EPS)
        self.fc1 = nn.Linear(width, ratio * width)
        self.fc2 = nn.Linear(ratio * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """G(x), of the tokens' own shape."""
        out: Tensor = self.fc2(F.gelu(self.fc1(self.norm(x))))
        return out


class RevViT(nn.Module):
    """Patches and a class token, reversible blocks, a head on what the class token has become."""

    def __init__(
        self,
        image: int,
        patch: int,
        width: int,
        blocks: list[RevBlock],
        num_classes: int,
        fuse: FuseKind = "mean",
    ) -> None:
        super().__init__()
        if image % patch:
            raise ValueError(f"patch: expected a divisor of image={image}, got {patch}")
        if fuse not in ("mean", "concat"):
            raise ValueError(f"fuse: expected 'mean' or 'concat', got {fuse!r}")
        self.fuse = fuse
        self.patch_embed = nn.Conv2d(3, width, patch, stride=patch)
        self.cls_token = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.pos_embed = nn.Parameter(torch.randn(1, (image // patch) ** 2 + 1, width) * 0.02)
        self.blocks = nn.ModuleList(blocks)
        fused = width if fuse == "mean" else 2 * width
        self.norm = nn.LayerNorm(fused, eps=_EPS)
        self.head = nn.Linear(fused, num_classes)

    def embed(self, x: Tensor) -> Tensor:
        """The tokens of a batch of images: the class token, then the patches."""
        patches = self.patch_embed(x).flatten(2).transpose(1, 2)
        return torch.cat((self.cls_token.expand(len(x), -1, -1), patches), dim=1) + self.pos_embed

    def forward(self, x: Tensor) -> Tensor:
        """Logits of a batch of images."""
        x1 = x2 = self.embed(x)
        for block in self.blocks:
            x1, x2 = block(x1, x2)
        fused = (x1 + x2) / 2 if self.fuse == "mean" else torch.cat((x1, x2), dim=2)
        out: Tensor = self.head(self.norm(fused)[:, 0])
        return out


def rev_vit(
    image: int = 224,
    patch: int = 16,
    width: int = 192,
    depth: int = 12,
    heads: int = 3,
    num_classes: int = 1000,
    fuse: FuseKind = "mean",
) -> RevViT:
    """A Rev-ViT; without arguments as large as ViT-Ti/16, 5.7 M parameters."""
    blocks = [RevBlock(Attention(width, heads), Mlp(width)) for _ in range(depth)]
    return RevViT(image, patch, width, blocks, num_classes, fuse)
