"""Convolutions that give the same bits when they run again.

cuDNN may split a convolution's sum and add the parts in any order, and with `cudnn.benchmark` each
thread chooses its algorithms by its own timing. An averaged coupling multiplies such differences of
a last bit by 16 in every block (`fixed_point`), so its branches run without both.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch


class RepeatableConvolutions(AbstractContextManager[None]):
    """Inside, convolutions on a GPU are repeatable. Not a generator: entered for every block."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = torch._C._get_cudnn_deterministic(), torch._C._get_cudnn_benchmark()
        torch._C._set_cudnn_deterministic(True)
        torch._C._set_cudnn_benchmark(False)

    def __exit__(self, *_: Any) -> None:
        deterministic, benchmark = self._before
        torch._C._set_cudnn_deterministic(deterministic)
        torch._C._set_cudnn_benchmark(benchmark)
