"""A model's weights alone: out of a checkpoint, or as one file for others to read."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from revcompile.errors import InputError
from revcompile.runtime.checkpoint.codec import located
from revcompile.runtime.checkpoint.state import model_misfits, summed_up
from revcompile.runtime.checkpoint.storage import (
    Checkpoint,
    find_checkpoint,
    read_tensor,
    write_tensors,
)

__all__ = ["aliases", "export_weights", "load_into", "load_weights"]

_ALIASES: Final = "revcompile.aliases"


def aliases(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """From every further name of a tensor to its first one.

    >>> import torch
    >>> weight = torch.zeros(2)
    >>> aliases({"embedding": weight, "bias": torch.zeros(2), "head": weight})
    {'head': 'embedding'}
    """
    first: dict[Any, str] = {}
    found: dict[str, str] = {}
    for name, t in tensors.items():
        address = t.untyped_storage().data_ptr() if t.numel() else 0
        own = (address, t.storage_offset(), t.shape, t.stride(), t.dtype, t.device)
        if address and first.setdefault(own, name) != name:
            found[name] = first[own]
    return found


def export_weights(model: nn.Module, file: str | Path) -> Path:
    """The state dict as one file of safetensors; tied tensors are in it once.

    `safetensors.torch.load_model` and `load_weights` read it.
    """
    file = Path(file)
    if file.suffix != ".safetensors":
        raise InputError(f"export: {file.name}; name the file ....safetensors")
    tensors = dict(model.state_dict())
    also = aliases(tensors)
    new = file.with_name(f"{file.name}.{secrets.token_hex(4)}.new")  # several ranks may export
    with located("export"):
        for name, tensor in tensors.items():
            _check_writable(tensor, name)
        kept = {name: tensor for name, tensor in tensors.items() if name not in also}
        file.parent.mkdir(parents=True, exist_ok=True)
        write_tensors(new, kept, {_ALIASES: json.dumps(also)})
    os.replace(new, file)
    return file


def load_weights(place: str | Path) -> dict[str, Tensor]:
    """A state dict, from a folder of checkpoints (the newest), a checkpoint, or an export.

    It loads into `net.module()`, into what `reversify` makes of the same model, and into
    `net.model` of any number of stages.
    """
    place = Path(place)
    if place.is_file() or place.suffix == ".safetensors":
        return _exported(place)
    checkpoint = Checkpoint(find_checkpoint(place))
    found = checkpoint.tensors("model.")
    also = [part["aliases"] for part in checkpoint.plain]
    named = {name.removeprefix("model."): tensor.clone() for name, tensor in found.items()}
    return with_aliases(named, also)


def with_aliases(
    tensors: Mapping[str, Tensor], also: Iterable[Mapping[str, str]]
) -> dict[str, Tensor]:
    """Under all their names again."""
    return {**tensors, **{name: tensors[one] for names in also for name, one in names.items()}}


def _exported(file: Path) -> dict[str, Tensor]:
    try:
        with safe_open(file, framework="pt") as opened:
            also = json.loads((opened.metadata() or {}).get(_ALIASES, "{}"))
            names = list(opened.keys())
            return with_aliases({n: read_tensor(opened, n).clone() for n in names}, [also])
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise InputError(f"load_weights: {file} cannot be read ({error})") from error


def load_into(model: nn.Module, place: str | Path) -> None:
    """Take over the weights; those of another model change nothing."""
    found = load_weights(place)
    problems = list(model_misfits(model, found))
    if problems:
        raise InputError(f"net.load: {place} holds another model: {summed_up(problems)}")
    model.load_state_dict(found)


def _check_writable(tensor: Tensor, name: str) -> None:
    problem = None
    if type(tensor) not in (Tensor, nn.Parameter):
        problem = f"is a {type(tensor).__name__}; replace it by a plain tensor"
    elif tensor.layout is not torch.strided or tensor.is_quantized:
        problem = f"is {tensor.layout}, not dense; convert it with to_dense() or dequantize()"
    elif tensor.is_meta:
        problem = "is on the meta device and has no values; load the weights before saving"
    if problem:
        raise InputError(f"tensor {name}: {problem}")
