"""The modules of Triton kernels, imported when first used: importing Triton is slow."""

from __future__ import annotations

import functools
from typing import Any


@functools.cache
def stream_kernels() -> Any:
    from revcompile.kernels import triton_kernels

    return triton_kernels


@functools.cache
def average_kernels() -> Any:
    from revcompile.kernels import triton_average

    return triton_average


@functools.cache
def batch_norm_kernels() -> Any:
    from revcompile.kernels import triton_batch_norm

    return triton_batch_norm
