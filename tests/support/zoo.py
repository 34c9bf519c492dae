"""Small models, each awkward to capture in its own way.

    @specimen(image)
    class Lion(nn.Module): ...

registers `Lion` with a function that makes its positional arguments at a batch size. Where a
model takes keyword arguments, `kwargs=` makes those.
"""

import math
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from nets import module_of
from torch import Tensor, nn
from torch.nn import functional as F

Args = Callable[[int], tuple[Any, ...]]
Kwargs = Callable[[int], dict[str, Any]]


class Specimen(NamedTuple):
    """A model and its arguments at any batch size."""

    model: Callable[[], nn.Module]
    args: Args
    kwargs: Kwargs


ZOO: dict[str, Specimen] = {}
"""What FX captures."""

REFUSED: dict[str, Specimen] = {}
"""What nobody can turn into a graph."""


def specimen(
    args: Args, *, kwargs: Kwargs = lambda n: {}, cage: dict[str, Specimen] = ZOO
) -> Callable[[Any], Any]:
    def register(make: Any) -> Any:
        cage[make.__name__] = Specimen(make, args, kwargs)
        return make

    return register


def rows(n: int) -> tuple[Tensor, ...]:
    return (torch.randn(n, 8),)


def tokens(n: int) -> tuple[Tensor, ...]:
    return (torch.randn(n, 5, 8),)


def image(n: int) -> tuple[Tensor, ...]:
    return (torch.randn(n, 3, 8, 8),)


def words(n: int) -> tuple[Tensor, ...]:
    return (torch.randint(0, 11, (n, 6)),)


# -- arguments and results -----------------------------------------------------------------------


class Mlp(nn.Module):
    """The block most of the zoo is made of."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


@specimen(rows)
class OptionalMask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.mlp(x)
        return x if mask is None else x.masked_fill(mask, 0.0)


@specimen(lambda n: ({"x": torch.randn(n, 8), "more": [torch.randn(n, 8)], "k": 2},))
def DictInput() -> nn.Module:
    forward = lambda self, batch: self.mlp(batch["x"]) * batch["k"] + batch["more"][0]  # noqa: E731
    return module_of(forward, mlp=Mlp())


# -- structure -----------------------------------------------------------------------------------


@specimen(rows)
class ListLoop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mlp() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        taken = []
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i % 2 == 0:
                taken.append(x)
        return torch.stack(taken).sum(0)


causal = nn.Transformer.generate_square_subsequent_mask


@specimen(lambda n: (torch.randn(5, n, 8),), kwargs=lambda n: {"mask": causal(5)})
def SequenceFirstEncoder() -> nn.Module:
    """The batch is the second dimension, and a mask has the size of the first."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, norm_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


# -- shared and unusual parameters ---------------------------------------------------------------


@specimen(rows)
def SharedModule() -> nn.Module:
    mlp = Mlp()
    return module_of(lambda self, x: self.second(self.first(x)), first=mlp, second=mlp)


@specimen(words)
class TinyGPT(nn.Module):
    """Embedding and head are one parameter; the causal mask is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(11, 8), nn.Embedding(6, 8)
        self.qkv, self.proj, self.mlp = nn.Linear(8, 24), nn.Linear(8, 8), Mlp()
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.wte.weight
        self.register_buffer("mask", torch.tril(torch.ones(6, 6)).view(1, 1, 6, 6))

    def attend(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = (t.view(B, T, 2, C // 2).transpose(1, 2) for t in self.qkv(x).split(C, dim=2))
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        scores = scores.masked_fill(self.mask[:, :, :T, :T] == 0, float("-inf"))
        return self.proj((scores.softmax(-1) @ v).transpose(1, 2).contiguous().view(B, T, C))

    def forward(self, words: Tensor) -> Tensor:
        _, t = words.size()
        assert t <= 6, "too long"
        x = self.wte(words) + self.wpe(torch.arange(0, t, dtype=torch.long, device=words.device))
        return self.head(self.mlp(x + self.attend(x)))


@specimen(rows)
class PlainTensors(nn.Module):
    """Tensors that are neither parameters nor buffers: an attribute, one in a list, one made."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()
        self.scale = torch.linspace(0.5, 1.5, 8)
        self.shifts = [torch.ones(8)]

    def forward(self, x: Tensor) -> Tensor:
        made = torch.tensor([1.0, -1.0] * 4)
        return self.mlp(x) * self.scale + self.shifts[0] * made


@specimen(rows)
def HalfPrecision() -> nn.Module:
    def any_type(self: Any, x: Tensor) -> Tensor:
        y = self.mlp(x.to(self.mlp.up.weight.dtype))
        y += self.shift.float()
        return y.clamp(min=torch.finfo(y.dtype).min)

    model = module_of(any_type, mlp=Mlp())
    model.register_buffer("shift", torch.randn(8))
    return model.bfloat16()


# -- state ---------------------------------------------------------------------------------------


class Averaged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.mlp(x)
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(y.mean(0), alpha=0.1)
            self.steps += 1
        return y - self.mean.clone()


@specimen(rows)
def BufferInPlace() -> nn.Module:
    return module_of(lambda self, x: self.averaged(x), averaged=Averaged())


# -- randomness ----------------------------------------------------------------------------------


@specimen(rows)
def FunctionalDropout() -> nn.Module:
    forward = lambda self, x: x + F.dropout(self.mlp(x), p=0.3, training=self.training)  # noqa: E731
    return module_of(forward, mlp=Mlp())


@specimen(rows)
def Noise() -> nn.Module:
    """Draws into a tensor that exists before the graph sees it."""
    return nn.Sequential(Mlp(), module_of(lambda self, x: x + torch.zeros(8).uniform_()))


# -- sizes ---------------------------------------------------------------------------------------


@specimen(tokens)
class ShapeArithmetic(nn.Module):
    """Windows folded into the batch, sizes rounded up, positions counted."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.window = Mlp(), 2

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        padded = math.ceil(N / self.window) * self.window
        x = F.pad(x, (0, 0, 0, padded - N))
        windows = x.view(B * (padded // self.window), self.window, C)
        x = self.mlp(windows).view(B, -1, C)[:, :N]
        place = torch.arange(x.shape[1], device=x.device) / max(N, 1)
        *lead, last = x.shape
        return (x + place[None, :, None]).reshape(*lead, 2, last // 2).flatten(-2)


@specimen(tokens)
class RemembersSizes(nn.Module):
    """Sets its own attributes, to the same values every time; one module is not registered."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.shift = Mlp(), 3
        self.activations = [nn.SiLU()]

    def forward(self, x: Tensor) -> Tensor:
        self.length = x.shape[1]
        if self.length < 6:
            self.shift = 1
        return self.activations[0](self.mlp(x.roll(self.shift, dims=1)))


# -- control flow --------------------------------------------------------------------------------


@specimen(rows)
def UntraceableInEvalMode() -> nn.Module:
    """Looks at the data in eval mode only."""

    def guarded(self: Any, x: Tensor) -> Tensor:
        y = self.linear(x)
        if not self.training and y.isnan().any():
            y = torch.zeros_like(y)
        return y

    return nn.Sequential(Mlp(), module_of(guarded, linear=nn.Linear(8, 8)))


@specimen(rows, cage=REFUSED)
class DataDependentTop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            x = self.mlp(x)
        return x


@specimen(rows, cage=REFUSED)
class PythonLayerDrop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mlp() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if not self.training or random.random() > 0.5:
                x = block(x)
        return x
