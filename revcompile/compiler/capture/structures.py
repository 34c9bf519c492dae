"""Structured values (tuples, dicts, dataclasses of tensors) are unpacked where they are computed.

    parts = x.chunk(2)                    parts = x.chunk(2)
    y = layer(x)                          first, second = parts[0], parts[1]
    z = y + parts[0]             -->      y = layer(x)
    w = torch.cat(parts)                  z = y + first
                                          w = torch.cat((first, second))

The items of a structure become nodes right behind the node that computes it, and Python gets a
structure of their proxies. So every value that passes from one segment or stage to another is a
plain value or a tensor, which has a gradient of its own.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping, Set, ValuesView
from typing import Any, Final, cast

import torch
from torch import fx
from torch.fx.proxy import TraceError
from torch.utils import _pytree as pytree

from revcompile.compiler.capture.memory import tensors_in

_CONTAINERS: Final = (tuple, list, Set, ValuesView)


def is_structure(value: Any) -> bool:
    """Whether a value is not a tensor, but holds some."""
    return not isinstance(value, torch.Tensor) and bool(tensors_in(value))


def unpacked(
    node: fx.Node,
    value: Any,
    take: Callable[[Any, fx.Node, Any], fx.Node],
    proxy: Callable[[fx.Node], Any],
) -> Any:
    """A node's structured value, with proxies of new nodes in place of its items.

    `take(function, source, key)` makes a node, where `function` is `getitem` or `getattr`.
    """
    leaves, spec = pytree.tree_flatten_with_path(with_fields(value))
    taken: dict[pytree.KeyPath, fx.Node] = {(): node}
    for path, _ in leaves:
        for end in range(1, len(path) + 1):
            prefix, key = tuple(path[:end]), cast(Any, path[end - 1])
            if prefix not in taken:
                function = getattr if isinstance(key, pytree.GetAttrKey) else operator.getitem
                (name,) = dataclasses.astuple(key)  # a field's name, a dict's key, or an index
                taken[prefix] = take(function, taken[prefix[:-1]], name)
    items = (None if leaf is None else proxy(taken[tuple(path)]) for path, leaf in leaves)
    return pytree.tree_unflatten(items, spec)


def with_fields(value: Any) -> Any:
    """The value with its dataclasses (registered or not) replaced by objects pytree flattens."""

    def fields(leaf: Any) -> Any:
        if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type):
            return leaf
        return _fields_of(type(leaf))({n: with_fields(v) for n, v in vars(leaf).items()})

    return pytree.tree_map(fields, value)


@functools.cache
def _fields_of(kind: type) -> type:
    """For each dataclass a class that pytree flattens by field and rebuilds as the dataclass.

    The user's class itself is not registered with pytree: that would change what other code does
    with it.
    """

    class Fields:
        def __init__(self, values: dict[str, Any]) -> None:
            self.values = values

    def rebuilt(items: Any, names: Any) -> Any:
        made: Any = object.__new__(kind)
        for name, item in zip(names, items, strict=True):
            object.__setattr__(made, name, item)
        return made

    Fields.__name__ = Fields.__qualname__ = kind.__name__
    pytree.register_pytree_node(
        Fields,
        lambda made: (list(made.values.values()), tuple(made.values)),
        rebuilt,
        flatten_with_keys_fn=lambda made: (
            [(pytree.GetAttrKey(name), value) for name, value in made.values.items()],
            tuple(made.values),
        ),
    )
    return Fields


def refuse_hidden_tensors(value: Any) -> None:
    """Raise for a value that would hide tensors from the graph."""
    leaves = () if isinstance(value, torch.Tensor) else pytree.tree_leaves(with_fields(value))
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor) and _holds_tensors(leaf):
            raise TraceError(
                f"a {type(leaf).__name__} that holds tensors, which no graph can follow; "
                "tuples, lists, dicts and dataclasses of tensors are fine"
            )


def refuse_lost_type(value: Any) -> None:
    """Raise for an argument if a graph would keep its items, but not its class."""
    is_lost = dataclasses.is_dataclass(value) or isinstance(value, dict)
    if is_lost and type(value) not in (dict, type) and tensors_in(value):
        raise TraceError(f"a {type(value).__name__} of tensors is passed on as a whole")


def _holds_tensors(value: Any, depth: int = 3) -> bool:
    """Whether an object of an unknown class holds tensors."""
    if isinstance(value, torch.Tensor):
        return True
    if depth == 0 or isinstance(value, type) or callable(value):
        return False
    inner = value.values() if isinstance(value, Mapping) else value
    if not isinstance(value, (Mapping, *_CONTAINERS)):
        inner = getattr(value, "__dict__", {}).values()
    return any(_holds_tensors(item, depth - 1) for item in inner)
