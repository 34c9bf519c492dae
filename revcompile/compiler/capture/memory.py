"""Which values of a traced graph share memory, where in it they lie, and which nodes write to it.

Seen on the fake tensors while tracing, not guessed from names: an in-place layer, a dropout that
returns its input in eval mode and `mask.div_(keep)` are all seen the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Final

import torch
from torch import fx, nn

__all__ = [
    "MEMORY",
    "PLACES",
    "STATE",
    "WRITES",
    "Place",
    "mark_state",
    "record_places",
    "tensors_in",
    "watched_memory",
]

MEMORY: Final = "revcompile_memory"
"""`node.meta` key: the storages in which the node's value lies."""

WRITES: Final = "revcompile_writes"
"""`node.meta` key: the storages the node writes into, of those its inputs lie in."""

PLACES: Final = "revcompile_places"
"""`node.meta` key: a `Place` for each tensor of the node's value, in the order of `tensors_in`."""


STATE: Final = "revcompile_state"
"""`node.meta` key: of the memory a node writes into, is some a parameter's or buffer's?"""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies. Equal places read the same elements of the same storage.

    `layout` has offset, shape and strides at both batch sizes; `tensor` tells tensor objects apart.
    """

    storage: int
    layout: tuple[Any, ...]
    dtype: torch.dtype
    tensor: int

    def same_elements(self, other: Place) -> bool:
        """Do both name the same elements, at every batch size?"""
        mine, theirs = (self.storage, self.layout, self.dtype), other
        return mine == (theirs.storage, theirs.layout, theirs.dtype)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors in a nested value, dataclasses included."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = value.values()
    elif is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, field.name) for field in fields(value)]
    elif not isinstance(value, (tuple, list)):
        return []
    return [tensor for item in value for tensor in tensors_in(item)]


@contextmanager
def watched_memory(node: fx.Node, values: Mapping[fx.Node, Any]) -> Iterator[None]:
    """Note which memory an evaluation of `node` writes into, and where its value lies."""
    inputs = [t for source in node.all_input_nodes for t in tensors_in(values[source].first)]
    versions = [t._version for t in inputs]
    yield
    written = [t for t, version in zip(inputs, versions, strict=True) if t._version != version]
    node.meta[WRITES] = _storages(written)
    record_places(node, values[node].first, values[node].second)


def record_places(node: fx.Node, first: Any, second: Any) -> None:
    """Note where a node's value lies, given it at both batch sizes."""
    pairs = zip(tensors_in(first), tensors_in(second), strict=False)
    node.meta[PLACES] = tuple(_place(a, b) for a, b in pairs if torch._C._has_storage(a))
    node.meta[MEMORY] = frozenset(place.storage for place in node.meta[PLACES])


def mark_state(graph: fx.Graph, root: nn.Module) -> None:
    """Note which nodes write into parameters or buffers of the module that was traced."""
    state = _storages([*root.parameters(), *root.buffers()])
    for node in graph.nodes:
        node.meta[STATE] = bool(state & node.meta.get(WRITES, frozenset()))


def _place(first: torch.Tensor, second: torch.Tensor) -> Place:
    storage = first.untyped_storage()._cdata
    return Place(storage, (*_layout(first), *_layout(second)), first.dtype, id(first))


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    if tensor.layout is not torch.strided:
        return (tuple(tensor.shape),)
    return tensor.storage_offset(), tuple(tensor.shape), tensor.stride()


def _storages(tensors: Iterable[torch.Tensor]) -> frozenset[int]:
    with_storage = (t for t in tensors if torch._C._has_storage(t))
    return frozenset(t.untyped_storage()._cdata for t in with_storage)
