"""A model's weights alone: from a checkpoint, or exported as one safetensors file."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from revcompile.errors import InputError
from revcompile.runtime.checkpoint.folder import Checkpoint, find_checkpoint
from revcompile.runtime.checkpoint.training import (
    aliases,
    first_few,
    merged_state,
    model_mismatches,
    with_aliases,
)
from revcompile.runtime.checkpoint.tree import TensorFile, write_tensors

_ALIASES: Final = "revcompile.aliases"


def export_weights(model: nn.Module, file: Path) -> Path:
    """Write the state dict as one safetensors file, tied tensors once.

    `safetensors.torch.load_model` and `load_weights` read it.
    """
    if file.suffix != ".safetensors":
        raise InputError(f"export: {file.name}; name the file ....safetensors")
    tensors = dict(model.state_dict())
    names = aliases(tensors)
    for name, t in tensors.items():
        is_plain = type(t) in (Tensor, nn.Parameter) and t.layout is torch.strided
        if not is_plain or t.is_quantized or t.is_meta:
            kind = f"a {type(t).__name__}, not a dense tensor with values"
            raise InputError(f"export: {name} is {kind}, and cannot be written")
    distinct = {name: tensor for name, tensor in tensors.items() if name not in names}
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(f"{file.name}.{secrets.token_hex(4)}.new")  # several ranks may export
    write_tensors(new, distinct, {_ALIASES: json.dumps(names)})
    os.replace(new, file)
    return file


def load_weights(place: str | Path) -> dict[str, Any]:
    """A state dict, from a folder of checkpoints (the newest), a checkpoint, or an export.

    It loads into `net.to_module()`, into what `reversify` makes of the same model, and into
    `net.model` of any number of stages.
    """
    place = Path(place)
    if place.is_file() or place.suffix == ".safetensors":
        return _exported(place)
    checkpoint = Checkpoint(find_checkpoint(place))
    weights = checkpoint.read(merged_state(checkpoint)["model"])
    return {name: w.clone() if isinstance(w, Tensor) else w for name, w in weights.items()}


def _exported(file: Path) -> dict[str, Tensor]:
    try:
        opened = TensorFile(file)
        tensors = {name: opened.read(name).clone() for name in opened.names}
        return with_aliases(tensors, [json.loads(opened.about.get(_ALIASES, "{}"))])
    except Exception as error:  # of the system, of safetensors, of torch
        raise InputError(f"load_weights: {file} cannot be read ({error})") from error


def load_into(model: nn.Module, place: str | Path) -> None:
    """Load saved weights into a model; if they do not fit, nothing is changed."""
    weights = load_weights(place)
    problems = list(model_mismatches(model, weights))
    if problems:
        raise InputError(f"net.load_weights: {place} holds another model: {first_few(problems)}")
    model.load_state_dict(weights)
