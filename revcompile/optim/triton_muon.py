"""Muon's momentum and update in one pass over memory each, and products that are symmetric.

`muon` has the same step by step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # torch for other devices comes without it
    triton = tl = None

_SIZE: Final = 2048
"""Elements that a program works on."""
_MAX_ELEMENTS: Final = 2**31 - _SIZE
_FEW_TILES: Final = 128
"""Half of so many are computed: fewer than a large GPU computes at once."""


# Nothing is written to parameters and state if `flag` is not 0. Triton reads annotations as code,
# and an argument must not be called `params`.
# fmt: off
def _momentum(  # type: ignore[no-untyped-def]
    grads, means, out, flag, count, fresh, is_flagged: tl.constexpr, size: tl.constexpr,
):
    # fmt: on
    at = tl.program_id(0) * size + tl.arange(0, size)
    inside = at < count
    grad = tl.load(grads + at, mask=inside, other=0.0)
    mean = tl.load(means + at, mask=inside, other=0.0)
    mean += fresh * (grad - mean)
    tl.store(out + at, mean + fresh * (grad - mean), mask=inside)
    if is_flagged:
        inside = at < tl.where(tl.load(flag) == 0, count, 0)
    tl.store(means + at, mean, mask=inside)


# fmt: off
def _update(  # type: ignore[no-untyped-def]
    weights, updates, last, rates, flag, count, factor, decay, feedback,
    rate_is_tensor: tl.constexpr, decays: tl.constexpr, feeds_back: tl.constexpr,
    is_flagged: tl.constexpr, size: tl.constexpr,
):
    # fmt: on
    at = tl.program_id(0) * size + tl.arange(0, size)
    inside = at < count
    rate = rates
    if rate_is_tensor:
        rate = tl.load(rates).to(tl.float32)
    param = tl.load(weights + at, mask=inside, other=0.0)
    update = tl.load(updates + at, mask=inside, other=0.0).to(tl.float32) * (rate * factor)
    if decays:
        update += rate * decay * param
    change = update
    if is_flagged:
        inside = at < tl.where(tl.load(flag) == 0, count, 0)
    if feeds_back:
        change += feedback * (update - tl.load(last + at, mask=inside, other=0.0))
        tl.store(last + at, update, mask=inside)
    tl.store(weights + at, param - change, mask=inside)


# fmt: off
def _symmetric(  # type: ignore[no-untyped-def]
    x, out, rows, columns, of_batch, of_row, of_column, factor, beta,
    adds: tl.constexpr, size: tl.constexpr, depth: tl.constexpr,
):
    # fmt: on
    i, j = tl.program_id(0), tl.program_id(1)
    if j > i:  # the transpose of another one
        return
    batch = tl.program_id(2).to(tl.int64)
    x += batch * of_batch
    out += batch * rows * rows
    upper, lower = i * size + tl.arange(0, size), j * size + tl.arange(0, size)
    at = tl.arange(0, depth)
    total = tl.zeros((size, size), tl.float32)
    for start in range(0, columns, depth):
        inside = start + at < columns
        left = tl.load(
            x + upper[:, None] * of_row + (start + at)[None, :] * of_column,
            mask=(upper < rows)[:, None] & inside[None, :],
            other=0.0,
        )
        right = tl.load(
            x + lower[None, :] * of_row + (start + at)[:, None] * of_column,
            mask=(lower < rows)[None, :] & inside[:, None],
            other=0.0,
        )
        total = tl.dot(left, right, total)
    total *= factor
    mask = (upper < rows)[:, None] & (lower < rows)[None, :]
    if adds:
        places = upper[:, None] * of_row + lower[None, :] * of_column
        total += beta * tl.load(x + places, mask=mask, other=0.0).to(tl.float32)
    low = total.to(out.dtype.element_ty)
    tl.store(out + upper[:, None] * rows + lower[None, :], low, mask=mask)
    if j < i:
        mirrored = out + lower[:, None] * rows + upper[None, :]
        tl.store(mirrored, tl.trans(low), mask=tl.trans(mask))


_momentum_kernel, _update_kernel, _symmetric_kernel = (
    function if triton is None else triton.jit(function)
    for function in (_momentum, _update, _symmetric)
)


def supports(tensors: Sequence[Tensor]) -> bool:
    """Can kernels work on these?"""
    return triton is not None and all(
        t.dtype == torch.float32 and t.is_contiguous() and t.numel() <= _MAX_ELEMENTS
        for t in tensors
    )


def multiplies(x: Tensor) -> bool:
    """Can `symmetric_product` take these matrices?"""
    return triton is not None and x.dtype == torch.bfloat16 and x.numel() <= _MAX_ELEMENTS


def symmetric_product(x: Tensor, factor: float = 1.0, beta: float = 0.0) -> Tensor:
    """Of each matrix `x` of a batch: `factor * x x' + beta * x`; beta for symmetric ones only.

    One triangle is computed, and written twice.
    """
    count, rows, columns = x.shape
    out = torch.empty((count, rows, rows), dtype=x.dtype, device=x.device)
    size, warps, stages = 128, 8, 3
    if count * triton.cdiv(rows, size) ** 2 < _FEW_TILES:  # smaller ones keep more of a GPU busy
        size, warps, stages = 64, 4, 4
    tiles = triton.cdiv(rows, size)
    given = x, out, rows, columns, *x.stride(), factor, beta, bool(beta), size, 64
    kernel: Any = _symmetric_kernel
    with torch.cuda.device_of(x):  # Triton uses the current device
        kernel[tiles, tiles, count](*given, num_warps=warps, num_stages=stages)
    return out


def momentum(grad: Tensor, mean: Tensor, out: Tensor, fresh: float, flag: Tensor | None) -> None:
    """Update the mean of gradients; Nesterov's step from it, in the type of `out`."""
    given = grad, mean, out, mean if flag is None else flag, grad.numel(), fresh
    _launch(_momentum_kernel, mean, (*given, flag is not None))


def update(
    p: Tensor,
    direction: Tensor,
    last: Tensor | None,
    rate: float | Tensor,
    factor: float,
    decay: float,
    feedback: float,
    flag: Tensor | None,
) -> None:
    """Move a parameter by `rate * (factor * direction + decay * p)`, with error feedback.

    `last` is this update in the end; None: there is no feedback.
    """
    tensors = p, direction, p if last is None else last, rate, p if flag is None else flag
    flags = isinstance(rate, Tensor), bool(decay), last is not None, flag is not None
    _launch(_update_kernel, p, (*tensors, p.numel(), factor, decay, feedback, *flags))


def _launch(kernel: Any, like: Tensor, given: Sequence[Any]) -> None:
    programs = (triton.cdiv(like.numel(), _SIZE),)
    if like.is_cuda and like.get_device() != torch.cuda.current_device():
        with torch.cuda.device_of(like):  # Triton uses the current device
            kernel[programs](*given, _SIZE)
    else:
        kernel[programs](*given, _SIZE)
