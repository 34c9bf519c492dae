"""Real values where fake ones do not do: control flow that reads the contents of a tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.fx.proxy import TraceError
from torch.utils import _pytree as pytree

from revcompile.compiler.capture.copies import copy_model
from revcompile.compiler.capture.memory import MEMORY, WRITES, tensors_in
from revcompile.compiler.capture.rng import rng_kept

__all__ = ["NEEDS_DATA", "fold", "run_on_data"]

NEEDS_DATA: Final = (DataDependentOutputException, DynamicOutputShapeException)
"""What fake tensors raise when somebody asks for their contents."""


def fold(node: fx.Node, fakes: Mapping[fx.Node, Any]) -> Any:
    """The contents of a tensor that is made from sizes alone (a mask of no padding)."""
    generator = torch.get_rng_state()
    value = _folded(node, fakes)
    if not torch.equal(generator, torch.get_rng_state()):
        raise TraceError("control flow depends on random numbers")
    return value


def _folded(node: fx.Node, fakes: Mapping[fx.Node, Any]) -> Any:
    if not isinstance(fakes[node], (torch.Tensor, tuple, list)):
        return fakes[node]
    others = node.graph.nodes
    is_written = any(node.meta[MEMORY] & other.meta.get(WRITES, set()) for other in others)
    if is_written or node.op in ("placeholder", "get_attr", "call_module"):
        raise TraceError("control flow depends on the contents of a tensor")
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: _folded(n, fakes))
    target: Any = node.target
    if node.op == "call_method":
        return getattr(args[0], target)(*args[1:], **kwargs)
    return target(*args, **kwargs)


def run_on_data(
    module: nn.Module, fake: nn.Module, mode: FakeTensorMode, args: Any, kwargs: Any
) -> Any:
    """Run a module whose control flow needs real numbers on some; returns fake results.

    `args` and `kwargs` are fake, and so is the module's copy `fake`, which says the mode.
    """
    module = copy_model(module)
    for inner, twin in zip(module.modules(), fake.modules(), strict=True):
        inner.training = twin.training
    given = tensors_in((args, kwargs))
    if any(t.device.type == "meta" for t in (*module.parameters(), *module.buffers(), *given)):
        raise TraceError("control flow depends on data, and there is none on the meta device")
    with rng_kept(), torch.no_grad():
        real: dict[Any, torch.Tensor] = {tensor: _some_numbers(tensor) for tensor in given}
        args, kwargs = pytree.tree_map_only(torch.Tensor, real.get, (args, kwargs))
        result = module(*args, **kwargs)
    for tensor, numbers in real.items():
        if numbers._version:
            torch.autograd.graph.increment_version(tensor)
    known = {id(numbers): tensor for tensor, numbers in real.items()}
    return pytree.tree_map_only(
        torch.Tensor, lambda t: known.get(id(t), mode.from_tensor(t)), result
    )


def _some_numbers(fake: torch.Tensor) -> torch.Tensor:
    made = torch.zeros(fake.shape, dtype=fake.dtype, device=fake.device)
    return torch.randn_like(made) if made.is_floating_point() else made
