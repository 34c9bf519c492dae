"""Triton, where it is installed; kernels compiled by it, and their launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # torch for other devices comes without it
    triton = tl = None

__all__ = ["compiled", "compiles", "launch", "outputs", "tl", "triton"]


def compiled(kernel: Any) -> Any:
    """A kernel, compiled when it is launched; None without Triton."""
    return None if triton is None else triton.jit(kernel)


def compiles(probe: Callable[[], object]) -> bool:
    """Whether kernels compile here, which takes Triton and a C compiler. `probe` launches some."""
    if triton is None:
        return False
    try:
        probe()
    except Exception:  # a compiler error: torch computes the same, with more kernels
        return False
    return True


def launch(
    kernel: Any, programs: tuple[int, ...], like: Tensor, given: Sequence[Any], **options: Any
) -> None:
    """Launch a kernel on the device of a tensor: Triton itself uses the current device."""
    if like.is_cuda and like.get_device() != torch.cuda.current_device():
        with torch.cuda.device_of(like):
            kernel[programs](*given, **options)
    else:
        kernel[programs](*given, **options)


def outputs(like: Tensor, dtype: torch.dtype | None) -> tuple[Tensor, Tensor | None]:
    """Memory for a result, and for a copy of it in another dtype, if one is given."""
    return torch.empty_like(like), None if dtype is None else torch.empty_like(like, dtype=dtype)
