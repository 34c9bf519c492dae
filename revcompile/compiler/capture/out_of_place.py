"""The parts of functionalization that concern single operations.

other_name_of       which value a value is another name of
out_of_place_call   the out-of-place form of an in-place operation
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx, nn
from torch.nn import functional

from revcompile.compiler.capture.memory import (
    INPLACE_OPERATORS,
    LOCATIONS,
    Location,
)
from revcompile.ir.ops import op_name, out_of_place, with_item
from revcompile.ir.types import TYPE, TensorType


def location_of(node: fx.Node) -> Location | None:
    """Where the node's value is in memory, if it is a single tensor."""
    locations = node.meta.get(LOCATIONS, ())
    return locations[0] if len(locations) == 1 and not is_structured(node) else None


def is_structured(node: fx.Node) -> bool:
    """Is the node's value a container of tensors?"""
    return isinstance(node.meta.get(TYPE), (tuple, dict))


def other_name_of(node: fx.Node, root: nn.Module) -> fx.Node | None:
    """The input of which the value of a node that writes nothing is another name, if it is."""
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node):
        return None
    if node.op != "call_module":
        return source if _converts_to_itself(node) else None
    result, given = location_of(node), location_of(source)
    if result is None or given is None or not result.same_elements(given):
        return None
    of_torch = type(root.get_submodule(str(node.target))).__module__.startswith("torch.nn")
    return source if of_torch or result.tensor == given.tensor else None  # no layer detaches


def _converts_to_itself(node: fx.Node) -> bool:
    """Is it `x.to(x.dtype)`, `x.to(x)` or the like, which is `x` itself in every precision?"""
    x, *rest = node.args

    def is_own(given: Any) -> bool:
        if not isinstance(given, fx.Node):
            return isinstance(given, bool)
        return given is x or (given.target is getattr and given.args == (x, "dtype"))

    converts = node.op == "call_method" and node.target in ("to", "type", "type_as")
    return converts and all(map(is_own, (*rest, *node.kwargs.values())))


_FILLS: Final[dict[str, Callable[..., Any]]] = {
    "bernoulli_": torch.bernoulli,
    "fill_": torch.full_like,
    "normal_": torch.randn_like,
    "uniform_": torch.rand_like,
    "zero_": torch.zeros_like,
}
"""Methods without an out-of-place method of the same name and meaning."""

_NEW_STORAGE: Final = ("resize_", "resize_as_", "set_", "share_memory_", "apply_", "map_", "map2_")
"""Methods that change more than the contents of a tensor, or call back into Python."""

_COMPARISONS: Final = frozenset(
    f"{name}_" for name in ("eq", "ne", "lt", "le", "gt", "ge", "less", "less_equal", "greater")
) | {"greater_equal_", "not_equal_", "logical_and_", "logical_or_", "logical_xor_", "logical_not_"}
"""In place their results have the target's type; out of place they are boolean."""


@dataclass(frozen=True)
class OutOfPlace:
    """An out-of-place call: the op, target and arguments of a node."""

    op: str
    function: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def written_argument(node: fx.Node) -> fx.Node | None:
    """The input that an operation writes to."""
    target = node.kwargs.get("out")
    if target is None:
        first = (node.kwargs.get(name) for name in ("input", "self"))
        target = node.args[0] if node.args else next((f for f in first if f is not None), None)
    return target if isinstance(target, fx.Node) else None


def out_of_place_call(node: fx.Node) -> OutOfPlace | None:
    """The out-of-place form of a node that writes to its `written_argument`, if there is one."""
    args, kwargs = node.args, dict(node.kwargs)
    if node.op == "call_method":
        return _method_form(str(node.target), args, kwargs)
    if node.target in INPLACE_OPERATORS:
        return OutOfPlace("call_function", INPLACE_OPERATORS[node.target], args, kwargs)
    if node.target is operator.setitem:
        return OutOfPlace("call_function", with_item, args, kwargs)
    if "out" in kwargs:
        del kwargs["out"]
        return OutOfPlace("call_function", node.target, args, kwargs)
    if kwargs.pop("inplace", False):
        return OutOfPlace("call_function", node.target, args, kwargs)
    if isinstance(node.target, torch._ops.OpOverload):
        return _operator_form(node.target, args, kwargs)
    return _function_form(op_name(node), args, kwargs)


def _operator_form(
    operator_: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> OutOfPlace | None:
    """`aten.silu_.default` without its underscore, if there is such an operator."""
    name, overload = operator_._schema.name.partition("::")[2], operator_._overloadname
    packet = getattr(torch.ops.aten, name[:-1], None) if name.endswith("_") else None
    plain = getattr(packet, overload, None)
    return None if plain is None else OutOfPlace("call_function", plain, args, kwargs)


def _function_form(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OutOfPlace | None:
    if not name.endswith("_"):
        return None
    plain = getattr(functional, name[:-1], None) or getattr(torch, name[:-1], None)
    if inspect.isfunction(plain) or inspect.isbuiltin(plain):
        return OutOfPlace("call_function", plain, args, kwargs)
    return _generic(name, args, kwargs) if hasattr(torch.Tensor, name) else None


def _method_form(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OutOfPlace | None:
    if name in _NEW_STORAGE:
        return None
    value = args[1] if len(args) > 1 else None
    of_tensor = isinstance(value, fx.Node) and isinstance(value.meta.get(TYPE), TensorType)
    if name == "copy_" or (name == "fill_" and of_tensor):
        return OutOfPlace("call_function", with_item, (args[0], ..., kwargs.get("src", value)), {})
    if name in _FILLS:
        given = len(args) > 1 or bool(kwargs)
        if of_tensor or (given and name in ("normal_", "uniform_")):
            return _generic(name, args, kwargs)
        args = (*args, 0.5) if name == "bernoulli_" and not given else args
        return OutOfPlace("call_function", _FILLS[name], args, kwargs)
    if name in _COMPARISONS or not hasattr(torch.Tensor, name[:-1]):
        return _generic(name, args, kwargs)
    return OutOfPlace("call_method", name[:-1], args, kwargs)


def _generic(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OutOfPlace:
    return OutOfPlace("call_function", out_of_place, (args[0], name, *args[1:]), kwargs)


def promotes(target: fx.Node, node: fx.Node) -> bool:
    """Would the out-of-place form have another type than the target?"""

    def empty(n: fx.Node) -> torch.Tensor | None:
        known = n.meta.get(TYPE)
        if not isinstance(known, TensorType):
            return None
        return torch.empty(known.shape, dtype=known.dtype, device="meta")

    result, others = empty(target), [empty(n) for n in node.all_input_nodes]
    if result is None or result.dtype is torch.bool:
        return False
    return any(o is not None and torch.result_type(result, o) != result.dtype for o in others)
