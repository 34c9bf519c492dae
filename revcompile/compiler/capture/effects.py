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
from torch import fx, nn
from torch.nn import functional

from revcompile.compiler.capture.memory import MEMORY, STATE, WRITES
from revcompile.ir import PATH, SOURCE, TYPE, TensorType
from revcompile.ops import with_item

__all__ = ["INPLACE_OPERATORS", "eliminate_dead_code", "functionalize", "is_effect", "is_view"]

INPLACE_OPERATORS: Final[dict[Any, Callable[..., Any]]] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
    operator.ifloordiv: operator.floordiv,
    operator.imod: operator.mod,
    operator.ipow: operator.pow,
    operator.iand: operator.and_,
    operator.ior: operator.or_,
    operator.ixor: operator.xor,
    operator.ilshift: operator.lshift,
    operator.irshift: operator.rshift,
}

_FILLS: Final[dict[str, Callable[..., Any]]] = {
    "bernoulli_": torch.bernoulli,
    "fill_": torch.full_like,
    "normal_": torch.randn_like,
    "uniform_": torch.rand_like,
    "zero_": torch.zeros_like,
}
"""Methods whose name without the underscore is no method of the same meaning."""

_NO_TWIN: Final = ("resize_", "resize_as_", "set_", "share_memory_")

# fmt: off
_VIEWS: Final = frozenset((
    "__getitem__", "adjoint", "as_strided", "bfloat16", "chunk", "contiguous", "data", "detach",
    "diagonal", "double", "dropout", "expand", "expand_as", "flatten", "float", "getattr",
    "getitem", "half", "hsplit", "imag", "mT", "moveaxis", "movedim", "narrow", "permute", "ravel",
    "real", "reshape", "reshape_as", "select", "split", "split_with_sizes", "squeeze", "swapaxes",
    "swapdims", "T", "t", "tensor_split", "to", "transpose", "type", "type_as", "unbind",
    "unflatten", "unfold", "unsqueeze", "view", "view_as", "vsplit",
))
# fmt: on
"""Functions and methods whose result may share memory with their first input."""


def is_view(node: fx.Node) -> bool:
    """May the node's result share memory with its first input?"""
    if node.op == "call_method":
        return str(node.target) in _VIEWS
    if node.op != "call_function":
        return False
    schema = getattr(node.target, "_schema", None)
    if schema is not None and any(result.alias_info is not None for result in schema.returns):
        return True
    return str(getattr(node.target, "__name__", "")).split(".")[0] in _VIEWS


def is_effect(node: fx.Node) -> bool:
    """Does the node write into one of its inputs?"""
    if node.meta.get(WRITES):
        return True
    if node.op == "call_method":
        return _is_inplace_name(str(node.target))
    if node.op != "call_function":
        return False
    if getattr(node.target, "__module__", "") == "_operator":  # where `or_` writes nothing
        return node.target in INPLACE_OPERATORS or node.target is operator.setitem
    schema = getattr(node.target, "_schema", None)
    if schema is not None:
        return bool(schema.is_mutable)
    name = str(getattr(node.target, "__name__", ""))
    return _is_inplace_name(name) or bool(node.kwargs.get("inplace", False))


def _is_inplace_name(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__") and name != "requires_grad_"


def functionalize(graph: fx.Graph, root: nn.Module | None = None) -> fx.Graph:
    """A copy of the graph with in-place operations replaced where that is safe.

    Layers with an `inplace` flag stay as they are, but whoever read their input afterwards
    reads their output. `root` tells which layers those are.
    """
    result = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        copies[node] = result.node_copy(node, copies.__getitem__)
    aliases = _Aliases(result)
    for node in list(result.nodes):
        if is_effect(node):
            _replace(result, node, aliases, root)
    eliminate_dead_code(result)
    result.lint()
    return result


def eliminate_dead_code(graph: fx.Graph) -> None:
    """Remove pure nodes without users, assertions, and parameters nobody reads."""
    for node in reversed(list(graph.nodes)):
        name = getattr(node.target, "__name__", "")
        is_assertion = name in ("_assert", "_assert_scalar", "_assert_tensor_metadata")
        is_needed = node.users or node.op in ("placeholder", "output", "call_module")
        if is_assertion or not (is_needed or is_effect(node)):
            graph.erase_node(node)


class _Aliases:
    """Which values live in the same memory, as far as one can tell."""

    def __init__(self, graph: fx.Graph) -> None:
        self.order = {node: i for i, node in enumerate(graph.nodes)}
        self._parent: dict[Any, Any] = {}
        for node in graph.nodes:
            if node.meta.get(TYPE, ...) is None and node.target is not operator.setitem:
                continue  # a size or a flag: it has no memory
            numbers = list(node.meta.get(MEMORY, ()))
            source = node.args[0] if node.args and (is_view(node) or is_effect(node)) else node
            for other in (source, *numbers, *([STATE] if node.op == "get_attr" else [])):
                self._parent[self._find(node)] = self._find(other)
        self._members: dict[Any, list[fx.Node]] = {}
        for node in graph.nodes:
            self._members.setdefault(self._find(node), []).append(node)

    def _find(self, item: Any) -> Any:
        while (parent := self._parent.get(item, item)) != item:
            item = parent
        return item

    def reachable(self, target: fx.Node, after: fx.Node) -> bool:
        """Can the memory of `target` be reached under another, older name after a node?"""
        group = self._find(target)
        if group == self._find(STATE):
            return True
        now = self.order[after]
        older = (m for m in self._members.get(group, ()) if m is not target and self.order[m] < now)
        return any(self.order[user] > now for member in older for user in member.users)

    def stands_for(self, new: fx.Node, old: fx.Node) -> None:
        """`new` takes the place of `old`."""
        self.order[new] = self.order[old]
        group = self._find(old)
        self._parent[new] = group
        self._members.setdefault(group, []).append(new)


def _replace(graph: fx.Graph, node: fx.Node, aliases: _Aliases, root: nn.Module | None) -> None:
    target = node.args[0] if node.args else None
    if not isinstance(target, fx.Node) or aliases.reachable(target, node):
        return
    later = [u for u in target.users if aliases.order[u] > aliases.order[node]]
    if node.op == "call_module":
        if root is not None and _works_in_place(root.get_submodule(str(node.target))):
            node.meta[WRITES] = frozenset()
            for user in later:
                user.replace_input_with(target, node)
        return
    twin = _twin(node)
    if twin is None:
        return
    kind, function, args, kwargs = twin
    with graph.inserting_before(node):
        new = graph.create_node(kind, function, args, kwargs)
        if _promotes(target, node):
            new = graph.call_method("type_as", (new, target))
    after = node.meta.get(TYPE)
    for made in (new, *(n for n in new.all_input_nodes if n not in aliases.order)):
        made.meta.update({k: node.meta.get(k) for k in (PATH, SOURCE)})
        made.meta[TYPE] = after if after is not None else target.meta.get(TYPE)
        aliases.stands_for(made, node)
    node.replace_all_uses_with(new)
    for user in later:
        user.replace_input_with(target, new)
    graph.erase_node(node)


def _works_in_place(module: nn.Module) -> bool:
    """Does the layer overwrite its input only because it was told to save memory?"""
    return any(getattr(inner, "inplace", False) is True for inner in module.modules())


def _promotes(target: fx.Node, node: fx.Node) -> bool:
    """Would the out-of-place twin have another type than the target?"""

    def empty(n: fx.Node) -> torch.Tensor | None:
        known = n.meta.get(TYPE)
        if not isinstance(known, TensorType):
            return None
        return torch.empty(known.shape, dtype=known.dtype, device="meta")

    mine, others = empty(target), [empty(n) for n in node.all_input_nodes]
    if mine is None or not mine.is_floating_point():
        return False
    return any(o is not None and torch.result_type(mine, o) != mine.dtype for o in others)


def _twin(node: fx.Node) -> tuple[str, Any, tuple[Any, ...], dict[str, Any]] | None:
    """The out-of-place form of an in-place node: op, target, args, kwargs."""
    args, kwargs = node.args, dict(node.kwargs)
    if node.op == "call_method":
        return _method_twin(str(node.target), args, kwargs)
    if node.target in INPLACE_OPERATORS:
        return "call_function", INPLACE_OPERATORS[node.target], args, kwargs
    if node.target is operator.setitem:
        return "call_function", with_item, args, kwargs
    if kwargs.pop("inplace", False):
        return "call_function", node.target, args, kwargs
    name = str(getattr(node.target, "__name__", ""))
    plain = getattr(functional, name[:-1], None) or getattr(torch, name[:-1], None)
    is_python = inspect.isfunction(plain) or inspect.isbuiltin(plain)
    if name.endswith("_") and is_python and "." not in name:
        return "call_function", plain, args, kwargs
    return None


def _method_twin(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[str, Any, tuple[Any, ...], dict[str, Any]] | None:
    value = args[1] if len(args) > 1 else None
    of_tensor = isinstance(value, fx.Node) and isinstance(value.meta.get(TYPE), TensorType)
    if name == "copy_" or (name == "fill_" and of_tensor):
        return "call_function", with_item, (args[0], ..., value), {}
    if name in _FILLS:
        given = len(args) > 1 or bool(kwargs)
        if of_tensor or (given and name in ("normal_", "uniform_")):
            return None
        args = (*args, 0.5) if name == "bernoulli_" and not given else args
        return "call_function", _FILLS[name], args, kwargs
    if name in _NO_TWIN or not hasattr(torch.Tensor, name[:-1]):
        return None
    return "call_method", name[:-1], args, kwargs
