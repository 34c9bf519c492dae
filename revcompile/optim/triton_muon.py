"""Muon's momentum and update in one pass over memory each; `muon` has the same step by step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # torch for other devices comes without it
    triton = tl = None

_SIZE: Final = 2048
"""Elements that a program works on."""
_MAX_ELEMENTS: Final = 2**31 - _SIZE


# Nothing is written to parameters and state if `flag` is not 0. Triton reads annotations as code,
# and an argument must not be called `params`.
# fmt: off
def _momentum(  # type: ignore[no-untyped-def]
    grads, means, out, flag, count, fresh, is_flagged: tl.constexpr, size: tl.constexpr,
):
    # fmt: on
    at = tl.program_id(0) * size + tl.arange(0, size)
    inside = at < count
    grad = tl.load(grads + at, mask=inside, other=0.0)
    mean = tl.load(means + at, mask=inside, other=0.0)
    mean += fresh * (grad - mean)
    tl.store(out + at, mean + fresh * (grad - mean), mask=inside)
    if is_flagged:
        inside = at < tl.where(tl.load(flag) == 0, count, 0)
    tl.store(means + at, mean, mask=inside)


# fmt: off
def _update(  # type: ignore[no-untyped-def]
    weights, updates, last, rates, flag, count, factor, decay, feedback,
    rate_is_tensor: tl.constexpr, decays: tl.constexpr, feeds_back: tl.constexpr,
    is_flagged: tl.constexpr, size: tl.constexpr,
):
    # fmt: on
    at = tl.program_id(0) * size + tl.arange(0, size)
    inside = at < count
    rate = rates
    if rate_is_tensor:
        rate = tl.load(rates).to(tl.float32)
    param = tl.load(weights + at, mask=inside, other=0.0)
    update = tl.load(updates + at, mask=inside, other=0.0).to(tl.float32) * (rate * factor)
    if decays:
        update += rate * decay * param
    change = update
    if is_flagged:
        inside = at < tl.where(tl.load(flag) == 0, count, 0)
    if feeds_back:
        change += feedback * (update - tl.load(last + at, mask=inside, other=0.0))
        tl.store(last + at, update, mask=inside)
    tl.store(weights + at, param - change, mask=inside)


_momentum_kernel, _update_kernel = (
    function if triton is None else triton.jit(function) for function in (_momentum, _update)
)


def supports(tensors: Sequence[Tensor]) -> bool:
    """Can kernels work on these?"""
    return triton is not None and all(
        t.dtype == torch.float32 and t.is_contiguous() and t.numel() <= _MAX_ELEMENTS
        for t in tensors
    )


def momentum(grad: Tensor, mean: Tensor, out: Tensor, fresh: float, flag: Tensor | None) -> None:
    """Update the mean of gradients; Nesterov's step from it, in the type of `out`."""
    given = grad, mean, out, mean if flag is None else flag, grad.numel(), fresh
    _launch(_momentum_kernel, mean, (*given, flag is not None))


def update(
    p: Tensor,
    direction: Tensor,
    last: Tensor | None,
    rate: float | Tensor,
    factor: float,
    decay: float,
    feedback: float,
    flag: Tensor | None,
) -> None:
    """Move a parameter by `rate * (factor * direction + decay * p)`, with error feedback.

    `last` is this update in the end; None: there is no feedback.
    """
    tensors = p, direction, p if last is None else last, rate, p if flag is None else flag
    flags = isinstance(rate, Tensor), bool(decay), last is not None, flag is not None
    _launch(_update_kernel, p, (*tensors, p.numel(), factor, decay, feedback, *flags))


def _launch(kernel: Any, like: Tensor, given: Sequence[Any]) -> None:
    programs = (triton.cdiv(like.numel(), _SIZE),)
    if like.is_cuda and like.get_device() != torch.cuda.current_device():
        with torch.cuda.device_of(like):  # Triton uses the current device
            kernel[programs](*given, _SIZE)
    else:
        kernel[programs](*given, _SIZE)
