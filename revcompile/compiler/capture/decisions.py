"""Discrete operations: results that jump where their inputs change by a rounding error.

A reversible block's input is reconstructed up to rounding errors. For a continuous branch (ReLU,
max pooling, clamp) that is precise enough. A branch that routes by `topk`, sorts, compares or
rounds may decide differently at a tie. A router whose weights start as zeros has only ties.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from revcompile.ir.module_tree import called_module
from revcompile.ir.ops import FACTORIES, op_name
from revcompile.ir.types import TYPE, TensorType, types_in

DECIDES: Final = "revcompile_decides"
"""`node.meta` key: the discrete operation inside a leaf module, if it has one."""

# fmt: off
_JUMPS: Final = frozenset((
    "ceil", "fix", "floor", "floor_divide", "floordiv", "fmod", "frac", "gumbel_softmax",
    "hardshrink", "heaviside", "mod", "remainder", "round", "sgn", "sign", "signbit",
    "threshold", "trunc", "fake_quantize_per_tensor_affine", "rint",
))
"""Functions from numbers to numbers that are not continuous."""

_PICKS: Final = frozenset((
    "argmax", "argmin", "argsort", "argwhere", "bucketize", "eq", "ge", "gt", "histc",
    "isclose", "kthvalue", "le", "lt", "max_dim", "median", "min_dim", "mode", "msort", "ne",
    "nonzero", "searchsorted", "sort", "topk", "unique", "unique_consecutive", "unique_dim",
    "_unique2", "logical_and", "logical_not", "logical_or",
))
"""Operators whose integer or boolean results depend on comparisons."""

_UNCHANGED: Final = FACTORIES | {
    "isfinite", "isinf", "isnan", "isneginf", "isposinf", "bernoulli",
}
"""Results of integer or boolean type that no rounding error of the input changes."""

# fmt: on
_JUMPING_LAYERS: Final = (nn.Hardshrink, nn.Threshold)


def decision(node: fx.Node, root: nn.Module) -> str | None:
    """The name of a node's discrete operation on floating-point inputs, if it has one."""
    module = called_module(node, root)
    if module is not None:
        if any(isinstance(inner, _JUMPING_LAYERS) for inner in module.modules()):
            return type(module).__name__
        inside: str | None = node.meta.get(DECIDES)
        return inside
    if node.op not in ("call_function", "call_method"):
        return None
    name = _name(node)
    if name in _JUMPS or node.kwargs.get("rounding_mode") is not None:
        return name if any(_has_floats(i.meta.get(TYPE)) for i in node.all_input_nodes) else None
    kind = node.meta.get(TYPE)  # of several tensors, the items are nodes of their own
    if name in _UNCHANGED or not isinstance(kind, TensorType) or kind.differentiable:
        return None
    sources = [i for i in node.all_input_nodes if _has_floats(i.meta.get(TYPE))]
    if not sources:
        return None
    return _name(sources[0]) if name in ("getitem", "getattr") else name


def _name(node: fx.Node) -> str:
    return op_name(node).strip("_")


def _has_floats(kind: Any) -> bool:
    return any(inner.differentiable for inner in types_in(kind))


class DecisionWatch(TorchDispatchMode):
    """Notes the first discrete operation on floating-point numbers while it is active."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operation: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if func._overloadname == "dim" and name in ("max", "min"):
            name = f"{name}_dim"
        if self.operation is None and (name in _PICKS or name in _JUMPS):
            floats = (
                t
                for t in pytree.tree_leaves((args, kwargs))
                if isinstance(t, torch.Tensor) and t.is_floating_point()
            )
            if next(floats, None) is not None:
                self.operation = name.strip("_").removesuffix("_dim")
        return func(*args, **(kwargs or {}))
