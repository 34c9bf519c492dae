"""The weights of some updates ago, computed from the latest ones and the updates in between.

An update is rounded to 4 bits an element before it is applied, so that what is kept of it is all of
it. Weights of float32 and float64 are multiples of a power of two, the same for all elements that
share a scale and for all updates: adding an update to the latest weights then gives those before to
the bit. Weights of other types come back but for the last bits.

A stage that is t updates late keeps t updates, about t/2 bytes a parameter, and needs one copy of
its weights while backward runs; stashed weights take 4 t bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

from revcompile.schedule import REWOUND_BLOCK as BLOCK

_MOST: Final = 7
"""Multiples of the scale are from -7 to 7."""
_DIGITS: Final = {torch.float32: 24, torch.float64: 53}
"""Bits of numbers of which sums and differences can be exact."""
_GROWTH: Final = 8
"""How many times as large as at first the largest weight of a block may become."""
_LEAST: Final = 2.0
"""What all weights may grow to."""
# What is rounded up where depends on these and the number of the update: over updates, fractions of
# multiples of an irrational number are spread evenly, so that small parts of updates are not lost.
_BY_UPDATE: Final = (math.sqrt(5) - 1) / 2
_BY_BLOCK: Final = math.sqrt(2) - 1
_BY_ELEMENT: Final = math.sqrt(3) - 1


class RewoundWeights:
    """A stage's weights of earlier updates. Rounds the weights themselves to begin with.

    >>> w = {"w": torch.tensor([1.0, 2.0], requires_grad=True)}
    >>> weights = RewoundWeights(w, count=2)
    >>> for update in (0.25, 0.5):
    ...     with torch.no_grad(), weights.following():
    ...         _ = w["w"].sub_(update)
    >>> weights.past(2)["w"]
    tensor([1., 2.], requires_grad=True)
    """

    def __init__(self, parameters: Mapping[str, Tensor], count: int) -> None:
        self._parameters, self._count = parameters, count
        self._trained = {name: p for name, p in parameters.items() if p.requires_grad}
        self._updates: dict[str, tuple[Tensor, Tensor]] = {}
        """By name: the last `count` updates, the newest first, and their scales' exponents.

        The same tensors from the first update on: captured steps hold their addresses.
        """
        self._number: Tensor | None = None
        """How many updates there were."""
        self._grids: dict[str, Tensor] = {}
        """By name: the exponent of what each block's weights are multiples of."""
        for name, p in self._trained.items():
            if p.dtype in _DIGITS:
                blocks = _blocks(p.detach())
                largest = blocks.abs().amax(1).mul(_GROWTH).clamp_min(_LEAST)
                grid = torch.frexp(largest).exponent - _DIGITS[p.dtype]
                self._grids[name] = grid.to(torch.int8)
                p.detach().copy_(_unblocked(_on_grid(blocks, self._grids[name]), p))

    @contextmanager
    def following(self) -> Iterator[None]:
        """Around an update of all parameters."""
        number = self._allocated()
        trained = [p.detach() for p in self._trained.values()]
        before = [torch.empty_like(p) for p in trained]
        if trained:
            torch._foreach_copy_(before, trained)
        yield
        offset = number.double() * _BY_UPDATE
        for (name, p), old in zip(self._trained.items(), before, strict=True):
            packed, exponents = self._updates[name]
            for kept in (packed, exponents):
                kept[1:].copy_(kept[:-1].clone())
            update, grid = _blocks(old - p.detach()), self._grids.get(name)
            multiples, exponents[0] = _rounded(update, offset, grid)
            scale = _scale(exponents[0], p.dtype)
            if grid is not None:
                # Weights that have outgrown the grid stay where they are, unless they are still
                # exact. What others have written may be anywhere, and returns to the grid here.
                blocks = _blocks(old)
                rounded = _on_grid(blocks, grid)
                step = multiples * scale
                is_exact = (rounded - step) + step == rounded
                multiples = torch.where(is_exact, multiples, 0.0)
                old = _unblocked(rounded, old)
            packed[0] = _packed(multiples)
            p.detach().copy_(old - _unblocked(multiples * scale, old))
        number.add_(1)

    def _allocated(self) -> Tensor:
        if self._number is None:
            for name, p in self._trained.items():
                blocks = -(-p.numel() // BLOCK)
                packed = torch.empty(
                    self._count, blocks, BLOCK // 2, dtype=torch.uint8, device=p.device
                )
                packed.fill_(0x88)  # 8 in each half of a byte is zero
                exponents = torch.zeros(self._count, blocks, dtype=torch.int8, device=p.device)
                self._updates[name] = packed, exponents
            device = next((p.device for p in self._trained.values()), None)
            self._number = torch.zeros((), dtype=torch.long, device=device)
        return self._number

    def past(self, updates: int) -> dict[str, Tensor]:
        """The weights of so many updates ago, as leaves of their own."""
        weights = dict(self._parameters)
        for name, p in self._trained.items():
            old = p.detach().clone()
            packed, exponents = self._updates[name]
            for number in range(updates):
                step = _unpacked(packed[number], p.dtype) * _scale(exponents[number], p.dtype)
                old.add_(_unblocked(step, p))
            weights[name] = old.requires_grad_()
        return weights

    # -- checkpoints --------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What `load` needs."""
        number = int(self._allocated())
        return {"number": number, "updates": {**self._updates}, "grids": {**self._grids}}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from there. Tensors are written to: captured steps hold their addresses."""
        self._allocated().fill_(state["number"])
        for name, kept in self._updates.items():
            for own, saved in zip(kept, state["updates"][name], strict=True):
                own.copy_(saved)
        for name, grid in self._grids.items():
            grid.copy_(state["grids"][name])


def _blocks(tensor: Tensor) -> Tensor:
    """Its elements in rows that share a scale, filled up with zeros."""
    flat = tensor.reshape(-1)
    return F.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)


def _unblocked(blocks: Tensor, like: Tensor) -> Tensor:
    return blocks.reshape(-1)[: like.numel()].view(like.shape)


def _on_grid(blocks: Tensor, grid: Tensor) -> Tensor:
    scale = _scale(grid, blocks.dtype)
    return (blocks / scale).round() * scale


def _rounded(update: Tensor, offset: Tensor, grid: Tensor | None) -> tuple[Tensor, Tensor]:
    """Multiples of each block's scale, and the exponents of these, none below those of the grid."""
    largest = update.abs().amax(1)
    exponents = torch.frexp(largest / _MOST).exponent.clamp(-100, 100).to(torch.int8)
    if grid is not None:
        exponents = torch.maximum(exponents, grid)
    rows = torch.arange(len(update), device=update.device, dtype=torch.double) * _BY_BLOCK
    columns = torch.arange(BLOCK, device=update.device, dtype=torch.double) * _BY_ELEMENT
    threshold = (
        (rows + offset).frac().to(update.dtype)[:, None] + columns.frac().to(update.dtype)
    ).frac()
    return torch.floor(update / _scale(exponents, update.dtype) + threshold), exponents


def _scale(exponents: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.ldexp(torch.ones_like(exponents, dtype=dtype), exponents)[:, None]


def _packed(multiples: Tensor) -> Tensor:
    low, high = (multiples + 8).to(torch.uint8).chunk(2, dim=1)
    return low | (high << 4)


def _unpacked(packed: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.cat([packed & 15, packed >> 4], dim=1).to(dtype) - 8
