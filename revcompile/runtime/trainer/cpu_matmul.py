"""Which matrix product torch uses on this CPU for a low-precision type."""

from __future__ import annotations

import warnings

import torch
from torch.nn import functional as F

__all__ = ["choose_cpu_matmul"]


def choose_cpu_matmul(dtype: torch.dtype | None) -> None:
    """Let torch choose its CPU matmul for `dtype` now, not in the middle of training.

    On a CPU without bf16 instructions the first bf16 matmul of some size makes torch switch
    oneDNN off for the whole process, and float32 convolutions and products round differently from
    then on. Ranks would meet that first product at different moments, or never, and no longer
    equal a run in one process.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return
    operand = torch.ones(64, 64, dtype=dtype)
    with torch.autocast("cpu", enabled=False), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says what it does; here it is what is wanted
        F.linear(operand, operand)
