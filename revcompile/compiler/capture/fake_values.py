"""Fake tensors while tracing: copies of models on them, and what is known of each node's value.

Every node is evaluated on fake tensors (shape, type and strides, no memory) at two batch sizes.
Control flow that reads the contents of a tensor needs real values: they are computed from sizes
where that is possible (`fold`), or a leaf module is run on random inputs (`run_on_data`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import fx, nn
from torch._prims_common import get_computation_dtype
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx.proxy import TraceError
from torch.utils import _pytree as pytree

from revcompile.compiler.capture.isolation import copy_model, preserve_rng
from revcompile.compiler.capture.memory import STORAGES, WRITES, tensors_in, watch_state
from revcompile.compiler.capture.trace_errors import BatchDependent
from revcompile.ir.ops import called
from revcompile.ir.types import TensorType

NEEDS_DATA: Final = (DataDependentOutputException, DynamicOutputShapeException)
"""What fake tensors raise when an operation needs their contents."""


# -- batch norms ----------------------------------------------------------------------------------

_BATCH_NORM: Final = torch.ops.aten.native_batch_norm.default


class FakeMode(FakeTensorMode):
    """torch's mode for fake tensors, with a shortcut to the results of a batch norm.

    For each new shape torch would evaluate twenty operations: most of the time that it takes to
    capture a convolutional network.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not _BATCH_NORM or kwargs or not _is_plain_batch_norm(args, self):
            return super().dispatch(func, types, args, kwargs or {})
        x, training, is_on_cpu = args[0], args[5], args[0].device.type == "cpu"
        saved = x.shape[1] if training or not is_on_cpu else 0
        dtype = x.dtype if is_on_cpu else get_computation_dtype(x.dtype)
        made = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")]
        made += [torch.empty(saved, dtype=dtype, device="meta") for _ in range(2)]
        return tuple(FakeTensor(self, tensor, x.device) for tensor in made)


def _is_plain_batch_norm(args: Sequence[Any], mode: FakeTensorMode) -> bool:
    """Whether the results have the strides of the input, which sizes of 1 would make ambiguous."""
    x, tensors, training = args[0], args[:5], args[5]
    is_fake = all(t is None or (isinstance(t, FakeTensor) and t.fake_mode is mode) for t in tensors)
    if not is_fake or x.dim() < 2 or 1 in x.shape or not (training or args[3] is not None):
        return False
    is_last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
    return is_last or bool(x.is_contiguous())


# -- copies of a model without memory -------------------------------------------------------------


def fake_copy(
    model: nn.Module, mode: FakeTensorMode, device: torch.device | None = None
) -> nn.Module:
    """A copy of a model with fake parameters and buffers: takes no memory.

    With `device`, tensors on the meta device become fake tensors of that device.
    """
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        with torch.no_grad():
            if device is None:
                memo[id(tensor)] = mode.from_tensor(tensor, static_shapes=True)
            else:
                with mode:
                    memo[id(tensor)] = empty_like_on(tensor, tensor.dtype, device)
    return copy_model(model, memo)


def meta_copy(model: nn.Module) -> nn.Module:
    """A copy of a model on the meta device: its structure and attributes, without memory.

    Tensors that are plain attributes are not copied.
    """
    plain = (v for m in model.modules() for v in vars(m).values() if isinstance(v, torch.Tensor))
    memo: dict[int, Any] = {id(tensor): tensor for tensor in plain}
    for tensor in (*model.parameters(), *model.buffers()):
        memo[id(tensor)] = empty_like_on(tensor, tensor.dtype, "meta")
    return copy_model(model, memo)


def empty_like_on(
    tensor: torch.Tensor, dtype: torch.dtype, device: torch.device | str
) -> torch.Tensor:
    """An empty tensor of the same shape and strides on a device; a parameter if `tensor` is one."""
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, tensor.requires_grad)
    return empty


# -- a node's values at two batch sizes -----------------------------------------------------------


class Values(NamedTuple):
    """The fake values of one node at the two batch sizes."""

    first: Any
    second: Any

    def plain(self) -> Any:
        """The Python value, if it is the same at both batch sizes; raises otherwise."""
        a, b = self.first, self.second
        if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
            raise TraceError("control flow depends on the contents of a tensor")
        if type(a) is not type(b) or a != b:
            raise BatchDependent(a, b)
        return a


def type_of_values(first: Any, second: Any, batch: tuple[int, int]) -> Any:
    """The type of a tensor, or those of all tensors in a structure; None for anything else."""
    if isinstance(first, torch.Tensor):
        shape = tuple(int(n) for n in first.shape)
        grown = batch[1] - batch[0]
        slope = tuple(
            (int(m) - n) // grown if grown else 0 for n, m in zip(shape, second.shape, strict=True)
        )
        return TensorType(shape, slope, first.dtype, batch[0])
    pairs = zip(tensors_in(first), tensors_in(second), strict=False)
    return tuple(type_of_values(*pair, batch) for pair in pairs) or None


def size_of_values(first: Any, second: Any, batch: tuple[int, int]) -> tuple[Any, Any] | None:
    """A number or a shape, at the first batch size and for one sample more; else None."""
    grown = batch[1] - batch[0] or 1
    if type(first) is int and type(second) is int:
        return first, first + (second - first) // grown
    if isinstance(first, tuple) and first and all(type(n) is int for n in (*first, *second)):
        pairs = zip(first, second, strict=True)
        return tuple(first), tuple(n + (m - n) // grown for n, m in pairs)
    return None


# -- real values ----------------------------------------------------------------------------------


def fold(node: fx.Node, fakes: Mapping[fx.Node, Any]) -> Any:
    """The contents of a tensor that is computed from sizes alone (a mask without padding)."""
    if not isinstance(fakes[node], (torch.Tensor, tuple, list)):
        return fakes[node]
    others = node.graph.nodes
    is_written = any(node.meta[STORAGES] & other.meta.get(WRITES, set()) for other in others)
    if is_written or node.op in ("placeholder", "get_attr", "call_module"):
        raise TraceError("control flow depends on the contents of a tensor")
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: fold(n, fakes))
    return called(node, args, kwargs)


def run_on_data(
    module: nn.Module, fake: nn.Module, mode: FakeTensorMode, args: Any, kwargs: Any
) -> tuple[Any, set[str]]:
    """Run a module with data-dependent control flow on random inputs.

    Returns fake results, and the names of the parameters and buffers that it writes. `args` and
    `kwargs` are fake tensors; `fake` is the module's fake copy, whose train/eval modes are used.
    """
    module = copy_model(module)
    for inner, twin in zip(module.modules(), fake.modules(), strict=True):
        inner.training = twin.training
    given = tensors_in((args, kwargs))
    if any(t.device.type == "meta" for t in (*module.parameters(), *module.buffers(), *given)):
        raise TraceError(
            "data-dependent control flow needs real tensors, and the model is on the meta device"
        )
    with preserve_rng(), torch.no_grad():
        real: dict[Any, torch.Tensor] = {tensor: _random_like(tensor) for tensor in given}
        args, kwargs = pytree.tree_map_only(torch.Tensor, real.get, (args, kwargs))
        with watch_state(module) as moved:
            result = module(*args, **kwargs)
    for tensor, numbers in real.items():
        if numbers._version:
            torch.autograd.graph.increment_version(tensor)
    known = {id(numbers): tensor for tensor, numbers in real.items()}
    results = pytree.tree_map_only(
        torch.Tensor, lambda t: known.get(id(t), mode.from_tensor(t)), result
    )
    return results, moved


def _random_like(fake: torch.Tensor) -> torch.Tensor:
    made = torch.zeros(fake.shape, dtype=fake.dtype, device=fake.device)
    return torch.randn_like(made) if made.is_floating_point() else made
