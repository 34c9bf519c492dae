"""Residual blocks as segments of the two-stream model.

x + F(x)       `coupling`      (a, b) -> (b, a + F(b))         reversible
P(x) + F(x)    `transition`    (a, b) -> (s(b), P(a) + F(b))   two streams of another shape
"""

from __future__ import annotations

from typing import Final

import torch
from torch import fx

from revcompile.compiler.dataflow import Flow, tensor_type
from revcompile.compiler.find.conflicts import is_flat_at_zero
from revcompile.compiler.rewire.module_editor import ModuleEditor
from revcompile.compiler.rewire.placement import Placement, Streams
from revcompile.compiler.rewire.region import Region
from revcompile.ir.module_tree import NORMS, called_module
from revcompile.ir.types import Coupling, Opaque, Residual

_STREAM: Final = ""
"""The key of a branch's stream in `Region.inputs`; other keys are names of live values."""


def coupling(
    name: str, block: Residual, streams: Streams, place: Placement, editor: ModuleEditor
) -> Coupling:
    """A block whose shortcut keeps the shape; an activation after the sum joins F.

    A scaled shortcut `s*x + F(x)` is `x + (s*x + F(x) - x)`, so the scale joins F too.
    """
    flow = place.flow
    x = flow.by_name[block.x]
    region = Region(flow, place.side)
    b = region.keep = region.input("b", like=x)
    region.inputs = {_STREAM: b}  # a live value may be called b
    region.bind(x, b)
    _revive_zero_init(flow, block, editor)
    _copy_all(region, block.branch)
    terms = [region.value(flow.by_name[term]) for term in block.terms]
    addend = terms[0]
    for term in terms[1:]:
        addend = region.call(torch.add, addend, term, like=x)
    if not block.shortcut_term:
        addend = region.call(torch.sub, addend, b, like=x)
    addend = _post(region, block, addend)
    extras = [region.value(flow.by_name[extra]) for extra in block.extras]
    branch = region.finish((addend, *extras) if extras else addend)
    return Coupling(
        name=name,
        kind=block.kind,
        streams_in=streams.before,
        streams_out=streams.after,
        sides=tuple(side for side in region.inputs if side != _STREAM),
        branch=branch,
        rearrange=streams.rearrange,
        extras=block.extras,
        averaged=place.averaged,
    )


def transition(
    name: str, block: Residual, streams: Streams, place: Placement, editor: ModuleEditor
) -> Opaque:
    """A block with a projected shortcut: an opaque segment from two streams to two.

    `s(b)` is the branch's first layer that already has the output's shape; if there is none (a
    bottleneck), a second copy of the shortcut, with parameters of its own.
    """
    flow = place.flow
    x, total = flow.by_name[block.x], flow.by_name[block.total]
    region = Region(flow, place.side)
    a, b = (region.input(s, like=x) for s in streams.before)
    region.bind(x, b)
    _revive_zero_init(flow, block, editor)
    _copy_all(region, block.branch)
    shaped = _first_shaped(flow, block)
    first = _project(region, block, b, editor) if shaped is None else region.value(shaped)
    branch = _post(region, block, region.value(flow.by_name[block.terms[0]]))
    second = region.call(torch.add, _project(region, block, a), branch, like=total)
    return Opaque(
        name=name,
        inputs=tuple(region.inputs),
        outputs=streams.after,
        graph=region.finish((first, second)),
        reason="its shortcut is projected to another shape",
    )


def _copy_all(region: Region, names: tuple[str, ...]) -> None:
    flow = region.flow
    for node in flow.in_order(names):
        if node not in flow.constant and not region.has(node):
            region.copy(node)


def _post(region: Region, block: Residual, addend: fx.Node) -> fx.Node:
    """Apply the activation that followed the sum."""
    region.bind(region.flow.by_name[block.total], addend)
    for name in block.post:
        addend = region.copy(region.flow.by_name[name])
    return addend


def _revive_zero_init(flow: Flow, block: Residual, editor: ModuleEditor) -> None:
    """Let norms train whose weight starts as 0 (a block then starts as its shortcut).

    In `relu(x + F(x))` the sum gives them a gradient. In `a + relu(F(b))` the ReLU sees only zeros,
    where its derivative is 0: the norms would never move.
    """
    if not any(is_flat_at_zero(flow.by_name[name], flow.root) for name in block.post):
        return
    for node in flow.in_order(block.branch):
        if isinstance(called_module(node, flow.root), NORMS):
            editor.revive_zero_init(str(node.target))


def _project(
    region: Region,
    block: Residual,
    stream: fx.Node,
    copying: ModuleEditor | None = None,
) -> fx.Node:
    """Apply P to one stream; with an editor, apply a copy of P whose parameters start equal."""
    flow = region.flow
    local: dict[fx.Node, fx.Node] = {flow.by_name[block.x]: stream}

    def source(node: fx.Node) -> fx.Node:
        return local[node] if node in local else region.value(node)

    for node in flow.in_order(block.shortcut):
        if node in flow.constant:
            continue
        for i in node.all_input_nodes:
            source(i)
        local[node] = region.graph.node_copy(node, source)
        if copying is not None and node.op == "call_module" and flow.parameter_count(node):
            local[node].target = copying.duplicate(str(node.target))
    return source(flow.by_name[block.shortcut_term])


def _first_shaped(flow: Flow, block: Residual) -> fx.Node | None:
    """The branch's first layer (with its norm) of the output's shape, except its last layer."""
    wanted = tensor_type(flow.by_name[block.total])
    layers = [n for n in flow.in_order(block.branch) if flow.is_weighted(n)]
    for layer in layers[:-1]:
        users = flow.users(layer)
        has_norm = len(users) == 1 and isinstance(called_module(users[0], flow.root), NORMS)
        last = users[0] if has_norm else layer
        if tensor_type(last) == wanted:
            return last
    return None
