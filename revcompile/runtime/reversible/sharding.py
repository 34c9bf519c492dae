"""FSDP2 units inside a captured graph: `fully_shard` on a module whose forward is never called.

FSDP gathers a unit's parameters in a hook before its forward, lets go of them in one after it, and
does the same around its backward by hooks on the tensors that go in and out. Where the module was
inlined into the graph, each block (or segment) made of its layers calls these hooks in its place:

    enter(units, (b,))      gather; after the block's backward: reduce gradients, let go
    leave(units, (y,))      let go; before the block's backward: gather

Only tensors of the outer graph are handed to them; inside a block, and in its rebuild, the hooks
of layers that are units themselves are passed over.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from revcompile.errors import InputError

__all__ = ["Unit", "enter", "is_sharding_hook", "leave", "units_of"]

Unit = tuple[str, nn.Module]
"""The path of a sharded module, and the module."""


def is_sharding_hook(hook: Callable[..., Any]) -> bool:
    """Is a forward hook one of FSDP2's?"""
    kind = type(getattr(hook, "__self__", None))
    return kind.__name__ == "FSDPState" and kind.__module__.startswith("torch.distributed.")


def units_of(modules: Iterable[tuple[nn.Module, str]]) -> tuple[Unit, ...]:
    """Those of the modules that are FSDP2 units."""
    return tuple(
        (path, module)
        for module, path in modules
        if any(map(is_sharding_hook, module._forward_hooks.values()))
    )


def enter(units: Sequence[Unit], tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    """Gather the units' parameters, outermost first; returns the tensors to go on with."""
    for path, module in units:
        before = tensors
        for hook in filter(is_sharding_hook, module._forward_pre_hooks.values()):
            tensors, _ = hook(module, tensors, {})
        _refuse_casts(path, before, tensors)
    return tensors


def leave(units: Sequence[Unit], tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    """Let go of the units' parameters, innermost first."""
    for path, module in reversed(units):
        before = tensors
        for hook in filter(is_sharding_hook, module._forward_hooks.values()):
            with warnings.catch_warnings():
                # of in-place operations on views, which captured graphs do not have
                warnings.filterwarnings("ignore", ".*returned a view tensor")
                tensors = hook(module, (), tensors)
        _refuse_casts(path, before, tensors)
    return tensors


def _refuse_casts(path: str, before: tuple[Any, ...], after: tuple[Any, ...]) -> None:
    for old, new in zip(before, after, strict=True):
        if isinstance(old, Tensor) and old.dtype != new.dtype:
            raise InputError(
                f"{path}: fully_shard would cast its inputs or outputs to {new.dtype}, but "
                "residual streams keep their type inside a reversible chain; give it "
                "MixedPrecisionPolicy(..., cast_forward_inputs=False) without output_dtype, or "
                "shard the whole model only"
            )
