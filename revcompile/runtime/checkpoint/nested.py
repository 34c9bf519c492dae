"""Nested values taken apart: tensors under names made from their path, the rest as JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from revcompile.errors import InputError
from revcompile.runtime.checkpoint.codec import decode, encode
from revcompile.runtime.stage.tensors import overlaps

__all__ = ["put_together", "take_apart"]


@dataclass(frozen=True)
class _Stored:
    """A tensor's place in the table; `stride` where it does not lie in memory row by row."""

    name: str
    device: str
    stride: tuple[int, ...] | None


def take_apart(tree: Any) -> tuple[Any, dict[str, Tensor]]:
    """The tree as JSON, and its tensors by name.

    >>> take_apart({"model": {"head.bias": torch.zeros(1)}, "betas": (0.9, 0.99)})[1]
    {'model.head.bias': tensor([0.])}
    """
    tensors: dict[str, Tensor] = {}
    plain = _walk(tree, (), tensors)
    return encode(plain, _as_json), tensors


Home = Callable[[str, str], torch.device]
"""From a tensor's name and the kind of device it was on to where it is to go."""


def put_together(
    plain: Any,
    tensors: Mapping[str, Tensor],
    home: Home = lambda name, kind: torch.device("cpu"),
) -> Any:
    """The tree again; every tensor is laid out in memory as it was, since results depend on it."""

    def read(content: Any) -> Tensor:
        name, kind, stride = content
        if name not in tensors:
            raise InputError(f"the tensor {name!r} is missing")
        found = tensors[name].to(home(name, kind))
        if stride is None:
            return found
        return torch.empty_strided(
            found.shape, stride, dtype=found.dtype, device=found.device
        ).copy_(found)

    return decode(plain, {"tensor": read})


def _as_json(value: Any) -> dict[str, Any] | None:
    if isinstance(value, _Stored):
        return {"tensor": [value.name, value.device, value.stride and list(value.stride)]}
    return None


def _walk(tree: Any, path: tuple[str, ...], tensors: dict[str, Tensor]) -> Any:
    if isinstance(tree, Tensor):
        return _store(tree, ".".join(path), tensors)
    if isinstance(tree, Mapping):
        return {_leaf(k, path): _walk(v, (*path, str(k)), tensors) for k, v in tree.items()}
    if type(tree) in (list, tuple):
        items = [_walk(v, (*path, str(i)), tensors) for i, v in enumerate(tree)]
        return items if type(tree) is list else tuple(items)
    return _leaf(tree, path)


def _store(tensor: Tensor, name: str, tensors: dict[str, Tensor]) -> _Stored:
    if name in tensors:
        raise InputError(f"two tensors would be saved as {name!r}; rename one of their owners")
    tensors[name] = tensor
    rows = torch.empty(tensor.shape, device="meta").stride()
    stride = None if tensor.stride() == rows or overlaps(tensor) else tensor.stride()
    return _Stored(name, tensor.device.type, stride)


def _leaf(value: Any, path: tuple[str, ...]) -> Any:
    """Only what can be read back without running anything."""
    known = (torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, slice)
    if value is None or isinstance(value, (complex, *known)):
        return value
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)  # of numpy's float64, for one, just the number
    raise InputError(
        f"{'.'.join(path)}: a {type(value).__name__} cannot be saved; numbers, strings and tensors "
        "can. Remove it from the parameter groups or from the model's values"
    )
