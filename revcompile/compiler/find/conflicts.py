"""find, second half: conflicts between residual blocks.

Each pass takes the blocks and returns those that remain. It refuses the others with a reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final

import networkx as nx
from torch import fx, nn

from revcompile.compiler.dataflow import Flow
from revcompile.ir.module_tree import called_module
from revcompile.ir.ops import op_name
from revcompile.ir.types import VALUE, Residual, ResidualKind

Refuse = Callable[[Residual, str], None]

_ACTIVATIONS: Final = frozenset(
    (
        *("relu", "relu_", "relu6", "gelu", "silu", "silu_", "swish", "hardswish", "hardsigmoid"),
        *("hardtanh", "leaky_relu", "elu", "selu", "celu", "prelu", "mish", "softplus", "tanh"),
        *("sigmoid", "hard_swish", "hard_mish"),
    )
)
"""Elementwise activation functions."""

_ACTIVATION_LAYERS: Final = frozenset(
    (
        *(nn.ReLU, nn.ReLU6, nn.RReLU, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU),
        *(nn.SiLU, nn.Mish, nn.Hardswish, nn.Sigmoid, nn.Hardsigmoid, nn.LogSigmoid, nn.Tanh),
        *(nn.Hardtanh, nn.Tanhshrink, nn.Hardshrink, nn.Softshrink, nn.Softplus, nn.Softsign),
        nn.Threshold,
    )
)

_MIN_INNER_BLOCKS: Final = 2
_INNER_SHARE: Final = 0.8


def is_activation(node: fx.Node, root: nn.Module) -> bool:
    """Whether the node is an elementwise activation function."""
    if node.op == "call_module":
        return type(called_module(node, root)) in _ACTIVATION_LAYERS
    return node.op in ("call_function", "call_method") and op_name(node) in _ACTIVATIONS


def is_flat_at_zero(node: fx.Node, root: nn.Module) -> bool:
    """Whether the node is an activation function whose derivative at 0 is 0."""
    if node.op == "call_module":
        return isinstance(called_module(node, root), (nn.ReLU, nn.ReLU6))
    return op_name(node) in ("relu", "relu_", "relu6")


def resolve_nesting(flow: Flow, residuals: list[Residual], refuse: Refuse) -> list[Residual]:
    """Where blocks are nested, keep the inner ones if they form a chain, else the outer one."""
    kept: list[Residual] = []
    for block in residuals:  # inner blocks end before the block around them
        region = {*block.branch, *block.shortcut}
        inner = [r for r in kept if r.total in region]
        reversible = [r for r in inner if not r.is_projected]
        is_chain = len(reversible) >= _MIN_INNER_BLOCKS and _mostly(flow, block, reversible)
        if reversible and (is_chain or block.is_projected):
            count = len(reversible)
            refuse(block, f"holds {count} residual blocks of its own, which are used instead")
            continue
        for each in inner:
            refuse(each, f"part of the branch of {block.path}")
        kept = [*(r for r in kept if r not in inner), block]
    return kept


def _mostly(flow: Flow, outer: Residual, inner: list[Residual]) -> bool:
    """Whether the inner blocks hold most of the outer block's parameters."""

    def size(block: Residual) -> int:
        return sum(flow.parameter_count(flow.by_name[name]) for name in block.branch)

    return sum(map(size, inner)) >= _INNER_SHARE * size(outer)


def absorb_activations(flow: Flow, residuals: list[Residual], refuse: Refuse) -> list[Residual]:
    """Make the activation after the sum of a post-activation block part of the block.

    It is part of the block only if several nodes read its result (as a next block does), or if the
    block starts from such an activation. After the last sum of a pre-activation network it belongs
    to the head.
    """
    result: list[Residual] = []
    activated: set[str] = set()
    for block in residuals:
        total = flow.by_name[block.total]
        users = flow.users(total)
        if len(users) == 1 and is_activation(users[0], flow.root):
            post = users[0]
            if len(flow.users(post)) > 1 or block.x in activated:
                activated.add(post.name)
                kind = block.kind
                if kind is ResidualKind.IDENTITY:
                    kind = ResidualKind.POST_ACTIVATION
                block = replace(block, kind=kind, out=post.name, post=(post.name,))
        result.append(block)
    return result


def drop_useless(flow: Flow, residuals: list[Residual], refuse: Refuse) -> list[Residual]:
    """Drop projected blocks without a reversible neighbour: they have no streams to pass on."""
    by_x: dict[str, list[Residual]] = {}
    for block in residuals:
        by_x.setdefault(block.x, []).append(block)
    streams: set[str] = set()
    kept: list[Residual] = []

    def feeds_coupling(block: Residual) -> bool:
        return any(
            not after.is_projected or feeds_coupling(after) for after in by_x.get(block.out, [])
        )

    for block in residuals:
        if block.is_projected and block.x not in streams and not feeds_coupling(block):
            refuse(block, "a projected shortcut next to no reversible block")
            continue
        streams.add(block.out)
        kept.append(block)
    return kept


def drop_overlapping(flow: Flow, residuals: list[Residual], refuse: Refuse) -> list[Residual]:
    """Keep only the first of the blocks that share a computation: nothing is computed twice.

    Blocks overlap if a second stream starts inside a block, or a skip crosses the end of one.
    """
    owner: dict[str, Residual] = {}
    kept: list[Residual] = []
    for block in residuals:
        computed = [node.name for node in _computed(flow, block)]
        shared = next((name for name in computed if name in owner), None)
        if shared is not None:
            other = owner[shared].path or "another block"
            refuse(block, f"shares {shared} with {other}, and a value belongs to one block only")
            continue
        owner |= dict.fromkeys(computed, block)
        kept.append(block)
    return kept


def drop_cyclic(flow: Flow, residuals: list[Residual], refuse: Refuse) -> list[Residual]:
    """Drop blocks that wait for each other: each reads values inside the other's branch."""
    while True:
        components = nx.strongly_connected_components(contracted(flow, residuals))
        cycle = next((nodes for nodes in components if len(nodes) > 1), None)
        if cycle is None:
            return residuals
        blocks = [block for block in residuals if flow.by_name[block.out] in cycle]
        last = max(reversed(blocks), key=lambda block: bool(block.extras))
        refuse(last, "blocks read each other's branches, so none can come first")
        residuals = [block for block in residuals if block is not last]


def _computed(flow: Flow, block: Residual) -> list[fx.Node]:
    """The values of a block, except sizes and values that any block can recompute."""
    nodes = flow.in_order(block.nodes)
    return [n for n in nodes if not flow.recomputable(n) and n not in flow.plain]


def contracted(flow: Flow, residuals: Iterable[Residual]) -> nx.DiGraph[fx.Node]:
    """The dependencies between nodes if each block is contracted to one node, its output."""
    output: dict[fx.Node, fx.Node] = {}
    reads: dict[fx.Node, list[fx.Node]] = {}
    for block in residuals:
        end = flow.by_name[block.out]
        reads[end] = [flow.by_name[name] for name in (block.x, *block.sides)]
        output |= dict.fromkeys(_computed(flow, block), end)
    graph: nx.DiGraph[fx.Node] = nx.DiGraph()
    for node in flow.nodes:
        if output.get(node, node) is not node:
            continue
        graph.add_node(node)
        sources = reads.get(node, node.all_input_nodes)
        if node not in flow.plain or node.meta.get(VALUE) is None:  # a known size needs nothing
            graph.add_edges_from((output.get(source, source), node) for source in sources)
    return graph
