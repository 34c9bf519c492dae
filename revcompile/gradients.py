"""The gradient of a stream that a branch reads: its own, and what comes through the branch.

Their sum is a pass over memory of its own, unless the branch begins with a layer norm: the kernel
that writes the norm's gradient then adds the stream's own on the way (`norms`).
"""

from __future__ import annotations

from typing import Final

from torch import Tensor

from revcompile.grid import widening_sum

__all__ = ["GradientSum"]

_NAME: Final = "_revcompile_gradient_sum"


class GradientSum:
    """What becomes of the gradient of a stream, known to whoever differentiates a reader of it."""

    def __init__(self) -> None:
        self._own: Tensor | None = None
        self._is_taken = False

    @staticmethod
    def of(stream: Tensor) -> GradientSum | None:
        """The sum that a stream's gradient goes into, if anybody has said so."""
        found: GradientSum | None = getattr(stream, _NAME, None)
        return found

    def awaits(self, stream: Tensor) -> Tensor:
        """Say so of a stream, for those who read this very tensor."""
        setattr(stream, _NAME, self)
        return stream

    def begin(self, own: Tensor) -> None:
        """From here on the stream's own gradient can be taken."""
        self._own, self._is_taken = own, False

    def taken(self, like: Tensor) -> Tensor | None:
        """The stream's own gradient, if it lies as `like` does, for one who adds it: only once.

        A stream may have more readers; autograd adds what they give to that.
        """
        own, is_taken = self._own, self._is_taken
        if own is None or is_taken or own.dtype != like.dtype or own.stride() != like.stride():
            return None
        self._is_taken = own.shape == like.shape
        return own if self._is_taken else None

    def finish(self, through: Tensor | None) -> Tensor:
        """The stream's gradient, from what autograd found through the branch."""
        own, self._own = self._own, None
        assert own is not None, "begin() comes first"
        if through is None:
            return own
        return through if self._is_taken else widening_sum(own, through)
