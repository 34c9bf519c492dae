"""The weights of some updates ago, computed from the latest ones and the updates in between.

An update is rounded to 4 bits an element before it is applied, so that what is kept of it is all of
it. Weights, which are float32 or float64, are multiples of a power of two, the same for all
elements that share a scale and for all updates: adding an update to the latest weights then gives
those before to the bit.

A stage that is t updates late keeps t updates, about t/2 bytes a parameter, and needs one copy of
its weights while backward runs; stashed weights take 4 t bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor

from revcompile.kernels import four_bits
from revcompile.schedule import REWOUND_BLOCK as BLOCK

_BUCKET: Final = 2**22
"""Elements that are rounded at once: what is computed on the way takes some times their memory."""


class RewoundWeights:
    """A stage's weights of earlier updates. `start` rounds the weights themselves.

    >>> w = {"w": torch.tensor([1.0, 2.0], requires_grad=True)}
    >>> weights = RewoundWeights(w, count=2)
    >>> weights.start()
    >>> for update in (0.25, 0.5):
    ...     with torch.no_grad(), weights.following():
    ...         _ = w["w"].sub_(update)
    >>> weights.past(2)["w"]
    tensor([1., 2.], requires_grad=True)
    """

    def __init__(self, parameters: Mapping[str, Tensor], count: int) -> None:
        self._parameters = parameters
        trained = {name: p for name, p in parameters.items() if p.requires_grad}
        self._buckets = [_Bucket(bucket, count) for bucket in _bucketed(trained)]
        self._number: Tensor | None = None
        """How many updates there were."""

    def start(self) -> None:
        """Before the first forward pass."""
        for bucket in self._buckets:
            bucket.start()

    @contextmanager
    def following(self) -> Iterator[None]:
        """Around an update of all parameters."""
        number = self._allocated()
        before = [bucket.rows() for bucket in self._buckets]
        yield
        for bucket, old in zip(self._buckets, before, strict=True):
            bucket.follow(old, number)
        number.add_(1)

    def _allocated(self) -> Tensor:
        if self._number is None:
            for bucket in self._buckets:
                bucket.allocate()
            device = next((bucket.device for bucket in self._buckets), None)
            self._number = torch.zeros((), dtype=torch.long, device=device)
        return self._number

    def past(self, updates: int) -> dict[str, Tensor]:
        """The weights of so many updates ago, as leaves of their own."""
        weights = dict(self._parameters)
        for bucket in self._buckets:
            weights.update(bucket.past(updates))
        return weights

    # -- checkpoints --------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What `load` needs."""
        number, updates, grids = int(self._allocated()), {}, {}
        for bucket in self._buckets:
            updates.update(bucket.updates())
            grids.update(bucket.grids())
        return {"number": number, "updates": updates, "grids": grids}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from there. Tensors are written to: captured steps hold their addresses."""
        self._allocated().fill_(state["number"])
        for bucket in self._buckets:
            for name, kept in bucket.updates().items():
                for own, saved in zip(kept, state["updates"][name], strict=True):
                    own.copy_(saved)
            for name, grid in bucket.grids().items():
                grid.copy_(state["grids"][name])


class _Bucket:
    """Parameters of one dtype, side by side in rows of which each has a scale.

    A kernel for each parameter would take longer to start than to run.
    """

    def __init__(self, parameters: Mapping[str, Tensor], count: int) -> None:
        self._parameters, self._count = parameters, count
        self._sizes = [-(-p.numel() // BLOCK) for p in parameters.values()]
        first = next(iter(parameters.values()))
        self._dtype, self.device = first.dtype, first.device
        self._packed = self._exponents = self._grid = torch.empty(0)
        """The last `count` updates, the newest first, and their scales' exponents.

        The same tensors from the first update on: captured steps hold their addresses. `_grid`: the
        exponent of what each row's weights are multiples of.
        """

    def start(self) -> None:
        rows = self.rows()
        self._grid = four_bits.grid_of(rows)
        self._write(four_bits.on_grid(rows, self._grid))

    def allocate(self) -> None:
        """Room for updates."""
        shape, device = (self._count, sum(self._sizes)), self.device
        # 8 in each half of a byte is zero.
        self._packed = torch.full((*shape, BLOCK // 2), 0x88, dtype=torch.uint8, device=device)
        self._exponents = torch.zeros(shape, dtype=torch.int8, device=device)

    def rows(self) -> Tensor:
        """The parameters as they are, rows filled up with zeros."""
        rows = torch.zeros(sum(self._sizes), BLOCK, dtype=self._dtype, device=self.device)
        torch._foreach_copy_(self._views(rows), [p.detach() for p in self._parameters.values()])
        return rows

    def _views(self, rows: Tensor) -> list[Tensor]:
        parts = zip(rows.split(self._sizes), self._parameters.values(), strict=True)
        return [part.reshape(-1)[: p.numel()].view(p.shape) for part, p in parts]

    def _write(self, rows: Tensor) -> None:
        torch._foreach_copy_([p.detach() for p in self._parameters.values()], self._views(rows))

    def follow(self, old: Tensor, number: Tensor) -> None:
        """Round the update, with its number, since the parameters were `old`, and keep it."""
        for kept in (self._packed, self._exponents):
            kept[1:].copy_(kept[:-1].clone())
        multiples, exponents = four_bits.multiples_of(old - self.rows(), number, self._grid)
        scale = four_bits.scale_of(exponents, self._dtype)
        # Weights that have outgrown the grid stay where they are, unless they are still exact. What
        # others have written may be anywhere, and returns to the grid here.
        old = four_bits.on_grid(old, self._grid)
        step = multiples * scale
        multiples = torch.where((old - step) + step == old, multiples, 0.0)
        self._exponents[0], self._packed[0] = exponents, four_bits.packed(multiples)
        self._write(old - multiples * scale)

    def past(self, updates: int) -> dict[str, Tensor]:
        """The parameters of so many updates ago, with the strides they have."""
        rows = self.rows()
        for number in range(updates):
            scale = four_bits.scale_of(self._exponents[number], self._dtype)
            rows.add_(four_bits.unpacked(self._packed[number], self._dtype) * scale)
        found = {}
        for (name, p), view in zip(self._parameters.items(), self._views(rows), strict=True):
            value = view if p.is_contiguous() else torch.empty_like(p).copy_(view)
            found[name] = value.requires_grad_()
        return found

    def updates(self) -> dict[str, tuple[Tensor, Tensor]]:
        """By name: parts of what is kept."""
        kept = (tensor.split(self._sizes, dim=1) for tensor in (self._packed, self._exponents))
        return dict(zip(self._parameters, zip(*kept, strict=True), strict=True))

    def grids(self) -> dict[str, Tensor]:
        """By name: parts of the grid."""
        return dict(zip(self._parameters, self._grid.split(self._sizes), strict=True))


def _bucketed(parameters: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Of one device and dtype each, and about as large as `_BUCKET` at most."""
    by_kind: dict[Any, list[dict[str, Tensor]]] = {}
    for name, p in parameters.items():
        buckets = by_kind.setdefault((p.device, p.dtype), [{}])
        if buckets[-1] and sum(q.numel() for q in buckets[-1].values()) + p.numel() > _BUCKET:
            buckets.append({})
        buckets[-1][name] = p
    return [bucket for buckets in by_kind.values() for bucket in buckets]
