"""Layer norms of float32 streams whose result is read in low precision.

Under autocast a layer norm writes float32, which a cast reads again for the layer that comes next;
backward goes the same way back. On a GPU one kernel each does that in one pass over memory, with
float32's arithmetic all the same, and adds the stream's own gradient where it is at hand
(`gradients`). Everywhere else torch's own layer norm is what runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from revcompile.kernels.autocast import is_autocasting
from revcompile.kernels.gradient_sum import GradientSum

__all__ = ["is_layer_norm", "layer_norm", "norm_of"]

_ALIGNED: Final = 16
"""Bytes: Triton makes another kernel for what is not, which may sum rows up in another order."""


def is_layer_norm(layer: nn.Module) -> bool:
    """Does a layer compute what `F.layer_norm` does, and nothing else?"""
    if not isinstance(layer, nn.LayerNorm) or "forward" in vars(layer):
        return False
    kind = type(layer)
    if f"{kind.__module__}.{kind.__qualname__}" == "timm.layers.norm.LayerNorm":
        return not getattr(layer, "_fast_norm", True)  # which computes in low precision
    return kind.forward is nn.LayerNorm.forward


def norm_of(layer: nn.LayerNorm, x: Tensor) -> Tensor:
    """`layer(x)`, for readers that autocast would give it in low precision."""
    is_watched = layer._forward_pre_hooks or layer._forward_hooks or layer._backward_hooks
    if is_watched or not _fits(x, layer.normalized_shape, layer.weight, layer.bias):
        wide: Tensor = layer(x)
        return wide
    return _narrow(x, layer.weight, layer.bias, layer.eps)


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """`F.layer_norm`, for readers that autocast would give it in low precision."""
    if not _fits(input, normalized_shape, weight, bias):
        return F.layer_norm(input, list(normalized_shape), weight, bias, eps)
    assert weight is not None and bias is not None
    return _narrow(input, weight, bias, eps)


def _narrow(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """The same bits wherever `x` lies: in backward that is somewhere else than in forward."""
    dtype = torch.get_autocast_dtype(x.device.type)
    aligned = x.clone() if x.data_ptr() % _ALIGNED else x
    narrow: Tensor = _NarrowNorm.apply(aligned, weight, bias, eps, dtype, GradientSum.of(x))
    return narrow


def _fits(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None
) -> bool:
    """Is there a kernel for this, and is it worth starting?"""
    if weight is None or bias is None or not _is_for_kernels(x):
        return False
    return (
        x.dtype == weight.dtype == bias.dtype == torch.float32
        and len(normalized_shape) == 1
        and all(tensor.is_contiguous() for tensor in (x, weight, bias))
        and _kernels().norms_on(x.device, x.shape[-1], torch.get_autocast_dtype(x.device.type))
    )


def _is_for_kernels(x: Tensor) -> bool:
    """A large tensor of a GPU's under autocast; `torch.compile` has kernels of its own."""
    if torch.compiler.is_compiling() or not is_autocasting(x.device):
        return False
    return x.is_cuda and type(x) in (Tensor, nn.Parameter) and x.numel() >= _kernels().FEW


class _NarrowNorm(torch.autograd.Function):
    """A layer norm over the last dimension, in another type."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        eps: float,
        dtype: torch.dtype,
        total: GradientSum | None = None,
    ) -> Tensor:
        out: Tensor
        out, means, scales = _kernels().normed(x, weight, bias, eps, dtype)
        ctx.eps, ctx.total = eps, total or GradientSum()
        ctx.save_for_backward(x, weight, means, scales)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        x, weight, means, scales = ctx.saved_tensors
        if torch.is_grad_enabled():
            found = _differentiable(grad.float(), x, weight, ctx.eps)
        else:
            own, dtype = ctx.total.asked_of(x)
            given = grad.contiguous(), x, weight, means, scales, own, dtype
            of_x, copy, *of_parameters = _kernels().normed_back(*given)
            if own is not None:
                ctx.total.note(of_x, copy)
            found = of_x, *of_parameters
        return *found, None, None, None


def _differentiable(
    grad: Tensor, x: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients as operations that can be differentiated once more."""
    variance, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
    scale = (variance + eps).rsqrt()
    normal, scaled = (x - mean) * scale, grad * weight
    along = (scaled * normal).mean(-1, keepdim=True)
    of_x = (scaled - scaled.mean(-1, keepdim=True) - normal * along) * scale
    rows = range(x.dim() - 1)
    return of_x, (grad * normal).sum(tuple(rows)), grad.sum(tuple(rows))


def _kernels() -> Any:
    """Imported late: Triton takes a moment."""
    from revcompile.kernels import triton_kernels

    return triton_kernels
