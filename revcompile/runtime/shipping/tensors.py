"""Tensors as a table and the memory they live in, so that what was shared is shared again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from revcompile.errors import InputError

__all__ = ["TensorReader", "TensorWriter", "as_stored"]


def as_stored(tensor: Tensor) -> Tensor:
    """A tensor as safetensors has a word for it: complex numbers as pairs of real ones."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


class TensorWriter:
    """Collects tensors under the first name each is met by.

    >>> writer, weight = TensorWriter(), torch.zeros(2)
    >>> writer.add(weight, "a"), writer.add(weight, "b")
    ('a', 'a')
    """

    def __init__(self) -> None:
        self._keys: dict[int, str] = {}
        self._tensors: dict[str, Tensor] = {}

    def add(self, tensor: Tensor, name: str) -> str:
        """The key of a tensor in the table."""
        if id(tensor) not in self._keys:
            _check_writable(tensor, name)
            self._keys[id(tensor)] = name
            self._tensors[name] = tensor
        return self._keys[id(tensor)]

    def finish(self) -> tuple[dict[str, dict[str, Any]], dict[str, Tensor]]:
        """The table, and the contiguous tensors that hold its memory."""
        table: dict[str, dict[str, Any]] = {}
        memory: dict[str, Tensor] = {}
        for names in self._shared():
            alone = len(names) == 1 and self._tensors[names[0]].is_contiguous()
            if not alone:
                memory[names[0]], low = self._span(names)
            for name in names:
                tensor = self._tensors[name]
                table[name] = _description(tensor)
                if alone:
                    memory[name] = tensor.detach()
                else:
                    place = {"stride": tensor.stride(), "offset": tensor.storage_offset() - low}
                    table[name] |= {"memory": names[0]} | place
        return {name: table[name] for name in self._tensors}, memory

    def _shared(self) -> list[list[str]]:
        """Names grouped by the memory behind them."""
        groups: dict[Any, list[str]] = {}
        for name, tensor in self._tensors.items():
            address = tensor.untyped_storage().data_ptr()
            own = name if address == 0 or tensor.numel() == 0 else None
            groups.setdefault((tensor.device, address, own), []).append(name)
        return list(groups.values())

    def _span(self, names: list[str]) -> tuple[Tensor, int]:
        """The stretch of memory that these tensors cover, and where it begins."""
        tensors = [self._tensors[name] for name in names]
        dtypes = {tensor.dtype for tensor in tensors}
        if len(dtypes) > 1:
            listed = ", ".join(sorted(map(str, dtypes)))
            raise InputError(
                f"tensors {', '.join(names)}: share memory as different types ({listed}); "
                "clone() one of them"
            )
        low = min(int(tensor.storage_offset()) for tensor in tensors)
        high = max(int(tensor.storage_offset()) + _extent(tensor) for tensor in tensors)
        return torch.as_strided(tensors[0].detach(), (high - low,), (1,), low), low


def _extent(tensor: Tensor) -> int:
    if not tensor.numel():
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def _description(tensor: Tensor) -> dict[str, Any]:
    found = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
    if isinstance(tensor, nn.Parameter):
        return found | {"parameter": True, "requires_grad": tensor.requires_grad}
    return found | ({"requires_grad": True} if tensor.requires_grad else {})


def _check_writable(tensor: Tensor, name: str) -> None:
    problem = None
    if type(tensor) not in (Tensor, nn.Parameter):
        problem = f"is a {type(tensor).__name__}; replace it by a plain tensor"
    elif tensor.layout is not torch.strided or tensor.is_quantized:
        problem = f"is {tensor.layout}, not dense; convert it with to_dense() or dequantize()"
    elif tensor.is_meta:
        problem = "is on the meta device and has no values; load the weights before saving"
    elif tensor.requires_grad and not tensor.is_leaf:
        problem = "is the result of a computation that autograd recorded; detach() it"
    if problem:
        raise InputError(f"tensor {name}: {problem}")


class TensorReader:
    """Gives each tensor of a table, the same object whenever it is asked for again."""

    def __init__(self, table: Mapping[str, Mapping[str, Any]], memory: Mapping[str, Tensor]):
        self._table = table
        # A copy: the file may be mapped, and must be free to change while the stage trains.
        self._memory = {name: self._as_it_was(name, memory[name]).clone() for name in memory}
        self._made: dict[str, Tensor] = {}

    def _as_it_was(self, name: str, stored: Tensor) -> Tensor:
        dtype = str(self._table.get(name, {}).get("dtype", ""))
        is_pairs = dtype.startswith("complex") and not stored.is_complex()
        return torch.view_as_complex(stored) if is_pairs else stored

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._table:
            raise InputError(f"tensor {name!r} is not in the table of tensors")
        if name not in self._made:
            self._made[name] = self._make(name, self._table[name])
        return self._made[name]

    def _make(self, name: str, entry: Mapping[str, Any]) -> Tensor:
        stored = entry.get("memory", name)
        if stored not in self._memory:
            raise InputError(
                f"tensor {name}: {stored!r} is missing in the file of tensors; copy both files "
                "of the stage together, or save it again"
            )
        found = self._memory[stored]
        if "stride" in entry:
            try:
                found = torch.as_strided(found, entry["shape"], entry["stride"], entry["offset"])
            except RuntimeError as error:
                raise InputError(f"tensor {name}: does not fit its memory ({error})") from error
        got = {"dtype": str(found.dtype).removeprefix("torch."), "shape": list(found.shape)}
        expected = {key: entry[key] for key in got}
        if got != expected:
            raise InputError(
                f"tensor {name}: expected {expected['dtype']} {expected['shape']}, got "
                f"{got['dtype']} {got['shape']}; the two files are not of one stage"
            )
        wants = bool(entry.get("requires_grad", False))
        if entry.get("parameter", False):
            return nn.Parameter(found, requires_grad=wants)
        return found.requires_grad_(wants) if wants else found
