"""Rearrangements: operations between two blocks that only move the stream's elements.

The stream of a Swin alternates between images and windows, that of a PVT between NCHW and
tokens. Such operations are bijections: a chain continues across them, with their inverses.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx, nn

from revcompile.compiler.dataflow import Flow, tensor_type
from revcompile.compiler.rewire.region import Region, describe
from revcompile.ir.module_tree import called_module
from revcompile.ir.ops import op_name
from revcompile.ir.types import Rearrange
from revcompile.kernels.layout import usual, usual_strides, with_strides

_RESHAPES = frozenset(["view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze"])
_COPIES = frozenset(["contiguous", "clone"])
_MOVES = frozenset(["permute", "transpose"])


def rearranged_source(flow: Flow, node: fx.Node) -> fx.Node | None:
    """The value that a node rearranges, or None if the node does something else."""
    name = _op_name(flow, node)
    source = node.args[0] if node.args else None
    if name is None or not isinstance(source, fx.Node):
        return None
    before, after = tensor_type(source), tensor_type(node)
    if before is None or after is None or before.numel() != after.numel():
        return None
    others = [n for n in node.all_input_nodes if n is not source]
    return source if all(n in flow.plain for n in others) else None


def _op_name(flow: Flow, node: fx.Node) -> str | None:
    if node.op == "call_module":
        is_known = isinstance(called_module(node, flow.root), (nn.Identity, nn.Flatten))
        return "contiguous" if is_known else None
    name = op_name(node)
    return name if name in _RESHAPES | _COPIES | _MOVES else None


def build_rearrange(flow: Flow, source: fx.Node, result: fx.Node) -> Rearrange | None:
    """The rearrangement of one value into a later one, or None if it cannot be inverted."""
    steps: list[fx.Node] = []
    node = result
    while node is not source:
        steps.append(node)
        previous = rearranged_source(flow, node)
        assert previous is not None
        node = previous
    steps.reverse()
    inside, sides = flow.region(source, [result])
    if any(side not in flow.plain for side in sides):
        return None
    forward = Region(flow, _nothing_else)
    stream = forward.input("stream", like=source)
    forward.bind(source, stream)
    for side in sides:
        forward.bind(side, forward.input(side.name, like=side))
    shapes = []
    for step in sorted(inside):
        new = forward.copy(step)
        if step in steps:
            assert isinstance(new.args[0], fx.Node)
            shapes.append(forward.call(getattr, new.args[0], "shape", like=step))
    strides = forward.call(usual_strides, stream, like=source)
    arranged = forward.call(usual, forward.value(result), like=result)
    forward.graph.output((arranged, (*shapes, strides)))
    inverse = _inverse(flow, steps)
    if inverse is None:
        return None
    return Rearrange(forward.graph, inverse, tuple(side.name for side in sides))


def _nothing_else(region: Region, node: fx.Node) -> fx.Node:
    raise AssertionError(f"a rearrangement reads {node.name}")


def _inverse(flow: Flow, steps: list[fx.Node]) -> fx.Graph | None:
    graph = fx.Graph()
    value = graph.placeholder("arranged")
    shapes = graph.placeholder("shapes")
    describe(value, steps[-1])
    for index, step in reversed(list(enumerate(steps))):
        name = _op_name(flow, step)
        arguments = step.args[1:]
        if name in _COPIES and step.op != "call_module":
            continue
        if name == "permute":
            axes = _flat(arguments) or _flat((step.kwargs.get("dims", ()),))
            if not all(isinstance(axis, int) for axis in axes):
                return None
            places = [axis % len(axes) for axis in axes]
            order = [places.index(axis) for axis in range(len(axes))]
            value = graph.call_function(torch.permute, (value, order))
        elif name == "transpose" and not step.kwargs:
            value = graph.call_function(torch.transpose, (value, *arguments))
        elif name in _RESHAPES or step.op == "call_module":
            shape = graph.call_function(operator.getitem, (shapes, index))
            value = graph.call_function(torch.reshape, (value, shape))
        else:
            return None
    strides = graph.call_function(operator.getitem, (shapes, len(steps)))
    graph.output(graph.call_function(with_strides, (value, strides)))
    graph.lint()
    return graph


def _flat(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(arguments) == 1 and isinstance(arguments[0], (tuple, list)):
        return tuple(arguments[0])
    return tuple(arguments)
