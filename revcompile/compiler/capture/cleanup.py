"""Small passes over a traced graph: dead code, `no_grad`, identity layers, slices of `cat`."""

from __future__ import annotations

import operator
from itertools import accumulate
from typing import Any

import torch
from torch import fx, nn

from revcompile.compiler.capture.memory import NO_GRAD, WRITES, eliminate_dead_code, is_effect
from revcompile.ir.module_tree import called_module
from revcompile.ir.types import TYPE, TensorType


def remove_unused(graph: fx.Graph) -> None:
    """Erase nodes that were only inspected, and move each `get_attr` before its first reader.

    Train and eval traces that compute the same then have the same graph, whatever the model
    inspected while it was traced.
    """
    eliminate_dead_code(graph)
    placed: set[fx.Node] = set()
    for user in list(graph.nodes):
        for source in user.all_input_nodes:
            if source.op == "get_attr" and source not in placed:
                placed.add(source)
                user.prepend(source)


def detach_no_grad(graph: fx.Graph) -> None:
    """Insert `detach` where values computed under `no_grad` are read outside of it."""
    for node in list(graph.nodes):
        if not node.meta.get(NO_GRAD):
            continue
        if is_effect(node):
            for source in node.all_input_nodes:
                if source not in node.args[:1] and isinstance(source.meta[TYPE], TensorType):
                    _detach(graph, source, node, [node])
        outside = [u for u in node.users if not u.meta.get(NO_GRAD)]
        if outside and node.op != "get_attr" and isinstance(node.meta[TYPE], TensorType):
            _detach(graph, node, node.next, outside)


def _detach(graph: fx.Graph, node: fx.Node, before: fx.Node, users: list[fx.Node]) -> None:
    with graph.inserting_before(before):
        detached = graph.call_method("detach", (node,))
    detached.meta.update(node.meta)
    detached.meta[WRITES] = frozenset()
    for user in users:
        user.replace_input_with(node, detached)


def passed_on(node: fx.Node, root: nn.Module) -> fx.Node | None:
    """The input of a node that only passes it on, or None.

    Such nodes are `nn.Identity`, and the addition to 0 with which Python's `sum` starts. They would
    hide where a residual block begins.
    """
    module = called_module(node, root)
    if type(module) is nn.Identity and len(node.args) == 1:
        is_passed = not (module._forward_hooks or module._forward_pre_hooks)
    elif node.target is operator.add and type(node.args[0]) is int and node.args[0] == 0:
        is_returned = any(user.op == "output" for user in node.users)  # results must be copies
        is_passed = not is_returned and isinstance(node.meta.get(TYPE), TensorType)
    else:
        return None
    source = node.args[-1]
    if not is_passed or not isinstance(source, fx.Node):
        return None
    return source if source.meta.get(TYPE) == node.meta.get(TYPE) else None


def uncut_parts(node: fx.Node) -> tuple[list[fx.Node], list[fx.Node], int]:
    """The whole tensors that a slice of a `torch.cat` consists of; none if it cuts one of them.

    A block may keep its residual stream as the first channels of a wider value (DPN). Also returns
    the tensors whose sizes decide that, and the dimension.
    """
    args: Any = node.args
    is_slice = node.target is operator.getitem and args[0].target is torch.cat
    if not is_slice or not args[0].args:
        return [], [], 0
    whole, index = args[0], args[1] if isinstance(args[1], tuple) else (args[1],)
    parts, dim = (*whole.args, whole.kwargs.get("dim", 0))[:2]
    *before, chosen = index
    is_slice = isinstance(chosen, slice) and chosen.step is None and len(before) == dim
    if not is_slice or any(index != slice(None) for index in before):
        return [], [], dim
    kind, kinds = whole.meta[TYPE], [part.meta[TYPE] for part in parts]
    ends = [0, *accumulate(each.shape[dim] for each in kinds)]
    start, stop = chosen.start or 0, ends[-1] if chosen.stop is None else chosen.stop
    is_fixed = not kind.per_sample[dim] and all(each.dtype == kind.dtype for each in kinds)
    if not is_fixed or start not in ends or stop not in ends:
        return [], [], dim
    first, behind = ends.index(start), ends.index(stop)
    return list(parts[first:behind]), list(parts[: first if chosen.stop is None else behind]), dim
