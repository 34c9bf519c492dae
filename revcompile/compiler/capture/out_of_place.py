"""The out-of-place form of an in-place operation: what its target holds afterwards."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx
from torch.nn import functional

from revcompile.compiler.capture.side_effects import INPLACE_OPERATORS
from revcompile.ir.ops import out_of_place, with_item
from revcompile.ir.types import TYPE, TensorType

__all__ = ["Twin", "promotes", "twin_of", "written_argument"]

_FILLS: Final[dict[str, Callable[..., Any]]] = {
    "bernoulli_": torch.bernoulli,
    "fill_": torch.full_like,
    "normal_": torch.randn_like,
    "uniform_": torch.rand_like,
    "zero_": torch.zeros_like,
}
"""Methods whose name without the underscore is no method of the same meaning."""

_NEW_STORAGE: Final = ("resize_", "resize_as_", "set_", "share_memory_", "apply_", "map_", "map2_")
"""Methods that change more than the contents of a tensor, or call back into Python."""

_COMPARISONS: Final = frozenset(
    f"{name}_" for name in ("eq", "ne", "lt", "le", "gt", "ge", "less", "less_equal", "greater")
) | {"greater_equal_", "not_equal_", "logical_and_", "logical_or_", "logical_xor_", "logical_not_"}
"""In place their results have the target's type, out of place they are boolean."""


@dataclass(frozen=True)
class Twin:
    """A node to be: an out-of-place call."""

    op: str
    function: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def written_argument(node: fx.Node) -> fx.Node | None:
    """The input that an operation writes into."""
    target = node.kwargs.get("out")
    if target is None:
        first = (node.kwargs.get(name) for name in ("input", "self"))
        target = node.args[0] if node.args else next((f for f in first if f is not None), None)
    return target if isinstance(target, fx.Node) else None


def twin_of(node: fx.Node) -> Twin | None:
    """The out-of-place form of a node that writes into its `written_argument`, if it has one."""
    args, kwargs = node.args, dict(node.kwargs)
    if node.op == "call_method":
        return _method_twin(str(node.target), args, kwargs)
    if node.target in INPLACE_OPERATORS:
        return Twin("call_function", INPLACE_OPERATORS[node.target], args, kwargs)
    if node.target is operator.setitem:
        return Twin("call_function", with_item, args, kwargs)
    if "out" in kwargs:
        del kwargs["out"]
        return Twin("call_function", node.target, args, kwargs)
    if kwargs.pop("inplace", False):
        return Twin("call_function", node.target, args, kwargs)
    if isinstance(node.target, torch._ops.OpOverload):
        return _operator_twin(node.target, args, kwargs)
    return _function_twin(str(getattr(node.target, "__name__", "")), args, kwargs)


def _operator_twin(
    operator_: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Twin | None:
    """`aten.silu_.default` without its underscore, if there is such an operator."""
    name, overload = operator_._schema.name.partition("::")[2], operator_._overloadname
    packet = getattr(torch.ops.aten, name[:-1], None) if name.endswith("_") else None
    plain = getattr(packet, overload, None)
    return None if plain is None else Twin("call_function", plain, args, kwargs)


def _function_twin(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Twin | None:
    if not name.endswith("_") or "." in name:
        return None
    plain = getattr(functional, name[:-1], None) or getattr(torch, name[:-1], None)
    if inspect.isfunction(plain) or inspect.isbuiltin(plain):
        return Twin("call_function", plain, args, kwargs)
    return _generic(name, args, kwargs) if hasattr(torch.Tensor, name) else None


def _method_twin(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Twin | None:
    if name in _NEW_STORAGE:
        return None
    value = args[1] if len(args) > 1 else None
    of_tensor = isinstance(value, fx.Node) and isinstance(value.meta.get(TYPE), TensorType)
    if name == "copy_" or (name == "fill_" and of_tensor):
        return Twin("call_function", with_item, (args[0], ..., kwargs.get("src", value)), {})
    if name in _FILLS:
        given = len(args) > 1 or bool(kwargs)
        if of_tensor or (given and name in ("normal_", "uniform_")):
            return _generic(name, args, kwargs)
        args = (*args, 0.5) if name == "bernoulli_" and not given else args
        return Twin("call_function", _FILLS[name], args, kwargs)
    if name in _COMPARISONS or not hasattr(torch.Tensor, name[:-1]):
        return _generic(name, args, kwargs)
    return Twin("call_method", name[:-1], args, kwargs)


def _generic(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Twin:
    return Twin("call_function", out_of_place, (args[0], name, *args[1:]), kwargs)


def promotes(target: fx.Node, node: fx.Node) -> bool:
    """Would the out-of-place form have another type than the target?"""

    def empty(n: fx.Node) -> torch.Tensor | None:
        known = n.meta.get(TYPE)
        if not isinstance(known, TensorType):
            return None
        return torch.empty(known.shape, dtype=known.dtype, device="meta")

    mine, others = empty(target), [empty(n) for n in node.all_input_nodes]
    if mine is None or mine.dtype is torch.bool:
        return False
    return any(o is not None and torch.result_type(mine, o) != mine.dtype for o in others)
