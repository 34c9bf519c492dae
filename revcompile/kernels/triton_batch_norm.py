"""Batch norm + ReLU of images in channels_last format, as Triton kernels.

Torch writes the norm's result, which the ReLU reads and writes again, and in backward the ReLU's
gradient, which the norm reads. Here the ReLU is part of the norm: in backward its mask is computed
again from the norm's input.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import torch
from torch import Tensor

from revcompile.kernels.launch import compiled, compiles, launch, tl, triton

_TILE: Final = 4096
"""Elements that a program works on at a time: sixteen for each thread of its eight warps."""
_MAX_TILE_COLUMNS: Final = 128
"""Channels of a tile."""
_PROGRAMS: Final = 528
"""Programs that share a sum over all images: four per multiprocessor of a large GPU."""
_FAST: Final[dict[str, Any]] = {"num_warps": 8, "enable_fp_fusion": True}
_PARTS_AT_ONCE: Final = 16
"""Partial sums that are added up at a time."""

Running = tuple[Tensor, Tensor, float]
"""Running mean and variance, and the momentum they move with."""


@compiled
def _offsets(row, rows, column, columns):  # type: ignore[no-untyped-def]
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    return inside, row.to(tl.int64)[:, None] * columns + column[None, :]


# Triton reads annotations as code.
# fmt: off
@compiled
def _moments(  # type: ignore[no-untyped-def]
    x, parts, rows, tiles_each,
    columns: tl.constexpr, tile_rows: tl.constexpr, tile_columns: tl.constexpr,
):
    # fmt: on
    column = tl.program_id(1) * tile_columns + tl.arange(0, tile_columns)
    valid = column < columns
    level = tl.load(x + column, mask=valid, other=0.0).to(tl.float32)  # squares stay small
    first = tl.zeros((tile_rows, tile_columns), tl.float32)
    second = tl.zeros((tile_rows, tile_columns), tl.float32)
    for tile in tl.range(0, tiles_each, num_stages=3):
        row = (tl.program_id(0) * tiles_each + tile) * tile_rows + tl.arange(0, tile_rows)
        inside, at = _offsets(row, rows, column, columns)
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        value = tl.where(inside, value - level[None, :], 0.0)
        first += value
        second += value * value
    offset_in_parts = tl.program_id(0) * columns + column
    tl.store(parts + offset_in_parts, tl.sum(first, 0), mask=valid)
    tl.store(parts + tl.num_programs(0) * columns + offset_in_parts, tl.sum(second, 0), mask=valid)


# fmt: off
@compiled
def _finish_statistics(  # type: ignore[no-untyped-def]
    x, parts, means, scales, running_mean, running_variance, count, rows, eps, momentum,
    is_tracked: tl.constexpr,
    columns: tl.constexpr, tile_rows: tl.constexpr, tile_columns: tl.constexpr,
):
    # fmt: on
    column = tl.program_id(0) * tile_columns + tl.arange(0, tile_columns)
    valid = column < columns
    first = tl.zeros((tile_rows, tile_columns), tl.float32)
    second = tl.zeros((tile_rows, tile_columns), tl.float32)
    for start in range(0, count, tile_rows):
        part = start + tl.arange(0, tile_rows)
        inside = (part < count)[:, None] & valid[None, :]
        at = part[:, None] * columns + column[None, :]
        first += tl.load(parts + at, mask=inside, other=0.0)
        second += tl.load(parts + count * columns + at, mask=inside, other=0.0)
    offset = tl.sum(first, 0) / rows
    mean = tl.load(x + column, mask=valid, other=0.0).to(tl.float32) + offset
    variance = tl.maximum(tl.sum(second, 0) / rows - offset * offset, 0.0)
    tl.store(means + column, mean, mask=valid)
    tl.store(scales + column, 1.0 / tl.sqrt(variance + eps), mask=valid)
    if is_tracked:
        before = tl.load(running_mean + column, mask=valid)
        tl.store(running_mean + column, before + momentum * (mean - before), mask=valid)
        before = tl.load(running_variance + column, mask=valid)
        unbiased = variance * (rows / (rows - 1.0))
        tl.store(running_variance + column, before + momentum * (unbiased - before), mask=valid)


@compiled
def _channel_terms(means, scales, weight, bias, column, valid):  # type: ignore[no-untyped-def]
    mean = tl.load(means + column, mask=valid, other=0.0)[None, :]
    scale = tl.load(scales + column, mask=valid, other=0.0)[None, :]
    gain = tl.load(weight + column, mask=valid, other=0.0)[None, :]
    shift = tl.load(bias + column, mask=valid, other=0.0)[None, :]
    return mean, scale, gain, shift


# fmt: off
@compiled
def _normalize_relu(  # type: ignore[no-untyped-def]
    x, weight, bias, means, scales, out, rows,
    columns: tl.constexpr, tile_rows: tl.constexpr, tile_columns: tl.constexpr,
):
    # fmt: on
    column = tl.program_id(1) * tile_columns + tl.arange(0, tile_columns)
    valid = column < columns
    row = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    inside, at = _offsets(row, rows, column, columns)
    mean, scale, gain, shift = _channel_terms(means, scales, weight, bias, column, valid)
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    value = (value - mean) * scale * gain + shift
    value = tl.maximum(value, 0.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(out + at, value, mask=inside)


# fmt: off
@compiled
def _backward_sums(  # type: ignore[no-untyped-def]
    grad, x, weight, bias, means, scales, parts, rows, tiles_each,
    columns: tl.constexpr, tile_rows: tl.constexpr, tile_columns: tl.constexpr,
):
    # fmt: on
    column = tl.program_id(1) * tile_columns + tl.arange(0, tile_columns)
    valid = column < columns
    mean, scale, gain, shift = _channel_terms(means, scales, weight, bias, column, valid)
    of_weight = tl.zeros((tile_rows, tile_columns), tl.float32)
    of_bias = tl.zeros((tile_rows, tile_columns), tl.float32)
    for tile in tl.range(0, tiles_each, num_stages=3):
        row = (tl.program_id(0) * tiles_each + tile) * tile_rows + tl.arange(0, tile_rows)
        inside, at = _offsets(row, rows, column, columns)
        up = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        normal = (tl.load(x + at, mask=inside, other=0.0).to(tl.float32) - mean) * scale
        up = tl.where(inside & (normal * gain + shift > 0.0), up, 0.0)
        of_weight += up * normal
        of_bias += up
    offset_in_parts = tl.program_id(0) * columns + column
    tl.store(parts + offset_in_parts, tl.sum(of_weight, 0), mask=valid)
    tl.store(parts + tl.num_programs(0) * columns + offset_in_parts, tl.sum(of_bias, 0), mask=valid)


# fmt: off
@compiled
def _backward_input(  # type: ignore[no-untyped-def]
    grad, x, weight, bias, means, scales, of_weight, of_bias, of_x, rows,
    columns: tl.constexpr, tile_rows: tl.constexpr, tile_columns: tl.constexpr,
):
    # fmt: on
    column = tl.program_id(1) * tile_columns + tl.arange(0, tile_columns)
    valid = column < columns
    row = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    inside, at = _offsets(row, rows, column, columns)
    mean, scale, gain, shift = _channel_terms(means, scales, weight, bias, column, valid)
    along = tl.load(of_weight + column, mask=valid, other=0.0)[None, :] / rows
    level = tl.load(of_bias + column, mask=valid, other=0.0)[None, :] / rows
    up = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    normal = (tl.load(x + at, mask=inside, other=0.0).to(tl.float32) - mean) * scale
    up = tl.where(normal * gain + shift > 0.0, up, 0.0)
    tl.store(of_x + at, (up - level - normal * along) * scale * gain, mask=inside)


@functools.cache
def works_on(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether these kernels can be compiled here."""
    x = torch.zeros(2, 256, 2, 2, device=device, dtype=dtype)
    x = x.to(memory_format=torch.channels_last)
    ones = torch.ones(256, dtype=torch.float32, device=device)

    def probe() -> None:
        out, means, scales = bn_relu_forward(x, ones, ones, 1.0, (ones.clone(), ones.clone(), 0.1))
        bn_relu_backward(out, x, ones, ones, means, scales)

    return compiles(probe)


def bn_relu_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    running: Running | None,
    known: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`relu(batch_norm(x))`, and each channel's mean and inverse standard deviation.

    Args:
        running: running statistics to update, if any.
        known: the batch statistics of an earlier run on the same values.
    """
    rows, columns, tile_rows, tile_columns, blocks = _sizes(x)
    means, scales = known or _batch_statistics(x, eps, running)
    out = torch.empty_like(x)
    given = x, weight, bias, means, scales, out, rows, columns, tile_rows, tile_columns
    launch(_normalize_relu, (triton.cdiv(rows, tile_rows), blocks), x, given, **_FAST)
    return out, means, scales


def _batch_statistics(x: Tensor, eps: float, running: Running | None) -> tuple[Tensor, Tensor]:
    rows, columns, tile_rows, tile_columns, blocks = _sizes(x)
    tiles_each, programs = _programs_for(rows, tile_rows, blocks)
    parts, (means, scales) = _floats(x, 2, programs, columns), _floats(x, 2, columns)
    summed = x, parts, rows, tiles_each, columns, tile_rows, tile_columns
    launch(_moments, (programs, blocks), x, summed, **_FAST)
    mean, variance, momentum = running or (means, scales, 0.0)
    moved = x, parts, means, scales, mean, variance, programs, rows, eps, momentum
    given = *moved, running is not None, columns, _PARTS_AT_ONCE, tile_columns
    # The batch statistics must be the same bits whether running statistics are updated or not.
    launch(_finish_statistics, (blocks,), x, given, enable_fp_fusion=False)
    return means, scales


def bn_relu_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor, means: Tensor, scales: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    rows, columns, tile_rows, tile_columns, blocks = _sizes(x)
    tiles_each, programs = _programs_for(rows, tile_rows, blocks)
    parts = _floats(x, 2, programs, columns)
    read, sizes = (grad, x, weight, bias, means, scales), (columns, tile_rows, tile_columns)
    summed = *read, parts, rows, tiles_each, *sizes
    launch(_backward_sums, (programs, blocks), x, summed, **_FAST)
    of_weight, of_bias = parts.sum(1)
    of_x = torch.empty_like(x)
    given = *read, of_weight, of_bias, of_x, rows, *sizes
    launch(_backward_input, (triton.cdiv(rows, tile_rows), blocks), x, given, **_FAST)
    return of_x, of_weight, of_bias


def _floats(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, device=like.device, dtype=torch.float32)


def _sizes(x: Tensor) -> tuple[int, int, int, int, int]:
    """Rows and channels, those of a tile (powers of two), and the number of tiles side by side."""
    columns = x.shape[1]
    tile_columns = min(_MAX_TILE_COLUMNS, triton.next_power_of_2(columns))
    blocks = triton.cdiv(columns, tile_columns)
    return x.numel() // columns, columns, _TILE // tile_columns, tile_columns, blocks


def _programs_for(rows: int, tile_rows: int, blocks: int) -> tuple[int, int]:
    """How many tiles each program adds up, and how many programs that takes."""
    tiles = triton.cdiv(rows, tile_rows)
    tiles_each = triton.cdiv(tiles, max(1, _PROGRAMS // blocks))
    return tiles_each, triton.cdiv(tiles, tiles_each)
