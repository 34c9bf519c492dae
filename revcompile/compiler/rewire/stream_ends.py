"""Where streams begin and end: a layer with twice the outputs, a head with twice the inputs.

Both look for the nearest dense layer, across operations that treat each channel independently. If
there is none, the streams start as two copies of one value and end as their mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from torch import fx, nn

from revcompile.compiler.dataflow import Flow, tensor_type
from revcompile.compiler.find.conflicts import is_activation
from revcompile.compiler.rewire.module_editor import Change, ModuleEditor
from revcompile.ir.module_tree import called_module, parameters_of
from revcompile.ir.ops import op_name
from revcompile.ir.types import Residual

_PER_CHANNEL: Final = frozenset(
    (
        *("MaxPool1d", "MaxPool2d", "MaxPool3d", "AvgPool1d", "AvgPool2d", "AvgPool3d"),
        *("AdaptiveAvgPool1d", "AdaptiveAvgPool2d", "AdaptiveAvgPool3d", "AdaptiveMaxPool2d"),
        *("max_pool2d", "avg_pool2d", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "Dropout2d"),
    )
)
"""Layers and functions over the dimensions after `[N, C]`; their name says how many there are."""


def enter_widened(flow: Flow, editor: ModuleEditor, x: fx.Node) -> int | None:
    """Double the last dense layer before `x`; returns the dimension to split, or None."""
    norms: list[str] = []
    is_elementwise = True
    node = x
    while True:
        if node is not x and len(node.users) != 1:
            return None
        if not _called_once(flow, node):
            return None
        if _allows(editor, "widen", node):
            break
        if _allows(editor, "widen_norm", node):
            norms.append(str(node.target))
        elif not _is_channelwise(flow, node) or _rank(node) != _rank(x):
            return None
        is_elementwise = is_elementwise and _is_elementwise(flow, node)
        node = node.all_input_nodes[0]
    layer = editor.root.get_submodule(str(node.target))
    if isinstance(layer, nn.Linear) and not is_elementwise:  # its outputs are the last dimension
        return None
    editor.change(str(node.target), "widen")
    for norm in norms:
        editor.change(norm, "widen_norm")
    return -1 if isinstance(layer, nn.Linear) else 1


def leave_concatenated(
    flow: Flow, editor: ModuleEditor, blocks: Sequence[Residual], inside: set[fx.Node]
) -> dict[fx.Node, int]:
    """Double the inputs of the dense layers after chains: last value -> concat dimension."""
    ends: dict[fx.Node, int] = {}
    starts = [flow.by_name[block.x] for block in blocks]
    for out in flow.in_order(block.out for block in blocks):
        users = [u for u in flow.users(out) if u.op != "output"]
        is_read_once = len(users) == len(flow.users(out)) == 1 and users[0] not in inside
        if not is_read_once or any(flow.depends(x, out) or x is out for x in starts):
            continue
        if _double_consumer(flow, editor, users[0]):
            # Counted from the end: a net of dense layers then takes inputs of any rank.
            ends[out] = -1 if _rank(out) == 2 else 1
    return ends


def _double_consumer(flow: Flow, editor: ModuleEditor, node: fx.Node) -> bool:
    """Double the inputs of the first dense layer at or after `node`; False if none is in reach."""
    norms: list[str] = []
    while True:
        if not _called_once(flow, node):
            return False
        if _allows(editor, "double_inputs", node):
            break
        if _allows(editor, "widen_norm", node):
            norms.append(str(node.target))
        elif not _is_channelwise(flow, node) and not _is_spatial(node):
            return False
        users = flow.users(node)
        if len(users) != 1 or users[0].op == "output":
            return False
        node = users[0]
    layer = editor.root.get_submodule(str(node.target))
    if isinstance(layer, nn.Linear) and _rank(node.all_input_nodes[0]) != 2:
        return False
    for norm in norms:
        editor.change(norm, "widen_norm")
    editor.change(str(node.target), "double_inputs")
    return True


def _rank(node: fx.Node) -> int:
    kind = tensor_type(node)
    return -1 if kind is None else len(kind.shape)


def _called_once(flow: Flow, node: fx.Node) -> bool:
    """Whether this call is the only place where the layer's parameters are read."""
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


def _allows(editor: ModuleEditor, change: Change, node: fx.Node) -> bool:
    """Whether the node calls a layer that the editor can change, on a batch of samples."""
    source = node.args[0] if node.op == "call_module" and node.args else None
    kind = tensor_type(source) if isinstance(source, fx.Node) else None
    return kind is not None and editor.allows(str(node.target), change, kind.shape)


def _is_elementwise(flow: Flow, node: fx.Node) -> bool:
    """Whether the node is an elementwise function without parameters."""
    module = called_module(node, flow.root)
    if module is not None:
        is_known = is_activation(node, flow.root) or type(module) in (nn.Identity, nn.Dropout)
        return is_known and not isinstance(module, nn.PReLU)
    is_known = is_activation(node, flow.root) or op_name(node) == "dropout"
    return is_known and len(node.all_input_nodes) == 1


def _is_channelwise(flow: Flow, node: fx.Node) -> bool:
    """Whether the node treats each channel of `[N, C, ...]` independently."""
    module = called_module(node, flow.root)
    if isinstance(module, nn.Flatten):
        return module.start_dim >= 1
    name = op_name(node) if module is None else type(module).__name__
    is_torch = module is None or type(module).__module__.startswith("torch.nn.")
    if name in _PER_CHANNEL and is_torch and len(node.all_input_nodes) == 1:
        return _rank(node) == int(name[-2]) + 2
    return _is_elementwise(flow, node)


def _is_spatial(node: fx.Node) -> bool:
    """Whether the node is `flatten(1)` or a spatial mean, which keep channels in order."""
    name = op_name(node)
    arguments = (*node.args[1:], *node.kwargs.values())
    if name == "flatten":
        return arguments[:1] in ((1,), (1, -1)) or arguments == (1, -1)
    if name == "mean":
        dims = arguments[0] if arguments else None
        listed = tuple(dims) if isinstance(dims, (tuple, list)) else (dims,)
        return listed in ((2, 3), (-2, -1), (-1, -2), (2, 3, 4)) and _rank(node) == 2
    return False
