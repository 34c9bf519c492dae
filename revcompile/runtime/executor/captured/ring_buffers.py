"""Static buffers for what outlives a step by more than one.

A stage that keeps the inputs of several micro-batches in flight has a slot for each. Every step
writes the newest micro-batch to one slot and reads the oldest from another, so the slots move on
from step to step. The addresses in a captured step are fixed; which slots it uses is a number on
the device, which its kernels read:

    slots       | m-3 | m-2 | m-1 |  m  |       m enters with the step, which differentiates m-3
                   |                 ^
                   v pop             | push
               backward           forward
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from revcompile.runtime.executor.captured.static_buffers import Flat, StaticBuffers


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
            whoever owns it advances.
        oldest: That of the slot that `pop` reads.
    """

    def __init__(self, like: Any, count: int, newest: Tensor, oldest: Tensor) -> None:
        self.count, self.newest, self.oldest = count, newest, oldest
        self._like = Flat.of(like)
        self._rows = [
            _Rows(leaf, count) if isinstance(leaf, Tensor) else None for leaf in self._like.leaves
        ]

    def push(self, tree: Any) -> None:
        """Copy values to the newest slot."""
        for rows, leaf in zip(self._rows, Flat.of(tree).leaves, strict=True):
            if rows is not None:
                rows.write(self.newest, leaf)

    def pop(self) -> Any:
        """A copy of the values in the oldest slot."""
        pairs = zip(self._rows, self._like.leaves, strict=True)
        leaves = [leaf if rows is None else rows.read(self.oldest) for rows, leaf in pairs]
        return self._like.with_leaves(leaves).value

    def slot(self, number: int) -> StaticBuffers:
        """The buffers of a slot; numbers go on beyond the last slot with the first."""
        pairs = zip(self._rows, self._like.leaves, strict=True)
        leaves = [leaf if rows is None else rows.view(number % self.count) for rows, leaf in pairs]
        return StaticBuffers(self._like.with_leaves(leaves), allocate=False)


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
        return self._shaped(self._rows[row : row + 1])

    def _shaped(self, row: Tensor) -> Tensor:
        return row.view(self._dtype).as_strided(self._shape, self._stride)


def updates_since_forward(microbatch: int, entering: int, accumulated: int, accumulate: int) -> int:
    """A stage's updates since its forward pass of a micro-batch, once the pipeline is full.

    Args:
        entering: The micro-batch that enters with the step to come.
        accumulated: Micro-batches in the stage's gradient since its last update.
        accumulate: Micro-batches of one update.

    >>> [updates_since_forward(microbatch, 7, 0, accumulate=1) for microbatch in (4, 5, 6, 7)]
    [3, 2, 1, 0]
    >>> [updates_since_forward(microbatch, 7, 1, accumulate=2) for microbatch in (4, 5, 6, 7)]
    [1, 1, 0, 0]
    """
    return max(0, (entering - 1 - accumulated - microbatch) // accumulate + 1)
