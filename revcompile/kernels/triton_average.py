"""Averaged couplings in one pass over memory; `fixed_point` has the same step by step.

A dozen of torch's operations would read and write the streams a dozen times. Results are the same
to the bit, so that one block may be computed by either.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import torch
from torch import Tensor

from revcompile.kernels.loading import MIN_ELEMENTS
from revcompile.kernels.triton_kernels import launch

try:
    import triton
    import triton.language as tl
except ImportError:  # torch for other devices comes without it
    triton = tl = None

_BYTES: Final = 128
"""Bytes of lost bits that a program works on: eight elements each."""
_MAX_ELEMENTS: Final = 2**31 - 8 * _BYTES
_INTEGERS_FROM: Final = 2.0**23 if tl is None else tl.constexpr(2.0**23)
"""Float32 numbers from here on have no fraction."""


# Triton reads annotations as code.
# fmt: off
def _read(  # type: ignore[no-untyped-def]
    b, addend, signs, units, count, sample, size: tl.constexpr,
):
    # fmt: on
    byte = tl.program_id(0) * size + tl.arange(0, size)
    bit = tl.arange(0, 8)
    at = byte[:, None] * 8 + bit[None, :]
    inside = at < count
    unit = tl.load(units)
    sign = tl.load(signs + at // sample, mask=inside, other=1.0)
    value = tl.load(addend + at, mask=inside, other=0.0).to(tl.float32)
    scaled = value * ((1.0 + sign / 2.0) / unit)
    size = tl.abs(scaled)
    whole = (size + _INTEGERS_FROM) - _INTEGERS_FROM  # rounds half to even
    whole = tl.where(size < _INTEGERS_FROM, whole, size)
    scaled = tl.where(scaled < 0, -whole, whole)
    second = tl.load(b + at, mask=inside, other=0)
    return byte, bit, at, inside, unit, scaled, sign.to(tl.int32), second


# fmt: off
def _average(  # type: ignore[no-untyped-def]
    a, b, addend, signs, units, y, values, lost, next_unit, count, sample, limit,
    size: tl.constexpr,
):
    # fmt: on
    byte, bit, at, inside, unit, scaled, sign, second = _read_function(
        b, addend, signs, units, count, sample, size
    )
    difference = tl.load(a + at, mask=inside, other=0) - second
    tl.store(lost + byte, tl.sum((difference & 1) << bit[None, :], 1), mask=byte * 8 < count)
    is_small = tl.abs(scaled) < limit  # nor NaN
    total = second + sign * (difference >> 1) + tl.where(is_small, scaled, 0.0).to(tl.int32)
    magnitude = tl.abs(total.to(tl.float32))
    is_small = is_small & (magnitude < limit)
    tl.store(y + at, total, mask=inside)
    value = tl.where(is_small, total.to(tl.float32) * unit, float("nan"))
    tl.store(values + at, value, mask=inside)
    overflown = tl.sum(tl.sum(tl.where(inside & (is_small == 0), 1, 0), 1), 0)
    tl.store(next_unit, float("nan"), mask=overflown > 0)


# fmt: off
def _undo(  # type: ignore[no-untyped-def]
    y, b, addend, signs, units, lost, a, values, count, sample,
    size: tl.constexpr,
):
    # fmt: on
    byte, bit, at, inside, unit, scaled, sign, second = _read_function(
        b, addend, signs, units, count, sample, size
    )
    packed = tl.load(lost + byte, mask=byte * 8 < count, other=0).to(tl.int32)
    bits = (packed[:, None] >> bit[None, :]) & 1
    half = sign * (tl.load(y + at, mask=inside, other=0) - second - scaled.to(tl.int32))
    total = second + 2 * half + bits
    tl.store(a + at, total, mask=inside)
    tl.store(values + at, total.to(tl.float32) * unit, mask=inside)


# fmt: off
def _gradients(  # type: ignore[no-untyped-def]
    of_b, of_y, signs, of_a, own, of_addend, count, sample, size: tl.constexpr,
):
    # fmt: on
    at = tl.program_id(0) * size + tl.arange(0, size)
    inside = at < count
    half = tl.load(signs + at // sample, mask=inside, other=1.0) / 2.0
    up = tl.load(of_y + at, mask=inside, other=0.0)
    first = up * half
    tl.store(of_a + at, first, mask=inside)
    tl.store(own + at, (tl.load(of_b + at, mask=inside, other=0.0) + up) - first, mask=inside)
    tl.store(of_addend + at, up * (1.0 + half), mask=inside)


if triton is not None:
    _read_function = triton.jit(_read)
    _average_kernel, _undo_kernel = triton.jit(_average), triton.jit(_undo)
    _gradients_kernel = triton.jit(_gradients)


def supports(sign: Tensor, *tensors: Tensor) -> bool:
    """Can the kernels walk tensors of this many elements, all alike, in memory order?

    Signs are for the first dimension, or for all elements.
    """
    first = tensors[0]
    return (
        first.is_cuda
        and MIN_ELEMENTS <= first.numel() < _MAX_ELEMENTS
        and first.dtype in (torch.int32, torch.float32)
        and sign.dtype == torch.float32
        and sign.numel() in (1, sign.shape[0])
        and all(t.shape == first.shape and t.is_contiguous() for t in tensors)
        and works_on(first.device)
    )


@functools.cache
def works_on(device: torch.device) -> bool:
    """Can the kernels be compiled here?"""
    if triton is None:
        return False
    try:
        a = torch.zeros(8, dtype=torch.int32, device=device)
        one = torch.ones(1, device=device)
        addend = torch.zeros(8, device=device)
        y, _, lost, unit = average(a, a, addend, one, one, 1.0)
        undo_average(y, a, addend, one, unit, lost)
        average_gradients(addend, addend, one, torch.bfloat16)
    except Exception:  # of the compiler: there is another way to the same numbers
        return False
    return True


def average(
    a: Tensor, b: Tensor, addend: Tensor, sign: Tensor, unit: Tensor, limit: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`y` in units and as float32, the lost bits, and the unit, NaN after an overflow."""
    y, values = torch.empty_like(b), torch.empty_like(b, dtype=torch.float32)
    lost = torch.empty(-(-b.numel() // 8), dtype=torch.uint8, device=b.device)
    next_unit = unit.clone()
    tensors = a, b, addend, sign, unit, y, values, lost, next_unit
    _launch(_average_kernel, b, sign, tensors, limit)
    return y, values, lost, next_unit


def undo_average(
    y: Tensor, b: Tensor, addend: Tensor, sign: Tensor, unit: Tensor, lost: Tensor
) -> tuple[Tensor, Tensor]:
    """`a` in units and as float32."""
    a, values = torch.empty_like(b), torch.empty_like(b, dtype=torch.float32)
    tensors = y, b, addend, sign, unit, lost, a, values
    _launch(_undo_kernel, b, sign, tensors)
    return a, values


def average_gradients(
    of_b: Tensor, of_y: Tensor, sign: Tensor, dtype: torch.dtype, may_overwrite: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `a`, of `b` without its way through F, and of F(b), the last in its dtype.

    If they may be overwritten, the first two are written where those of `y` and `b` were.
    """
    # Each element is read before it is written, by the same thread.
    of_a, own = (of_y, of_b) if may_overwrite else (torch.empty_like(t) for t in (of_y, of_y))
    of_addend = torch.empty_like(of_y, dtype=dtype)
    tensors = of_b, of_y, sign, of_a, own, of_addend
    _launch(_gradients_kernel, of_y, sign, tensors, size=8 * _BYTES)
    return of_a, own, of_addend


def _launch(
    kernel: Any, like: Tensor, sign: Tensor, given: tuple[Any, ...], *more: Any, size: int = _BYTES
) -> None:
    count, each = like.numel(), 8 * _BYTES
    given = *given, count, count // sign.numel(), *more, size
    launch(kernel, (triton.cdiv(count, each),), like, given, enable_fp_fusion=False)
