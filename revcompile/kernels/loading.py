"""The modules of Triton kernels, imported when first used: importing Triton is slow."""

from __future__ import annotations

import functools
import importlib
from typing import Any, Final

MIN_ELEMENTS: Final = 2**20
"""A kernel takes longer to launch than to run on fewer."""


@functools.cache
def stream_kernels() -> Any:
    return importlib.import_module("revcompile.kernels.triton_kernels")


@functools.cache
def average_kernels() -> Any:
    return importlib.import_module("revcompile.kernels.triton_average")


@functools.cache
def batch_norm_kernels() -> Any:
    return importlib.import_module("revcompile.kernels.triton_batch_norm")
