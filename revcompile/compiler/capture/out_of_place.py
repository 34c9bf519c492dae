"""The parts of functionalization that concern single operations.

other_name_of       which value a value is another name of
out_of_place_call   the out-of-place form of an in-place operation
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Mapping
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


_NEW_STORAGE: Final = ("resize_", "resize_as_", "set_", "share_memory_", "apply_", "map_", "map2_")
"""Methods that change more than the contents of a tensor, or call back into Python."""

_OTHER_MEANING: Final = frozenset(
    f"{name}_"
    for name in (
        *("eq", "ne", "lt", "le", "gt", "ge", "less", "less_equal", "greater", "greater_equal"),
        *("not_equal", "logical_and", "logical_or", "logical_xor", "logical_not"),
        *("bernoulli", "fill", "normal"),
    )
)
"""Methods that are something else, or have another type, without the underscore."""


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
    args, kwargs, name = node.args, dict(node.kwargs), op_name(node)
    if node.target is operator.setitem:
        return OutOfPlace("call_function", with_item, args, kwargs)
    if kwargs.pop("out", None) is not None or kwargs.pop("inplace", False):
        return OutOfPlace("call_function", node.target, args, kwargs)
    is_operator = node.target in INPLACE_OPERATORS
    in_place = f"__{name}__" if is_operator else name
    if not promotes(written_argument(node), node) and name not in _OTHER_MEANING:
        plain = name[:-1] if name.endswith("_") else ""
        if is_operator:
            return OutOfPlace("call_function", INPLACE_OPERATORS[node.target], args, kwargs)
        if node.op == "call_method" and name not in _NEW_STORAGE and hasattr(torch.Tensor, plain):
            return OutOfPlace("call_method", plain, args, kwargs)
        function = getattr(functional, plain, None) or getattr(torch, plain, None)
        if node.op == "call_function" and inspect.isroutine(function):
            return OutOfPlace("call_function", function, args, kwargs)
    if name in _NEW_STORAGE or not args or not hasattr(torch.Tensor, in_place):
        return None
    return OutOfPlace("call_function", out_of_place, (args[0], in_place, *args[1:]), kwargs)


def promotes(target: Any, node: fx.Node) -> bool:
    """Would the out-of-place form have another type than the target?"""

    def empty(n: Any) -> torch.Tensor | None:
        known = n.meta.get(TYPE) if isinstance(n, fx.Node) else None
        if not isinstance(known, TensorType):
            return None
        return torch.empty(known.shape, dtype=known.dtype, device="meta")

    result, others = empty(target), [empty(n) for n in node.all_input_nodes]
    if result is None or result.dtype is torch.bool:
        return False
    return any(o is not None and torch.result_type(result, o) != result.dtype for o in others)
