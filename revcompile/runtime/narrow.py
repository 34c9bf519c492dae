"""Branches whose layer norms give what autocast would make of their result anyway, but earlier.

Between a norm and the layers that read it in low precision there is often nothing but
rearrangement (windows, rolls, padding), which then moves half the bytes. No bit of the result
changes by that: rearranging commutes with rounding.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import fx, nn
from torch.nn import functional as F

from revcompile.norms import is_layer_norm, norm_as_read
from revcompile.tree import casts_input

__all__ = ["narrowed"]

_METHODS: Final = frozenset(
    ("contiguous", "flatten", "permute", "reshape", "roll", "transpose", "view")
)
_FUNCTIONS: Final[frozenset[Any]] = frozenset(
    (torch.flatten, torch.permute, torch.reshape, torch.roll, torch.transpose)
)


def narrowed(graph: fx.Graph, root: nn.Module) -> fx.Graph:
    """A copy of a branch with the norms replaced that are only read in low precision."""
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    for node in list(copy.find_nodes(op="call_module")):
        layer = root.get_submodule(str(node.target))
        if len(node.args) != 1 or node.kwargs or not _is_read_cast(node, root):
            continue
        if is_layer_norm(layer):
            with copy.inserting_before(node):
                found = copy.create_node("get_attr", str(node.target))
                new = copy.call_function(norm_as_read, (found, node.args[0]))
            node.replace_all_uses_with(new)
            copy.erase_node(node)
    return copy


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


_SIZES: Final = ("shape", "ndim", "device")


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
