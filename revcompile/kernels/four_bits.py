"""Updates of weights in 4 bits an element, which can be undone to the bit.

Rows of weights are on a grid: multiples of a power of two, the same for all updates. An update is a
row of multiples, from -7 to 7, of a scale that is on the grid; adding it to the weights after it
gives those before.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

_MOST: Final = 7
_DIGITS: Final = {torch.float32: 24, torch.float64: 53}
"""Bits of the numbers of which sums and differences can be exact."""
_GROWTH: Final = 8
"""How many times as large as at first the largest weight of a row may become."""
_LEAST: Final = 2.0
"""What all weights may grow to."""
# What is rounded up where depends on these and the number of the update: over updates, fractions of
# multiples of an irrational number are spread evenly, so that small parts of updates are not lost.
_BY_UPDATE: Final = (math.sqrt(5) - 1) / 2
_BY_ROW: Final = math.sqrt(2) - 1
_BY_ELEMENT: Final = math.sqrt(3) - 1


def grid_of(rows: Tensor) -> Tensor:
    """The exponents of what each row's weights can be multiples of."""
    largest = rows.abs().amax(1).mul(_GROWTH).clamp_min(_LEAST)
    return (torch.frexp(largest).exponent - _DIGITS[rows.dtype]).to(torch.int8)


def on_grid(rows: Tensor, grid: Tensor) -> Tensor:
    """Weights rounded to multiples of the grid."""
    scale = scale_of(grid, rows.dtype)
    return (rows / scale).round() * scale


def multiples_of(update: Tensor, number: Tensor, grid: Tensor) -> tuple[Tensor, Tensor]:
    """An update, with its number, as multiples of a scale for each row; the scales' exponents."""
    largest = update.abs().amax(1)
    exponents = torch.frexp(largest / _MOST).exponent.clamp(-100, 100).to(torch.int8)
    exponents = torch.maximum(exponents, grid)
    offset = number.double() * _BY_UPDATE
    rows = torch.arange(update.shape[0], device=update.device, dtype=torch.double) * _BY_ROW
    columns = torch.arange(update.shape[1], device=update.device, dtype=torch.double) * _BY_ELEMENT
    threshold = (
        (rows + offset).frac().to(update.dtype)[:, None] + columns.frac().to(update.dtype)
    ).frac()
    return torch.floor(update / scale_of(exponents, update.dtype) + threshold), exponents


def scale_of(exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """Powers of two, as a column."""
    return torch.ldexp(torch.ones_like(exponents, dtype=dtype), exponents)[:, None]


def packed(multiples: Tensor) -> Tensor:
    """Two to a byte; 8 in a half of it is zero.

    >>> multiples = torch.tensor([[-7.0, 0.0, 3.0, 7.0]])
    >>> packed(multiples).shape, unpacked(packed(multiples), torch.float32).equal(multiples)
    (torch.Size([1, 2]), True)
    """
    low, high = (multiples + 8).to(torch.uint8).chunk(2, dim=1)
    return low | (high << 4)


def unpacked(packed: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.cat([packed & 15, packed >> 4], dim=1).to(dtype) - 8
