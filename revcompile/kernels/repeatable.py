"""Layers that give the same bits when they run again.

cuDNN may split a convolution's sum and add the parts in any order, and with `cudnn.benchmark` each
thread chooses its algorithms by its own timing. Attention whose mask has a gradient cannot take the
flash kernel; without gradients, in the forward pass of a chain, it would. An averaged coupling
multiplies such differences of a last bit by 16 in every block (`fixed_point`), so its branches run
without either.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch


class Repeated(NamedTuple):
    """Which of its layers a branch has to keep from choosing another kernel."""

    convolutions: bool = False
    attention: bool = False
    """With a mask that parameters are part of."""


class Repeatable(AbstractContextManager[None]):
    """Inside, such layers are repeatable. Not a generator: entered for every block."""

    __slots__ = ("_before", "_layers")

    def __init__(self, layers: Repeated) -> None:
        self._layers = layers

    def __enter__(self) -> None:
        cudnn = torch._C._get_cudnn_deterministic(), torch._C._get_cudnn_benchmark()
        self._before = *cudnn, torch._C._get_flash_sdp_enabled()
        if self._layers.convolutions:
            torch._C._set_cudnn_deterministic(True)
            torch._C._set_cudnn_benchmark(False)
        if self._layers.attention:
            torch._C._set_sdp_use_flash(False)

    def __exit__(self, *_: Any) -> None:
        deterministic, benchmark, flash = self._before
        torch._C._set_cudnn_deterministic(deterministic)
        torch._C._set_cudnn_benchmark(benchmark)
        torch._C._set_sdp_use_flash(flash)
