"""find: every additive shortcut of a captured graph, accepted or refused with a reason.

A sum `t1 + t2 + ...` is a residual block if one summand is an input of the others (identity),
or if all come from one value and one of them is a single projection of it (projected).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import torch
from torch import fx

from revcompile.compiler.capture.decisions import decision
from revcompile.compiler.dataflow import Flow, cuts_gradient, is_add, tensor_type
from revcompile.compiler.find.conflicts import (
    absorb_activations,
    drop_entangled,
    drop_overlapping,
    drop_useless,
    resolve_nesting,
)
from revcompile.ir.ops import read_buffer
from revcompile.ir.types import PATH, VALUE, Captured, NameSet, Refusal, Residual, ResidualKind

__all__ = ["Found", "find"]

_MULTIPLY: Final = frozenset({operator.mul, torch.mul, torch.ops.aten.mul.Tensor})
_LIGHT: Final = 2
"""Layers that may be computed again in a branch rather than kept beside the streams."""


@dataclass(frozen=True)
class Found:
    """What `find` saw in one graph."""

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
        verdict = _judge(flow, node)
        (residuals if isinstance(verdict, Residual) else refusals).append(verdict)  # type: ignore[arg-type]
    kept, dropped = resolve_nesting(flow, residuals)
    kept = absorb_activations(flow, kept)
    kept, overlapping = drop_overlapping(flow, kept)
    kept, useless = drop_useless(flow, kept)
    kept, entangled = drop_entangled(flow, kept)
    return Found(tuple(kept), (*refusals, *dropped, *overlapping, *useless, *entangled))


# -- judging one sum ------------------------------------------------------------------------------


def _is_inner_add(flow: Flow, node: fx.Node) -> bool:
    """A partial sum that only feeds the next addition: judged with it."""
    users = flow.users(node)
    return len(users) == 1 and is_add(users[0]) and len(node.users) == 1


def _terms(flow: Flow, total: fx.Node) -> tuple[list[fx.Node], set[fx.Node]]:
    """The summands of a nested sum, and the additions that join them."""
    terms: list[fx.Node] = []
    adds = {total}
    for arg in total.args[:2]:
        assert isinstance(arg, fx.Node)
        if is_add(arg) and _is_inner_add(flow, arg):
            inner, more = _terms(flow, arg)
            terms += inner
            adds |= more
        else:
            terms.append(arg)
    return terms, adds


def _judge(flow: Flow, total: fx.Node) -> Residual | Refusal:
    terms, adds = _terms(flow, total)
    path = str(total.meta.get(PATH, ""))
    kind = tensor_type(total)
    if kind is None or not kind.dtype.is_floating_point:
        numbers = "complex numbers" if kind and kind.dtype.is_complex else "integers"
        return Refusal(path, total.name, f"a sum of {numbers}, not of real features")
    refused = None
    for x in sorted(terms, key=flow.index.__getitem__, reverse=True):  # nearest first
        others = [t for t in terms if t is not x]
        if x not in flow.constant and any(flow.depends(t, x) for t in others):
            verdict = _identity(flow, path, total, adds, x, x, others)
            if isinstance(verdict, Residual):
                return verdict
            refused = refused or verdict
    if refused is not None:
        return refused
    for term in terms:
        scaled = _scaled_source(flow, term)
        others = [t for t in terms if t is not term]
        if scaled is None or not any(flow.depends(t, scaled[0]) for t in others):
            continue
        x, factor = scaled
        if isinstance(factor, fx.Node) and tensor_type(x) == kind:
            return _identity(flow, path, total, adds, term, x, terms)
        return Refusal(path, total.name, f"the shortcut is scaled by {factor} before the add")
    if len(terms) == 2:
        return _projected(flow, path, total, adds, terms[0], terms[1])
    return Refusal(path, total.name, "no summand is the input of the others")


def _scaled_source(flow: Flow, term: fx.Node) -> tuple[fx.Node, fx.Node | float] | None:
    """`(x, factor)` where a summand is `x * factor`, the factor a number or a parameter."""
    if term.op == "call_module":
        module = flow.root.get_submodule(str(term.target))
        parameters = list(module.parameters())
        looks = "scale" in type(module).__name__.lower() and not list(module.children())
        if looks and len(parameters) == 1 and isinstance(term.args[0], fx.Node):
            return term.args[0], term
        return None
    multiplies = term.op == "call_function" and term.target in _MULTIPLY
    if not multiplies and not (term.op == "call_method" and term.target == "mul"):
        return None
    left, right = term.args[:2]
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
    path: str,
    total: fx.Node,
    adds: set[fx.Node],
    shortcut: fx.Node,
    x: fx.Node,
    others: list[fx.Node],
) -> Residual | Refusal:
    if tensor_type(x) != tensor_type(total):
        return Refusal(
            path,
            total.name,
            f"the shortcut is {tensor_type(x)} but the sum is {tensor_type(total)}",
        )
    branch, sides = flow.region(x, others)
    sides = _absorb(flow, branch, sides)
    extras = _escapes(flow, branch, adds)
    if isinstance(extras, str):
        return Refusal(path, total.name, extras)
    if not any(flow.parameter_count(node) for node in branch):
        return Refusal(path, total.name, "the branch has no parameters: a formula, not a block")
    decides = _decision(flow, branch, x)
    if decides is not None:
        return Refusal(path, total.name, decides)
    driven = [t for t in others if t in branch and flow.depends(t, x)]
    parallel = len(driven) > 1 and shortcut not in others
    return Residual(
        path=path,
        kind=ResidualKind.PARALLEL if parallel else ResidualKind.IDENTITY,
        x=x.name,
        total=total.name,
        out=total.name,
        terms=tuple(t.name for t in others),
        adds=_names(flow, adds),
        branch=_names(flow, branch),
        shortcut_term="" if shortcut in others else shortcut.name,
        sides=tuple(s.name for s in sides),
        extras=tuple(e.name for e in extras),
    )


def _decision(flow: Flow, branch: set[fx.Node], x: fx.Node) -> str | None:
    """Why a branch must be given its very input again: it jumps at ties."""
    for node in sorted(branch, key=flow.index.__getitem__):
        found = decision(node, flow.root) if flow.depends(node, x) else None
        if found is not None:
            where = f" in {node.target}" if node.op == "call_module" else ""
            return (
                f"the branch decides by {found}{where}, and at a tie a rebuilt input may decide "
                "otherwise; its input is kept"
            )
    return None


def _projected(
    flow: Flow, path: str, total: fx.Node, adds: set[fx.Node], a: fx.Node, b: fx.Node
) -> Residual | Refusal:
    x = flow.latest_common_ancestor(a, b)
    if x is None or tensor_type(x) is None:
        return Refusal(path, total.name, "the summands share no input: a plain sum")
    regions = {term: flow.region(x, [term]) for term in (a, b)}
    light, heavy = sorted((a, b), key=lambda t: flow.weights(regions[t][0]))
    few, many = flow.weights(regions[light][0]), flow.weights(regions[heavy][0])
    if few > 1:
        return Refusal(path, total.name, f"both summands transform it ({few} and {many} layers)")
    if many < 2:
        return Refusal(path, total.name, "a sum of single layers, not of a shortcut and a branch")
    sides = [s for _, found in regions.values() for s in found if s not in flow.plain]
    if sides:
        return Refusal(path, total.name, f"the summands also read {sides[0].name}")
    extras = _escapes(flow, regions[light][0] | regions[heavy][0], adds)
    if extras:
        reason = extras if isinstance(extras, str) else f"{extras[0].name} is used elsewhere too"
        return Refusal(path, total.name, reason)
    return Residual(
        path=path,
        kind=ResidualKind.PROJECTED,
        x=x.name,
        total=total.name,
        out=total.name,
        terms=(heavy.name,),
        adds=_names(flow, adds),
        branch=_names(flow, regions[heavy][0]),
        shortcut_term=light.name,
        shortcut=_names(flow, regions[light][0]),
        sides=tuple(s.name for r in regions.values() for s in r[1]),
    )


def _absorb(flow: Flow, inside: set[fx.Node], sides: list[fx.Node]) -> list[fx.Node]:
    """Take light computations that only this branch reads (keys of a memory) into the branch.

    What travels beside the streams is then the memory itself, once for all blocks.
    """
    kept: dict[fx.Node, None] = {}
    for side in sides:
        closure, reads = _exclusive(flow, side, inside)
        if closure and flow.weights(closure) <= _LIGHT:
            inside |= closure
            kept.update(dict.fromkeys(reads))
        else:
            kept[side] = None
    for node in [n for n in kept if n in flow.plain]:
        inside |= _metadata(flow, node, inside)
    return sorted((n for n in kept if n not in inside), key=flow.index.__getitem__)


def _metadata(flow: Flow, node: fx.Node, inside: set[fx.Node]) -> set[fx.Node]:
    """A size, type or device of values inside that only the branch reads, and what is between.

    A mask is filled with the smallest number of the keys' type: the mask comes from outside, the
    type from inside.
    """
    found: set[fx.Node] = set()
    work = [node]
    while work:
        node = work.pop()
        if not all(user in inside or user in found for user in node.users):
            return set()
        found.add(node)
        sources = [source for source in node.all_input_nodes if source not in inside]
        if not all(source in flow.plain for source in sources):
            return set()
        work += sources
    return found


def _exclusive(
    flow: Flow, side: fx.Node, inside: set[fx.Node]
) -> tuple[set[fx.Node], list[fx.Node]]:
    """Nodes behind a side value that nobody else reads, and what those read."""
    closure: set[fx.Node] = set()
    reads: list[fx.Node] = []
    work = [side]
    while work:
        node = work.pop()
        whole = _with_producer(flow, node)
        fixed = any(
            n.op == "placeholder" or n in flow.plain or n in flow.effects or cuts_gradient(n)
            for n in whole
        )
        # What decides is computed once, outside: inside a branch it would be decided again.
        fixed = fixed or any(decision(n, flow.root) for n in whole)
        fixed = fixed or node.target is read_buffer  # read before it is written, not in a branch
        mine = all(u in inside or u in closure or u in whole for n in whole for u in n.users)
        if flow.anywhere(node):
            closure |= flow.sources(node)
        elif fixed or is_add(node) or not mine:
            reads.append(node)
        else:
            closure.update(whole)
            sources = dict.fromkeys(i for n in whole for i in n.all_input_nodes)
            work += [i for i in sources if i not in closure]
    sizes = sorted(closure & flow.plain, key=flow.index.__getitem__)
    return closure - flow.plain, [*(n for n in reads if n not in closure), *sizes]


def _with_producer(flow: Flow, node: fx.Node) -> list[fx.Node]:
    """A value; an item of a structured one with its producer and all other items of that."""
    while node.all_input_nodes and node in flow.items(node.all_input_nodes[0]):
        node = node.all_input_nodes[0]
    found = [node]
    for one in found:
        found += flow.items(one)
    return found


def _escapes(flow: Flow, inside: set[fx.Node], adds: set[fx.Node]) -> list[fx.Node] | str:
    """Values of a region that are also read outside it, or why it cannot be cut out."""
    extras: list[fx.Node] = []
    for node in sorted(inside, key=flow.index.__getitem__):
        if node in flow.effects:
            return f"the branch writes in place ({node.name})"
        if flow.anywhere(node) or (node in flow.plain and _known_elsewhere(flow, node, inside)):
            continue
        outside = [u for u in _readers(flow, node) if u not in inside and u not in adds]
        outside = [u for u in outside if not (u in flow.plain and u.meta.get(VALUE))]
        if not outside:
            continue
        if tensor_type(node) is not None:
            extras.append(node)
        else:
            return f"the branch's {node.name} is also used outside it (by {outside[0].name})"
    return extras


def _readers(flow: Flow, node: fx.Node) -> list[fx.Node]:
    """Who reads a value. What can be computed anywhere needs its sizes and devices there."""
    found: dict[fx.Node, None] = dict.fromkeys(node.users)
    work = [*node.users] if node in flow.plain else []
    while work:
        user = work.pop()
        if flow.anywhere(user):
            work += [reader for reader in user.users if reader not in found]
            found |= dict.fromkeys(user.users)
    return list(found)


def _known_elsewhere(flow: Flow, node: fx.Node, inside: set[fx.Node]) -> bool:
    """Can a size be had outside the branch: from its input, or because its value is known?"""
    if node.meta.get(VALUE):
        return True
    return all(
        _known_elsewhere(flow, source, inside) if source in flow.plain else source not in inside
        for source in node.all_input_nodes
    )


def _names(flow: Flow, nodes: Iterable[fx.Node]) -> NameSet:
    return NameSet(n.name for n in sorted(nodes, key=flow.index.__getitem__))
