"""Small models, and what each of two ranks does with them under torch's pipeline schedules."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from nets import MaskedSkips, Mlp, Residuals, ResNet, ViT, images, words
from torch import Tensor, distributed, nn
from torch.distributed import pipelining
from torch.nn import functional as F

import revcompile

MICROBATCHES: Final = 4
BATCH: Final = 3
"""Samples a micro-batch; models are compiled with two."""

# -- models ---------------------------------------------------------------------------------------


class Windows(nn.Module):
    """Sizes of the first stage, the batch size among them, are read by later ones."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, 1, 1)
        self.mlps = nn.ModuleList(Mlp() for _ in range(3))
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


class Returning(Residuals):
    """Several outputs while it trains, one otherwise."""

    def __init__(self) -> None:
        super().__init__(4)

    def forward(self, x: Tensor) -> Any:
        x = self.chain(self.stem(x))
        return {"logits": self.head(x), "hidden": x} if self.training else self.head(x)


class Tied(nn.Module):
    """The embedding is the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.mlps = nn.ModuleList(Mlp() for _ in range(4))

    def forward(self, words: Tensor) -> Any:
        x = self.embed(words)
        for mlp in self.mlps:
            x = x + mlp(x)
        return F.linear(x, self.embed.weight)


class Scaled(Residuals):
    """A later stage reads a size that grows with the square of the batch, or its inverse."""

    def __init__(self, inverse: bool) -> None:
        super().__init__(3)
        self.inverse = inverse

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        pairs = (x.unsqueeze(0) + x.unsqueeze(1)).flatten(0, 1).shape[0]
        scale = 1.0 / pairs if self.inverse else pairs
        return self.head(self.chain(x)) * scale


class Renormed(nn.Module):
    """Blocks far apart share a batch norm without weights."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn = nn.Linear(7, 6), nn.BatchNorm1d(6, affine=False)
        self.mlps = nn.ModuleList(Mlp() for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        for mlp in self.mlps:
            x = x + mlp(self.bn(x))
        return x


Inputs = Callable[[int], tuple[Tensor, ...]]
MODELS: Final[dict[str, tuple[Callable[[], nn.Module], Inputs, int]]] = {
    "resnet": (ResNet, images, 2),
    "vit": (functools.partial(ViT, drop=0.0), images, 4),
    "skips": (MaskedSkips, words, 4),
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


NO_INTEGERS: Final = "only Tensors of floating point dtype can require gradients"
"""What the schedules of older torch say of integers that pass between stages."""


def run_rank(rank: int, options: dict[str, Any]) -> dict[str, Any] | str:
    """What this rank found, for every case; or why torch cannot run them."""
    distributed.init_process_group("gloo")
    try:
        return {str(case): by_torch(case, rank) for case in CASES}
    except RuntimeError as error:
        if NO_INTEGERS not in str(error):
            raise
        return NO_INTEGERS
    finally:
        distributed.destroy_process_group()
