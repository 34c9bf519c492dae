"""The modules of Triton kernels, imported when first used: importing Triton is slow."""

from __future__ import annotations

import functools
import importlib
from typing import Any


@functools.cache
def triton_module(name: str) -> Any:
    """The module `triton_{name}`."""
    return importlib.import_module(f"revcompile.kernels.triton_{name}")
