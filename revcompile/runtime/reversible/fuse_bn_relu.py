"""Programs in which a batch norm and the ReLU that alone reads it are one call."""

from __future__ import annotations

from typing import Final

import torch
from torch import fx, nn
from torch.nn import functional as F

from revcompile.kernels.batch_norm import clipped_norm

__all__ = ["clipped"]

_FUNCTIONS: Final = (F.relu, torch.relu)


def clipped(graph: fx.Graph, root: nn.Module) -> fx.Graph:
    """A copy of a program with such pairs joined."""
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    for node in list(copy.nodes):
        relu = next(iter(node.users), None)
        if relu and len(node.users) == 1 and _is_norm(node, root) and _is_relu(relu, root):
            _join(node, relu)
    return copy


def _is_norm(node: fx.Node, root: nn.Module) -> bool:
    if node.op != "call_module" or len(node.args) != 1 or node.kwargs:
        return False
    layer = root.get_submodule(str(node.target))
    return type(layer) is nn.BatchNorm2d and "forward" not in vars(layer)


def _is_relu(node: fx.Node, root: nn.Module) -> bool:
    if node.op == "call_module":
        layer = root.get_submodule(str(node.target))
        return type(layer) is nn.ReLU and "forward" not in vars(layer)
    return node.op == "call_function" and node.target in _FUNCTIONS


def _join(norm: fx.Node, relu: fx.Node) -> None:
    graph = norm.graph
    with graph.inserting_before(relu):
        layers = [
            graph.create_node("get_attr", node.target) if node.op == "call_module" else None
            for node in (norm, relu)
        ]
        both = graph.call_function(clipped_norm, (*layers, norm.args[0]))
    relu.replace_all_uses_with(both)
    graph.erase_node(relu)
    graph.erase_node(norm)
