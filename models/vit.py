"""Rev-ViT: a vision transformer on two streams, whose blocks can all be run backwards.

Both streams start as the embedded patches. Attention reads the second stream and is added to the
first; the MLP reads the first stream and is added to the second. The head reads the mean of both,
so the model has the parameters of a plain ViT.

>>> net = RevViT(image=32, patch=8, width=48, depth=3, heads=3, num_classes=10)
>>> net(torch.randn(2, 3, 32, 32)).shape
torch.Size([2, 10])
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_EPS = 1e-6  # of layer norms, as in the ViT paper; not torch's default


class Attention(nn.Module):
    """F of a transformer: normalise, then every token attends to all tokens."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width, eps=_EPS)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """F(x), with the shape of the tokens, `(batch, tokens, width)`."""
        query, key, value = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm(x)).chunk(3, dim=2)
        )
        found = F.scaled_dot_product_attention(query, key, value)
        out: Tensor = self.proj(found.transpose(1, 2).flatten(2))
        return out


class Mlp(nn.Module):
    """G of a transformer: normalise, then pass each token through a wider layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=_EPS)
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """G(x), with the shape of the tokens."""
        out: Tensor = self.fc2(F.gelu(self.fc1(self.norm(x))))
        return out


class RevBlock(nn.Module):
    """`y1 = x1 + F(x2)`, `y2 = x2 + G(y1)`, RevNet Eq. 6: two couplings in a row."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.f, self.g = Attention(width, heads), Mlp(width)

    def forward(self, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
        """The next pair of streams."""
        y1 = x1 + self.f(x2)
        return y1, x2 + self.g(y1)


class RevViT(nn.Module):
    """Patches and a class token, reversible blocks, and a head on the class token's output."""

    def __init__(
        self, image: int, patch: int, width: int, depth: int, heads: int, num_classes: int
    ) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, width, patch, stride=patch)
        self.cls_token = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.pos_embed = nn.Parameter(torch.randn(1, (image // patch) ** 2 + 1, width) * 0.02)
        self.blocks = nn.ModuleList(RevBlock(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width, eps=_EPS)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of a batch of images."""
        patches = self.patch_embed(x).flatten(2).transpose(1, 2)
        tokens = torch.cat((self.cls_token.expand(len(x), -1, -1), patches), dim=1)
        x1 = x2 = tokens + self.pos_embed
        for block in self.blocks:
            x1, x2 = block(x1, x2)
        out: Tensor = self.head(self.norm((x1 + x2) / 2)[:, 0])
        return out
