"""Branches that cast a norm's result before they rearrange it, not after.

Autocast lets norms give float32 and casts it for the layer that reads it. Where there is nothing
but rearrangement in between (windows, rolls, padding), that then moves half the bytes, and so does
its gradient. No bit of the result changes: rearranging commutes with rounding.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import fx, nn
from torch.nn import functional as F

from revcompile.ops import as_read
from revcompile.tree import casts_input

__all__ = ["narrowed"]

_METHODS: Final = frozenset(
    ("contiguous", "flatten", "permute", "reshape", "roll", "transpose", "view")
)
_FUNCTIONS: Final[frozenset[Any]] = frozenset(
    (torch.flatten, torch.permute, torch.reshape, torch.roll, torch.transpose)
)
_SIZES: Final = ("shape", "ndim", "device")


def narrowed(graph: fx.Graph, root: nn.Module) -> fx.Graph:
    """A copy of a branch that casts norms which are rearranged and then read in low precision."""
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    for node in list(copy.find_nodes(op="call_module")):
        is_norm = isinstance(root.get_submodule(str(node.target)), nn.LayerNorm)
        if is_norm and any(map(_rearranges, node.users)) and _is_read_cast(node, root):
            with copy.inserting_after(node):
                cast = copy.call_function(as_read, (node,))
            node.replace_all_uses_with(cast, lambda user, cast=cast: user is not cast)
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
