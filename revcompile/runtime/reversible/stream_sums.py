"""What a coupling does to its streams besides running F, in one run of a chain.

Added          y = a + F(b)
Averaged       y = b + gamma (a - b) + (1 + gamma) F(b)     gamma = 0 in eval mode
FixedAverage   the same in integers, which can be undone    gamma = ±1/16 in training
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from revcompile.kernels.exact_sum import add_or_subtract, rounded
from revcompile.kernels.fixed_point import (
    average_and_value,
    average_gradients,
    average_value,
    fixed,
    undo_average_and_value,
    unit_of,
    value,
    with_value,
)

_Pair = tuple[Tensor, Tensor]
_HELD: Final = 2**26
"""Values of a rebuilt stream of more bytes are not held until they are read, but made again."""


class Added:
    """`y = a + F(b)`, the addend on a grid if there is one."""

    casts = True
    """May a kernel write `y` in the dtype of autocast, too?"""
    casts_to_read = False
    """May it in the model's own dtype, where that has fewer bits than streams?"""

    def __init__(self, grid: Tensor | None) -> None:
        self.grid = grid

    def enter(self, a: Tensor, b: Tensor) -> _Pair:
        """The input of a chain as its couplings need it."""
        return rounded(a, self.grid), rounded(b, self.grid)

    def rearrange(self, function: Callable[[Tensor], tuple[Tensor, Any]]) -> None:
        """Apply a block's rearrangement to what is held beside the values of the streams."""

    def add(
        self, index: int, a: Tensor, b: Tensor, addend: Tensor, with_cast: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The sum of the block `index`, and its cast copy if one kernel wrote both."""
        return add_or_subtract(a, addend, self.grid, False, with_cast)

    def undo(
        self, index: int, y: Tensor, b: Tensor, addend: Tensor, with_cast: bool
    ) -> tuple[Tensor, Tensor | None]:
        """`a` of the block `index`, and its cast copy if one kernel wrote both."""
        return add_or_subtract(y, addend, self.grid, True, with_cast)

    def kept(self, b: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        """Of the last block's output: what `undo` needs, and what autograd knows."""
        return b, y

    def release(self, index: int) -> tuple[Tensor, ...]:
        """What only `undo` of the block `index` needs, for autograd to keep as long as needed."""
        return ()

    def restore(self, index: int, released: Sequence[Tensor]) -> None:
        """What `release` has returned, for the next `undo`."""

    def value(self, stream: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """A stream from what `kept` or `undo` returned, perhaps in this dtype already."""
        return stream

    def gradients(
        self, index: int, of_b: Tensor, of_y: Tensor, dtype: torch.dtype, may_overwrite: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of `a`, of `b` without its way through F, and of F(b), which has this dtype."""
        return of_y, of_b, of_y


class Averaged(Added):
    """`y = b + gamma (a - b) + (1 + gamma) F(b)` in floating point.

    Args:
        signs: 2 gamma, by block and sample; None for gamma = 0.
        batch_dims: For each block, the streams' dimension that counts samples, if there is one.
    """

    casts = False

    def __init__(self, signs: Tensor | None, batch_dims: tuple[int | None, ...]) -> None:
        super().__init__(None)
        self.signs, self.batch_dims = signs, batch_dims

    def sign(self, index: int, like: Tensor) -> Tensor:
        """2 gamma of a block, to be broadcast to its streams."""
        assert self.signs is not None
        signs, dim = self.signs[index], self.batch_dims[index]
        shape = [1] * like.ndim
        if dim is None:
            return signs[:1].view(shape)
        shape[dim] = size = like.shape[dim]
        if size != len(signs):  # a rearrangement has split samples into windows, or joined them
            rows = torch.arange(size, device=signs.device)
            signs = signs[rows * len(signs) // max(size, 1)]
        return signs.view(shape)

    def add(
        self, index: int, a: Tensor, b: Tensor, addend: Tensor, with_cast: bool
    ) -> tuple[Tensor, Tensor | None]:
        if self.signs is None:
            return b + addend, None
        half = self.sign(index, b) / 2
        return half * a + (1 - half) * b + (1 + half) * addend, None

    def undo(
        self, index: int, y: Tensor, b: Tensor, addend: Tensor, with_cast: bool
    ) -> tuple[Tensor, Tensor | None]:
        assert self.signs is None, "only fixed-point averages can be undone"
        return b, None  # which `a` was equal to, or is not needed

    def gradients(
        self, index: int, of_b: Tensor, of_y: Tensor, dtype: torch.dtype, may_overwrite: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert self.signs is None, "of other averages autograd computes the gradients"
        return torch.zeros_like(of_y), of_b + of_y, of_y


class FixedAverage(Averaged):
    """The same, exact. Holds the integers of both streams beside their values.

    Branches read streams in `read_dtype`.
    """

    casts_to_read = True

    def __init__(
        self,
        signs: Tensor,
        batch_dims: tuple[int | None, ...],
        read_dtype: torch.dtype,
    ) -> None:
        super().__init__(signs, batch_dims)
        self._read_dtype = read_dtype
        self._streams: _Pair | None = None
        self._lost: list[Tensor | None] = []
        self._known: _Pair | None = None
        """The latest stream that was rebuilt, and its value, if a kernel wrote both."""

    def enter(self, a: Tensor, b: Tensor) -> _Pair:
        self._unit = unit_of(a, b)
        of_b = fixed(b, self._unit)
        of_a = of_b if a is b else fixed(a, self._unit)
        self._streams = of_a, of_b
        values = [value(stream, self._unit) for stream in (of_a, of_b)]
        return with_value(a, values[0]), with_value(b, values[1])

    def rearrange(self, function: Callable[[Tensor], tuple[Tensor, Any]]) -> None:
        assert self._streams is not None
        self._streams = function(self._streams[0])[0], function(self._streams[1])[0]

    def add(
        self, index: int, a: Tensor, b: Tensor, addend: Tensor, with_cast: bool
    ) -> tuple[Tensor, Tensor | None]:
        assert self._streams is not None
        sign = self.sign(index, b)
        dtype = self._read_dtype if with_cast else None
        given = *self._streams, addend, sign, self._unit, dtype
        y, total, lost, self._unit, copy = average_and_value(*given)
        self._streams = self._streams[1], y
        self._lost.append(lost)
        return average_value(a, b, addend, sign, total), copy

    def undo(
        self, index: int, y: Tensor, b: Tensor, addend: Tensor, with_cast: bool
    ) -> tuple[Tensor, Tensor | None]:
        sign, lost = self.sign(index, b), self._lost[index]
        assert lost is not None
        self._lost[index] = None
        is_held = y.numel() * self._read_dtype.itemsize <= _HELD
        dtype = self._read_dtype if is_held else None
        given = y, b, addend, sign, self._unit, lost, dtype
        a, values = undo_average_and_value(*given)
        self._known = None if values is None else (a, values)
        return a, None

    def release(self, index: int) -> tuple[Tensor, ...]:
        lost, self._lost[index] = self._lost[index], None
        return () if lost is None else (lost,)

    def restore(self, index: int, released: Sequence[Tensor]) -> None:
        (self._lost[index],) = released

    def kept(self, b: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        streams, self._streams = self._streams, None
        assert streams is not None
        return *streams, y

    def value(self, stream: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        dtype = dtype or self._unit.dtype
        known = self._known
        if known is not None and known[0] is stream and known[1].dtype == dtype:
            return known[1]
        return value(stream, self._unit, dtype)

    def gradients(
        self, index: int, of_b: Tensor, of_y: Tensor, dtype: torch.dtype, may_overwrite: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        return average_gradients(of_b, of_y, self.sign(index, of_y), dtype, may_overwrite)


Sums = Added
"""Any of them."""
