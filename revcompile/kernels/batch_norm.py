"""A batch norm and the ReLU after it in one pass over memory, where there are kernels for that.

The kernels are for training on a GPU, with images in low precision and in channels_last format.
Everywhere else the two layers run. A branch that runs a second time, in a rebuild, gets its batch
statistics (mean and inverse standard deviation of each channel) from the first run instead of
computing them again, which would take a pass over memory.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import _has_any_global_hook

from revcompile.kernels.autocast import LOW_PRECISION, MIN_ELEMENTS
from revcompile.kernels.loading import triton_module

_kernels = functools.partial(triton_module, "batch_norm")

MIN_ELEMENTS_UNCAPTURED: int = 2**24
"""The fewest elements for which the kernels pay outside of a captured CUDA graph: the host takes
longer to launch our five kernels than torch's two, and a deep net launches hundreds."""

_BatchStatistics = tuple[Tensor, Tensor]
"""Mean and inverse standard deviation of each channel."""


class Statistics:
    """Batch statistics of one run of a branch, recorded for its second run."""

    def __init__(self) -> None:
        self._recorded: dict[nn.Module, list[_BatchStatistics]] = {}
        self._counters: dict[int, Tensor] = {}
        """Counters of batches, by id: one kernel increments all of them at the end of the run."""

    def record(self) -> AbstractContextManager[None]:
        """A context for the first run, whose statistics are recorded."""
        self._recorded.clear()
        return _recording_to(self)

    @property
    def is_needed(self) -> bool:
        """Whether a run on the same values needs `replay`: not if no layer recorded statistics."""
        return bool(self._recorded) or _active.get() is not None

    def replay(self) -> AbstractContextManager[None]:
        """A context for a run on the same values, which reads the recorded statistics."""
        return _recording_to({norm: iter(each) for norm, each in self._recorded.items()})

    def append(self, norm: nn.Module, mean: Tensor, scale: Tensor) -> None:
        """Record one call of a layer."""
        self._recorded.setdefault(norm, []).append((mean, scale))

    def count(self, counter: Tensor) -> None:
        """Note that a layer has seen a batch."""
        if id(counter) in self._counters:  # the layer runs twice
            counter.add_(1)
        self._counters[id(counter)] = counter

    def finish(self) -> None:
        """Increment the counters, after the first run."""
        if self._counters:
            torch._foreach_add_(list(self._counters.values()), 1)
            self._counters.clear()


_active: ContextVar[Statistics | dict[nn.Module, Iterator[_BatchStatistics]] | None]
_active = ContextVar("_active", default=None)
"""A `Statistics` while one is recorded; iterators over recorded ones while they are replayed."""


@contextmanager
def _recording_to(
    statistics: Statistics | dict[nn.Module, Iterator[_BatchStatistics]],
) -> Iterator[None]:
    token = _active.set(statistics)
    try:
        yield
    finally:
        _active.reset(token)
        if isinstance(statistics, Statistics):
            statistics.finish()


def bn_relu(
    norm: nn.BatchNorm2d, relu: nn.Module | None, x: Tensor, captured_or_not: bool = False
) -> Tensor:
    """`relu(norm(x))`; without a layer `relu`, `F.relu(norm(x))`.

    With `captured_or_not`, the choice of kernels does not depend on CUDA graph capture.
    """
    if (
        not _pays(x, captured_or_not)
        or not _is_supported(norm, x)
        or has_hooks(norm)
        or has_hooks(relu)
    ):
        normed = _normed(norm, x)
        plain: Tensor = F.relu(normed) if relu is None else relu(normed)
        return plain
    running = None
    if norm.track_running_stats and norm.running_mean is not None:
        running = norm.running_mean, norm.running_var, norm.momentum
        _count(norm.num_batches_tracked)
    active = _active.get()
    known = next(active.get(norm, iter(())), None) if isinstance(active, dict) else None
    out: Tensor
    out, mean, scale = _BnRelu.apply(x, norm.weight, norm.bias, norm.eps, running, known)
    if isinstance(active, Statistics):
        active.append(norm, mean, scale)
    return out


def _normed(norm: nn.BatchNorm2d, x: Tensor) -> Tensor:
    """`norm(x)`, with less work for the host: a deep net launches hundreds of such layers."""
    momentum, is_simple = norm.momentum, norm.training and x.dim() == 4
    is_observed = torch.compiler.is_compiling() or has_hooks(norm)
    if momentum is None or not is_simple or is_observed:
        normed: Tensor = norm(x)
        return normed
    mean = variance = None
    if norm.track_running_stats:
        buffers = norm._buffers
        mean, variance = buffers["running_mean"], buffers["running_var"]
        _count(buffers["num_batches_tracked"])
    affine = norm._parameters["weight"], norm._parameters["bias"]
    return F.batch_norm(x, mean, variance, *affine, True, momentum, norm.eps)


def _count(counter: Tensor | None) -> None:
    active = _active.get()
    if isinstance(active, Statistics) and counter is not None:
        active.count(counter)
    elif counter is not None:
        counter.add_(1)


def has_hooks(layer: nn.Module | None) -> bool:
    """Whether calling a layer runs hooks: its own, or those of all modules."""
    if layer is None:
        return False
    hooks = layer._forward_pre_hooks or layer._forward_hooks or layer._backward_hooks
    return bool(hooks or layer._backward_pre_hooks or _has_any_global_hook())


def _is_supported(norm: nn.BatchNorm2d, x: Tensor) -> bool:
    """Whether the kernels can compute this layer, on images of this dtype and format."""
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


def _pays(x: Tensor, captured_or_not: bool = False) -> bool:
    """Whether `x` is a large GPU tensor outside `torch.compile`, which has its own kernels."""
    if not x.is_cuda or torch.compiler.is_compiling() or type(x) is not Tensor:
        return False
    count = x.numel()
    if captured_or_not or count >= MIN_ELEMENTS_UNCAPTURED:
        return count >= MIN_ELEMENTS_UNCAPTURED
    return count >= MIN_ELEMENTS and torch.cuda.is_current_stream_capturing()


class _BnRelu(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, running: Any, known: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        out, means, scales = _kernels().bn_relu_forward(x, weight, bias, eps, running, known)
        ctx.eps = eps
        ctx.save_for_backward(x, weight, bias, means, scales)
        ctx.mark_non_differentiable(means, scales)
        ctx.set_materialize_grads(False)
        return out, means, scales

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        grad = outer[0]
        x, weight, bias, means, scales = ctx.saved_tensors
        if torch.is_grad_enabled():
            grads: Any = _differentiable(grad, x, weight, bias, ctx.eps)
        else:
            grad = grad.contiguous(memory_format=torch.channels_last)
            grads = _kernels().bn_relu_backward(grad, x, weight, bias, means, scales)
        return *grads, None, None, None


def _differentiable(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor | None, ...]:
    """The gradients that are needed, made of operations that can be differentiated again."""
    out = F.relu(F.batch_norm(x, None, None, weight, bias, True, 0.0, eps))
    inputs = x, weight, bias
    needed = [tensor for tensor in inputs if tensor.requires_grad]
    grads = iter(torch.autograd.grad(out, needed, grad, create_graph=True))
    return tuple(next(grads) if tensor.requires_grad else None for tensor in inputs)
