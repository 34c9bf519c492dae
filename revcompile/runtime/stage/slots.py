"""Static buffers: tensors that stay at one address, for captured steps to read and write.

A CUDA graph repeats its kernels on the addresses it was captured with. Whatever one step leaves for
a later one is therefore copied into buffers that are allocated once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from revcompile.runtime.stage.tensors import SMALL, aligned

Layout = tuple[tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...]] | None, ...]
"""For each tensor of a buffer: offset in bytes, dtype, shape and strides.

None: the tensor is on the host although the buffer is not."""

LARGE: Final = 1 << 20
"""Size in bytes above which torch's allocator uses its pool of large blocks."""


class Flat:
    """A flattened pytree. Functions that copy or compare pytrees accept it, too."""

    memory: Tensor
    """The buffer of bytes that holds all tensors, if there is one; `layout` says where they lie."""
    layout: Layout = ()

    def __init__(self, leaves: list[Any], spec: pytree.TreeSpec) -> None:
        self.leaves, self._spec = leaves, spec

    @classmethod
    def of(cls, tree: Any) -> Flat:
        if isinstance(tree, Flat):
            return tree
        return Flat(*pytree.tree_flatten(tree))

    @property
    def value(self) -> Any:
        """The tree itself."""
        return pytree.tree_unflatten(self.leaves, self._spec)

    @property
    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    def cloned(self) -> Any:
        """The tree with copies of its tensors."""
        leaves = (leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in self.leaves)
        return pytree.tree_unflatten(leaves, self._spec)

    def with_leaves(self, leaves: list[Any]) -> Flat:
        """A tree of the same structure with other leaves."""
        return Flat(leaves, self._spec)

    def matches(self, tree: Any) -> bool:
        """Whether structure, shapes and types are the same; devices may differ."""
        other = Flat.of(tree)
        is_same = other._spec is self._spec or other._spec == self._spec
        return is_same and all(map(_is_alike, self.leaves, other.leaves))

    def copy_(self, tree: Any) -> None:
        """Copy values of the same structure to its tensors."""
        pairs = zip(self.leaves, Flat.of(tree).leaves, strict=True)
        _copy_tensors([(own, leaf) for own, leaf in pairs if isinstance(own, Tensor)])


class StaticBuffers(Flat):
    """A pytree whose tensors stay where they are; new values are copied into them.

    >>> buffers = StaticBuffers({"x": torch.zeros(2), "size": 3})
    >>> [buffers.matches({"x": torch.ones(n), "size": 3}) for n in (2, 5)]
    [True, False]
    >>> buffers.copy_({"x": torch.ones(2), "size": 3})
    >>> buffers.value["x"]
    tensor([1., 1.])

    Args:
        like: Values with the structure, shapes, types, devices and memory layouts to allocate.
    """

    def __init__(self, like: Any) -> None:
        flat = Flat.of(like)
        self.memory, self.layout, views = _allocate(flat.tensors)
        leaves = [next(views) if isinstance(leaf, Tensor) else leaf for leaf in flat.leaves]
        super().__init__(leaves, flat._spec)

    def copy_(self, tree: Any) -> None:
        if isinstance(tree, StaticBuffers) and self.layout and tree.layout == self.layout:
            self.memory.copy_(tree.memory)
        else:
            super().copy_(tree)


def empty_on(device: torch.device, tree: Any) -> Any:
    """Nested values with uninitialised tensors on a device instead of their own."""
    return pytree.tree_map_only(Tensor, lambda t: torch.empty_like(t.detach(), device=device), tree)


def free_cached(device: torch.device) -> None:
    """Empty the cache of torch's allocator, before long-lived tensors are allocated.

    A tensor in a part of a large cached block would keep the whole block from being freed.
    """
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        # After a failed capture the allocator itself does not wait for memory that is in use.
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def move(tensors: Iterable[Tensor]) -> None:
    """Move large GPU tensors to newly allocated memory."""
    for tensor in tensors:
        is_whole = tensor.untyped_storage().nbytes() == tensor.nbytes
        if tensor.is_cuda and is_whole and tensor.nbytes >= LARGE:
            tensor.data = tensor.data.clone()


# -- tensors ---------------------------------------------------------------------------------------


def _allocate(like: Sequence[Tensor]) -> tuple[Tensor, Layout, Iterator[Tensor]]:
    """One buffer of bytes, its layout, and tensors in it like the given ones.

    If these are on several devices, each tensor gets its own memory, and the buffer is empty.
    """
    devices = list(dict.fromkeys(tensor.device for tensor in like))
    if len(devices) != 1:
        return torch.empty(0, dtype=torch.uint8), (), iter(map(torch.empty_like, like))
    shapes = [torch.empty_like(tensor.detach(), device="meta") for tensor in like]
    offsets, size = aligned(shape.nbytes for shape in shapes)
    memory = torch.empty(size, dtype=torch.uint8, device=devices[0])
    places = [
        (offset, shape.dtype, tuple(shape.shape), shape.stride())
        for offset, shape in zip(offsets, shapes, strict=True)
    ]
    # .data gives each view its own version counter.
    views = [
        memory[o : o + shape.nbytes].view(shape.dtype).as_strided(shape.shape, shape.stride()).data
        for o, shape in zip(offsets, shapes, strict=True)
    ]
    return memory, tuple(places), iter(views)


def _is_alike(buffer: Any, leaf: Any) -> bool:
    if isinstance(buffer, Tensor) and isinstance(leaf, Tensor):
        return buffer.shape == leaf.shape and buffer.dtype == leaf.dtype
    return type(buffer) is type(leaf) and bool(buffer == leaf)


def _copy_tensors(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy small tensors of one type together; a large one takes a kernel of its own anyway."""
    small: dict[tuple[Any, ...], list[tuple[Tensor, Tensor]]] = {}
    with torch.no_grad():
        for target, source in pairs:
            if target is source:
                continue
            if target.numel() <= SMALL and target.device == source.device:
                kind = target.device, target.dtype, source.dtype
                small.setdefault(kind, []).append((target, source))
            else:
                target.copy_(source, non_blocking=True)
        for group in small.values():
            torch._foreach_copy_([a for a, _ in group], [b for _, b in group])


def when_copied(sources: Iterable[Any], device: torch.device) -> torch.cuda.Event | None:
    """An event that follows copies of these to the device; None if no copy can be pending.

    A copy may still read host memory, pinned or not, after the call has returned.
    """
    is_late = device.type == "cuda" and any(isinstance(s, Tensor) and s.is_cpu for s in sources)
    return torch.cuda.current_stream(device).record_event() if is_late else None


# -- slots -----------------------------------------------------------------------------------------


class Ring:
    """Slots for nested values of one structure: what a stage keeps of each micro-batch in flight.

        slots       | m-3 | m-2 | m-1 |  m  |       m enters with the step, which differentiates m-3
                       |                 ^
                       v take            | put
                   backward           forward

    Micro-batch m has slot `m % count`. A captured step has fixed addresses, so there the numbers of
    its slots are on the device (`ends`), where kernels read them.

    >>> ring = Ring({"x": torch.zeros(2), "size": 2}, 3)
    >>> _ = ring.put(1, {"x": torch.ones(2), "size": 2})
    >>> ring.ends = torch.tensor([2]), torch.tensor([1])
    >>> ring.take(1)
    {'x': tensor([1., 1.]), 'size': 2}

    Args:
        like: Values of this structure.
        count: How many slots there are.
    """

    def __init__(self, like: Any, count: int) -> None:
        self.count = count
        self.ends: tuple[Tensor, Tensor] | None = None
        """In a captured step: the numbers of the slots that it writes to and reads from."""
        form = Flat.of(like)
        for device in {x.device: None for x in form.leaves if isinstance(x, Tensor)}:
            free_cached(device)
        self._rows = [_Rows(x, count) if isinstance(x, Tensor) else None for x in form.leaves]
        pairs = list(zip(self._rows, form.leaves, strict=True))
        views = [
            [x if rows is None else rows.view(row) for rows, x in pairs] for row in range(count)
        ]
        self._slots = [form.with_leaves(view) for view in views]

    def slot(self, number: int) -> Flat:
        """The buffers of a slot; numbers wrap around."""
        return self._slots[number % self.count]

    def value(self, number: int) -> Any:
        """The values in a slot, not copied."""
        return self.slot(number).value

    def put(self, number: int, tree: Any) -> bool:
        """Copy values to a slot; False if structure, shapes or dtypes differ."""
        if not self.slot(number).matches(tree):
            return False
        if self.ends is not None:
            for rows, leaf in zip(self._rows, Flat.of(tree).leaves, strict=True):
                if rows is not None:
                    rows.write(self.ends[0], leaf)
        else:
            self.slot(number).copy_(tree)
        return True

    def take(self, number: int) -> Any:
        """A copy of the values in a slot."""
        if self.ends is None:
            return self.slot(number).cloned()
        leaves = [
            leaf if rows is None else rows.read(self.ends[1])
            for rows, leaf in zip(self._rows, self._slots[0].leaves, strict=True)
        ]
        return self._slots[0].with_leaves(leaves).value


class _Rows:
    """Tensors of one shape, as rows of a matrix of large words, which are faster to index."""

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
        # .data gives each view its own version counter.
        return self._shaped(self._rows[row : row + 1]).data

    def _shaped(self, row: Tensor) -> Tensor:
        return row.view(self._dtype).as_strided(self._shape, self._stride)
