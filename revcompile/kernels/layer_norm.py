"""Layer norms of float32 streams that write low precision.

Under autocast a layer norm writes float32, which a cast reads again for the next layer; backward
does the reverse. On a GPU, one kernel for each direction does both in one pass over memory. It
computes in float32. The backward kernel also adds the stream's own gradient (`gradient_sum`).
Everywhere else torch's own layer norm runs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from revcompile.kernels.autocast import MIN_ELEMENTS, is_autocasting
from revcompile.kernels.batch_norm import has_hooks
from revcompile.kernels.gradient_sum import GradientSum
from revcompile.kernels.loading import triton_module

_kernels = functools.partial(triton_module, "kernels")

_ALIGNED: Final = 16
"""Bytes. Triton compiles another kernel for unaligned memory, which may sum in another order."""


def is_layer_norm(layer: nn.Module) -> bool:
    """Whether a layer computes what `F.layer_norm` does, and nothing else."""
    if not isinstance(layer, nn.LayerNorm) or "forward" in vars(layer):
        return False
    kind = type(layer)
    if f"{kind.__module__}.{kind.__qualname__}" == "timm.layers.norm.LayerNorm":
        return not getattr(layer, "_fast_norm", True)  # that computes in low precision
    return kind.forward is nn.LayerNorm.forward


def call_layer_norm(layer: nn.LayerNorm, x: Tensor) -> Tensor:
    """`layer(x)`, in the dtype that autocast would cast it to for its readers."""
    if _pays(x) and not has_hooks(layer):
        weight, bias = layer.weight, layer.bias
        if _is_supported(x, layer.normalized_shape, weight, bias):
            return _cast_down_norm(x, weight, bias, layer.eps)
    plain: Tensor = layer(x)
    return plain


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """`F.layer_norm`, in the dtype that autocast would cast it to for its readers."""
    if not _pays(input) or not _is_supported(input, normalized_shape, weight, bias):
        return F.layer_norm(input, list(normalized_shape), weight, bias, eps)
    assert weight is not None and bias is not None
    return _cast_down_norm(input, weight, bias, eps)


def _cast_down_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Give the same bits for any address of `x`, which is another one in the rebuild."""
    dtype = torch.get_autocast_dtype(x.device.type)
    aligned = x.clone() if x.data_ptr() % _ALIGNED else x
    out: Tensor = _CastDownLayerNorm.apply(aligned, weight, bias, eps, dtype, GradientSum.of(x))
    return out


def _is_supported(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None
) -> bool:
    """Whether the kernels support these arguments."""
    if weight is None or bias is None:
        return False
    dtype = torch.get_autocast_dtype(x.device.type)
    return (
        x.dtype == weight.dtype == bias.dtype == torch.float32
        and len(normalized_shape) == 1
        and all(tensor.is_contiguous() for tensor in (x, weight, bias))
        and _kernels().supports_layer_norm(x.device, x.shape[-1], dtype)
    )


def _pays(x: Tensor) -> bool:
    """Whether `x` is a large GPU tensor under autocast, but not in `torch.compile`."""
    if not x.is_cuda or torch.compiler.is_compiling() or not is_autocasting(x.device):
        return False
    return type(x) in (Tensor, nn.Parameter) and x.numel() >= MIN_ELEMENTS


class _CastDownLayerNorm(torch.autograd.Function):
    """A layer norm over the last dimension that writes another dtype."""

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
        out, means, scales = _kernels().layer_norm_forward(x, weight, bias, eps, dtype)
        ctx.eps, ctx.total = eps, total or GradientSum()
        ctx.save_for_backward(x, weight, means, scales)
        return out

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        (grad,) = outer
        x, weight, means, scales = ctx.saved_tensors
        if torch.is_grad_enabled():
            grads = _differentiable(grad.float(), x, weight, ctx.eps)
        else:
            own, dtype = ctx.total.addend_for(x)
            arguments = grad.contiguous(), x, weight, means, scales, own, dtype
            of_x, copy, *of_parameters = _kernels().layer_norm_backward(*arguments)
            if own is not None:
                ctx.total.store(of_x, copy)
            grads = of_x, *of_parameters
        return *grads, None, None, None


def _differentiable(
    grad: Tensor, x: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients, made of operations that can be differentiated again."""
    variance, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
    scale = (variance + eps).rsqrt()
    normal, scaled = (x - mean) * scale, grad * weight
    along = (scaled * normal).mean(-1, keepdim=True)
    of_x = (scaled - scaled.mean(-1, keepdim=True) - normal * along) * scale
    rows = range(x.dim() - 1)
    return of_x, (grad * normal).sum(tuple(rows)), grad.sum(tuple(rows))
