"""Copies of a model to trace and run, so that the user's own is never touched."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from revcompile.compiler.capture.trace_errors import Untraceable
from revcompile.errors import CaptureError
from revcompile.ir.module_tree import copied

__all__ = [
    "attributes_kept",
    "copy_model",
    "empty_like_on",
    "fake_copy",
    "keep_constant",
    "set_mode",
]


def copy_model(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """A deep copy. `memo` maps ids of tensors to what stands for them in the copy."""
    try:
        twin: nn.Module = copied(model, memo)
        return twin
    except Exception as error:
        raise CaptureError(
            f"capture: {type(model).__name__} cannot be copied with copy.deepcopy: "
            f"{type(error).__name__}: {error}; keep what cannot be copied (open files, locks, "
            "process groups) outside the model"
        ) from error


def fake_copy(
    model: nn.Module, mode: FakeTensorMode, device: torch.device | None = None
) -> nn.Module:
    """A structural copy of a model with fake parameters and buffers: costs no memory.

    With `device` a model on the meta device passes for one that is there.
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


def empty_like_on(
    tensor: torch.Tensor, dtype: torch.dtype, device: torch.device | str
) -> torch.Tensor:
    """A tensor of the same form, a parameter if it is one, on another device."""
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, tensor.requires_grad)
    return empty


def set_mode(twin: nn.Module, model: nn.Module, training: bool) -> nn.Module:
    """Put a copy in a mode; modules the user froze in eval mode stay frozen."""
    frozen = {path for path, module in model.named_modules() if not module.training}
    for path, module in twin.named_modules():
        module.training = training and (not model.training or path not in frozen)
    return twin


def keep_constant(root: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Make a tensor that tracing found a buffer of the copy, so that it moves with the module.

    One that is a plain attribute of the model keeps its place and value.
    """
    if not isinstance(tensor, torch.Tensor):
        what = "a region of the graph (no_grad, autocast) kept as a submodule"
        raise Untraceable("", what, f"{name}: {type(tensor).__name__}")
    path, _, leaf = name.rpartition(".")
    owner = root.get_submodule(path)
    value = vars(owner).pop(leaf, tensor)
    if not hasattr(owner, leaf):
        owner.register_buffer(leaf, value, persistent=False)


@contextmanager
def attributes_kept(model: nn.Module) -> Iterator[Callable[[nn.Module], None]]:
    """Undo what forward passes do to the modules' attributes (caches, counters, buffers).

    Yields a function that does so for one module and those inside it, before the end.
    """
    before = {module: _contents(module) for module in model.modules()}

    def restore(part: nn.Module) -> None:
        for module in list(part.modules()):
            vars(module).clear()
            for name, (value, held) in before[module].items():
                if isinstance(held, (dict, set)):
                    value.clear()
                    value.update(held)
                elif isinstance(held, list):
                    value[:] = held
                vars(module)[name] = value

    try:
        yield restore
    finally:
        restore(model)


def _contents(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Each attribute, and what a container among them holds."""
    containers = (dict, list, set)
    return {
        name: (value, copy.copy(value) if type(value) in containers else None)
        for name, value in vars(module).items()
    }
