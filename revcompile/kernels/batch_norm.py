"""Batch norms and the ReLU after them in one pass over memory, where there are kernels for that.

That is on a GPU, in training, for images in low precision whose channels lie together
(channels_last). Everywhere else the two layers are what runs. A branch that runs a second time has
its statistics from the first: two numbers a channel, which take a pass over memory to find.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from revcompile.kernels.autocast import LOW_PRECISION

__all__ = ["Statistics", "clipped_norm"]

MANY: int = 2**24
"""Elements from which on a step that is not recorded gains by kernels: to start their five, from
Python, takes the host longer than two of torch's, and a deep net has it start hundreds."""

_Found = tuple[Tensor, Tensor]
"""Each channel's mean and scale."""


class Statistics:
    """What batch norms found in one run of a branch, for the next."""

    def __init__(self) -> None:
        self._found: dict[nn.Module, list[_Found]] = {}

    def kept(self) -> AbstractContextManager[None]:
        """The first run."""
        self._found.clear()
        return _listening(self)

    def repeated(self) -> AbstractContextManager[None]:
        """A run like the first, on the same values."""
        return _listening({norm: iter(found) for norm, found in self._found.items()})

    def note(self, norm: nn.Module, *found: Tensor) -> None:
        """In the order in which a layer is called."""
        means, scales = found
        self._found.setdefault(norm, []).append((means, scales))


_listener: ContextVar[Statistics | dict[nn.Module, Iterator[_Found]] | None]
_listener = ContextVar("_listener", default=None)


@contextmanager
def _listening(listener: Statistics | dict[nn.Module, Iterator[_Found]]) -> Iterator[None]:
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def clipped_norm(norm: nn.BatchNorm2d, relu: nn.Module | None, x: Tensor) -> Tensor:
    """`relu(norm(x))`; without a layer for it, torch's own ReLU."""
    if not _is_for_kernels(x) or not _fits(norm, x) or _is_watched(norm) or _is_watched(relu):
        wide = norm(x)
        plain: Tensor = F.relu(wide) if relu is None else relu(wide)
        return plain
    moved = None
    if norm.track_running_stats and norm.running_mean is not None:
        moved = norm.running_mean, norm.running_var, norm.momentum
        if norm.num_batches_tracked is not None:
            norm.num_batches_tracked.add_(1)
    listener = _listener.get()
    known = next(listener.get(norm, iter(())), None) if isinstance(listener, dict) else None
    given = x, norm.weight, norm.bias, norm.eps, moved, known
    out: Tensor
    out, *found = _ClippedNorm.apply(*given)
    if isinstance(listener, Statistics):
        listener.note(norm, *found)
    return out


def _is_watched(layer: nn.Module | None) -> bool:
    """Does anybody look on?"""
    if layer is None:
        return False
    return bool(layer._forward_pre_hooks or layer._forward_hooks or layer._backward_hooks)


def _fits(norm: nn.BatchNorm2d, x: Tensor) -> bool:
    """Does a layer do what the kernels do, and do they know such images?"""
    parameters = (norm.weight, norm.bias, norm.running_mean, norm.running_var)
    return (
        norm.training
        and norm.affine
        and norm.momentum is not None
        and all(p is None or p.dtype == torch.float32 for p in parameters)
        and x.dtype in LOW_PRECISION
        and x.dim() == 4
        and x.numel() > x.shape[1] == norm.num_features
        and x.is_contiguous(memory_format=torch.channels_last)
        and bool(_kernels().works_on(x.device, x.dtype))
    )


def _is_for_kernels(x: Tensor) -> bool:
    """A large tensor of a GPU's; `torch.compile` has kernels of its own."""
    if torch.compiler.is_compiling() or not x.is_cuda or type(x) is not Tensor:
        return False
    from revcompile.kernels.triton_kernels import FEW

    return x.numel() >= (FEW if torch.cuda.is_current_stream_capturing() else MANY)


class _ClippedNorm(torch.autograd.Function):
    """A batch norm in training, and a ReLU."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, moved: Any, known: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        out, means, scales = _kernels().clipped(x, weight, bias, eps, moved, known)
        ctx.eps = eps
        ctx.save_for_backward(x, weight, bias, means, scales)
        ctx.mark_non_differentiable(means, scales)
        ctx.set_materialize_grads(False)
        return out, means, scales

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad = grads[0]
        x, weight, bias, means, scales = ctx.saved_tensors
        if torch.is_grad_enabled():
            found = _differentiable(grad, x, weight, bias, ctx.eps)
        else:
            grad = grad.contiguous(memory_format=torch.channels_last)
            found = _kernels().clipped_back(grad, x, weight, bias, means, scales)
        return *found, None, None, None


def _differentiable(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, ...]:
    """The gradients as operations that can be differentiated once more."""
    out = F.relu(F.batch_norm(x, None, None, weight, bias, True, 0.0, eps))
    return torch.autograd.grad(out, (x, weight, bias), grad, create_graph=True)


def _kernels() -> Any:
    """Imported late: Triton takes a moment."""
    from revcompile.kernels import triton_batch_norm

    return triton_batch_norm
