"""Averaged couplings in one pass over memory; `fixed_point` computes the same step by step.

A dozen of torch's operations would read and write the streams a dozen times. Results are
bit-identical, so either may compute a block.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import torch
from torch import Tensor

from revcompile.errors import warn
from revcompile.kernels.autocast import MIN_ELEMENTS
from revcompile.kernels.launch import compiled, compiles, launch, outputs, tl, triton

_ELEMENTS: Final = 1024
"""Elements per program."""
_MAX_ELEMENTS: Final = 2**31 - _ELEMENTS
_INTEGERS_FROM: Final = 2.0**23 if tl is None else tl.constexpr(2.0**23)
"""Float32 numbers from here on have no fraction."""


# The four bits that are kept of an element share a byte with those of the next.
# Triton reads annotations as code.
# fmt: off
@compiled
def _read(  # type: ignore[no-untyped-def]
    b, addend, signs, units, count, sample, size: tl.constexpr,
):
    # fmt: on
    byte = tl.program_id(0) * (size // 2) + tl.arange(0, size // 2)
    place = tl.arange(0, 2)
    at = byte[:, None] * 2 + place[None, :]
    inside = at < count
    unit = tl.load(units)
    sign = tl.load(signs + at // sample, mask=inside, other=1.0)
    value = tl.load(addend + at, mask=inside, other=0.0).to(tl.float32)
    scaled = value * ((1.0 + sign / 2.0) / unit)
    magnitude = tl.abs(scaled)
    whole = (magnitude + _INTEGERS_FROM) - _INTEGERS_FROM  # rounds half to even
    whole = tl.where(magnitude < _INTEGERS_FROM, whole, magnitude)
    scaled = tl.where(scaled < 0, -whole, whole)
    second = tl.load(b + at, mask=inside, other=0.0)
    direction = tl.where(sign < 0, -1, 1)
    return byte, place[None, :] * 4, at, inside, unit, scaled, direction, second


# fmt: off
@compiled
def _average(  # type: ignore[no-untyped-def]
    a, b, addend, signs, units, y, copy, lost, count, sample, limit, has_copy: tl.constexpr,
    size: tl.constexpr,
):
    # fmt: on
    byte, shift, at, inside, unit, scaled, direction, second = _read(
        b, addend, signs, units, count, sample, size
    )
    first = tl.load(a + at, mask=inside, other=0.0)
    is_small = (tl.abs(scaled) < limit) & (first == first) & (second == second)  # not NaN
    first = tl.where(is_small, first / unit, 0.0).to(tl.int32)
    second = tl.where(is_small, second / unit, 0.0).to(tl.int32)
    difference = first - second
    kept = tl.sum((difference & 15) << shift, 1)
    tl.store(lost + byte, kept, mask=byte * 2 < count)
    total = second + direction * (difference >> 4)
    total += tl.where(is_small, scaled, 0.0).to(tl.int32)
    is_small = is_small & (tl.abs(total.to(tl.float32)) < limit)
    value = tl.where(is_small, total.to(tl.float32) * unit, float("nan"))
    tl.store(y + at, value, mask=inside)
    if has_copy:
        tl.store(copy + at, value, mask=inside)


# fmt: off
@compiled
def _undo(  # type: ignore[no-untyped-def]
    y, b, addend, signs, units, lost, a, copy, count, sample, has_copy: tl.constexpr,
    size: tl.constexpr,
):
    # fmt: on
    byte, shift, at, inside, unit, scaled, direction, second = _read(
        b, addend, signs, units, count, sample, size
    )
    packed = tl.load(lost + byte, mask=byte * 2 < count, other=0).to(tl.int32)
    kept = (packed[:, None] >> shift) & 15
    last = tl.load(y + at, mask=inside, other=0.0)
    is_known = (last == last) & (second == second)  # overflows stay visible
    last = tl.where(is_known, last / unit, 0.0).to(tl.int32)
    second = tl.where(is_known, second / unit, 0.0).to(tl.int32)
    part = direction * (last - second - tl.where(is_known, scaled, 0.0).to(tl.int32))
    value = (second + (part << 4) + kept).to(tl.float32) * unit
    value = tl.where(is_known, value, float("nan"))
    tl.store(a + at, value, mask=inside)
    if has_copy:
        tl.store(copy + at, value, mask=inside)


# fmt: off
@compiled
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


def supports(sign: Tensor, *tensors: Tensor) -> bool:
    """Whether the kernels can process these tensors, which must be large, alike and contiguous.

    There may be one sign for each index of the first dimension, or one for all elements.
    """
    first = tensors[0]
    return (
        first.is_cuda
        and MIN_ELEMENTS <= first.numel() < _MAX_ELEMENTS
        and first.dtype == torch.float32
        and sign.dtype == torch.float32
        and sign.numel() in (1, sign.shape[0])
        and all(t.shape == first.shape and t.is_contiguous() for t in tensors)
        and works_on(first.device)
    )


@functools.cache
def works_on(device: torch.device) -> bool:
    """Whether the kernels can be compiled here."""

    def probe() -> None:
        a, one = (torch.ones(n, dtype=torch.float32, device=device) for n in (8, 1))
        y, lost, _ = average(a, a, a, one, one, 1.0, torch.bfloat16)
        undo_average(y, a, a, one, one, lost, torch.bfloat16)
        average_gradients(a, a, one, torch.bfloat16)

    works = compiles(probe)
    if not works and triton is not None:
        warn(
            f"averaged couplings on {device}: torch's operations compute the same, but slower, as "
            "the Triton kernels cannot be compiled"
        )
    return works


def average(
    a: Tensor,
    b: Tensor,
    addend: Tensor,
    sign: Tensor,
    unit: Tensor,
    limit: float,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`y` (NaN where it overflows), the lost bits, and `y` in another dtype, if one is given."""
    y, copy = outputs(b, dtype)
    lost = torch.empty(-(-b.numel() // 2), dtype=torch.uint8, device=b.device)
    tensors = a, b, addend, sign, unit, y, y if copy is None else copy, lost
    _launch(_average, b, sign, tensors, limit, copy is not None)
    return y, lost, copy


def undo_average(
    y: Tensor,
    b: Tensor,
    addend: Tensor,
    sign: Tensor,
    unit: Tensor,
    lost: Tensor,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor | None]:
    """`a`, and the same in another dtype, if one is given."""
    a, copy = outputs(b, dtype)
    tensors = y, b, addend, sign, unit, lost, a, a if copy is None else copy
    _launch(_undo, b, sign, tensors, copy is not None)
    return a, copy


def average_gradients(
    of_b: Tensor, of_y: Tensor, sign: Tensor, dtype: torch.dtype, may_overwrite: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `a`, of `b` without the path through F, and of F(b), the last in `dtype`.

    With `may_overwrite`, the first two overwrite the gradients of `y` and `b`.
    """
    # Each element is read before it is written, by the same thread.
    of_a, own = (of_y, of_b) if may_overwrite else (torch.empty_like(t) for t in (of_y, of_y))
    of_addend = torch.empty_like(of_y, dtype=dtype)
    _launch(_gradients, of_y, sign, (of_b, of_y, sign, of_a, own, of_addend))
    return of_a, own, of_addend


def _launch(
    kernel: Any, like: Tensor, sign: Tensor, given: tuple[Any, ...], *more: Any
) -> None:
    count = like.numel()
    given = *given, count, count // sign.numel(), *more, _ELEMENTS
    launch(kernel, (triton.cdiv(count, _ELEMENTS),), like, given, enable_fp_fusion=False)
