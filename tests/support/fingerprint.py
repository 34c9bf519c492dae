"""What a process compiles models to, as text: `python -m tests.support.fingerprint Llama ...`.

Names of values, blocks and buffers, cuts, types and generated programs; printed as one JSON object
from a model's name to that text.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import revcompile

SMALL = ("Llama", "Constants", "Shared", "Streams")


class Block(nn.Module):
    """A decoder block whose matrices w1, w2 and w3 are all of one size."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        for name in ("wq", "wk", "wv", "wo", "w1", "w2", "w3"):
            self.add_module(name, nn.Linear(width, width, bias=False))

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (layer(y).unsqueeze(1) for layer in (self.wq, self.wk, self.wv))
        x = x + self.wo(F.scaled_dot_product_attention(q * turn, k * turn, v).squeeze(1))
        y = self.norm2(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        turn = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)[:, None].cos()
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x, turn)
        return self.head(x)


class Constants(nn.Module):
    """Tensors the model makes from nothing become buffers; branches read several sides."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.tables = [torch.full((8,), 0.1 * i) for i in range(9)]

    def forward(self, x: Tensor) -> Tensor:
        sides = [self.layers[0](x) + table for table in self.tables]
        for layer in self.layers[1:]:
            x = x + torch.tanh(layer(x) + sum(sides[1:], sides[0]))
        return x


class Shared(nn.Module):
    """One layer read by blocks far apart, and a bias all of them share."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.layers[3] = self.layers[0]
        self.bias = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x) + self.bias.chunk(2)[0].repeat(2))
        return x


class Streams(nn.Module):
    """Two streams that read each other."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.right = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        y = x.cos()
        for left, right in zip(self.left, self.right, strict=True):
            x = x + torch.tanh(left(x) * y.sigmoid())
            y = y + torch.tanh(right(y) * x.sigmoid())
        return {"x": x, "y": y}


def compiled(name: str, stages: int) -> revcompile.StagedModel:
    """A model of this file, or one of timm's."""
    torch.manual_seed(0)
    if name in SMALL:
        model, example = globals()[name](), torch.randn(2, 3, 8)
        return revcompile.petrafy(model, stages, example, check="off")
    import timm

    return revcompile.petrafy(timm.create_model(name), stages, check="off")


def fingerprint(net: revcompile.StagedModel) -> str:
    """Everything that two ranks, or a run and its continuation, must agree on."""
    lines = [f"buffer {name}" for name, _ in net.model.named_buffers()]
    lines += [f"parameter {name}" for name, _ in net.model.named_parameters()]
    lines += [f"{name}: {kind}" for name, kind in net.partition.types.items()]
    lines += [str(refusal) for refusal in net.partition.rewired.refusals]
    lines += [f"tied {tie}: {names}" for tie, names in net.partition.ties.items()]
    for stage in net.stages:
        lines += [f"stage {stage.part.index}: {stage.part.inputs} -> {stage.part.outputs}"]
        lines += [piece.name for piece in stage.part.pieces]
        lines += [stage.code, str(stage.generated.forward), str(stage.generated.backward)]
    return "\n".join(lines)


if __name__ == "__main__":
    print(json.dumps({name: fingerprint(compiled(name, 3)) for name in sys.argv[1:]}))
