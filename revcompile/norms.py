"""Layer norms that give their result in the precision in which it is read.

Under autocast a layer norm writes float32, which the next layer's cast reads again and writes in
low precision; backward does the same the other way round. One kernel does each in one pass over
memory. The arithmetic is float32's all the same.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from revcompile.ops import is_autocasting

__all__ = ["is_layer_norm", "norm_as_read"]

_WIDEST: Final = 4096
_FEW: Final = 2**20
"""Elements below which starting kernels of Triton's takes longer than two of torch's run."""


def is_layer_norm(layer: nn.Module) -> bool:
    """Is a layer, whatever its class calls it, the layer norm over the last dimension?"""
    if not isinstance(layer, nn.LayerNorm) or len(layer.normalized_shape) != 1:
        return False
    if layer.weight is None or layer.bias is None or layer.weight.dtype != torch.float32:
        return False
    if layer._forward_hooks or layer._forward_pre_hooks or layer.weight.is_meta:
        return False
    with torch.no_grad():
        x = torch.linspace(-1.0, 1.0, layer.weight.numel(), device=layer.weight.device)
        expected = F.layer_norm(x, layer.normalized_shape, layer.weight, layer.bias, layer.eps)
        return torch.equal(layer(x), expected)


def norm_as_read(layer: nn.LayerNorm, x: Tensor) -> Tensor:
    """A layer norm whose readers autocast would give its result in low precision."""
    if not is_autocasting(x.device):
        normed: Tensor = layer(x)
        return normed
    dtype = torch.get_autocast_dtype(x.device.type)
    if layer.training and _fits(layer, x):
        narrow: Tensor = _NarrowNorm.apply(x, layer.weight, layer.bias, layer.eps, dtype)
        return narrow
    wide: Tensor = layer(x)
    return wide.to(dtype)


def _fits(layer: nn.LayerNorm, x: Tensor) -> bool:
    return (
        x.is_cuda
        and x.dtype == layer.weight.dtype == torch.float32
        and x.is_contiguous()
        and x.shape[-1] <= _WIDEST
        and x.numel() >= _FEW
        and _kernels().works_on(x.device)
    )


class _NarrowNorm(torch.autograd.Function):
    """`layer_norm(x)` in another precision."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype
    ) -> Tensor:
        out: Tensor
        out, means, scales = _kernels().norm(x, weight, bias, eps, dtype)
        ctx.save_for_backward(x, weight, means, scales)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        found = _kernels().norm_back(grads[0].contiguous(), *ctx.saved_tensors)
        return *found, None, None


def _kernels() -> ModuleType:
    """Imported late: Triton takes a moment."""
    from revcompile import kernels

    return kernels
