"""Where streams begin and end: a layer with twice the outputs, a head with twice the inputs.

Both look for the nearest dense layer, across operations that treat every channel alone. If there is
none, the streams start as two copies of one value and end as their mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from torch import fx, nn

from revcompile.compiler.dataflow import Flow, tensor_type
from revcompile.compiler.find.conflicts import is_activation
from revcompile.compiler.rewire.module_editor import ModuleEditor
from revcompile.ir.module_tree import called_module, parameters_of
from revcompile.ir.ops import op_name
from revcompile.ir.types import Residual

_CHANNELWISE: Final = (
    nn.Identity,
    nn.MaxPool1d,
    nn.MaxPool2d,
    nn.MaxPool3d,
    nn.AvgPool1d,
    nn.AvgPool2d,
    nn.AvgPool3d,
    nn.AdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d,
    nn.AdaptiveAvgPool3d,
    nn.AdaptiveMaxPool2d,
    nn.Dropout,
    nn.Dropout2d,
    nn.Flatten,
)
_CHANNELWISE_FUNCTIONS: Final = frozenset(
    ["dropout", "max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "adaptive_avg_pool1d"]
)


def enter_widened(flow: Flow, editor: ModuleEditor, x: fx.Node) -> int | None:
    """Double the last dense layer before `x`; returns the dimension to split, or None."""
    norms: list[str] = []
    node = x
    while True:
        target = str(node.target)
        if node is not x and len(node.users) != 1:
            return None
        if not _called_once(flow, node):
            return None
        if node.op == "call_module" and editor.can_widen(target):
            break
        if node.op == "call_module" and editor.can_widen_norm(target):
            norms.append(target)
        elif not _is_channelwise(flow, node) or _rank(node) != _rank(x):
            return None
        source = node.args[0]
        if not isinstance(source, fx.Node):
            return None
        node = source
    layer = editor.root.get_submodule(str(node.target))
    if isinstance(layer, nn.Linear) and norms:
        return None
    editor.widen(str(node.target))
    for norm in norms:
        editor.widen_norm(norm)
    return -1 if isinstance(layer, nn.Linear) else 1


def leave_concatenated(
    flow: Flow,
    editor: ModuleEditor,
    blocks: Sequence[Residual],
    inside: set[fx.Node],
    *,
    inner: bool,
    last: bool,
) -> dict[fx.Node, int]:
    """Ends of chains whose next dense layer takes both streams: value -> concat dimension."""
    ends: dict[fx.Node, int] = {}
    starts = [flow.by_name[block.x] for block in blocks]
    for out in flow.in_order(block.out for block in blocks):
        users = [u for u in flow.users(out) if u.op != "output"]
        if len(users) != 1 or users[0] in inside or len(flow.users(out)) != 1:
            continue
        is_last = not any(flow.depends(x, out) or x is out for x in starts)
        if not (last if is_last else inner):
            continue
        dimension = _double_consumer(flow, editor, users[0])
        if dimension is not None:
            ends[out] = dimension
    return ends


def _double_consumer(flow: Flow, editor: ModuleEditor, node: fx.Node) -> int | None:
    """Double the inputs of the first dense layer at or after `node`, if one is in reach."""
    norms: list[str] = []
    while True:
        target = str(node.target)
        if not _called_once(flow, node):
            return None
        if node.op == "call_module" and editor.can_widen(target):
            break
        if node.op == "call_module" and editor.can_widen_norm(target):
            norms.append(target)
        elif not _is_channelwise(flow, node) and not _is_spatial(node):
            return None
        users = flow.users(node)
        if len(users) != 1 or users[0].op == "output":
            return None
        node = users[0]
    layer = editor.root.get_submodule(str(node.target))
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node):
        return None
    if isinstance(layer, nn.Linear) and _rank(source) != 2:
        return None
    for norm in norms:
        editor.widen_norm(norm)
    editor.double_inputs(str(node.target))
    return 1


def _rank(node: fx.Node) -> int:
    kind = tensor_type(node)
    return -1 if kind is None else len(kind.shape)


def _called_once(flow: Flow, node: fx.Node) -> bool:
    """Is this call the only place where the layer's parameters are read?"""
    if node.op != "call_module":
        return True
    own = {id(p) for p in parameters_of(node, flow.root)}
    if not own:
        return True
    readers = [n for n in flow.nodes if own & {id(p) for p in parameters_of(n, flow.root)}]
    prefix = f"{node.target}."
    is_tied = any(
        id(p) in own and not name.startswith(prefix)
        for name, p in flow.root.named_parameters(remove_duplicate=False)
    )
    return readers == [node] and not is_tied


def _is_channelwise(flow: Flow, node: fx.Node) -> bool:
    """Does the node treat every channel of `[N, C, ...]` alone?"""
    module = called_module(node, flow.root)
    if is_activation(node, flow.root):
        return not isinstance(module, nn.PReLU)  # which has a parameter for each channel
    if module is not None:
        return type(module) in _CHANNELWISE
    return op_name(node) in _CHANNELWISE_FUNCTIONS and len(node.all_input_nodes) == 1


def _is_spatial(node: fx.Node) -> bool:
    """`flatten(1)` and means over the spatial dimensions: they keep channels in order."""
    name = op_name(node)
    arguments = (*node.args[1:], *node.kwargs.values())
    if name == "flatten":
        return arguments[:1] in ((1,), (1, -1)) or arguments == (1, -1)
    if name == "mean":
        dims = arguments[0] if arguments else None
        listed = tuple(dims) if isinstance(dims, (tuple, list)) else (dims,)
        return listed in ((2, 3), (-2, -1), (-1, -2), (2, 3, 4)) and _rank(node) == 2
    return False
