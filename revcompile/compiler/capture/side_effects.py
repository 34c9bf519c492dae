"""Which nodes write into memory, which values may share it, and dead code.

After capture (`functional.py`) the only nodes that write are those that store a buffer's new
contents, and layers that overwrite a value nobody else can see.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Final

from torch import fx, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from revcompile.compiler.capture.memory import WRITES
from revcompile.ir.ops import store_buffer

__all__ = [
    "INPLACE_OPERATORS",
    "eliminate_dead_code",
    "is_effect",
    "overwrites_unseen",
    "works_in_place",
]

INPLACE_OPERATORS: Final[dict[Any, Callable[..., Any]]] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
    operator.ifloordiv: operator.floordiv,
    operator.imod: operator.mod,
    operator.ipow: operator.pow,
    operator.iand: operator.and_,
    operator.ior: operator.or_,
    operator.ixor: operator.xor,
    operator.ilshift: operator.lshift,
    operator.irshift: operator.rshift,
}

_MAKE_NEW_MEMORY: Final = (_ConvNd, _NormBase, nn.GroupNorm, nn.LayerNorm, nn.Linear)
"""Layers whose result never shares memory with their input."""


def is_effect(node: fx.Node) -> bool:
    """Does the node write into one of its inputs?"""
    if node.meta.get(WRITES):
        return True
    if node.op == "call_method":
        return _is_inplace_name(str(node.target))
    if node.op != "call_function":
        return False
    if node.target is store_buffer:
        return True
    if getattr(node.target, "__module__", "") == "_operator":  # where `or_` writes nothing
        return node.target in INPLACE_OPERATORS or node.target is operator.setitem
    schema = getattr(node.target, "_schema", None)
    if schema is not None:
        return bool(schema.is_mutable)
    name = str(getattr(node.target, "__name__", ""))
    return _is_inplace_name(name) or bool(node.kwargs.get("inplace", False))


def _is_inplace_name(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__") and name != "requires_grad_"


def works_in_place(module: nn.Module) -> bool:
    """Does the layer, or one inside it, overwrite its input because it was told to save memory?"""
    return any(getattr(inner, "inplace", False) is True for inner in module.modules())


def overwrites_unseen(node: fx.Node, root: nn.Module) -> bool:
    """Is the layer's input new memory that nobody else reads, so that it may be overwritten?"""
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or source.op != "call_module" or len(source.users) > 1:
        return False
    return isinstance(root.get_submodule(str(source.target)), _MAKE_NEW_MEMORY)


def eliminate_dead_code(graph: fx.Graph) -> None:
    """Remove pure nodes without users, assertions, and parameters nobody reads."""
    for node in reversed(list(graph.nodes)):
        name = getattr(node.target, "__name__", "")
        is_assertion = name in ("_assert", "_assert_scalar", "_assert_tensor_metadata")
        is_needed = node.users or node.op in ("placeholder", "output", "call_module")
        if is_assertion or not (is_needed or is_effect(node)):
            graph.erase_node(node)
