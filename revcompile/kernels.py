"""Sums of two types, on the grid or not, as one Triton kernel at the speed of memory.

Torch's own generated kernels take mixed types and the grid's single number element by element and
reach a third of that speed, which costs a step in bfloat16 several per cent.
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

__all__ = ["fits", "summed", "works_on"]

_SIZE: Final = 1024
_FEW: Final = 2**20
"""Elements below which a kernel takes longer to start than to run."""
_MANY: Final = 2**31 - _SIZE


# Triton reads annotations as code.
# fmt: off
def _sum(  # type: ignore[no-untyped-def]
    wide, addend, grid, out, count,
    is_minus: tl.constexpr, is_rounded: tl.constexpr, size: tl.constexpr,
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
    tl.store(out + at, tl.load(wide + at, mask=inside) + value, mask=inside)


_kernel = triton.jit(_sum) if triton is not None else None


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
        summed(one, one)
    except Exception:  # whatever a compiler may say: there is another way to the same sum
        return False
    return True


def summed(
    wide: Tensor, addend: Tensor, grid: Tensor | None = None, is_minus: bool = False
) -> Tensor:
    """`wide + addend`, or minus it; the addend on the grid, if there is one."""
    assert _kernel is not None
    out = torch.empty_like(wide)
    count = wide.numel()
    launch = _kernel[(triton.cdiv(count, _SIZE),)]
    given = wide, addend, wide if grid is None else grid, out, count
    launch(*given, is_minus, grid is not None, _SIZE, enable_fp_fusion=False)
    return out
