"""The gradient of a stream `b` that a branch reads: `db + F'(b)^T dy`.

The sum is a pass over memory of its own, unless the branch begins with a layer norm: the kernel
that writes the norm's gradient then adds `db` on the way (`layer_norm`). Either way the sum may
also be written in low precision, for the previous block, whose branch is differentiated next.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from revcompile.kernels.loading import triton_module

_NAME: Final = "_revcompile_gradient_sum"


class GradientSum:
    """The sum of a stream's gradients, attached to the stream, where its reader finds it."""

    def __init__(self) -> None:
        self._own: Tensor | None = None
        self._dtype: torch.dtype | None = None
        self._written: tuple[Tensor, Tensor | None] | None = None

    @staticmethod
    def of(stream: Tensor) -> GradientSum | None:
        """The sum attached to a stream, if there is one."""
        attached: GradientSum | None = getattr(stream, _NAME, None)
        return attached

    def attach(self, stream: Tensor) -> Tensor:
        """Attach the sum to this very tensor; views and copies of it do not have it."""
        setattr(stream, _NAME, self)
        return stream

    def begin(self, own: Tensor | None, dtype: torch.dtype | None = None) -> None:
        """Set the stream's own gradient, and a second dtype in which the sum is to be written."""
        self._own, self._written = own, None
        self._dtype = None if own is None or dtype == own.dtype else dtype

    def addend_for(self, reader: Tensor) -> tuple[Tensor | None, torch.dtype | None]:
        """The stream's own gradient, if a reader's kernel may add it, and the second dtype.

        Only the first reader gets it: autograd adds the gradients of further readers to the sum.
        """
        own = self._own
        if own is None or self._written is not None or own.shape != reader.shape:
            return None, None
        if own.dtype != reader.dtype or own.stride() != reader.stride():
            return None, None
        return own, self._dtype

    def store(self, total: Tensor, copy: Tensor | None) -> None:
        """Note that a reader's kernel has written the sum, and its copy in the second dtype."""
        self._written = total, copy

    def finish(self, through: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """The sum and its copy, from the gradient that autograd returned for the branch."""
        own, self._own = self._own, None
        if own is None or through is None:
            return own if through is None else through, None
        if self._written is None:
            return add_gradients(own, through, self._dtype)
        (total, copy), self._written = self._written, None
        return through, copy if through.data_ptr() == total.data_ptr() else None


def add_gradients(
    own: Tensor, through: Tensor, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor | None]:
    """`own + through`, and the same in a second dtype if one kernel gives both.

    Torch's own kernel for two dtypes is a third slower.
    """
    is_mixed = dtype is not None or own.dtype != through.dtype
    if is_mixed and own.is_cuda and not torch.is_grad_enabled():
        kernels = triton_module("kernels")
        if kernels.supports_add(own, through):
            total, copy = kernels.add(own, through, dtype=dtype)
            return total, copy
    return own + through, None
