"""What a coupling does to its streams besides running F, in one run of a chain.

Added          y = a + F(b)
Averaged       y = b + gamma (a - b) + (1 + gamma) F(b)     gamma = 0 in eval mode
FixedAverage   the same in fixed point, which can be undone    gamma = ±1/16 in training
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from revcompile.kernels.exact_sum import add_or_subtract, rounded
from revcompile.kernels.fixed_point import (
    average,
    average_gradients,
    in_units,
    undo_average,
    unit_of,
)

_Pair = tuple[Tensor, Tensor]


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

    def release(self, index: int) -> tuple[Tensor, ...]:
        """What only `undo` of the block `index` needs, for autograd to keep as long as needed."""
        return ()

    def restore(self, index: int, released: Sequence[Tensor]) -> None:
        """What `release` has returned, for the next `undo`."""

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
    """The same in fixed point, which can be undone. Branches read streams in `read_dtype`."""

    casts_to_read = True

    def __init__(
        self,
        signs: Tensor,
        batch_dims: tuple[int | None, ...],
        read_dtype: torch.dtype,
    ) -> None:
        super().__init__(signs, batch_dims)
        self._read_dtype = read_dtype
        self._lost: list[Tensor | None] = []

    def enter(self, a: Tensor, b: Tensor) -> _Pair:
        self._unit = unit_of(a, b)
        of_b = in_units(b, self._unit)
        return of_b if a is b else in_units(a, self._unit), of_b

    def add(
        self, index: int, a: Tensor, b: Tensor, addend: Tensor, with_cast: bool
    ) -> tuple[Tensor, Tensor | None]:
        dtype = self._read_dtype if with_cast else None
        y, lost, copy = average(a, b, addend, self.sign(index, b), self._unit, dtype)
        self._lost.append(lost)
        return y, copy

    def undo(
        self, index: int, y: Tensor, b: Tensor, addend: Tensor, with_cast: bool
    ) -> tuple[Tensor, Tensor | None]:
        lost, self._lost[index] = self._lost[index], None
        assert lost is not None
        dtype = self._read_dtype if with_cast else None
        return undo_average(y, b, addend, self.sign(index, b), self._unit, lost, dtype)

    def release(self, index: int) -> tuple[Tensor, ...]:
        lost, self._lost[index] = self._lost[index], None
        return () if lost is None else (lost,)

    def restore(self, index: int, released: Sequence[Tensor]) -> None:
        (self._lost[index],) = released

    def gradients(
        self, index: int, of_b: Tensor, of_y: Tensor, dtype: torch.dtype, may_overwrite: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        return average_gradients(of_b, of_y, self.sign(index, of_y), dtype, may_overwrite)


Sums = Added
"""Any of them."""
