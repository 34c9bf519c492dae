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
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx
from torch.fx.proxy import TraceError
from torch.utils import _pytree as pytree

from revcompile.compiler.capture.memory import NO_GRAD, tensors_in
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

_VIEWS_OF_DICTS: Final[tuple[type, ...]] = (type({}.items()), type({}.values()))


@dataclass(frozen=True)
class Structure:
    """A nested value without its tensors: its class, and the key, index or name of each item."""

    kind: type
    keys: tuple[Any, ...]
    items: tuple[Structure | None, ...]
    """Items that are structured themselves; None for a tensor or a plain value."""

    @property
    def by_name(self) -> bool:
        """Are items attributes (of a dataclass), not elements?"""
        return dataclasses.is_dataclass(self.kind) and not issubclass(self.kind, Mapping)

    @property
    def is_rebuilt(self) -> bool:
        """Can an argument of a node be of this kind?"""
        return issubclass(self.kind, (tuple, list)) or self.kind is dict


def structure_of(value: Any) -> Structure | None:
    """The structure of a value that holds tensors; None for a tensor or a plain value."""
    items = _items(value)
    if items is None or not tensors_in(value):
        return None
    return Structure(type(value), tuple(items), tuple(map(structure_of, items.values())))


def _items(value: Any) -> dict[Any, Any] | None:
    if isinstance(value, Mapping):
        return dict(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dict(vars(value))
    return dict(enumerate(value)) if isinstance(value, (tuple, list)) else None


# -- while tracing --------------------------------------------------------------------------------


def refuse_hidden_tensors(node: fx.Node, value: Any) -> None:
    """Raise for a value, or a use of one, that would hide tensors from the graph."""
    is_known = isinstance(value, torch.Tensor) or structure_of(value) is not None
    if not is_known and _hidden_tensors(value):
        raise TraceError(
            f"a {type(value).__name__} that holds tensors, which no graph can follow; "
            "tuples, lists, dicts and dataclasses of tensors are fine"
        )
    first = node.args[0] if node.args else None
    changed = first.meta.get(STRUCTURE) if isinstance(first, fx.Node) else None
    mutates = node.op == "call_method" and node.target in _MUTATORS
    if changed and (mutates or node.target in (operator.setitem, operator.delitem)):
        raise TraceError(f"a {changed.kind.__name__} of tensors is changed in place")
    for source in node.all_input_nodes:
        structure = source.meta.get(STRUCTURE)
        if structure and not structure.is_rebuilt and not _is_item(node):
            raise TraceError(f"a {structure.kind.__name__} of tensors is passed on as a whole")


def _hidden_tensors(value: Any, depth: int = 3) -> bool:
    """Does an object of an unknown class hold tensors?"""
    if isinstance(value, torch.Tensor):
        return True
    if depth == 0 or isinstance(value, type) or callable(value):
        return False
    inner: list[Any]
    if isinstance(value, (set, frozenset)) or type(value) in _VIEWS_OF_DICTS:
        inner = list(value)
    elif isinstance(value, (tuple, list, Mapping)):
        inner = list((_items(value) or {}).values())
    else:
        inner = list(getattr(value, "__dict__", {}).values())
    return any(_hidden_tensors(item, depth - 1) for item in inner)


def expanded(value: Any) -> Any:
    """A model's result with every structure written out, so that its leaves are single values."""

    def expand(leaf: Any) -> Any:
        if not isinstance(leaf, ShapedProxy):
            is_record = dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)
            return _record(type(leaf), expanded(dict(vars(leaf)))) if is_record else leaf
        structure = structure_of(leaf.known.first)
        if structure is None:
            return leaf
        take = getattr if structure.by_name else operator.getitem
        return _rebuilt(structure, [expand(take(leaf, key)) for key in structure.keys])

    return pytree.tree_map(expand, value)


def _rebuilt(structure: Structure, items: list[Any]) -> Any:
    kind = structure.kind
    if structure.by_name:
        return _record(kind, dict(zip(structure.keys, items, strict=True)))
    if issubclass(kind, Mapping):
        return kind(**dict(zip(structure.keys, items, strict=True)))
    if hasattr(kind, "_fields"):
        return kind(*items)
    return items if kind is list else _known_to_pytree(kind)(items)


def _known_to_pytree(kind: type) -> type:
    return kind if kind in pytree.SUPPORTED_NODES else tuple


def _record(kind: type, values: dict[str, Any]) -> Any:
    """A dataclass as pytree can flatten it, whether or not its author has registered it."""
    return _fields_of(kind)(values)


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
        Fields, lambda made: (list(made.values.values()), tuple(made.values)), rebuilt
    )
    return Fields


# -- in the graph ---------------------------------------------------------------------------------


def unpack_structures(graph: fx.Graph) -> None:
    """Unpack every structured value behind its producer, and let readers read the items."""
    parts: dict[fx.Node, _Parts] = {}
    for node in list(graph.nodes):
        source = node.args[0] if _is_item(node) else None
        if isinstance(source, fx.Node) and source in parts:
            item = parts[source].pick(node.args[1])
            if isinstance(item, _Parts):
                parts[node] = item
            elif item is not None and item is not node and node not in item.all_input_nodes:
                node.replace_all_uses_with(item)
            if item is not None:
                continue
        _rebuild_arguments(node, parts)
        structure = node.meta.get(STRUCTURE)
        if structure is not None:
            parts[node] = _unpacked(graph, node, structure)
    _erase_unread_items(graph)


def _is_item(node: fx.Node) -> bool:
    """Does a node take a known item out of something?"""
    if node.op != "call_function" or node.target not in (operator.getitem, getattr):
        return False
    return isinstance(node.args[1], (int, str, slice)) and not isinstance(node.args[1], bool)


def _rebuild_arguments(node: fx.Node, parts: Mapping[fx.Node, _Parts]) -> None:
    """Replace structured arguments of a node by tuples and dicts of their items."""

    def given(source: fx.Node) -> Any:
        return parts[source].whole() if source in parts else source

    if any(source in parts for source in node.all_input_nodes):
        node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), given)


def _unpacked(graph: fx.Graph, producer: fx.Node, structure: Structure) -> _Parts:
    """Nodes for all items, right behind their producer; existing ones are moved there."""
    existing: dict[Any, fx.Node] = {}
    for user in producer.users:
        if _is_item(user) and user.args[0] is producer:
            existing.setdefault(structure_key(structure, user.args[1]), user)
    items: dict[Any, fx.Node | _Parts] = {}
    last = producer
    for key, inner in zip(structure.keys, structure.items, strict=True):
        item = existing.get(key)
        if item is None:
            item = _new_item(graph, producer, structure, key)
        last.append(item)
        last = item
        item.meta[STRUCTURE] = inner
        if inner is not None:
            nested = _unpacked(graph, item, inner)
            items[key], last = nested, _last(nested, item)
        else:
            items[key] = last = _detached(graph, producer, item)
    return _Parts(structure, items)


def _new_item(graph: fx.Graph, producer: fx.Node, structure: Structure, key: Any) -> fx.Node:
    with graph.inserting_after(producer):
        take = getattr if structure.by_name else operator.getitem
        item = graph.call_function(take, (producer, key))
    item.meta.update({k: producer.meta.get(k) for k in (PATH, SOURCE, NO_GRAD)})
    item.meta |= {TYPE: producer.meta[TYPE][key], VALUE: None}
    return item


def _detached(graph: fx.Graph, producer: fx.Node, item: fx.Node) -> fx.Node:
    """What was computed under `no_grad` passes no gradient, wherever its items are taken."""
    if not producer.meta.get(NO_GRAD) or not isinstance(item.meta[TYPE], TensorType):
        return item
    with graph.inserting_after(item):
        detached = graph.call_method("detach", (item,))
    detached.meta.update(item.meta)
    item.replace_all_uses_with(detached, delete_user_cb=lambda user: user is not detached)
    return detached


def _last(parts: _Parts, default: fx.Node) -> fx.Node:
    """The last node among the items."""
    item = [*parts.items.values(), default][max(len(parts.items) - 1, 0)]
    return _last(item, default) if isinstance(item, _Parts) else item


def structure_key(structure: Structure, key: Any) -> Any:
    """An index or a name as the structure's own key; None for what is no single item."""
    if isinstance(key, slice):
        return None
    if key in structure.keys:
        return key
    if isinstance(key, int) and -len(structure.keys) <= key < len(structure.keys):
        return structure.keys[key]
    kind: Any = structure.kind
    names: tuple[str, ...] = getattr(kind, "_fields", ()) or getattr(kind, "__match_args__", ())
    return structure.keys[names.index(key)] if key in names else None


@dataclass(frozen=True)
class _Parts:
    """The items of a structured value, as nodes."""

    structure: Structure
    items: Mapping[Any, fx.Node | _Parts]

    def pick(self, key: Any) -> fx.Node | _Parts | None:
        """One item, or several in order."""
        if not isinstance(key, slice):
            return self.items.get(structure_key(self.structure, key))
        if any(isinstance(end, fx.Node) for end in (key.start, key.stop, key.step)):
            return None
        kind = list if issubclass(self.structure.kind, list) else tuple
        items = [self.items[k] for k in self.structure.keys][key]
        inner = tuple(item.structure if isinstance(item, _Parts) else None for item in items)
        return _Parts(Structure(kind, tuple(range(len(items))), inner), dict(enumerate(items)))

    def whole(self) -> Any:
        """The value rebuilt from its items, as an argument of a node."""
        items = [i.whole() if isinstance(i, _Parts) else i for i in self.items.values()]
        kind = self.structure.kind
        if kind is dict:
            return dict(zip(self.items, items, strict=True))
        if hasattr(kind, "_fields"):
            return kind(*items)
        return items if issubclass(kind, list) else tuple(items)


def _erase_unread_items(graph: fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        is_taken = _is_item(node) or (node.op == "call_method" and node.target == "detach")
        if is_taken and not node.users:
            graph.erase_node(node)
    graph.lint()
