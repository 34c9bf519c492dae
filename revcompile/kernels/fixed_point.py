"""Averaged couplings in fixed-point numbers, undone to the bit.

    forward   y = b + gamma (a - b) + (1 + gamma) F(b)         gamma = s / 16, s = ±1
    inverse   a = b + (y - b - (1 + gamma) F(b)) / gamma

The inverse multiplies every rounding error by 16, so 96 blocks would by 16**96. Streams are
integers therefore, counted in units of a power of two, and the four bits that are lost are kept:

    d = a - b              y = b + s (d >> 4) + n              n = round((1 + gamma) F(b))
                           a = b + s (y - b - n) << 4 + (d mod 16)

`sign` is 2 gamma everywhere.

A unit is about 2**-16 of the largest element of the chain's input, or of 1 if that is larger
(2**-40 in float64): below what a branch in bfloat16 can tell apart. A float32 holds only 24 bits of
that, and the streams of pretrained transformers have elements thousands of times as large as their
input: so integers of 32 bits, whose range is 2**13 times the largest input. Beyond it the unit, and
with it all that is computed from the streams, becomes NaN: an overflow, as one of float16.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from revcompile.kernels.autocast import wide_dtype
from revcompile.kernels.loading import average_kernels

KEPT_BITS: Final = 4
"""Of each element and block: log2 of 1 / gamma."""


class _Format(NamedTuple):
    integers: torch.dtype
    precision: int
    """log2 of the largest input, in units."""
    limit: float
    """The largest magnitude of an element, in units, for which no sum leaves the integers."""


_FORMATS: Final = {
    torch.float32: _Format(torch.int32, 16, 2.0**29),
    torch.float64: _Format(torch.int64, 40, 2.0**52),
}
"""By the type of the streams' values."""
_IN_FLOATS: Final = _FORMATS | {torch.float32: _Format(torch.int32, 13, 2.0**24)}
"""Of streams that pass from block to block as floating-point numbers without an error."""
STREAM_RANGE: Final = int(_FORMATS[torch.float32].limit) >> _FORMATS[torch.float32].precision
"""How many times larger than the largest input of a chain its float32 streams may become."""
STAGE_RANGE: Final = int(_IN_FLOATS[torch.float32].limit) >> _IN_FLOATS[torch.float32].precision
"""The same in stages."""
_SMALLEST: Final = 1.0
"""Streams with smaller inputs get the unit of this one. They may begin as zeros, and the streams of
a transformer that is trained from scratch begin at 0.02 and grow to more than 100."""


def unit_of(a: Tensor, b: Tensor, formats: Mapping[torch.dtype, _Format] = _FORMATS) -> Tensor:
    """The unit of a chain with these input streams, a power of two. Waits for no device.

    >>> float(unit_of(torch.tensor([3.0]), torch.tensor([-1.0])) * 2**14)
    1.0
    """
    with torch.no_grad():
        largest = _largest(b) if a is b else torch.maximum(_largest(a), _largest(b))
        exponent = torch.log2(largest.clamp_min(_SMALLEST)).ceil()
        return torch.exp2(exponent - formats[b.dtype].precision)


def fixed(x: Tensor, unit: Tensor) -> Tensor:
    """A stream in units, rounded."""
    return with_usual_strides((x.detach() / unit).round_().to(_FORMATS[x.dtype].integers))


def value(stream: Tensor, unit: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A stream of integers as floating-point numbers of the unit's type, then of another one."""
    dtype = dtype or unit.dtype
    if kernels := kernels_for(unit.reshape(1), stream):
        return with_usual_strides(kernels.value(stream, unit, dtype))
    return with_usual_strides(stream.to(unit.dtype).mul_(unit).to(dtype))


@functools.lru_cache(maxsize=256)
def _strides(shape: torch.Size, memory_format: torch.memory_format) -> tuple[int, ...]:
    return torch.empty(shape, device="meta", memory_format=memory_format).stride()


def with_usual_strides(x: Tensor) -> Tensor:
    """The tensor, with the strides that its memory format has for these sizes.

    Dimensions of size 1 can have any stride. Sums and differences give them the usual one, but
    what enters a chain may have others, and layers choose their kernels by them: a convolution of
    images of 1 x 1 would take another kernel in the rebuild, and give other last bits.
    """
    if 1 not in x.shape:
        return x
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    for memory_format in (torch.contiguous_format, formats.get(x.ndim)):
        if memory_format is not None and x.is_contiguous(memory_format=memory_format):
            usual = _strides(x.shape, memory_format)
            return x if x.stride() == usual else x.as_strided(x.shape, usual)
    return x


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
    """What `pack_bits` was given, modulo 16."""
    bits = torch.stack((packed & 15, packed >> KEPT_BITS), 1)
    return bits.flatten()[: shape.numel()].view(shape)


def random_signs(shape: Sequence[int], device: torch.device, dtype: torch.dtype) -> Tensor:
    """2 gamma = ±1/8, from the default generator of the device."""
    drawn = torch.randint(2, shape, device=device)
    return drawn.to(dtype).mul_(2).sub_(1).mul_(2.0 ** (1 - KEPT_BITS))


def kernels_for(sign: Tensor, *tensors: Tensor) -> Any:
    """The kernels that do all of a block's steps at once, if they can; else None."""
    if not tensors[0].is_cuda:
        return None
    kernels = average_kernels()
    return kernels if kernels.supports(sign, *tensors) else None


def average_and_value(
    a: Tensor,
    b: Tensor,
    addend: Tensor,
    sign: Tensor,
    unit: Tensor,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """`y` in units and its value; the lost bits, and the unit, NaN after an overflow.

    Also the value in this dtype, if one is given and that comes with it.
    """
    if kernels := kernels_for(sign, a, b, addend):
        limit = _FORMATS[torch.float32].limit
        found: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]
        found = kernels.average(a, b, addend.detach(), sign, unit, limit, dtype)
        return found
    y, lost, unit = average(a, b, addend, sign, unit)
    return y, value(y, unit), lost, unit, None


def undo_average_and_value(
    y: Tensor,
    b: Tensor,
    addend: Tensor,
    sign: Tensor,
    unit: Tensor,
    lost: Tensor,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor | None]:
    """`a` in units, and its value in this dtype if one is given and that comes with it."""
    if kernels := kernels_for(sign, y, b, addend):
        found: tuple[Tensor, Tensor | None]
        found = kernels.undo_average(y, b, addend.detach(), sign, unit, lost, dtype)
        return found
    return undo_average(y, b, addend, sign, unit, lost), None


def average(
    a: Tensor,
    b: Tensor,
    addend: Tensor,
    sign: Tensor,
    unit: Tensor,
    formats: Mapping[torch.dtype, _Format] = _FORMATS,
) -> tuple[Tensor, Tensor, Tensor]:
    """`y` from streams in units and F(b); the lost bits, and the unit, NaN after an overflow.

    Args:
        a: The first stream.
        b: The second stream.
        addend: F(b), in any floating-point type.
        sign: 2 gamma in the type of the streams' values; broadcast to them.
        unit: Of the streams.
        formats: Of integers, by the type of the streams' values.
    """
    with torch.no_grad():
        scaled = _scaled(addend, sign, unit)
        difference = a - b
        lost = pack_bits(difference)
        y = difference.bitwise_right_shift_(KEPT_BITS).mul_(sign.sign().to(a.dtype)).add_(b)
        y = y.add_(scaled.to(a.dtype))
        limit = formats[unit.dtype].limit
        largest = torch.maximum(_largest(scaled), _largest(y).to(unit.dtype))
        return y, lost, torch.where(largest < limit, unit, torch.nan)


def undo_average(
    y: Tensor, b: Tensor, addend: Tensor, sign: Tensor, unit: Tensor, lost: Tensor
) -> Tensor:
    """`a`, from what `average` was given and returned."""
    with torch.no_grad():
        part = (y - b).sub_(_scaled(addend, sign, unit).to(y.dtype)).mul_(sign.sign().to(y.dtype))
        return part.bitwise_left_shift_(KEPT_BITS).add_(unpack_bits(lost, b.shape)).add_(b)


def _scaled(addend: Tensor, sign: Tensor, unit: Tensor) -> Tensor:
    """`(1 + gamma) F(b)` in units, rounded."""
    return torch.mul(addend.detach(), (1 + sign / 2) / unit).round_()


def _largest(x: Tensor) -> Tensor:
    """The largest magnitude, NaN if there is one; 0 of an empty tensor."""
    if not x.numel():
        return x.new_zeros(())
    smallest, largest = torch.aminmax(x)
    return torch.maximum(-smallest, largest)


class _WithValue(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rounded: Tensor) -> Tensor:
        return rounded

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


def with_value(x: Tensor, rounded: Tensor) -> Tensor:
    """`rounded`, to autograd the same as `x`."""
    return _WithValue.apply(x, rounded) if torch.is_grad_enabled() else rounded


class _AverageValue(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, a: Tensor, b: Tensor, addend: Tensor, sign: Tensor, total: Tensor
    ) -> Tensor:
        ctx.save_for_backward(sign)
        ctx.shape, ctx.dtype = addend.shape, addend.dtype
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (sign,) = ctx.saved_tensors
        of_a = gradient * (sign / 2)
        of_addend = (gradient * (1 + sign / 2)).to(ctx.dtype).sum_to_size(ctx.shape)
        return of_a, gradient - of_a, of_addend, None, None


def average_value(a: Tensor, b: Tensor, addend: Tensor, sign: Tensor, total: Tensor) -> Tensor:
    """`total`, with the derivatives of `b + gamma (a - b) + (1 + gamma) addend`."""
    if not torch.is_grad_enabled():
        return total
    out: Tensor = _AverageValue.apply(a, b, addend, sign, total)
    return out


def average_gradients(
    of_b: Tensor | None,
    of_y: Tensor,
    sign: Tensor,
    dtype: torch.dtype | None = None,
    may_overwrite: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `a`, of `b` without its way through F, and of F(b), which has this dtype.

    If they may be overwritten, the first two are written where those of `y` and `b` were.
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


# -- in stages ------------------------------------------------------------------------------------
#
# Streams are sent from stage to stage, and other pieces read them: they stay floating-point numbers
# there, multiples of the unit, 2**-13 of the largest input, below 2**24 of it.


def draw_sign(is_training: bool, b: Tensor, dim: int | None) -> Tensor | None:
    """A block's 2 gamma, one for each sample; None for gamma = 0, in eval mode."""
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
    unit = unit_of(a, b, _IN_FLOATS).reshape(1)
    return (
        with_value(a, value(fixed(a, unit), unit)),
        with_value(b, value(fixed(b, unit), unit)),
        unit,
    )


def couple_average(
    a: Tensor, b: Tensor, addend: Tensor, sign: Tensor | None, unit: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """`b + gamma (a - b) + (1 + gamma) F(b)`, and the bits that it loses of `a`."""
    if sign is None or unit is None:
        return b + addend, None
    if kernels := kernels_for(sign, a, b, addend):
        limit = _IN_FLOATS[torch.float32].limit
        given = *(t.detach() for t in (a, b, addend)), sign, unit, limit
        total, lost = kernels.average(*given)[1:3]
    else:
        streams = fixed(a, unit), fixed(b, unit)
        y, lost, overflown = average(*streams, addend, sign, unit, _IN_FLOATS)
        total = value(y, overflown)
    return average_value(a, b, addend, sign, total), lost


def uncouple_average(
    y: Tensor, b: Tensor, addend: Tensor, sign: Tensor, unit: Tensor, lost: Tensor
) -> Tensor:
    """`a`, from what `couple_average` was given and returned."""
    if kernels := kernels_for(sign, y, b, addend):
        given = *(t.detach() for t in (y, b, addend)), sign, unit, lost
        a: Tensor = kernels.undo_average(*given)[0]
        return a
    streams = fixed(y, unit), fixed(b, unit)
    return value(undo_average(*streams, addend, sign, unit, lost), unit)
