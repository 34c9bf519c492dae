"""find: every additive shortcut of a captured graph, accepted or refused with a reason.

A sum `t1 + t2 + ...` is a residual block if one summand is an input of the others (identity),
or if all come from one value and one of them is a single projection of it (projected).
"""

from __future__ import annotations

import operator
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import fx

from revcompile.compiler.capture.decisions import decision
from revcompile.compiler.dataflow import Flow, cuts_gradient, is_add, operands, tensor_type
from revcompile.compiler.find.conflicts import (
    absorb_activations,
    drop_cyclic,
    drop_overlapping,
    drop_useless,
    resolve_nesting,
)
from revcompile.ir.reached import reached
from revcompile.ir.types import PATH, VALUE, Captured, Refusal, Residual, ResidualKind

_MULTIPLY: Final = frozenset({operator.mul, torch.mul, torch.ops.aten.mul.Tensor})
_CONFLICT_PASSES: Final = (
    resolve_nesting,  # blocks inside blocks
    absorb_activations,  # relu(x + F(x))
    drop_overlapping,  # blocks that share a computation
    drop_useless,  # projections without a reversible neighbour
    drop_cyclic,  # blocks that read each other's branches
)
"""The passes in order: each sees only the blocks that the earlier ones have kept."""
_LIGHT: Final = 2
"""How many layers may be moved into a branch rather than passed to it as a side value."""


@dataclass(frozen=True)
class Found:
    """The sums of one graph: those that are residual blocks, and the others with a reason."""

    residuals: tuple[Residual, ...]
    refusals: tuple[Refusal, ...]


def find(captured: Captured, graph: fx.Graph | None = None) -> Found:
    """Classify every sum of the graph (by default the training graph)."""
    flow = Flow(captured.graph if graph is None else graph, captured.root)
    residuals: list[Residual] = []
    refusals: list[Refusal] = []
    for node in flow.nodes:
        if not is_add(node) or _is_inner_add(flow, node):
            continue
        result = _classify(flow, node)
        if isinstance(result, Residual):
            residuals.append(result)
        else:
            refusals.append(Refusal(_path(node), node.name, result))

    def refuse(block: Residual, reason: str) -> None:
        refusals.append(Refusal(block.path, block.total, reason))

    for conflict_pass in _CONFLICT_PASSES:
        residuals = conflict_pass(flow, residuals, refuse)
    return Found(tuple(residuals), tuple(refusals))


# -- classifying one sum ---------------------------------------------------------------------------


def _is_inner_add(flow: Flow, node: fx.Node) -> bool:
    """Whether only another addition reads this sum; both are then classified as one sum."""
    users = flow.users(node)
    return len(users) == 1 and is_add(users[0]) and len(node.users) == 1


def _terms(flow: Flow, total: fx.Node) -> tuple[list[fx.Node], set[fx.Node]]:
    """The summands of a nested sum, and the additions that join them."""
    terms: list[fx.Node] = []
    adds = {total}
    for arg in operands(total):
        if is_add(arg) and _is_inner_add(flow, arg):
            inner, more = _terms(flow, arg)
            terms += inner
            adds |= more
        else:
            terms.append(arg)
    return terms, adds


def _path(node: fx.Node) -> str:
    return str(node.meta.get(PATH, ""))


def _classify(flow: Flow, total: fx.Node) -> Residual | str:
    """A sum as a residual block, or the reason why it is none."""
    terms, adds = _terms(flow, total)
    kind = tensor_type(total)
    if kind is None or not kind.dtype.is_floating_point:
        numbers = "complex numbers" if kind and kind.dtype.is_complex else "integers"
        return f"a sum of {numbers}, not of real features"
    refused = None
    for x in sorted(terms, reverse=True):  # nearest first
        others = [t for t in terms if t is not x]
        if x not in flow.constant and any(flow.depends(t, x) for t in others):
            if len(others) + 1 < len(terms):  # x + x + F(x): the shortcut is scaled
                others = terms
            result = _identity(flow, total, adds, x, x, others)
            if isinstance(result, Residual):
                return result
            refused = refused or result
    if refused is not None:
        return refused
    for term in terms:
        scaled = _scaled_source(flow, term)
        others = [t for t in terms if t is not term]
        if scaled is None or not any(flow.depends(t, scaled[0]) for t in others):
            continue
        x, factor = scaled
        if isinstance(factor, fx.Node) and tensor_type(x) == kind:
            return _identity(flow, total, adds, term, x, terms)
        return f"the shortcut is scaled by {factor} before the add"
    if len(terms) == 2:
        return _projected(flow, total, adds, terms[0], terms[1])
    return "no summand is the input of the others"


def _scaled_source(flow: Flow, term: fx.Node) -> tuple[fx.Node, fx.Node | float] | None:
    """`(x, factor)` where a summand is `x * factor`, the factor a number or a parameter."""
    multiplies = term.op == "call_function" and term.target in _MULTIPLY
    if not multiplies and not (term.op == "call_method" and term.target == "mul"):
        return None
    left, right = operands(term)[:2]
    for x, factor in ((left, right), (right, left)):
        if not isinstance(x, fx.Node) or x in flow.constant:
            continue
        if isinstance(factor, (int, float)):
            return x, float(factor)
        if isinstance(factor, fx.Node) and factor in flow.constant:
            return x, factor
    return None


def _identity(
    flow: Flow,
    total: fx.Node,
    adds: set[fx.Node],
    shortcut: fx.Node,
    x: fx.Node,
    others: list[fx.Node],
) -> Residual | str:
    branch, sides = flow.region(x, others)
    sides = _absorb(flow, branch, sides)
    extras = _escapes(flow, branch, adds)
    if not any(flow.parameter_count(node) for node in branch):
        return "the branch has no parameters: a formula, not a block"
    decides = _decision(flow, branch, x)
    if decides is not None:
        return decides
    driven = [t for t in others if t in branch and flow.depends(t, x)]
    parallel = len(driven) > 1 and shortcut not in others
    return Residual(
        path=_path(total),
        kind=ResidualKind.PARALLEL if parallel else ResidualKind.IDENTITY,
        x=x.name,
        total=total.name,
        out=total.name,
        terms=tuple(t.name for t in others),
        adds=_names(adds),
        branch=_names(branch),
        shortcut_term="" if shortcut in others else shortcut.name,
        sides=tuple(s.name for s in sides),
        extras=tuple(e.name for e in extras),
    )


def _decision(flow: Flow, branch: set[fx.Node], x: fx.Node) -> str | None:
    """Why a branch needs its exact input: it has a discrete operation, which jumps at ties."""
    for node in sorted(branch):
        name = decision(node, flow.root) if flow.depends(node, x) else None
        if name is not None:
            where = f" in {node.target}" if node.op == "call_module" else ""
            return (
                f"the branch decides by {name}{where}, and at a tie a reconstructed input may "
                "decide differently; its input is kept"
            )
    return None


def _projected(
    flow: Flow, total: fx.Node, adds: set[fx.Node], a: fx.Node, b: fx.Node
) -> Residual | str:
    x = flow.latest_common_ancestor(a, b)
    if x is None or tensor_type(x) is None:
        return "the summands share no input: a plain sum"
    regions = {term: flow.region(x, [term]) for term in (a, b)}
    light, heavy = sorted((a, b), key=lambda t: flow.weights(regions[t][0]))
    few, many = flow.weights(regions[light][0]), flow.weights(regions[heavy][0])
    if few > 1:
        return f"both summands transform it ({few} and {many} layers)"
    if many < 2:
        return "a sum of single layers, not of a shortcut and a branch"
    sides = [s for _, found in regions.values() for s in found if s not in flow.plain]
    if sides:
        return f"the summands also read {sides[0].name}"
    extras = _escapes(flow, regions[light][0] | regions[heavy][0], adds)
    if extras:
        return f"{extras[0].name} is used elsewhere too"
    return Residual(
        path=_path(total),
        kind=ResidualKind.PROJECTED,
        x=x.name,
        total=total.name,
        out=total.name,
        terms=(heavy.name,),
        adds=_names(adds),
        branch=_names(regions[heavy][0]),
        shortcut_term=light.name,
        shortcut=_names(regions[light][0]),
        sides=tuple(s.name for r in regions.values() for s in r[1]),
    )


def _absorb(flow: Flow, inside: set[fx.Node], sides: list[fx.Node]) -> list[fx.Node]:
    """Move cheap computations of side values that only this branch reads into the branch.

    In cross-attention these are the projections to keys and values: the side value is then the
    memory itself, which all blocks share.
    """
    kept: dict[fx.Node, None] = {}
    for side in reversed(sides):  # later ones may read sizes of earlier ones
        closure, reads = _exclusive(flow, side, inside)
        if closure and flow.weights(closure) <= _LIGHT:
            inside |= closure
            kept.update(dict.fromkeys(reads))
        else:
            kept[side] = None
    for node in [n for n in kept if n in flow.plain]:
        inside |= _metadata(flow, node, inside)
    return sorted(n for n in kept if n not in inside)


def _metadata(flow: Flow, node: fx.Node, inside: set[fx.Node]) -> set[fx.Node]:
    """A size, type or device of values inside, with the nodes between, if only the branch reads it.

    For example, a mask from outside is filled with the smallest number of a type from inside, that
    of the keys.
    """

    def sources(of: fx.Node) -> list[fx.Node]:
        return [n for n in of.all_input_nodes if n not in inside] if of in flow.plain else []

    between = {*reached([node], sources)}
    users = (user for one in between for user in one.users)
    is_own = between <= flow.plain and all(user in inside or user in between for user in users)
    return between if is_own else set()


def _exclusive(
    flow: Flow, side: fx.Node, inside: set[fx.Node]
) -> tuple[set[fx.Node], list[fx.Node]]:
    """The nodes that compute a side value and that only the branch reads, and their inputs."""
    closure: set[fx.Node] = set()
    reads: list[fx.Node] = []
    work = [side]
    while work:
        node = work.pop()
        whole = _with_producer(flow, node)
        fixed = any(n.op == "placeholder" or n in flow.plain or cuts_gradient(n) for n in whole)
        # A discrete operation is computed once, outside: recomputed, it might decide differently.
        fixed = fixed or any(decision(n, flow.root) for n in whole)
        own = (inside, closure, whole)
        is_exclusive = all(_is_read_in(flow, u, own) for n in whole for u in n.users)
        if flow.recomputable(node):
            closure |= flow.sources(node)
        elif fixed or is_add(node) or not is_exclusive:
            reads.append(node)
        else:
            closure.update(whole)
            sources = dict.fromkeys(i for n in whole for i in n.all_input_nodes)
            work += [i for i in sources if i not in closure]
    sizes = sorted(closure & flow.plain)
    return closure - flow.plain, [*(n for n in reads if n not in closure), *sizes]


def _is_read_in(flow: Flow, node: fx.Node, own: Iterable[Container[fx.Node]]) -> bool:
    """Whether a reader is one of these nodes, or a size or type that only they read."""
    if any(node in nodes for nodes in own):
        return True
    return node in flow.plain and all(_is_read_in(flow, user, own) for user in node.users)


def _with_producer(flow: Flow, node: fx.Node) -> list[fx.Node]:
    """The node alone or, for an item of a structured value, its producer with all items."""
    while node.all_input_nodes and node in flow.items(node.all_input_nodes[0]):
        node = node.all_input_nodes[0]
    group = [node]
    for member in group:
        group += flow.items(member)
    return group


def _escapes(flow: Flow, inside: set[fx.Node], adds: set[fx.Node]) -> list[fx.Node]:
    """Values of a region that are also read outside it."""
    extras: dict[fx.Node, None] = {}
    for node in sorted(inside):
        if flow.recomputable(node):
            continue
        outside = [u for u in node.users if u not in inside and u not in adds]
        outside = [u for u in outside if not (u in flow.plain and u.meta.get(VALUE))]
        if not outside:
            continue
        if tensor_type(node) is not None:
            extras[node] = None
        else:  # a type or device: hand on the value that it is read from
            assert node in flow.plain  # items of structured values are in the region, too
            extras |= dict.fromkeys(_read_off(flow, node, inside))
    return list(extras)


def _read_off(flow: Flow, node: fx.Node, inside: set[fx.Node]) -> Iterator[fx.Node]:
    """Values inside a branch that a type or device is read from; sizes are known without them."""
    for source in () if node.meta.get(VALUE) else node.all_input_nodes:
        if source in flow.plain:
            yield from _read_off(flow, source, inside)
        elif source in inside and not flow.recomputable(source):
            yield source


def _names(nodes: Iterable[fx.Node]) -> tuple[str, ...]:
    return tuple(n.name for n in sorted(nodes))
