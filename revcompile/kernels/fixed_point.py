"""Averaged couplings in fixed-point numbers, exactly invertible.

    forward   y = b + gamma (a - b) + (1 + gamma) F(b)         gamma = s / 16, s = ±1
    inverse   a = b + (y - b - (1 + gamma) F(b)) / gamma

The inverse multiplies rounding errors by 16, and those of 96 blocks by 16**96. Streams are
therefore whole multiples of a unit, a power of two, and the four bits that are lost are kept:

    d = a - b              y = b + s (d >> 4) + n              n = round((1 + gamma) F(b))
                           a = b + s (y - b - n) << 4 + (d mod 16)

In the code, `sign` is 2 gamma.

A unit is about 2**-13 of the largest element of the chain's input, or of 1 if that is larger
(2**-40 in float64). Streams are floating-point numbers, which hold 2**24 units exactly (2**52): an
element may grow to 2048 times the largest input. Beyond that it becomes NaN, which is an overflow
like that of float16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from revcompile.kernels.autocast import wide_dtype
from revcompile.kernels.layout import alike, like
from revcompile.kernels.loading import triton_module

KEPT_BITS: Final = 4
"""Bits per element per block: log2 of 1 / gamma."""


class _Format(NamedTuple):
    integers: torch.dtype
    precision: int
    """log2 of the largest input, in units."""
    limit: float
    """The magnitude of each element, in units, must be below this."""


_FORMATS: Final = {
    torch.float32: _Format(torch.int32, 13, 2.0**24),
    torch.float64: _Format(torch.int64, 40, 2.0**52),
}
"""Formats by the dtype of the streams."""
STREAM_RANGE: Final = int(_FORMATS[torch.float32].limit) >> _FORMATS[torch.float32].precision
"""How many times larger than the largest input of a chain its float32 streams may become."""
_SMALLEST: Final = 1.0
"""Chains with smaller inputs get the unit for an input this large. Streams may begin as zeros, and
those of a transformer that is trained from scratch begin at 0.02 and grow to more than 100."""


def unit_of(a: Tensor, b: Tensor) -> Tensor:
    """The unit of a chain with these input streams, a power of two. Does not wait for the device.

    >>> float(unit_of(torch.tensor([3.0]), torch.tensor([-1.0])) * 2**11)
    1.0
    """
    with torch.no_grad():
        largest = _largest(b) if a is b else torch.maximum(_largest(a), _largest(b))
        exponent = torch.log2(largest.clamp_min(_SMALLEST)).ceil()
        return torch.exp2(exponent - _FORMATS[b.dtype].precision)


def in_units(x: Tensor, unit: Tensor) -> Tensor:
    """A stream rounded to whole units. To autograd this is the identity."""
    with torch.no_grad():
        rounded = (x / unit).round_().mul_(unit)
    return _InUnits.apply(x, rounded) if torch.is_grad_enabled() else rounded


class _InUnits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rounded: Tensor) -> Tensor:
        return rounded

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


def pack_bits(numbers: Tensor) -> Tensor:
    """The lowest four bits of each integer, two integers in a byte.

    >>> unpack_bits(pack_bits(torch.tensor([3, 16, -1])), torch.Size([3])).tolist()
    [3, 0, 15]
    """
    bits = (numbers & 15).to(torch.uint8).flatten()
    if bits.numel() % 2:
        bits = torch.cat((bits, bits.new_zeros(1)))
    return bits[::2] | (bits[1::2] << KEPT_BITS)


def unpack_bits(packed: Tensor, shape: torch.Size) -> Tensor:
    """The integers that `pack_bits` was given, modulo 16."""
    bits = torch.stack((packed & 15, packed >> KEPT_BITS), 1)
    return bits.flatten()[: shape.numel()].view(shape)


def random_signs(shape: Sequence[int], device: torch.device, dtype: torch.dtype) -> Tensor:
    """2 gamma = ±1/8, from the default generator of the device."""
    drawn = torch.randint(2, shape, device=device)
    return drawn.to(dtype).mul_(2).sub_(1).mul_(2.0 ** (1 - KEPT_BITS))


def kernels_for(sign: Tensor, *tensors: Tensor) -> Any:
    """The kernels that do all steps of a block at once; None if they do not support this."""
    if not tensors[0].is_cuda:
        return None
    kernels = triton_module("average")
    return kernels if kernels.supports(sign, *tensors) else None


def average(
    a: Tensor,
    b: Tensor,
    addend: Tensor,
    sign: Tensor,
    unit: Tensor,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`y` (NaN where it overflows), the bits of `a` that are lost, and `y` in another dtype.

    Args:
        a: The first stream, in whole units.
        b: The second stream.
        addend: F(b), in any floating-point type.
        sign: 2 gamma in the dtype of the streams, to which it is broadcast.
        unit: The unit of the streams.
        dtype: The other dtype. The last result is None unless one kernel writes both.
    """
    integers, _, limit = _FORMATS[unit.dtype]
    with torch.no_grad():
        if kernels := kernels_for(sign, a, b, addend):
            y, lost, copy = kernels.average(a, b, addend, sign, unit, limit, dtype)
        else:
            scaled = _scaled(addend, sign, unit)
            second = (b / unit).to(integers)
            difference = (a / unit).to(integers) - second
            lost, copy = pack_bits(difference), None
            part = difference.bitwise_right_shift_(KEPT_BITS).mul_(sign.sign().to(integers))
            whole = part.add_(second).add_(scaled.to(integers)).to(unit.dtype)
            # The first operand, which has the strides of the streams, decides those of the result.
            is_small = (whole.abs() < limit) & (scaled.abs() < limit) & (a == a) & (b == b)
            y = torch.where(is_small, whole * unit, torch.nan)
    if torch.is_grad_enabled():
        y = _Average.apply(a, b, addend, sign, y)
    return like(b, y), lost, copy


class _Average(torch.autograd.Function):
    """`y`, with the derivatives of `b + gamma (a - b) + (1 + gamma) addend`."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, addend: Tensor, sign: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(sign)
        ctx.shape, ctx.dtype = addend.shape, addend.dtype
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (sign,) = ctx.saved_tensors
        of_a = gradient * (sign / 2)
        of_addend = (gradient * (1 + sign / 2)).to(ctx.dtype).sum_to_size(ctx.shape)
        return of_a, gradient - of_a, of_addend, None, None


def undo_average(
    y: Tensor,
    b: Tensor,
    addend: Tensor,
    sign: Tensor,
    unit: Tensor,
    lost: Tensor,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`a`, from the arguments and results of `average`; also in `dtype` if a kernel writes both."""
    with torch.no_grad():
        if kernels := kernels_for(sign, y, b, addend):
            found: tuple[Tensor, Tensor | None]
            found = kernels.undo_average(y, b, addend, sign, unit, lost, dtype)
            return found
        integers = _FORMATS[unit.dtype].integers
        second = (b / unit).to(integers)
        part = (y / unit).to(integers) - second - _scaled(addend, sign, unit).to(integers)
        part = part.mul_(sign.sign().to(integers)).bitwise_left_shift_(KEPT_BITS)
        whole = part.add_(unpack_bits(lost, b.shape)).add_(second)
        # Overflows stay visible.
        return like(b, torch.where((y == y) & (b == b), whole * unit, torch.nan)), None


def _scaled(addend: Tensor, sign: Tensor, unit: Tensor) -> Tensor:
    """`(1 + gamma) F(b)` in units, rounded."""
    return torch.mul(addend, (1 + sign / 2) / unit).round_()


def _largest(x: Tensor) -> Tensor:
    """The largest magnitude; NaN if an element is NaN, and 0 for an empty tensor."""
    if not x.numel():
        return x.new_zeros(())
    smallest, largest = torch.aminmax(x)
    return torch.maximum(-smallest, largest)


def average_gradients(
    of_b: Tensor | None,
    of_y: Tensor,
    sign: Tensor,
    dtype: torch.dtype | None = None,
    may_overwrite: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `a`, of `b` without the path through F, and of F(b), the last in `dtype`.

    With `may_overwrite`, the first two overwrite the gradients of `y` and `b`.
    """
    if of_b is not None and dtype and (kernels := kernels_for(sign, of_b, of_y)):
        found: tuple[Tensor, Tensor, Tensor]
        found = kernels.average_gradients(of_b, of_y, sign, dtype, may_overwrite)
        return found
    of_addend = (of_y * (1 + sign / 2)).to(dtype or of_y.dtype)
    if may_overwrite and of_b is not None:
        own = of_b.add_(of_y)
        of_a = of_y.mul_(sign / 2)
        return of_a, own.sub_(of_a), of_addend
    of_a = of_y * (sign / 2)
    own = of_y - of_a if of_b is None else (of_b + of_y).sub_(of_a)
    return of_a, own, of_addend


# -- in the code of stages ------------------------------------------------------------------------


def draw_sign(is_training: bool, b: Tensor, dim: int | None) -> Tensor | None:
    """A block's 2 gamma, one for each sample; None in eval mode, where gamma is 0."""
    if not is_training:
        return None
    shape = [b.shape[d] if d == dim else 1 for d in range(b.ndim)]
    return random_signs(shape, b.device, wide_dtype(b.dtype))


def enter_average(is_training: bool, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """The streams of a chain, in float32 at least, as multiples of a unit; in eval mode unchanged.

    The third result is the unit.
    """
    if not is_training:
        return a, b, None
    a, b = a.to(wide_dtype(a.dtype)), b.to(wide_dtype(b.dtype))
    unit = unit_of(a, b).reshape(1)
    return *alike(in_units(a, unit), in_units(b, unit)), unit


def couple_average(
    a: Tensor, b: Tensor, addend: Tensor, sign: Tensor | None, unit: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """`b + gamma (a - b) + (1 + gamma) F(b)`, and the bits of `a` that it loses."""
    if sign is None or unit is None:
        return b + addend, None
    return average(a, b, addend, sign, unit)[:2]


def uncouple_average(
    y: Tensor, b: Tensor, addend: Tensor, sign: Tensor, unit: Tensor, lost: Tensor
) -> Tensor:
    """`a`, from the arguments and results of `couple_average`."""
    return undo_average(y, b, addend, sign, unit, lost)[0]


def uncouple_gradients(
    of_b: Tensor | None, of_y: Tensor | None, sign: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """`average_gradients`, also where the loss does not depend on `y`."""
    return (None, of_b, None) if of_y is None else average_gradients(of_b, of_y, sign)
