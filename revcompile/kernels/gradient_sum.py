"""The gradient of a stream that a branch reads: its own, and what comes through the branch.

Their sum is a pass over memory of its own, unless the branch begins with a layer norm: the kernel
that writes the norm's gradient then adds the stream's own on the way (`norms`). Either way the sum
may be written in low precision too, for the block before, whose branch is differentiated next.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

__all__ = ["GradientSum", "added"]

_NAME: Final = "_revcompile_gradient_sum"


class GradientSum:
    """What becomes of the gradient of a stream, known to whoever differentiates a reader of it."""

    def __init__(self) -> None:
        self._own: Tensor | None = None
        self._dtype: torch.dtype | None = None
        self._written: tuple[Tensor, Tensor | None] | None = None

    @staticmethod
    def of(stream: Tensor) -> GradientSum | None:
        """The sum that a stream's gradient goes into, if anybody has said so."""
        found: GradientSum | None = getattr(stream, _NAME, None)
        return found

    def awaits(self, stream: Tensor) -> Tensor:
        """Say so of a stream, for those who read this very tensor."""
        setattr(stream, _NAME, self)
        return stream

    def begin(self, own: Tensor, dtype: torch.dtype | None = None) -> None:
        """From here on the stream's own gradient is there; the sum is wanted in a type too."""
        self._own, self._written = own, None
        self._dtype = None if dtype == own.dtype else dtype

    def asked_of(self, reader: Tensor) -> tuple[Tensor | None, torch.dtype | None]:
        """What the gradient of a tensor is to be added to, if it can be, and a second type for it.

        Only one reader of a stream is asked; autograd adds what others give to that.
        """
        own = self._own
        if own is None or self._written is not None or own.shape != reader.shape:
            return None, None
        if own.dtype != reader.dtype or own.stride() != reader.stride():
            return None, None
        return own, self._dtype

    def note(self, total: Tensor, copy: Tensor | None) -> None:
        """What was asked for is done."""
        self._written = total, copy

    def finish(self, through: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The stream's gradient, from what autograd found through the branch, and its copy."""
        own, self._own = self._own, None
        assert own is not None, "begin() comes first"
        if through is None:
            return own, None
        if self._written is None:
            return added(own, through, self._dtype)
        (total, copy), self._written = self._written, None
        return through, copy if through.data_ptr() == total.data_ptr() else None


def added(
    wide: Tensor, narrow: Tensor, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor | None]:
    """`wide + narrow`, and in a second type if one kernel gives both.

    Torch's own kernel for two types is a third slower.
    """
    is_mixed = dtype is not None or wide.dtype != narrow.dtype
    if is_mixed and wide.is_cuda and not torch.is_grad_enabled():
        from revcompile.kernels import triton_kernels  # Triton takes a moment to import

        if triton_kernels.can_sum(wide, narrow):
            if dtype is None:
                return triton_kernels.summed(wide, narrow), None
            return triton_kernels.summed_twice(wide, narrow, dtype, None)
    return wide + narrow, None
