"""What methods of the original may not do on the module that was made from it.

They must not apply rewired weights to data by another path than the module's `forward`: that is
another function than the one that is trained. No list of names decides this: while a method runs,
every tensor operation is looked at. Nor may they add, replace or remove modules and parameters: the
module's programs were made for those it has.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from revcompile.errors import OriginalMethodError

__all__ = ["structure_kept", "suspended", "watched"]

_LAYERS: Final = frozenset(
    (
        *("linear", "bilinear", "embedding", "embedding_bag", "multi_head_attention_forward"),
        *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d"),
        *("layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm", "prelu"),
    )
)
"""Functions that apply a weight, whatever they apply it to."""

_CHECKPOINTING_FLAGS: Final = frozenset(("gradient_checkpointing", "grad_checkpointing"))
"""Attributes by which transformers and timm switch activation checkpointing on."""

_suspended: ContextVar[bool] = ContextVar("suspended", default=False)


@contextmanager
def suspended() -> Iterator[None]:
    """Allow everything: the module itself runs."""
    token = _suspended.set(True)
    try:
        yield
    finally:
        _suspended.reset(token)


class watched(TorchFunctionMode):
    """Refuses operations that apply rewired weights to data.

    What is computed from the module's own parameters and buffers alone (norms, counts, averages)
    is allowed, and so are single numbers and operations in place, which optimizers and
    initialisers use. Whatever else a method is given, or makes itself, is data.
    """

    def __init__(self, call: str, rewired: Callable[[], dict[int, str]], module: nn.Module) -> None:
        super().__init__()
        self._call, self._find_rewired, self._module = call, rewired, module
        self._rewired: dict[int, str] = {}
        self._state: dict[int, Tensor] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Look at an operation, then perform it."""
        kwargs = kwargs or {}
        if _suspended.get():
            return func(*args, **kwargs)
        if not self._state:
            self._rewired = self._find_rewired()
            tensors = (*self._module.parameters(), *self._module.buffers())
            self._state = {id(tensor): tensor for tensor in tensors}
        read = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        weights = [self._rewired[id(tensor)] for tensor in read if id(tensor) in self._rewired]
        data = [t for t in read if id(t) not in self._state and t.dim() > 0]
        name = str(getattr(func, "__name__", ""))
        if weights and not name.endswith("_") and (data or name in _LAYERS):
            raise OriginalMethodError(_other_path(self._call, weights[0]))
        result = func(*args, **kwargs)
        if read and not data:
            self._add_state(result, weights)
        return result

    def _add_state(self, result: Any, weights: list[str]) -> None:
        """What is computed from weights alone counts as a weight (a transposed one, a slice)."""
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.dim() > 0 and id(leaf) not in self._state:
                self._state[id(leaf)] = leaf
                if weights:
                    self._rewired[id(leaf)] = weights[0]


def _other_path(call: str, weight: str) -> str:
    name = call.rpartition(".")[2]
    return (
        f"{call} computes with {weight} as the original model does, but the block that weight is "
        "in was rewired: it has two streams now, and the result would not be of the function that "
        f"is trained. Call the model as a whole, net(...). If you need what {name} returns, write "
        f"a module whose forward calls {name}, and make that reversible"
    )


# -- changes of the structure ---------------------------------------------------------------------


@contextmanager
def structure_kept(call: str, module: nn.Module) -> Iterator[None]:
    """Take back, and refuse, what changes the modules and parameters there are."""
    before, contents = _structure(module), _Contents(module)
    flags = _flags(module)
    try:
        yield
    except BaseException:
        if _difference(before, _structure(module)) is not None:
            contents.restore()
        raise
    changed = _difference(before, _structure(module))
    flag = next((name for name in _flags(module) if name not in flags), None)
    if changed is not None:
        contents.restore()
        raise OriginalMethodError(
            f"{call} changes {changed}, and the reversible model was made for the modules and "
            "parameters the original had; they were put back. Call it on the original model, and "
            "make the result reversible"
        )
    if flag is not None:
        contents.restore()
        raise OriginalMethodError(
            f"{call} sets {flag}, which would have no effect: reversible blocks keep no "
            "activations that checkpointing could save, and all else runs as it was captured. "
            "Leave the call out; summary() says which blocks are reversible"
        )


def _structure(module: nn.Module) -> dict[str, object]:
    """Modules and parameters by name, and the shapes of buffers."""
    modules = module.named_modules(remove_duplicate=False)
    found: dict[str, object] = {name: inner for name, inner in modules if name}
    found |= dict(module.named_parameters(remove_duplicate=False))
    buffers = module.named_buffers(remove_duplicate=False)
    return found | {name: buffer.shape for name, buffer in buffers}


def _difference(before: Mapping[str, object], after: Mapping[str, object]) -> str | None:
    for name in dict.fromkeys((*before, *after)):
        old, new = before.get(name), after.get(name)
        if isinstance(new, torch.Size) and (
            old is None or old == new
        ):  # a new buffer disturbs none
            continue
        if old is not new:
            return f"{name} ({_described(old)} became {_described(new)})"
    return None


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a parameter of shape {tuple(value.shape)}"
    if isinstance(value, torch.Size):
        return f"a buffer of shape {tuple(value)}"
    return "nothing" if value is None else type(value).__name__


class _Contents:
    """The attributes of all modules, what containers among them hold, and objects like configs."""

    def __init__(self, module: nn.Module) -> None:
        self._tables: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._containers: dict[int, tuple[Any, Any]] = {}
        seen: set[int] = set()
        for inner in module.modules():
            self._tables.append((vars(inner), dict(vars(inner))))
            for value in vars(inner).values():
                if isinstance(value, (dict, list, set)):
                    self._containers[id(value)] = value, copy.copy(value)
                elif _is_record(value) and id(value) not in seen:
                    seen.add(id(value))
                    self._tables.append((vars(value), dict(vars(value))))

    def restore(self) -> None:
        """Put everything back."""
        for table, held in self._tables:
            table.clear()
            table.update(held)
        for value, held in self._containers.values():
            if isinstance(value, list):
                value[:] = held
            else:
                value.clear()
                value.update(held)


def _is_record(value: object) -> bool:
    """Is it an object that holds plain values by name, as configurations do?"""
    plain = not isinstance(value, (nn.Module, Tensor, type)) and not callable(value)
    return plain and isinstance(getattr(value, "__dict__", None), dict)


def _flags(module: nn.Module) -> list[str]:
    """Flags of activation checkpointing that are on."""
    return [
        f"{path}.{name}".lstrip(".")
        for path, inner in module.named_modules()
        for name, value in vars(inner).items()
        if value is True and name in _CHECKPOINTING_FLAGS
    ]
