"""When and where Triton kernels are launched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

MIN_ELEMENTS: Final = 2**20
"""A kernel takes longer to launch than to run on fewer."""


def launch(
    kernel: Any, programs: tuple[int, ...], like: Tensor, given: Sequence[Any], **options: Any
) -> None:
    """Launch a kernel on the device of a tensor: Triton itself uses the current device."""
    if like.is_cuda and like.get_device() != torch.cuda.current_device():
        with torch.cuda.device_of(like):
            kernel[programs](*given, **options)
    else:
        kernel[programs](*given, **options)
