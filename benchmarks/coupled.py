"""Other packages' reversible blocks: a model's residual branches, coupled by memcnn or revlib.

Neither finds branches by itself. They are known here for stacks and for timm's vision transformers,
whose `blocks` are replaced by one module. Its two streams lie one after the other along the batch,
where splitting them copies nothing; both start as the input, and their mean goes on.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from timm.models.vision_transformer import Block as VisionBlock
from torch import Tensor, nn

from benchmarks.stacks import Block

__all__ = ["PACKAGES", "Missing", "couple"]

Pair = tuple[nn.Module, nn.Module]


class Missing(Exception):
    """Why a peer cannot take part."""


class Coupled(nn.Module):
    """Blocks in a row on two streams."""

    def __init__(self, chain: nn.Module) -> None:
        super().__init__()
        self.chain = chain

    def forward(self, x: Tensor) -> Tensor:
        """The same shape as `x`."""
        first, second = self.chain(torch.cat([x, x])).chunk(2)
        return torch.lerp(first, second, 0.5)


def couple(model: nn.Module, package: str) -> nn.Module:
    """Replace a model's blocks by couplings of `package`; `Missing` if that cannot be done."""
    pairs = _pairs(model)
    made = PACKAGES[package](_imported(package), pairs)
    holder = type(model.blocks)
    model.blocks = holder([Coupled(made)]) if holder is nn.ModuleList else holder(Coupled(made))
    return model


def _memcnn(memcnn: Any, pairs: Sequence[Pair]) -> nn.Module:
    """`y1 = x1 + F(x2); y2 = x2 + G(y1)`."""
    couplings = [memcnn.AdditiveCoupling(f, g, split_dim=0) for f, g in pairs]
    return nn.Sequential(*(memcnn.InvertibleModuleWrapper(coupling) for coupling in couplings))


def _revlib(revlib: Any, pairs: Sequence[Pair]) -> nn.Module:
    """The same, a half at a time."""
    made: nn.Module = revlib.ReversibleSequential(
        *(half for pair in pairs for half in pair), split_dim=0
    )
    return made


PACKAGES: Final[dict[str, Callable[[Any, Sequence[Pair]], nn.Module]]] = {
    "memcnn": _memcnn,
    "revlib": _revlib,
}


def _imported(package: str) -> Any:
    with warnings.catch_warnings(action="ignore"):
        try:
            return importlib.import_module(package)
        except Exception as error:  # an old package may fail in any way
            raise Missing(f"pip install {package} ({type(error).__name__}: {error})") from error


def _pairs(model: nn.Module) -> list[Pair]:
    """The two branches of every block."""
    blocks = list(getattr(model, "blocks", ()))
    if blocks and all(isinstance(block, Block) for block in blocks):
        return [(block.f, block.g) for block in blocks]
    if blocks and all(type(block) is VisionBlock for block in blocks):
        return [
            (
                nn.Sequential(block.norm1, block.attn, block.ls1, block.drop_path1),
                nn.Sequential(block.norm2, block.mlp, block.ls2, block.drop_path2),
            )
            for block in blocks
        ]
    raise Missing(f"the branches of {type(model).__name__} would have to be written out by hand")
