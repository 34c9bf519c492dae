"""find, second half: residual blocks seen together.

Blocks inside blocks, activations that follow a sum, projections next to nothing reversible, and
blocks that read each other's branches.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace
from typing import Final

from torch import fx, nn

from revcompile.compiler.dataflow import Flow
from revcompile.ir.ops import read_buffer
from revcompile.ir.types import VALUE, Refusal, Residual, ResidualKind

__all__ = [
    "absorb_activations",
    "drop_entangled",
    "drop_overlapping",
    "drop_useless",
    "is_activation",
    "is_flat_at_zero",
    "ready_times",
    "resolve_nesting",
]

ACTIVATIONS: Final = frozenset(
    [
        "relu",
        "relu6",
        "relu_",
        "gelu",
        "silu",
        "silu_",
        "swish",
        "hardswish",
        "hardsigmoid",
        "hardtanh",
        "leaky_relu",
        "elu",
        "selu",
        "celu",
        "prelu",
        "mish",
        "softplus",
        "tanh",
        "sigmoid",
        "hard_swish",
        "hard_mish",
    ]
)

_MIN_INNER_BLOCKS: Final = 2
_INNER_SHARE: Final = 0.8


def is_activation(node: fx.Node, root: nn.Module) -> bool:
    """Is the node an elementwise activation function?"""
    name = _called(node, root)
    if node.op == "call_module":
        module = root.get_submodule(str(node.target))
        in_torch = type(module).__module__ == "torch.nn.modules.activation"
        excluded = ("MultiheadAttention", "Softmax", "GLU", "LogSoftmax", "Softmax2d")
        return (in_torch and name not in excluded) or name.lower() in ACTIVATIONS
    return node.op in ("call_function", "call_method") and name in ACTIVATIONS


def is_flat_at_zero(node: fx.Node, root: nn.Module) -> bool:
    """Is the node an activation function whose derivative at 0 is 0?"""
    return _called(node, root).lower().rstrip("_") in ("relu", "relu6")


def _called(node: fx.Node, root: nn.Module) -> str:
    """The name of the module's class, or of the function, that a node calls."""
    if node.op == "call_module":
        return type(root.get_submodule(str(node.target))).__name__
    return str(getattr(node.target, "__name__", node.target)).split(".")[0]


def resolve_nesting(flow: Flow, residuals: list[Residual]) -> tuple[list[Residual], list[Refusal]]:
    """Of blocks inside blocks keep the inner ones if they are a chain, else the outer one."""
    kept: list[Residual] = []
    dropped: list[Refusal] = []
    for block in residuals:  # inner blocks end before the block around them
        region = block.branch | block.shortcut
        inner = [r for r in kept if r.total in region]
        reversible = [r for r in inner if r.kind is not ResidualKind.PROJECTED]
        chain = len(reversible) >= _MIN_INNER_BLOCKS and _mostly(flow, block, reversible)
        if reversible and (chain or block.kind is ResidualKind.PROJECTED):
            reason = f"holds {len(reversible)} residual blocks of its own, which are used instead"
            dropped.append(Refusal(block.path, block.total, reason))
            continue
        kept = [r for r in kept if r not in inner]
        dropped += [Refusal(r.path, r.total, f"part of the branch of {block.path}") for r in inner]
        kept.append(block)
    return kept, dropped


def _mostly(flow: Flow, outer: Residual, inner: list[Residual]) -> bool:
    """Do the inner blocks hold most of the outer block's parameters?"""

    def size(block: Residual) -> int:
        return sum(flow.parameter_count(flow.by_name[name]) for name in block.branch)

    return sum(map(size, inner)) >= _INNER_SHARE * size(outer)


def absorb_activations(flow: Flow, residuals: list[Residual]) -> list[Residual]:
    """Post-activation blocks: the activation after the sum belongs to the block.

    A lone activation after the last sum of a pre-activation network belongs to the head: it
    counts only if the next block starts from its result, or the block started from one.
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


def drop_useless(flow: Flow, residuals: list[Residual]) -> tuple[list[Residual], list[Refusal]]:
    """A projected block keeps two streams only where there are two streams to keep."""
    by_x: dict[str, list[Residual]] = {}
    for block in residuals:
        by_x.setdefault(block.x, []).append(block)
    streams: set[str] = set()
    kept: list[Residual] = []
    dropped: list[Refusal] = []

    def feeds_coupling(block: Residual) -> bool:
        return any(
            after.kind is not ResidualKind.PROJECTED or feeds_coupling(after)
            for after in by_x.get(block.out, [])
        )

    for block in residuals:
        projected = block.kind is ResidualKind.PROJECTED
        if projected and block.x not in streams and not feeds_coupling(block):
            reason = "a projected shortcut next to no reversible block"
            dropped.append(Refusal(block.path, block.total, reason))
            continue
        streams.add(block.out)
        kept.append(block)
    return kept, dropped


def drop_overlapping(flow: Flow, residuals: list[Residual]) -> tuple[list[Residual], list[Refusal]]:
    """Of blocks that share a computation the first one keeps it: nothing is computed twice.

    A second stream that starts inside a block, or a skip across its end, makes such blocks.
    """
    owner: dict[str, Residual] = {}
    kept: list[Residual] = []
    dropped: list[Refusal] = []
    for block in residuals:
        nodes = flow.in_order((*block.branch, *block.shortcut, *block.adds, *block.post))
        mine = [n.name for n in nodes if not flow.anywhere(n) and n not in flow.plain]
        shared = next((name for name in mine if name in owner), None)
        if shared is not None:
            other = owner[shared].path or "another block"
            reason = f"shares {shared} with {other}, and a value is computed in one block only"
            dropped.append(Refusal(block.path, block.total, reason))
            continue
        owner |= dict.fromkeys(mine, block)
        kept.append(block)
    return kept, dropped


def drop_entangled(flow: Flow, residuals: list[Residual]) -> tuple[list[Residual], list[Refusal]]:
    """Drop blocks whose values are needed before the block itself can be complete."""
    dropped: list[Refusal] = []
    while True:
        ready = ready_times(flow, residuals)
        late = {
            (block, flow.by_name[name])
            for block in residuals
            for name in (block.x, *block.sides)
            if ready[flow.by_name[name]] >= flow.index[flow.by_name[block.out]]
        }
        if not late:
            return residuals, dropped
        entangled = _waiting(flow, residuals, late)
        reason = "blocks read each other's branches, so none can come first"
        dropped += [Refusal(r.path, r.total, reason) for r in entangled]
        residuals = [r for r in residuals if r not in entangled]


def _waiting(
    flow: Flow, residuals: Sequence[Residual], late: Set[tuple[Residual, fx.Node]]
) -> list[Residual]:
    """The blocks whose extras come too late for their reader; the reader if it is not them."""
    makers = {flow.by_name[name]: block for block in residuals for name in block.extras}
    ends = {block: flow.index[flow.by_name[block.out]] for block in residuals}
    entangled: set[Residual] = set()
    for reader, side in late:
        behind = {makers[node] for node in flow.sources_with_sizes(side) if node in makers}
        entangled |= {block for block in behind if ends[block] >= ends[reader]} or {reader}
    return [block for block in residuals if block in entangled]


def ready_times(flow: Flow, residuals: Sequence[Residual]) -> dict[fx.Node, int]:
    """When each value is there, if a block's values appear all at once with its output."""
    block_of = {flow.by_name[n]: r for r in residuals for n in (*r.branch, *r.adds, *r.post)}
    ready: dict[fx.Node, int] = {}
    for node in flow.nodes:
        block = block_of.get(node)
        if block is not None and not flow.anywhere(node) and node not in flow.plain:
            ready[node] = flow.index[flow.by_name[block.out]]
        else:
            # a size whose value is known waits for nothing; a type or a device is not known
            known = node in flow.plain and node.meta.get(VALUE) is not None
            sources = () if known else node.all_input_nodes
            times = [ready[i] for i in sources if i not in flow.plain or i.meta.get(VALUE) is None]
            if node.target is read_buffer:  # read where its new contents are computed
                times += [ready.get(other, 0) for other in flow.read_with(node)[1]]
            ready[node] = max([flow.index[node], *times])
    return ready
