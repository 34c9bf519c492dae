"""The form every captured graph is brought to: no in-place writes, no calls that do nothing,
no values but tensors and plain ones that anybody far away reads."""

from __future__ import annotations

from torch import fx, nn

from revcompile.compiler.capture.functional import functionalize
from revcompile.compiler.capture.structures import unpack_structures

__all__ = ["simplify"]


def simplify(graph: fx.Graph, root: nn.Module) -> fx.Graph:
    """Functionalize, drop `nn.Identity` calls, which hide where a block begins, and unpack."""
    result = _without_identities(functionalize(graph, root), root)
    unpack_structures(result)
    return result


def _without_identities(graph: fx.Graph, root: nn.Module) -> fx.Graph:
    """A copy of the graph in which readers of an identity read its input."""
    result = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        source = node.args[0] if node.args else None
        if _is_identity(node, root) and isinstance(source, fx.Node):
            copies[node] = copies[source]
        else:
            copies[node] = result.node_copy(node, copies.__getitem__)
    return result


def _is_identity(node: fx.Node, root: nn.Module) -> bool:
    if node.op != "call_module" or len(node.args) != 1:
        return False
    module = root.get_submodule(str(node.target))
    hooked = module._forward_hooks or module._forward_pre_hooks
    return type(module) is nn.Identity and not hooked
