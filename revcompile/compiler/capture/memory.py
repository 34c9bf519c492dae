"""Which nodes of a traced graph share memory, and which write into it.

Seen on the fake tensors while tracing, not guessed from names: an in-place layer, a dropout that
hands its input through in eval mode and `mask.div_(keep)` are all caught the same way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any, Final

import torch
from torch import fx, nn

__all__ = ["MEMORY", "STATE", "WRITES", "number_memory", "tensors_in", "watched_memory"]

MEMORY: Final = "revcompile_memory"
"""`node.meta` key: numbers of the pieces of memory the node's value lives in."""

WRITES: Final = "revcompile_writes"
"""`node.meta` key: numbers of the pieces of memory the node writes into."""

STATE: Final = -1
"""The number of all memory that outlives a call: parameters, buffers, constants."""


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
    """Note which memory an evaluation of `node` writes into, and where its value lives."""
    inputs = [t for source in node.all_input_nodes for t in tensors_in(values[source].first)]
    versions = [t._version for t in inputs]
    yield
    node.meta[WRITES] = _storages(
        t for t, version in zip(inputs, versions, strict=True) if t._version != version
    )
    node.meta[MEMORY] = _storages(tensors_in(values[node].first))


def _storages(tensors: Iterator[torch.Tensor] | list[torch.Tensor]) -> frozenset[int]:
    with_storage = (t for t in tensors if torch._C._has_storage(t))
    return frozenset(t.untyped_storage()._cdata for t in with_storage)


def number_memory(graph: fx.Graph, root: nn.Module) -> None:
    """Replace addresses by the position of the node that first used them, or `STATE`."""
    numbers = dict.fromkeys(_storages([*root.parameters(), *root.buffers()]), STATE)
    for position, node in enumerate(graph.nodes):
        mine = STATE if node.op == "get_attr" else position
        for key in (MEMORY, WRITES):
            found = node.meta.get(key, frozenset())
            node.meta[key] = frozenset(numbers.setdefault(address, mine) for address in found)
