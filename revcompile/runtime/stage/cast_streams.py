"""A rewrite of stage programs for autocast: sums are written in both dtypes they are read in.

Streams and their gradients are added in float32. A layer that autocast casts for reads them in low
precision, which would be a pass over memory of its own:

    y = plus(a, f, grid)               y, copy = plus_and_cast(a, f, grid)
    h = self.conv(y)           ->      h = self.conv(read_stream(y, self.conv, copy))

In backward likewise: the rebuilt stream is the next branch's input, and the sum of its gradients is
what the next branch is differentiated with. Chains do the same from call to call (`coupling`).
No bit of a result changes.
"""

from __future__ import annotations

import operator
from typing import Any, Final

import torch
from torch import fx, nn
from torch.nn import functional as F

from revcompile.ir import coupling_ops
from revcompile.ir.module_tree import called_module, casts_input, is_cast
from revcompile.ir.python_code import copied

_KEEPS_DTYPE: Final[tuple[Any, ...]] = (nn.Dropout, nn.GELU, nn.Identity, nn.ReLU, nn.SiLU)
_KEEPING_DTYPE: Final[frozenset[Any]] = frozenset((F.dropout, F.gelu, F.relu, F.silu, torch.relu))


def cast_streams(graph: fx.Graph, root: nn.Module, dtype: torch.dtype) -> fx.Graph:
    """A copy of a stage's program that computes the same under autocast to `dtype`."""
    copy = copied(graph)
    for node in copy.find_nodes(op="call_function", target=coupling_ops.stream_leaf):
        _read_leaf(node, root)
    for node in copy.find_nodes(op="call_function", target=coupling_ops.plus):
        _cast_sum(node, root)
    for node in copy.find_nodes(op="call_function", target=coupling_ops.minus):
        _cast_rebuilt(node)
    for node in copy.find_nodes(op="call_function", target=coupling_ops.branch_vjp):
        _cast_gradient(node, root, dtype)
    copy.lint()
    return copy


def _layer_of(reader: fx.Node) -> fx.Node | bool:
    """The argument `reader` of `read_stream` and `stream_leaf`."""
    return reader.graph.get_attr(str(reader.target)) if reader.op == "call_module" else True


def _read_leaf(leaf: fx.Node, root: nn.Module) -> None:
    """Let the leaf of a branch have the dtype in which a layer alone reads it."""
    readers = [user for user in leaf.users if user.target is not coupling_ops.branch_vjp]
    vjps = [user for user in leaf.users if user.target is coupling_ops.branch_vjp]
    is_returned = any(leaf in vjp.args[2] for vjp in vjps)  # type: ignore[operator]
    if not is_returned and len(readers) == 1 and casts_input(readers[0], leaf, root):
        with leaf.graph.inserting_before(leaf):
            leaf.args = (leaf.args[0], _layer_of(readers[0]))


def _two_results(node: fx.Node, function: Any) -> tuple[fx.Node, fx.Node]:
    node.target = function
    with node.graph.inserting_after(node):
        second = node.graph.call_function(operator.getitem, (node, 1))
        first = node.graph.call_function(operator.getitem, (node, 0))
    node.replace_all_uses_with(first, lambda user: user not in (first, second))
    first.meta, node.meta = node.meta, {}
    return first, second


def _cast_sum(node: fx.Node, root: nn.Module) -> None:
    """In forward: if a layer alone reads the sum, other than as a stream to add to."""
    plus = coupling_ops.plus
    readers = [
        user
        for user in node.users
        if user.op != "output" and not (user.target is plus and user.args[1] is not node)
    ]
    if len(readers) != 1 or not casts_input(readers[0], node, root):
        return
    total, copy = _two_results(node, coupling_ops.plus_and_cast)
    with node.graph.inserting_before(readers[0]):
        given = total, _layer_of(readers[0]), copy
        read = node.graph.call_function(coupling_ops.read_stream, given)
    readers[0].replace_input_with(total, read)


def _cast_rebuilt(node: fx.Node) -> None:
    """In backward: if the branch before reads the rebuilt stream so."""
    leaves = [user for user in node.users if user.target is coupling_ops.stream_leaf]
    if len(leaves) == 1 and len(leaves[0].args) == 2:
        total, copy = _two_results(node, coupling_ops.minus_and_cast)
        leaves[0].args = (total, leaves[0].args[1], copy)


def _cast_gradient(vjp: fx.Node, root: nn.Module, dtype: torch.dtype) -> None:
    """In backward: if the branch before, whose result has this gradient, ends in low precision."""
    gradients = [user for user in vjp.users if user.args[1] == 0]
    for gradient in gradients:
        for reader in [user for user in gradient.users if user.target is coupling_ops.branch_vjp]:
            outputs, given = reader.args[2], reader.args[3]
            assert isinstance(outputs, tuple | list) and isinstance(given, tuple | list)
            if gradient in given and _is_low(end := outputs[given.index(gradient)], root):
                vjp.args = (*vjp.args[:6], dtype)
                with vjp.graph.inserting_after(vjp):
                    copy = vjp.graph.call_function(operator.getitem, (vjp, 1))
                with vjp.graph.inserting_before(reader):
                    arguments = gradient, copy, end
                    cast = vjp.graph.call_function(coupling_ops.cast_gradient, arguments)
                seeds = tuple(cast if each is gradient else each for each in given)
                reader.args = (*reader.args[:3], seeds, *reader.args[4:])


def _is_low(node: Any, root: nn.Module) -> bool:
    """Will a value have autocast's dtype? Only a guess: `cast_gradient` looks at the value."""
    if not isinstance(node, fx.Node) or not node.args:
        return False
    if node.target is coupling_ops.call_norm:
        return _is_low(node.args[1], root)
    layer = called_module(node, root)
    if layer is not None and is_cast(layer):
        return True
    keeps = type(layer) in _KEEPS_DTYPE or node.target in _KEEPING_DTYPE
    return keeps and _is_low(node.args[0], root)
