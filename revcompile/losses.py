"""Losses that need less memory than what they are computed from."""

from __future__ import annotations

from typing import Any, Final, Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function

from revcompile.errors import InputError
from revcompile.kernels.autocast import is_autocasting
from revcompile.units import is_int

_CHUNK_BYTES: Final = 2**28
"""Bytes of float32 logits that exist at a time, if `rows` is not given."""


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum"] = "mean",
    rows: int | None = None,
) -> Tensor:
    """`cross_entropy(linear(hidden, weight, bias), target)` without storing all logits.

    Logits are computed for some rows at a time, in the dtype of autocast. Their softmax, the loss
    and sums over rows are at least float32 (torch 2.15's own function loses digits with every chunk
    in bfloat16). In float16, so are the gradients until the loss scale has multiplied them.
    `reversify` and `petrafy` capture a call of this function as one operation.

    Args:
        hidden: Input of the head, `[..., width]`.
        weight: Weight of the head, `[classes, width]`.
        target: A class for each row, `[...]`.
        bias: Bias of the head.
        ignore_index: Rows with this target do not count.
        reduction: The mean over the rows that count, or their sum.
        rows: How many rows of logits exist at a time. Default: 256 MiB of them.

    >>> hidden, weight = torch.randn(2, 5, 8), torch.randn(100, 8)
    >>> target = torch.randint(100, (2, 5))
    >>> loss = linear_cross_entropy(hidden, weight, target)
    >>> logits = F.linear(hidden, weight).flatten(0, 1)
    >>> torch.allclose(loss, F.cross_entropy(logits, target.flatten()))
    True
    """
    if has_torch_function((hidden, weight, target)):  # tracing: the call becomes one node
        out: Tensor = handle_torch_function(
            linear_cross_entropy,
            (hidden, weight, target),
            *(hidden, weight, target, bias),
            ignore_index=ignore_index,
            reduction=reduction,
            rows=rows,
        )
        return out
    if hidden.shape[:-1] != target.shape:
        raise InputError(
            f"linear_cross_entropy: hidden has the shape {list(hidden.shape)} and target "
            f"{list(target.shape)}; the target needs one class for each row of hidden"
        )
    if reduction not in ("mean", "sum"):
        raise InputError(f"linear_cross_entropy: reduction={reduction!r}; use 'mean' or 'sum'")
    if target.is_floating_point() or target.is_complex():
        raise InputError(f"linear_cross_entropy: target is {target.dtype}; use numbers of classes")
    if rows is not None and not (is_int(rows) and rows >= 1):
        raise InputError(f"linear_cross_entropy: rows={rows!r}; use a whole number from 1, or None")
    hidden, target = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1).long()
    dtype = None
    if is_autocasting(hidden.device):
        dtype = torch.get_autocast_dtype(hidden.device.type)
    rows = rows or max(1, _CHUNK_BYTES // (4 * weight.shape[0]))
    with torch.autocast(hidden.device.type, enabled=False):
        total, count = _Chunked.apply(hidden, weight, bias, target, ignore_index, rows, dtype)
    summed: Tensor = total
    if reduction == "sum":
        return summed
    # As in torch: if no row counts the mean is not a number, and its gradient is zero.
    mean: Tensor = summed / count.clamp(min=1)
    return mean.masked_fill(count == 0, torch.nan)


class _Chunked(torch.autograd.Function):
    """The summed loss, and how many rows count."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        ignore_index: int,
        rows: int,
        low: torch.dtype | None,
    ) -> tuple[Tensor, Tensor]:
        needs = ctx.needs_input_grad[:3]
        ctx.dtypes = [None if each is None else each.dtype for each in (hidden, weight, bias)]
        if low is not None:
            hidden, weight = hidden.to(low), weight.to(low)
            bias = None if bias is None else bias.to(low)
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        # The loss is scaled only in backward, too late for what float16 has rounded to zero here.
        kept = dtype if hidden.dtype == torch.float16 else hidden.dtype
        wide_weight = weight.to(kept)
        total = torch.zeros((), dtype=dtype, device=hidden.device)
        of_hidden = torch.empty_like(hidden, dtype=kept) if needs[0] else None
        of_weight = torch.zeros_like(weight, dtype=dtype) if needs[1] else None
        of_bias = torch.zeros_like(bias, dtype=dtype) if needs[2] and bias is not None else None
        for start in range(0, len(hidden), rows):
            part, labels = hidden[start : start + rows], target[start : start + rows]
            logits = F.linear(part, weight, bias).to(dtype)
            log_softmax = torch.log_softmax(logits, 1)
            total += F.nll_loss(log_softmax, labels, ignore_index=ignore_index, reduction="sum")
            if not any(needs):
                continue
            counts = (labels != ignore_index).unsqueeze(1)
            gradient = log_softmax.exp_().mul_(counts)
            columns = labels.clamp(0, weight.shape[0] - 1).unsqueeze(1)
            gradient.scatter_add_(1, columns, -counts.to(dtype))
            gradient = gradient.to(kept)
            if of_hidden is not None:
                of_hidden[start : start + rows] = gradient @ wide_weight
            if of_weight is not None:
                of_weight += gradient.T @ part.to(kept)
            if of_bias is not None:
                of_bias += gradient.sum(0)
        ctx.save_for_backward(of_hidden, of_weight, of_bias)
        count = (target != ignore_index).sum()
        ctx.mark_non_differentiable(count)
        return total, count

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Any:
        # `gradient` has the loss scale, which may be infinite in float16.
        return (
            *(
                None if own is None else own.to(gradient.dtype).mul(gradient).to(dtype)
                for own, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
            ),
            *(None,) * 4,
        )
