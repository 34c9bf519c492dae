"""Exactly invertible sums, for branches that compute in low precision.

A float32 sum is rounded, so `y - F(b)` misses `a` by a last bit. To a float32 branch that does
not matter. A bfloat16 (or TF32) branch amplifies it: the input of the next block, off by 1e-8,
rounds to another bfloat16 here and there, and some blocks further every element is wrong (a
ViT-Large reconstructs to 6e-2). For such branches, all addends are rounded to multiples of one
number g, the grid, before they are added: sums of multiples of g up to 2**24 g are exact in
float32, and so is undoing them.

g is about 2**-17 of the largest element of the chain's input, far below what a branch of that
precision can tell apart. If that element is small, as in embeddings before training, g is larger,
up to 2**-11 of it: what normalised branches add does not depend on their input's size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from revcompile.kernels.autocast import is_autocasting
from revcompile.kernels.layout import like
from revcompile.kernels.loading import triton_module

HEADROOM: Final = 7
"""Streams may grow to 2**HEADROOM times their largest input before sums are inexact again."""
_USUAL: Final = 2.0
_MORE: Final = 64.0
"""Inputs below `_USUAL` count as that large, but as at most `_MORE` times their size."""


def is_imprecise(stream: Tensor, cast: torch.dtype | None, convolves: bool) -> bool:
    """Whether branches on this float32 stream compute in fewer bits (autocast, TF32)."""
    if stream.dtype != torch.float32:
        return False
    if cast is not None or is_autocasting(stream.device):
        return True
    if not stream.is_cuda:
        return False
    by_matmul: bool = torch.backends.cuda.matmul.allow_tf32
    by_convolution: bool = convolves and torch.backends.cudnn.allow_tf32
    return by_matmul or by_convolution


def make_grid(a: Tensor, b: Tensor) -> Tensor:
    """The number whose addition to a value leaves no bit below g. Does not wait for the device.

    >>> grid = make_grid(torch.tensor([3.0]), torch.tensor([-1.0]))
    >>> float(rounded(torch.tensor([0.1]), grid) * 2**15)
    3277.0
    """
    with torch.no_grad():
        largest = torch.maximum(_largest(a), _largest(b)).float().clamp_min(2.0**-60)
        largest = torch.maximum(largest, (_MORE * largest).clamp_max(_USUAL))
        exponent = torch.log2(largest).ceil() + (HEADROOM - 1)
        return 1.5 * torch.exp2(exponent).reshape(1)  # one dimension: decides the sum's type


def grid_for(a: Tensor, b: Tensor, cast: torch.dtype | None, convolves: bool) -> Tensor | None:
    """The grid of a chain with these input streams; None if its branches need none."""
    return make_grid(a, b) if is_imprecise(a, cast, convolves) else None


def _largest(x: Tensor) -> Tensor:
    """The largest magnitude; on a GPU in one pass."""
    return torch.linalg.vector_norm(x, float("inf")) if x.is_cuda else x.abs().amax()


def rounded(x: Tensor, grid: Tensor | None) -> Tensor:
    """`x` on the grid. To autograd this is the identity."""
    return x if grid is None else (x + grid).sub_(grid)


def add_or_subtract(
    stream: Tensor, addend: Tensor, grid: Tensor | None, is_minus: bool, with_cast: bool
) -> tuple[Tensor, Tensor | None]:
    """`stream ± addend`, the addend on the grid; with `with_cast` also in the dtype of autocast.

    The second is None unless one kernel writes both, which saves reading the sum again to cast it.
    """
    if grid is None or not stream.is_cuda or torch.is_grad_enabled():
        addend = rounded(addend, grid)
        return like(stream, stream - addend if is_minus else stream + addend), None
    # One kernel: the three of torch would cost a step up to 9 % of its time.
    kernels = triton_module("kernels")
    if not kernels.supports_add(stream, addend):
        return like(stream, _generated("-" if is_minus else "+")(stream, addend, grid)), None
    is_cast = with_cast and is_autocasting(stream.device)
    dtype = torch.get_autocast_dtype(stream.device.type) if is_cast else None
    total, copy = kernels.add(stream, addend, grid, is_minus, dtype)
    return total, copy


@functools.cache
def _generated(sign: str) -> Callable[..., Tensor]:
    """A kernel for tensors of any strides and size."""
    code = f"template <typename T> T on_grid(T s, T x, T g) {{ return s {sign} ((x + g) - g); }}"
    made: Callable[..., Tensor] = torch.cuda.jiterator._create_jit_fn(code)
    return made
