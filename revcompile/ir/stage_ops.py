"""What generated stage programs call besides torch: recording, vector-Jacobian products, seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from revcompile.ir import ops
from revcompile.kernels.autocast import LOW_PRECISION
from revcompile.kernels.exact_sum import add, grid_for, rounded, subtract

__all__ = [
    "detached",
    "enter_chain",
    "is_seeded_elsewhere",
    "laid_out_like",
    "largest",
    "leaf",
    "minus",
    "mix",
    "no_gradient_as_zeros",
    "normalised",
    "plus",
    "pull_back",
    "recording",
    "reseed",
    "seed_of",
    "seeding",
    "total",
    "wide",
]

_WORD: Final = (1 << 64) - 1
_Gradient = TypeVar("_Gradient", Tensor, Tensor | None)
_seeder: Callable[[int, int], None] | None = None


def recording(on: bool) -> None:
    """From here on autograd records, or does not; statistics move only while it does."""
    torch._C._set_grad_enabled(on)
    ops.statistics_frozen = not on


def normalised(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """A layer with batch norms: running statistics move once a micro-batch, while recording."""
    if not ops.statistics_frozen:
        return module(*args, **kwargs)
    moving = [
        norm
        for norm in module.modules()
        if isinstance(norm, _BatchNorm) and norm.training and norm.track_running_stats
    ]
    for norm in moving:
        norm.__dict__["track_running_stats"] = False
    try:
        return module(*args, **kwargs)
    finally:
        for norm in moving:
            norm.__dict__["track_running_stats"] = True


def leaf(x: Any) -> Any:
    """The value as the beginning of a graph."""
    if isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()):
        return x.detach().requires_grad_()
    return x


def detached(x: Any) -> Any:
    """The value without its graph."""
    return x.detach() if isinstance(x, Tensor) else x


def pull_back(
    outputs: Sequence[Any],
    gradients: Sequence[Tensor | None],
    inputs: Sequence[Any],
    parameters: Sequence[Tensor],
) -> tuple[Tensor | None, ...]:
    """Gradients of inputs and parameters, from gradients of outputs (PETRA, Eq. 2 and 3).

    >>> x = leaf(torch.tensor([2.0, 3.0]))
    >>> pull_back((x * x,), (torch.ones(2),), (x,), ())
    (tensor([4., 6.]),)
    """
    seeded = [
        (out, seed.to(out.dtype))
        for out, seed in zip(outputs, gradients, strict=True)
        if seed is not None and isinstance(out, Tensor) and out.requires_grad
    ]
    wanted = [
        (i, t)
        for i, t in enumerate((*inputs, *parameters))
        if isinstance(t, Tensor) and t.requires_grad
    ]
    found: list[Tensor | None] = [None] * (len(inputs) + len(parameters))
    if seeded and wanted:
        ends, seeds = zip(*seeded, strict=True)
        grads = torch.autograd.grad(ends, [t for _, t in wanted], seeds, allow_unused=True)
        for (index, value), grad in zip(wanted, grads, strict=True):
            found[index] = laid_out_like(value, grad) if index < len(inputs) else grad
    return tuple(found)


def laid_out_like(value: Tensor, gradient: _Gradient) -> _Gradient:
    """A gradient in the memory format of its value.

    Pooling hands out others, which every layer before it would have to rearrange again.
    """
    if gradient is None or not gradient.is_cuda or gradient.stride() == value.stride():
        return gradient
    if gradient.is_sparse or value.shape != gradient.shape:
        return gradient
    return torch.empty_like(value, dtype=gradient.dtype, requires_grad=False).copy_(gradient)


def total(*gradients: Tensor | None) -> Tensor | None:
    """The sum of those gradients that are there."""
    there = [g for g in gradients if g is not None]
    if not there:
        return None
    result = there[0]
    for gradient in there[1:]:
        result = result + gradient
    return result


def no_gradient_as_zeros(gradient: Tensor | None, like: Tensor) -> Tensor:
    """A gradient that operations can be applied to, where the loss may not depend on the value."""
    return torch.zeros_like(like) if gradient is None else gradient


def wide(x: Tensor) -> Tensor:
    """A stream in float32 at least: bf16 streams drift."""
    return x.float() if x.dtype in LOW_PRECISION else x


def enter_chain(
    a: Tensor, b: Tensor, cast: torch.dtype | None, convolves: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The streams of a chain as it keeps them: wide, and on a grid where branches are imprecise."""
    a, b = wide(a), wide(b)
    grid = grid_for(a, b, cast, convolves)
    return rounded(a, grid), rounded(b, grid), grid


def largest(x: Tensor) -> Tensor:
    """All that a grid needs to know of a stream, in one pass over it."""
    return torch.linalg.vector_norm(x.detach(), float("inf")).reshape(1) if x.is_cuda else x


def plus(stream: Tensor, addend: Tensor, grid: Tensor | None) -> Tensor:
    """`a + F(b)`."""
    return add(stream, addend, grid)


def minus(stream: Tensor, addend: Tensor, grid: Tensor | None) -> Tensor:
    """`y - F(b)`, whatever graph F has."""
    return subtract(stream.detach(), addend.detach(), grid)


def mix(key: int, number: int) -> int:
    """A new key from a key and a number; keys that differ a little give unrelated ones.

    >>> mix(1, 2) != mix(2, 1)
    True
    """
    word = (key * 0x9E3779B97F4A7C15 + number + 0x632BE59BD9B4E019) & _WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)


def seed_of(key: int, place: int) -> int:
    """What the random numbers of one piece start from."""
    return mix(key, place) >> 1


def reseed(key: int, place: int) -> None:
    """Start the random numbers of one piece, the same in forward and backward."""
    if _seeder is None:
        torch.manual_seed(seed_of(key, place))
    else:
        _seeder(key, place)


def is_seeded_elsewhere() -> bool:
    """Does somebody else start random numbers, and keep the generators' state, for now?"""
    return _seeder is not None


@contextmanager
def seeding(seeder: Callable[[int, int], None]) -> Iterator[None]:
    """Let `seeder(key, place)` start random numbers: a recorded graph has its own way."""
    global _seeder
    before, _seeder = _seeder, seeder
    try:
        yield
    finally:
        _seeder = before
