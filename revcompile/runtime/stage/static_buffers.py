"""Static buffers: tensors that stay at one address, for captured steps to read and write.

A CUDA graph repeats its kernels on the addresses it was captured with. Whatever one step leaves for
a later one is therefore copied into buffers that are allocated once.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from revcompile.runtime.stage.buffer_pool import BufferPool
from revcompile.runtime.stage.tensors import aligned

Layout = tuple[tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...]] | None, ...]
"""For each tensor of a buffer: offset in bytes, dtype, shape and strides.

None for one that has to be computed from its bytes."""

SMALL: Final = 1 << 16
"""Elements up to which tensors are copied together, by one kernel."""
LARGE: Final = 1 << 20
"""Bytes from which on torch's allocator puts a tensor among other large ones."""


class Flat:
    """A pytree, flattened: whatever takes values to copy or compare takes this, too."""

    def __init__(self, leaves: list[Any], spec: pytree.TreeSpec) -> None:
        self.leaves, self._spec = leaves, spec

    @classmethod
    def of(cls, tree: Any) -> Flat:
        if isinstance(tree, Flat):
            return tree
        if (flat := _flat_batch(tree)) is not None:
            return flat
        return Flat(*pytree.tree_flatten(tree))

    @property
    def value(self) -> Any:
        """The tree itself."""
        return pytree.tree_unflatten(self.leaves, self._spec)

    def with_leaves(self, leaves: list[Any]) -> Flat:
        """A tree of the same structure."""
        return Flat(leaves, self._spec)

    def is_alike(self, other: Flat) -> bool:
        """The same structure, shapes and types? Devices may differ."""
        is_same = other._spec is self._spec or other._spec == self._spec
        return is_same and all(map(_is_alike, self.leaves, other.leaves))


def _flat_batch(tree: Any) -> Flat | None:
    """What most steps are given, tensors by name and a target: in less time than a pytree takes."""
    if type(tree) is not tuple or len(tree) != 2 or not isinstance(tree[1], Tensor | None):
        return None
    values, target = tree
    if values is None:
        return Flat([None, target], _batch_spec(None))
    if type(values) is dict and all(isinstance(value, Tensor) for value in values.values()):
        return Flat([*values.values(), target], _batch_spec(tuple(values)))
    return None


@functools.lru_cache(maxsize=64)
def _batch_spec(names: tuple[str, ...] | None) -> pytree.TreeSpec:
    values = None if names is None else dict.fromkeys(names, 0)
    return pytree.tree_structure((values, 0))


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
        allocate: False if the tensors of `like` are the buffers.
    """

    def __init__(self, like: Any, allocate: bool = True) -> None:
        flat = Flat.of(like)
        tensors = [leaf for leaf in flat.leaves if isinstance(leaf, Tensor)]
        self.memory, self.layout, views = _allocate(tensors if allocate else ())
        """All its tensors lie in one buffer of bytes, if they are on one device."""
        leaves = [
            next(views) if allocate and isinstance(leaf, Tensor) else leaf for leaf in flat.leaves
        ]
        super().__init__(leaves, flat._spec)

    @property
    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    def matches(self, tree: Any) -> bool:
        """Can these values be copied in? They may be on another device."""
        return self.is_alike(Flat.of(tree))

    def copy_(self, tree: Any) -> None:
        if isinstance(tree, StaticBuffers) and self.layout and tree.layout == self.layout:
            self.memory.copy_(tree.memory)
        else:
            pairs = zip(self.leaves, Flat.of(tree).leaves, strict=True)
            copy_tensors([(buffer, leaf) for buffer, leaf in pairs if isinstance(buffer, Tensor)])


def empty_on(device: torch.device, tree: Any) -> Any:
    """Nested values with uninitialised tensors on a device instead of their own."""
    return pytree.tree_map_only(Tensor, lambda t: torch.empty_like(t.detach(), device=device), tree)


def free_cached(device: torch.device) -> None:
    """Before something is allocated that lasts: free what torch's allocator has cached.

    A tensor that gets a part of a large cached block keeps all of that block from being freed.
    """
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        # After a capture that has failed the allocator does not wait for what is in use.
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def move(tensors: Iterable[Tensor]) -> None:
    """Have large tensors on a GPU lie in memory that is allocated now."""
    for tensor in tensors:
        is_whole = tensor.untyped_storage().nbytes() == tensor.nbytes
        if tensor.is_cuda and is_whole and tensor.nbytes >= LARGE:
            tensor.data = tensor.data.clone()


def pooled_copy(pool: BufferPool, tree: Any) -> Any:
    """A copy of nested values in buffers of a pool: no memory is allocated in the long run."""

    def buffer(leaf: Tensor) -> Tensor:
        kind = leaf.shape, leaf.stride(), leaf.dtype, leaf.device
        return pool.take(kind, lambda: _empty_like(leaf))

    flat = Flat.of(tree)
    copies = [buffer(leaf) if isinstance(leaf, Tensor) else leaf for leaf in flat.leaves]
    copy_tensors(
        [(a, b) for a, b in zip(copies, flat.leaves, strict=True) if isinstance(a, Tensor)]
    )
    return flat.with_leaves(copies).value


# -- tensors ---------------------------------------------------------------------------------------


def _empty_like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor.detach(), requires_grad=False)


def _allocate(like: Sequence[Tensor]) -> tuple[Tensor, Layout, Iterator[Tensor]]:
    """One buffer of bytes, what lies where in it, and tensors like these.

    Tensors on several devices get memory of their own, and the buffer stays empty.
    """
    devices = list(dict.fromkeys(tensor.device for tensor in like))
    if len(devices) != 1:
        return torch.empty(0, dtype=torch.uint8), (), iter([_empty_like(t) for t in like])
    shapes = [torch.empty_like(tensor.detach(), device="meta") for tensor in like]
    offsets, size = aligned(shape.nbytes for shape in shapes)
    memory = torch.empty(size, dtype=torch.uint8, device=devices[0])
    places = [
        (offset, shape.dtype, tuple(shape.shape), shape.stride())
        for offset, shape in zip(offsets, shapes, strict=True)
    ]
    # .data: a version counter of its own for each
    views = [
        memory[o : o + shape.nbytes].view(shape.dtype).as_strided(shape.shape, shape.stride()).data
        for o, shape in zip(offsets, shapes, strict=True)
    ]
    return memory, tuple(places), iter(views)


def _is_alike(buffer: Any, leaf: Any) -> bool:
    if isinstance(buffer, Tensor) and isinstance(leaf, Tensor):
        return buffer.shape == leaf.shape and buffer.dtype == leaf.dtype
    return type(buffer) is type(leaf) and bool(buffer == leaf)


def storage(tensor: Tensor) -> int:
    """Identifies the memory that a tensor lies in."""
    address: int = tensor.untyped_storage()._cdata
    return address


def copy_tensors(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy small tensors of one type together; a large one takes a kernel of its own anyway."""
    if len(pairs) == 1:
        ((target, source),) = pairs
        if target is not source:
            target.detach().copy_(source, non_blocking=True)
        return
    small: dict[tuple[Any, ...], list[tuple[Tensor, Tensor]]] = {}
    with torch.no_grad():
        for target, source in pairs:
            if target is source:
                continue
            is_local = target.device == source.device and target.dtype is not torch.float8_e4m3fn
            if target.numel() <= SMALL and is_local:
                kind = target.device, target.dtype, source.dtype
                small.setdefault(kind, []).append((target, source))
            else:
                target.copy_(source, non_blocking=True)
        for group in small.values():
            torch._foreach_copy_([a for a, _ in group], [b for _, b in group])
