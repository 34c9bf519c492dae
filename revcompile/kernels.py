"""Triton kernels that do at the speed of memory what takes torch several passes.

Sums on the grid: torch's own generated kernels take mixed types and the grid's single number
element by element, which costs a step in bfloat16 several per cent. Layer norms whose result is
read in low precision: without a float32 copy in between.
"""

from __future__ import annotations

import functools
from typing import Final

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # torch for other devices comes without it
    triton = tl = None

__all__ = ["fits", "norm", "norm_back", "nothing", "on_grid", "works_on"]

_SIZE: Final = 1024
_FEW: Final = 2**20
"""Elements below which a kernel takes longer to start than to run."""
_MANY: Final = 2**31 - _SIZE


# Triton reads annotations as code.
def _on_grid(stream, addend, grid, out, count, is_sum: tl.constexpr, size: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * size + tl.arange(0, size)
    inside = at < count
    offset = tl.load(grid)
    wide = tl.load(stream + at, mask=inside)
    rounded = (tl.load(addend + at, mask=inside).to(tl.float32) + offset) - offset
    if is_sum:
        tl.store(out + at, wide + rounded, mask=inside)
    else:
        tl.store(out + at, wide - rounded, mask=inside)


_kernel = triton.jit(_on_grid) if triton is not None else None


@functools.cache
def nothing(device: torch.device) -> Tensor:
    """The grid that rounds nothing."""
    return torch.zeros(1, device=device)


def fits(stream: Tensor, addend: Tensor) -> bool:
    """Can the kernel run through both in the order they lie in memory?"""
    return (
        _FEW <= stream.numel() < _MANY
        and stream.dtype == torch.float32
        and stream.shape == addend.shape
        and stream.stride() == addend.stride()
        and _is_dense(stream)
    )


def _is_dense(x: Tensor) -> bool:
    """Does a tensor fill its memory without gaps, in whatever order?"""
    last = torch.channels_last
    return x.is_contiguous() or (x.dim() == 4 and x.is_contiguous(memory_format=last))


@functools.cache
def works_on(device: torch.device) -> bool:
    """Can kernels be built here? That takes Triton and a C compiler."""
    if _kernel is None:
        return False
    one = torch.zeros(1, device=device)
    try:
        on_grid(one, one, one, True)
    except Exception:  # whatever a compiler may say: there is another way to the same sum
        return False
    return True


def on_grid(stream: Tensor, addend: Tensor, grid: Tensor, is_sum: bool) -> Tensor:
    """`stream + addend` or `stream - addend`, the addend on the grid."""
    assert _kernel is not None
    out = torch.empty_like(stream)
    count = stream.numel()
    launch = _kernel[(triton.cdiv(count, _SIZE),)]
    launch(stream, addend, grid, out, count, is_sum, _SIZE, enable_fp_fusion=False)
    return out


# -- layer norms -----------------------------------------------------------------------------------

_TILE: Final = 2048
_PROGRAMS: Final = 1024


# fmt: off
def _norm(  # type: ignore[no-untyped-def]
    x, weight, bias, out, means, scales, rows, columns, eps,
    high: tl.constexpr, size: tl.constexpr,
):
    # fmt: on
    row = tl.program_id(0) * high + tl.arange(0, high)
    column = tl.arange(0, size)
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    at = row[:, None].to(tl.int64) * columns + column[None, :]
    value = tl.load(x + at, mask=inside, other=0.0)
    mean = tl.sum(value, 1) / columns
    centred = tl.where(inside, value - mean[:, None], 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(centred * centred, 1) / columns + eps)
    gain = tl.load(weight + column, mask=column < columns, other=0.0)
    shift = tl.load(bias + column, mask=column < columns, other=0.0)
    tl.store(out + at, centred * scale[:, None] * gain[None, :] + shift[None, :], mask=inside)
    tl.store(means + row, mean, mask=row < rows)
    tl.store(scales + row, scale, mask=row < rows)


# fmt: off
def _norm_back(  # type: ignore[no-untyped-def]
    grad, x, weight, means, scales, of_x, of_weight, of_bias, rows, columns, each,
    high: tl.constexpr, size: tl.constexpr,
):
    # fmt: on
    column = tl.arange(0, size)
    gain = tl.load(weight + column, mask=column < columns, other=0.0)
    sum_weight = tl.zeros((high, size), tl.float32)
    sum_bias = tl.zeros((high, size), tl.float32)
    for turn in range(each):
        row = (tl.program_id(0) * each + turn) * high + tl.arange(0, high)
        inside = (row[:, None] < rows) & (column[None, :] < columns)
        at = row[:, None].to(tl.int64) * columns + column[None, :]
        up = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(x + at, mask=inside, other=0.0)
        mean = tl.load(means + row, mask=row < rows, other=0.0)
        scale = tl.load(scales + row, mask=row < rows, other=0.0)
        normed = tl.where(inside, (value - mean[:, None]) * scale[:, None], 0.0)
        scaled = up * gain[None, :]
        along = tl.sum(scaled * normed, 1) / columns
        level = tl.sum(scaled, 1) / columns
        back = (scaled - level[:, None] - normed * along[:, None]) * scale[:, None]
        tl.store(of_x + at, back, mask=inside)
        sum_weight += up * normed
        sum_bias += up
    place = tl.program_id(0) * columns + column
    tl.store(of_weight + place, tl.sum(sum_weight, 0), mask=column < columns)
    tl.store(of_bias + place, tl.sum(sum_bias, 0), mask=column < columns)


_norm_kernels = [triton.jit(kernel) for kernel in (_norm, _norm_back)] if triton is not None else []


def norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """`layer_norm(x)` over the last dimension, in another type; each row's mean and scale."""
    rows, columns = x.numel() // x.shape[-1], x.shape[-1]
    out = torch.empty_like(x, dtype=dtype)
    means, scales = x.new_empty(rows), x.new_empty(rows)
    high, size = _tile(columns)
    launch = _norm_kernels[0][(triton.cdiv(rows, high),)]
    given = (x, weight, bias, out, means, scales, rows, columns, eps, high, size)
    launch(*given, enable_fp_fusion=False)
    return out, means, scales


def norm_back(
    grad: Tensor, x: Tensor, weight: Tensor, means: Tensor, scales: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of a layer norm's input, weight and bias."""
    rows, columns = means.numel(), x.shape[-1]
    high, size = _tile(columns)
    tiles = triton.cdiv(rows, high)
    each = triton.cdiv(tiles, _PROGRAMS)
    programs = triton.cdiv(tiles, each)
    of_x = torch.empty_like(x)
    parts = x.new_empty(2, programs, columns)
    given = (grad, x, weight, means, scales, of_x, *parts, rows, columns, each, high, size)
    _norm_kernels[1][(programs,)](*given, enable_fp_fusion=False)
    of_weight, of_bias = parts.sum(1)
    return of_x, of_weight, of_bias


def _tile(columns: int) -> tuple[int, int]:
    """Rows and columns, powers of two, that a program works on at a time."""
    size = triton.next_power_of_2(columns)
    return max(1, _TILE // size), size
