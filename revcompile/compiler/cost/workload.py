"""What memory and time depend on besides the model: batch size, method, optimizer, precision."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from revcompile.errors import InputError
from revcompile.schedule import Method
from revcompile.units import is_int


@dataclass(frozen=True)
class Workload:
    """How a model will be trained, as far as its memory and time depend on it.

    Args:
        method: The training method; it says how many micro-batches are in flight and what stages
            keep of them.
        microbatch_size: Samples a micro-batch.
        accumulation_steps: Micro-batches an update.
        optimizer_copies: Numbers of optimizer state a parameter: SGD with momentum 1, Adam 2.
        buffer_bytes: Bytes an element of a float32 input takes while it is kept for the backward
            pass (2 in bfloat16); None keeps it as it is.
        autocast: The dtype of autocast, in which stages have a copy of their weights.
    """

    method: Method
    microbatch_size: int
    accumulation_steps: int = 1
    optimizer_copies: float = 1.0
    buffer_bytes: int | None = None
    autocast: torch.dtype | None = None

    def __post_init__(self) -> None:
        if not is_int(self.microbatch_size) or self.microbatch_size < 1:
            raise InputError(
                f"microbatch_size={self.microbatch_size!r}; a micro-batch has 1 sample at least"
            )
