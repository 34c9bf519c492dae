"""Structured values (tuples, dicts, dataclasses of tensors) are unpacked where they are computed.

    parts = x.chunk(2)                    parts = x.chunk(2)
    y = layer(x)                          first, second = parts[0], parts[1]
    z = y + parts[0]             -->      y = layer(x)
    w = torch.cat(parts)                  z = y + first
                                          w = torch.cat((first, second))

Its items become nodes right behind the node that computes it. A reader of one item then reads the
tensor itself; a reader of the whole gets it rebuilt from the items. So every value that passes from
one segment or stage to another is a tensor, which has a gradient of its own, or a plain value.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import fx
from torch.fx.proxy import TraceError
from torch.utils import _pytree as pytree

from revcompile.compiler.capture.fake_values import Values, type_of_values
from revcompile.compiler.capture.memory import NO_GRAD
from revcompile.compiler.capture.proxy import ShapedProxy
from revcompile.ir.types import PATH, SOURCE, TYPE, VALUE, TensorType

STRUCTURE: Final = "revcompile_structure"
"""`node.meta` key: the node's `Structure`, or None for a tensor or a plain value."""

_MUTATORS: Final = frozenset(
    [
        *("append", "clear", "extend", "insert", "pop", "popitem", "remove", "reverse", "sort"),
        *("setdefault", "update", "__setitem__", "__delitem__", "move_to_end"),
    ]
)
"""Methods that change a list or a dict."""

_CONTAINERS: Final[tuple[type, ...]] = (
    tuple,
    list,
    set,
    frozenset,
    type({}.items()),
    type({}.values()),
)


class Structure(NamedTuple):
    """A nested value without its leaves: its form, and where each leaf is, and of which type."""

    kind: type
    spec: pytree.TreeSpec
    paths: tuple[pytree.KeyPath, ...]
    types: tuple[Any, ...]


def structure_of(values: Values, batch: tuple[int, int]) -> Structure | None:
    """The structure of a value that holds tensors; None for a tensor or a plain value."""
    if isinstance(values.first, torch.Tensor):
        return None
    leaves, spec = pytree.tree_flatten_with_path(_with_fields(values.first))
    if spec.is_leaf() or not any(isinstance(leaf, torch.Tensor) for _, leaf in leaves):
        return None
    others = pytree.tree_leaves(_with_fields(values.second))
    pairs = zip((leaf for _, leaf in leaves), others, strict=True)
    types = tuple(type_of_values(*pair, batch) for pair in pairs)
    return Structure(type(values.first), spec, tuple(path for path, _ in leaves), types)


def _with_fields(value: Any) -> Any:
    """The value, its dataclasses replaced by what pytree flattens, registered by them or not."""

    def fields(leaf: Any) -> Any:
        if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type):
            return leaf
        return _fields_of(type(leaf))({n: _with_fields(v) for n, v in vars(leaf).items()})

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


# -- while tracing --------------------------------------------------------------------------------


def refuse_hidden_tensors(node: fx.Node, value: Any) -> None:
    """Raise for a value, or a use of one, that would hide tensors from the graph."""
    leaves = () if isinstance(value, torch.Tensor) else pytree.tree_leaves(_with_fields(value))
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor) and _holds_tensors(leaf):
            raise TraceError(
                f"a {type(leaf).__name__} that holds tensors, which no graph can follow; "
                "tuples, lists, dicts and dataclasses of tensors are fine"
            )
    first = node.args[0] if node.args else None
    changed = first.meta.get(STRUCTURE) if isinstance(first, fx.Node) else None
    mutates = node.op == "call_method" and node.target in _MUTATORS
    if changed and (mutates or node.target in (operator.setitem, operator.delitem)):
        raise TraceError(f"a {changed.kind.__name__} of tensors is changed in place")
    for source in node.all_input_nodes:
        kind = structure.kind if (structure := source.meta.get(STRUCTURE)) else tuple
        if not issubclass(kind, (tuple, list)) and kind is not dict and not _is_item(node):
            raise TraceError(f"a {kind.__name__} of tensors is passed on as a whole")


def _holds_tensors(value: Any, depth: int = 3) -> bool:
    """Does an object of an unknown class hold tensors?"""
    if isinstance(value, torch.Tensor):
        return True
    if depth == 0 or isinstance(value, type) or callable(value):
        return False
    inner = value.values() if isinstance(value, Mapping) else value
    if not isinstance(value, (Mapping, *_CONTAINERS)):
        inner = getattr(value, "__dict__", {}).values()
    return any(_holds_tensors(item, depth - 1) for item in inner)


def expanded(value: Any) -> Any:
    """A model's result with every structure written out, so that its leaves are single values."""

    def expand(leaf: Any) -> Any:
        structure = leaf.node.meta.get(STRUCTURE) if isinstance(leaf, ShapedProxy) else None
        if structure is None:
            return leaf
        items = [functools.reduce(lambda v, key: key.get(v), p, leaf) for p in structure.paths]
        return pytree.tree_unflatten(items, structure.spec)

    return _with_fields(pytree.tree_map(expand, _with_fields(value)))


# -- in the graph ---------------------------------------------------------------------------------


def unpack_structures(graph: fx.Graph) -> None:
    """Unpack every structured value behind its producer, and let readers read the items."""
    wholes: dict[fx.Node, Any] = {}
    """Structured values, rebuilt from the nodes of their items."""
    for node in list(graph.nodes):
        if _is_item(node) and node.args[0] in wholes:
            take: Any = node.target
            item = take(wholes[node.args[0]], node.args[1])
            if not isinstance(item, fx.Node):
                wholes[node] = item
            else:
                item.meta[VALUE] = item.meta.get(VALUE) or node.meta.get(VALUE)
                node.replace_all_uses_with(item)
            continue
        node.args, node.kwargs = fx.map_arg(
            (node.args, node.kwargs), lambda source: wholes.get(source, source)
        )
        if (structure := node.meta.pop(STRUCTURE, None)) is not None:
            wholes[node] = _unpacked(graph, node, structure)
    for node in reversed(list(graph.nodes)):  # items without readers
        is_taken = _is_item(node) or (node.op == "call_method" and node.target == "detach")
        if is_taken and not node.users:
            graph.erase_node(node)
    graph.lint()


def _is_item(node: fx.Node) -> bool:
    """Does a node take a known item out of something?"""
    if node.op != "call_function" or node.target not in (operator.getitem, getattr):
        return False
    if isinstance(node.args[1], slice):
        return len(node.all_input_nodes) == 1
    return isinstance(node.args[1], (int, str)) and not isinstance(node.args[1], bool)


def _unpacked(graph: fx.Graph, producer: fx.Node, structure: Structure) -> Any:
    """The value, rebuilt from new nodes for its leaves, right behind their producer."""
    taken: dict[pytree.KeyPath, fx.Node] = {(): producer}
    last, leaves = producer, []
    for path, kind in zip(structure.paths, structure.types, strict=True):
        for end in range(1, len(path) + 1):
            prefix = tuple(path[:end])
            if prefix in taken:
                continue
            key: Any = path[end - 1]
            is_attribute = isinstance(key, pytree.GetAttrKey)
            name = key.name if is_attribute else getattr(key, "key", getattr(key, "idx", None))
            with graph.inserting_after(last):
                function = getattr if is_attribute else operator.getitem
                last = graph.call_function(function, (taken[prefix[:-1]], name))
            pairs = zip(structure.paths, structure.types, strict=True)
            below = tuple(k for p, k in pairs if tuple(p[:end]) == prefix)
            last.meta.update({k: producer.meta.get(k) for k in (PATH, SOURCE, NO_GRAD)})
            last.meta |= {TYPE: kind if end == len(path) else below, VALUE: None}
            taken[prefix] = last
        if producer.meta.get(NO_GRAD) and isinstance(kind, TensorType):
            # What was computed under `no_grad` passes no gradient, wherever its items are taken.
            with graph.inserting_after(last):
                detached = graph.call_method("detach", (last,))
            detached.meta.update(last.meta)
            last = detached
        leaves.append(last)
    return pytree.tree_unflatten(leaves, structure.spec)
