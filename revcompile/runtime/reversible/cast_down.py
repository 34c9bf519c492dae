"""Programs whose norms give what autocast would make of their result anyway, but earlier.

Autocast lets norms give float32 and casts it for the layer that reads it. Where a layer norm is
read in no other way it may give low precision itself (`norms`). Where there is nothing but
rearrangement in between (windows, rolls, padding), a cast before it lets that move half the bytes,
and so its gradient. No bit of the result changes by that: rearranging commutes with rounding.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import fx, nn
from torch.nn import functional as F

from revcompile.ir.module_tree import casts_input
from revcompile.ir.ops import as_read
from revcompile.kernels.layer_norm import is_layer_norm, layer_norm, norm_of

__all__ = ["narrowed"]

_METHODS: Final = frozenset(
    ("contiguous", "flatten", "permute", "reshape", "roll", "transpose", "view")
)
_FUNCTIONS: Final[frozenset[Any]] = frozenset(
    (torch.flatten, torch.permute, torch.reshape, torch.roll, torch.transpose)
)
_SIZES: Final = ("shape", "ndim", "device")


def narrowed(graph: fx.Graph, root: nn.Module) -> fx.Graph:
    """A copy of a program with those norms changed that are only read in low precision."""
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    for node in list(copy.nodes):
        if _is_norm(node, root) and _is_read_cast(node, root):
            if any(map(_rearranges, node.users)):
                _cast_early(node)
            _narrow(node, root)
    return copy


def _is_norm(node: fx.Node, root: nn.Module) -> bool:
    if node.op == "call_module":
        return isinstance(root.get_submodule(str(node.target)), nn.LayerNorm)
    return node.op == "call_function" and node.target is F.layer_norm


def _cast_early(node: fx.Node) -> None:
    with node.graph.inserting_after(node):
        cast = node.graph.call_function(as_read, (node,))
    node.replace_all_uses_with(cast, lambda user: user is not cast)


def _narrow(node: fx.Node, root: nn.Module) -> None:
    """Let a layer norm give low precision itself where there is a kernel for that."""
    if node.op == "call_function":
        node.target = layer_norm
    elif len(node.args) == 1 and is_layer_norm(root.get_submodule(str(node.target))):
        with node.graph.inserting_before(node):
            layer = node.graph.create_node("get_attr", node.target)
            norm = node.graph.call_function(norm_of, (layer, node.args[0]))
        node.replace_all_uses_with(norm)
        node.graph.erase_node(node)


def _is_read_cast(node: fx.Node, root: nn.Module) -> bool:
    """Do all that read a value, once it is rearranged, read it as autocast casts it?"""
    readers = [user for user in node.users if not _asks_for_sizes(user)]
    return bool(readers) and all(
        casts_input(user, node, root)
        or (_rearranges(user) and user.args[0] is node and _is_read_cast(user, root))
        for user in readers
    )


def _asks_for_sizes(user: fx.Node) -> bool:
    if user.op == "call_method":
        return user.target in ("size", "dim")
    return user.op == "call_function" and user.target is getattr and user.args[1] in _SIZES


def _rearranges(user: fx.Node) -> bool:
    if user.op == "call_method":
        return user.target in _METHODS
    if user.op != "call_function":
        return False
    if user.target is F.pad:
        settings: dict[str, Any] = dict(zip(("mode", "value"), user.args[2:], strict=False))
        settings |= user.kwargs
        return settings.get("mode", "constant") == "constant" and settings.get("value") in (None, 0)
    return user.target in _FUNCTIONS
