"""Static buffers for what outlives a step by more than one.

A stage that keeps the inputs of several micro-batches in flight has a slot for each. Every step
writes the newest micro-batch to one slot and reads the oldest from another, so the slots move on
from step to step:

    slots       | m-3 | m-2 | m-1 |  m  |       m enters with the step, which differentiates m-3
                   |                 ^
                   v pop             | push
               backward           forward

Steps that run action by action know the number of a slot (`put`, `value`). The addresses in a
captured step are fixed: there the number is on the device, where its kernels read it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from revcompile.runtime.stage.static_buffers import Flat, StaticBuffers, free_cached

_NONE: Final = torch.empty(0, dtype=torch.int64)


class RingBuffer:
    """A queue of nested values of one form, in static buffers.

    >>> ring = RingBuffer({"x": torch.zeros(2), "size": 2}, 3, torch.tensor([1]), torch.tensor([1]))
    >>> ring.push({"x": torch.ones(2), "size": 2})
    >>> ring.pop()
    {'x': tensor([1., 1.]), 'size': 2}

    Args:
        like: One of them.
        count: How many slots there are.
        newest: The number of the slot that `push` writes to: a tensor with one element, which
            whoever owns it advances. It may be given later, as that of the slot that `pop` reads.
    """

    def __init__(self, like: Any, count: int, newest: Tensor = _NONE, oldest: Tensor = _NONE):
        self.count, self.newest, self.oldest = count, newest, oldest
        form = Flat.of(like)
        for device in {x.device: None for x in form.leaves if isinstance(x, Tensor)}:
            free_cached(device)
        self._rows = [_Rows(x, count) if isinstance(x, Tensor) else None for x in form.leaves]
        # Not the tensors themselves: they would live on.
        self._form = form.with_leaves([None if isinstance(x, Tensor) else x for x in form.leaves])
        views = [self._filled(partial(_Rows.view, row=number)) for number in range(count)]
        self._slots = [StaticBuffers(view, allocate=False) for view in views]
        self._values = [slot.value for slot in self._slots]

    def _filled(self, tensor: Callable[[_Rows], Tensor]) -> Flat:
        pairs = zip(self._rows, self._form.leaves, strict=True)
        return self._form.with_leaves([x if rows is None else tensor(rows) for rows, x in pairs])

    def slot(self, number: int) -> StaticBuffers:
        """The buffers of a slot; numbers go on beyond the last slot with the first."""
        return self._slots[number % self.count]

    def value(self, number: int) -> Any:
        """The values in a slot: always the same object."""
        return self._values[number % self.count]

    def put(self, number: int, tree: Any) -> Any:
        """Copy values to a slot, and return what lies there; if they do not fit, themselves."""
        slot = self.slot(number)
        if not slot.matches(tree):
            return tree
        slot.copy_(tree)
        return self.value(number)

    def push(self, tree: Any) -> None:
        """Copy values to the newest slot."""
        for rows, leaf in zip(self._rows, Flat.of(tree).leaves, strict=True):
            if rows is not None:
                rows.write(self.newest, leaf)

    def pop(self) -> Any:
        """A copy of the values in the oldest slot."""
        return self._filled(partial(_Rows.read, row=self.oldest)).value


class _Rows:
    """Tensors of one form, each a row of a matrix: indexed in large words, which is faster."""

    def __init__(self, like: Tensor, count: int) -> None:
        form = torch.empty_like(like.detach(), device="meta")
        self._shape, self._stride, self._dtype = form.shape, form.stride(), form.dtype
        self._word = torch.int64 if form.nbytes % 8 == 0 else torch.uint8
        words = form.nbytes // self._word.itemsize
        self._rows = torch.empty(count, words, dtype=self._word, device=like.device)

    def write(self, row: Tensor, tensor: Tensor) -> None:
        tensor = tensor.detach()
        is_aligned = tensor.storage_offset() * tensor.element_size() % 8 == 0
        if tensor.stride() != self._stride or not is_aligned:
            tensor = tensor.new_empty_strided(self._shape, self._stride).copy_(tensor)
        flat = tensor.as_strided((1, tensor.numel()), (tensor.numel(), 1))
        self._rows.index_copy_(0, row, flat.view(self._word))

    def read(self, row: Tensor) -> Tensor:
        return self._shaped(self._rows.index_select(0, row))

    def view(self, row: int) -> Tensor:
        # .data: a version counter of its own for each
        return self._shaped(self._rows[row : row + 1]).data

    def _shaped(self, row: Tensor) -> Tensor:
        return row.view(self._dtype).as_strided(self._shape, self._stride)
