"""Make in-place operations out-of-place, and drop what nobody uses.

A branch that overwrites its own input ruins reconstruction, and an in-place result nobody
names (`mask.div_(keep)`) would be deleted as dead code: both silently. Here every in-place op
whose target has no other alias in use becomes its out-of-place twin, and later uses of the
target read the new value. What cannot be rewritten stays where it is as an *effect*, which no
residual block may contain.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import fx
from torch.nn import functional

from revcompile.ir import PATH, SOURCE, TYPE, TensorType
from revcompile.ops import with_item

__all__ = ["functionalize", "is_effect", "is_view"]

_OPERATORS: Final[dict[Any, Callable[..., Any]]] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
}

_FILLS: Final[dict[str, Callable[..., Any]]] = {
    "zero_": torch.zeros_like,
    "fill_": torch.full_like,
    "bernoulli_": torch.bernoulli,
}
"""Methods whose name without the underscore is no method of the same meaning."""

_VIEW_METHODS: Final = frozenset(
    "view reshape flatten unflatten permute transpose t squeeze unsqueeze expand expand_as chunk "
    "split unbind narrow select view_as reshape_as detach movedim swapaxes contiguous to float "
    "diagonal unfold __getitem__ T mT type_as tensor_split".split()
)


def is_view(node: fx.Node) -> bool:
    """May the node's result share memory with its first input?"""
    if node.op == "call_method":
        return str(node.target) in _VIEW_METHODS
    if node.op == "call_function":
        name = getattr(node.target, "__name__", "")
        return node.target in (operator.getitem, getattr) or name in _VIEW_METHODS
    return False


def is_effect(node: fx.Node) -> bool:
    """Does the node write into one of its inputs?"""
    if node.op == "call_method":
        name = str(node.target)
        return name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
    if node.op == "call_function":
        if node.target in _OPERATORS or node.target is operator.setitem:
            return True
        name = getattr(node.target, "__name__", "")
        schema = getattr(node.target, "_schema", None)
        if schema is not None:
            return bool(schema.is_mutable)
        if name.endswith("_") and not name.endswith("__"):
            return True
        return bool(node.kwargs.get("inplace", False))
    return False


def functionalize(graph: fx.Graph) -> fx.Graph:
    """A copy of the graph with in-place operations replaced where that is safe."""
    result = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        copies[node] = result.node_copy(node, copies.__getitem__)
    order = {n: i for i, n in enumerate(result.nodes)}
    for node in list(result.nodes):
        if is_effect(node):
            _replace(result, node, order)
    eliminate_dead_code(result)
    result.lint()
    return result


def eliminate_dead_code(graph: fx.Graph) -> None:
    """Remove pure nodes without users, assertions, and parameters nobody reads."""
    for node in reversed(list(graph.nodes)):
        if node.op in ("placeholder", "output") or node.users:
            continue
        name = getattr(node.target, "__name__", "")
        if name in ("_assert", "_assert_scalar", "_assert_tensor_metadata"):
            graph.erase_node(node)
        elif node.op != "call_module" and not is_effect(node):
            graph.erase_node(node)


def _replace(graph: fx.Graph, node: fx.Node, order: dict[fx.Node, int]) -> None:
    target = node.args[0] if node.args else None
    twin = _twin(node)
    if twin is None or not isinstance(target, fx.Node) or _aliased(target, node, order):
        return
    before, after = target.meta.get(TYPE), node.meta.get(TYPE)
    if before != after and isinstance(before, TensorType) and isinstance(after, TensorType):
        return
    kind, function, args, kwargs = twin
    with graph.inserting_before(node):
        new = graph.create_node(kind, function, args, kwargs)
    new.meta.update({k: node.meta.get(k) for k in (PATH, SOURCE)})
    new.meta[TYPE] = after if after is not None else before
    order[new] = order[node]
    node.replace_all_uses_with(new)
    for user in [u for u in target.users if order[u] > order[node]]:
        user.replace_input_with(target, new)
    graph.erase_node(node)


def _twin(node: fx.Node) -> tuple[str, Any, tuple[Any, ...], dict[str, Any]] | None:
    """The out-of-place form of an in-place node: op, target, args, kwargs."""
    args, kwargs = node.args, dict(node.kwargs)
    if node.op == "call_function":
        if node.target in _OPERATORS:
            return "call_function", _OPERATORS[node.target], args, kwargs
        if node.target is operator.setitem:
            return "call_function", with_item, args, kwargs
        if kwargs.pop("inplace", False):
            return "call_function", node.target, args, kwargs
        name = getattr(node.target, "__name__", "")
        plain = getattr(functional, name[:-1], None) or getattr(torch, name[:-1], None)
        is_python = inspect.isfunction(plain) or inspect.isbuiltin(plain)
        if name.endswith("_") and is_python and "." not in name:
            return "call_function", plain, args, kwargs
        return None
    name = str(node.target)
    if name in _FILLS:
        if name == "bernoulli_" and isinstance(args[1] if len(args) > 1 else None, fx.Node):
            return None
        return "call_function", _FILLS[name], args, kwargs
    if name in ("copy_", "uniform_", "normal_", "exponential_", "detach_", "random_", "set_"):
        return None
    return ("call_method", name[:-1], args, kwargs) if hasattr(torch.Tensor, name[:-1]) else None


def _aliased(target: fx.Node, node: fx.Node, order: dict[fx.Node, int]) -> bool:
    """Is memory of `target` reachable under another name after `node`?"""
    base = target
    family = {target}
    while is_view(base) and base.args and isinstance(base.args[0], fx.Node):
        base = base.args[0]
        family.add(base)
    if base.op == "get_attr":
        return True
    work = [base]
    while work:
        for user in work.pop().users:
            if is_view(user) and user not in family:
                family.add(user)
                work.append(user)
    family.discard(target)
    return any(order[u] > order[node] for member in family for u in member.users)
