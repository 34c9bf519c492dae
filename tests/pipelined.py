"""Small models, and what each of two ranks does with them under torch's pipeline schedules."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, distributed, nn
from torch.distributed import pipelining
from torch.nn import functional as F

import revcompile

MICROBATCHES: Final = 4
BATCH: Final = 3
"""Samples a micro-batch; models are compiled with two."""

# -- models ---------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, before: int, width: int) -> None:
        super().__init__()
        stride = width // before
        self.conv, self.bn = nn.Conv2d(before, width, 3, stride, 1), nn.BatchNorm2d(width)
        self.short = nn.Conv2d(before, width, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Any:
        return F.relu(self.short(x) + self.bn(self.conv(x)))


class ResNet(nn.Module):
    """Batch norms, and a transition in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        widths = itertools.pairwise((4, 4, 4, 8, 8, 8))
        self.blocks = nn.Sequential(*(Block(a, b) for a, b in widths))
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Any:
        return self.fc(self.blocks(F.relu(self.bn(self.conv(x)))).mean((2, 3)))


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Any:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4).unbind()
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Any:
        return self.down(torch.tanh(self.up(x)))


class ViT(nn.Module):
    def __init__(self, width: int = 8, depth: int = 3) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, width))
        self.place = nn.Parameter(torch.randn(1, 5, width))
        self.attention = nn.ModuleList(Attention(width) for _ in range(depth))
        self.mlp = nn.ModuleList(Mlp(width) for _ in range(depth))
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Any:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(x.shape[0], -1, -1), x), 1) + self.place
        for attention, mlp in zip(self.attention, self.mlp, strict=True):
            x = x + attention(x)
            x = x + mlp(x)
        return self.head(x[:, 0])


class Skips(nn.Module):
    """A value of the first stage, a mask and plain data are read at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.down = nn.Embedding(11, 6), nn.Linear(6, 6)
        self.first = nn.ModuleList(Mlp(6) for _ in range(4))
        self.merge = nn.Linear(12, 6)
        self.second = nn.ModuleList(Mlp(6) for _ in range(2))
        self.head = nn.Linear(6, 5)

    def forward(self, words: Tensor, weight: Tensor) -> Any:
        skip = torch.sin(self.embed(words))
        x = self.down(skip)
        for mlp in self.first:
            x = x + mlp(x)
        x = torch.tanh(self.merge(torch.cat((x, skip), dim=-1)))
        for mlp in self.second:
            x = x + mlp(x)
        return self.head(((x + skip) * weight * (words != 3).unsqueeze(-1)).mean(1))


class Windows(nn.Module):
    """Sizes of the first stage, the batch size among them, are read by later ones."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, 1, 1)
        self.mlps = nn.ModuleList(Mlp(6) for _ in range(3))
        self.convs = nn.ModuleList(nn.Conv2d(6, 6, 3, padding=1) for _ in range(3))
        self.head = nn.Linear(6 * 16, 5)

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        batch, width, height, _ = x.shape
        x = x.flatten(2).transpose(1, 2)
        for mlp, conv in zip(self.mlps, self.convs, strict=True):
            windows = x.reshape(batch * 4, 16, width)
            x = x + mlp(windows).reshape(batch, height * 8, width)
            image = x.transpose(1, 2).reshape(batch, width, height, 8)
            x = x + torch.tanh(conv(image)).flatten(2).transpose(1, 2)
        return self.head(x.reshape(batch * 4, -1)).reshape(batch, 4, -1).mean(1)


class Arranged(nn.Module):
    """Blocks on images, then on tokens of the same elements."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 6, 3), nn.Linear(6, 5)
        self.convs = nn.ModuleList(nn.Conv2d(6, 6, 3, padding=1) for _ in range(2))
        self.mlps = nn.ModuleList(Mlp(6) for _ in range(2))

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        for conv in self.convs:
            x = x + torch.tanh(conv(x))
        x = x.flatten(2).transpose(1, 2)
        for mlp in self.mlps:
            x = x + mlp(x)
        return self.head(x.mean(1))


class Returning(nn.Module):
    """Several outputs while it trains, one otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(7, 6), nn.Linear(6, 5)
        self.mlps = nn.ModuleList(Mlp(6) for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        for mlp in self.mlps:
            x = x + mlp(x)
        return {"logits": self.head(x), "hidden": x} if self.training else self.head(x)


class Tied(nn.Module):
    """The embedding is the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.mlps = nn.ModuleList(Mlp(6) for _ in range(4))

    def forward(self, words: Tensor) -> Any:
        x = self.embed(words)
        for mlp in self.mlps:
            x = x + mlp(x)
        return F.linear(x, self.embed.weight)


class Scaled(nn.Module):
    """A later stage reads a size that grows with the square of the batch, or its inverse."""

    def __init__(self, inverse: bool) -> None:
        super().__init__()
        self.inverse = inverse
        self.stem, self.head = nn.Linear(7, 6), nn.Linear(6, 5)
        self.mlps = nn.ModuleList(Mlp(6) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        pairs = (x.unsqueeze(0) + x.unsqueeze(1)).flatten(0, 1).shape[0]
        scale = 1.0 / pairs if self.inverse else pairs
        for mlp in self.mlps:
            x = x + mlp(x)
        return self.head(x) * scale


class Renormed(nn.Module):
    """Blocks far apart share a batch norm without weights."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn = nn.Linear(7, 6), nn.BatchNorm1d(6, affine=False)
        self.mlps = nn.ModuleList(Mlp(6) for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        for mlp in self.mlps:
            x = x + mlp(self.bn(x))
        return x


def images(size: int) -> tuple[Tensor, ...]:
    return (torch.randn(size, 3, 8, 8, dtype=torch.float64),)


def rows(size: int) -> tuple[Tensor, ...]:
    return (torch.randn(size, 7, dtype=torch.float64),)


def words(size: int) -> tuple[Tensor, ...]:
    return torch.randint(0, 11, (size, 4)), torch.rand(size, 1, 1, dtype=torch.float64)


Inputs = Callable[[int], tuple[Tensor, ...]]
MODELS: Final[dict[str, tuple[Callable[[], nn.Module], Inputs, int]]] = {
    "resnet": (ResNet, images, 2),
    "vit": (ViT, images, 4),
    "skips": (Skips, words, 4),
    "windows": (Windows, images, 2),
}
"""Each with a maker of its inputs, and a number of stages: one or two for each of two ranks."""


@functools.cache
def compiled(name: str) -> revcompile.StagedModel:
    make, inputs, stages = MODELS[name]
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return revcompile.petrafy(make().double().train(), stages, inputs(2), check="off")


@functools.cache
def data(name: str) -> tuple[tuple[Tensor, ...], Tensor]:
    size = BATCH * MICROBATCHES
    with torch.random.fork_rng():
        torch.manual_seed(4)
        return MODELS[name][1](size), torch.randint(0, 5, (size,))


# -- schedules ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A model under one of torch's schedules, and the method of ours it must equal."""

    model: str
    schedule: str
    method: str
    reversible: bool = False

    @property
    def stages(self) -> int:
        return MODELS[self.model][2]

    def mine(self, rank: int) -> tuple[int, ...]:
        """A rank's stages: every other one, or there and back again."""
        if "ZBV" in self.schedule:
            return (rank, self.stages - 1 - rank)
        return tuple(range(rank, self.stages, 2))

    def __str__(self) -> str:
        return f"{self.model}-{self.schedule}" + "-reversible" * self.reversible


CASES: Final = (
    Case("resnet", "ScheduleGPipe", "gpipe"),
    Case("resnet", "Schedule1F1B", "1f1b"),
    Case("resnet", "Schedule1F1B", "1f1b", reversible=True),
    Case("windows", "ScheduleGPipe", "gpipe", reversible=True),
    Case("windows", "Schedule1F1B", "1f1b"),
    Case("vit", "ScheduleInterleaved1F1B", "1f1b"),
    Case("vit", "ScheduleInterleaved1F1B", "1f1b", reversible=True),
    Case("vit", "ScheduleInterleavedZeroBubble", "1f1b"),
    Case("skips", "ScheduleLoopedBFS", "gpipe"),
    Case("skips", "ScheduleZBVZeroBubble", "1f1b"),
)


def by_torch(case: Case, rank: int) -> dict[str, Any]:
    """One step of a schedule: this rank's losses, gradients and buffers."""
    inputs, target = data(case.model)
    modules = compiled(case.model).to_pipeline_stages(reversible=case.reversible)
    mine = [modules[index] for index in case.mine(rank)]
    device = torch.device("cpu")
    stages = [
        pipelining.PipelineStage(modules[index], index, case.stages, device)
        for index in case.mine(rank)
    ]
    is_single = case.stages == 2
    make = getattr(pipelining, case.schedule)
    schedule = make(stages[0] if is_single else stages, MICROBATCHES, loss_fn=F.cross_entropy)
    losses: list[Tensor] = []
    is_last = case.stages - 1 in case.mine(rank)
    fed = inputs if 0 in case.mine(rank) else ()
    schedule.step(*fed, target=target if is_last else None, losses=losses)
    return {"losses": [float(loss) for loss in losses], "state": state_of(mine)}


def state_of(modules: Sequence[nn.Module]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for module in modules:
        found |= {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
        found |= {f"buffer {n}": b for n, b in module.named_buffers() if b.is_floating_point()}
    return found


def run_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2
    )
    torch.save({str(case): by_torch(case, rank) for case in CASES}, f"{folder}/{rank}.pt")
    distributed.destroy_process_group()
