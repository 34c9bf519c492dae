"""Triton kernels for whole streams in mixed precision, limited by memory bandwidth only.

Sums of two dtypes, on the grid or not: torch's own generated kernels read mixed dtypes and the
grid's single number element by element, and reach a third of that speed. That costs a step in
bfloat16 several per cent. A sum may also be written in a second dtype, for a reader that would cast
it. Layer norms write the dtype that their readers want: no float32 is written only to be cast.
"""

from __future__ import annotations

import functools
from typing import Final

import torch
from torch import Tensor

from revcompile.kernels.autocast import MIN_ELEMENTS
from revcompile.kernels.launch import compiled, compiles, launch, outputs, tl, triton

_SIZE: Final = 1024
_MAX_ELEMENTS: Final = 2**31 - _SIZE


# Triton reads annotations as code.
# fmt: off
@compiled
def _sum(  # type: ignore[no-untyped-def]
    stream, addend, grid, out, copy, count,
    is_minus: tl.constexpr, is_rounded: tl.constexpr, is_copied: tl.constexpr, size: tl.constexpr,
):
    # fmt: on
    at = tl.program_id(0) * size + tl.arange(0, size)
    inside = at < count
    value = tl.load(addend + at, mask=inside).to(tl.float32)
    if is_rounded:
        offset = tl.load(grid)
        value = (value + offset) - offset
    if is_minus:
        value = -value
    value = tl.load(stream + at, mask=inside) + value
    tl.store(out + at, value, mask=inside)
    if is_copied:
        tl.store(copy + at, value, mask=inside)


def supports_add(stream: Tensor, addend: Tensor) -> bool:
    """Whether the kernel can process both tensors in memory order."""
    return (
        MIN_ELEMENTS <= stream.numel() < _MAX_ELEMENTS
        and stream.dtype == torch.float32
        and stream.shape == addend.shape
        and stream.stride() == addend.stride()
        and _is_dense(stream)
        and works_on(stream.device)
    )


def _is_dense(x: Tensor) -> bool:
    """Whether a tensor fills its memory without gaps, in either memory format."""
    last = torch.channels_last
    return x.is_contiguous() or (x.dim() == 4 and x.is_contiguous(memory_format=last))


@functools.cache
def works_on(device: torch.device) -> bool:
    """Whether sums can be compiled here."""
    probe = torch.zeros(1, dtype=torch.float32, device=device)
    return compiles(lambda: add(probe, probe))


def add(
    stream: Tensor,
    addend: Tensor,
    grid: Tensor | None = None,
    is_minus: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`stream + addend`, or `stream - addend`; also in another dtype, if one is given.

    The addend is rounded to the grid, if there is one.
    """
    count, (out, copy) = stream.numel(), outputs(stream, dtype)
    tensors = stream, addend, stream if grid is None else grid, out, out if copy is None else copy
    given = *tensors, count, is_minus, grid is not None, copy is not None, _SIZE
    launch(_sum, (triton.cdiv(count, _SIZE),), stream, given, enable_fp_fusion=False)
    return out, copy


# -- layer norms -----------------------------------------------------------------------------------

_TILE: Final = 1024
"""Elements that a program works on at a time, unless a row is longer."""
_MAX_COLUMNS: Final = 4096
_PROGRAMS: Final = 528
"""Programs that share a backward pass: four per multiprocessor of a large GPU."""


# fmt: off
@compiled
def _norm(  # type: ignore[no-untyped-def]
    x, weight, bias, out, means, scales, rows, eps,
    columns: tl.constexpr, tile_rows: tl.constexpr, size: tl.constexpr,
):
    # fmt: on
    row = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    column = tl.arange(0, size)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = row.to(tl.int64)[:, None] * columns + column[None, :]
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
@compiled
def _norm_back(  # type: ignore[no-untyped-def]
    grad, x, weight, means, scales, own, of_x, copy, parts, rows, tiles_each,
    is_added: tl.constexpr, is_copied: tl.constexpr,
    columns: tl.constexpr, tile_rows: tl.constexpr, size: tl.constexpr,
):
    # fmt: on
    column = tl.arange(0, size)
    gain = tl.load(weight + column, mask=column < columns, other=0.0)
    sum_weight = tl.zeros((tile_rows, size), tl.float32)
    sum_bias = tl.zeros((tile_rows, size), tl.float32)
    for tile in tl.range(0, tiles_each, num_stages=3):  # prefetches the next rows
        row = (tl.program_id(0) * tiles_each + tile) * tile_rows + tl.arange(0, tile_rows)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        at = row.to(tl.int64)[:, None] * columns + column[None, :]
        up = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(x + at, mask=inside, other=0.0)
        mean = tl.load(means + row, mask=row < rows, other=0.0)
        scale = tl.load(scales + row, mask=row < rows, other=0.0)
        normal = tl.where(inside, (value - mean[:, None]) * scale[:, None], 0.0)
        scaled = up * gain[None, :]
        level = tl.sum(scaled, 1) / columns
        along = tl.sum(scaled * normal, 1) / columns
        back = (scaled - level[:, None] - normal * along[:, None]) * scale[:, None]
        if is_added:
            back += tl.load(own + at, mask=inside, other=0.0)
        tl.store(of_x + at, back, mask=inside)
        if is_copied:
            tl.store(copy + at, back, mask=inside)
        sum_weight += up * normal
        sum_bias += up
    of_weight = parts + tl.program_id(0) * columns + column
    tl.store(of_weight, tl.sum(sum_weight, 0), mask=column < columns)
    of_bias = of_weight + tl.num_programs(0) * columns
    tl.store(of_bias, tl.sum(sum_bias, 0), mask=column < columns)


@functools.cache
def supports_layer_norm(device: torch.device, columns: int, dtype: torch.dtype) -> bool:
    """Whether layer norms of this width, and their gradients, can be compiled here."""
    x = torch.zeros(1, columns, dtype=torch.float32, device=device)

    def probe() -> None:
        out, means, scales = layer_norm_forward(x, x[0], x[0], 1.0, dtype)
        # the variant that needs the most registers
        layer_norm_backward(out, x, x[0], means, scales, x, dtype)

    return columns <= _MAX_COLUMNS and compiles(probe)


def layer_norm_forward(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """`layer_norm(x)` over the last dimension in another dtype; each row's mean and scale."""
    columns = x.shape[-1]
    rows = x.numel() // columns
    out = torch.empty_like(x, dtype=dtype)
    means, scales = x.new_empty(rows), x.new_empty(rows)
    tile_rows, size, warps = _tile(columns)
    given = x, weight, bias, out, means, scales, rows, eps, columns, tile_rows, size
    programs = (triton.cdiv(rows, tile_rows),)
    launch(_norm, programs, x, given, num_warps=warps, enable_fp_fusion=True)
    return out, means, scales


def layer_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    means: Tensor,
    scales: Tensor,
    own: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Gradients of a layer norm's input (also in `dtype`, if given), weight and bias.

    If there is an `own` gradient of the input, it is added to the input's gradient.
    """
    rows, columns = means.numel(), x.shape[-1]
    tile_rows, size, warps = _tile(columns)
    tiles = triton.cdiv(rows, tile_rows)
    tiles_each = triton.cdiv(tiles, _PROGRAMS)
    programs = triton.cdiv(tiles, tiles_each)
    (of_x, copy), parts = outputs(x, dtype), x.new_empty(2, programs, columns)
    read, written = x if own is None else own, of_x if copy is None else copy
    tensors = grad, x, weight, means, scales, read, of_x, written, parts
    given = *tensors, rows, tiles_each, own is not None, copy is not None, columns, tile_rows, size
    launch(_norm_back, (programs,), x, given, num_warps=warps, enable_fp_fusion=True)
    of_weight, of_bias = parts.sum(1)
    return of_x, copy, of_weight, of_bias


@functools.cache
def _tile(columns: int) -> tuple[int, int, int]:
    """Rows and columns of a program, powers of two, and its warps: eight elements per thread."""
    size = triton.next_power_of_2(columns)
    tile_rows = max(1, _TILE // size)
    return tile_rows, size, tile_rows * size // 256
