"""A model's weights alone: from a checkpoint, or exported as one safetensors file."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from revcompile.errors import InputError
from revcompile.runtime.checkpoint.codec import located, parse_json, well_formed
from revcompile.runtime.checkpoint.storage import Checkpoint, find_checkpoint
from revcompile.runtime.checkpoint.tensor_files import open_tensors, write_tensors

_ALIASES: Final = "revcompile.aliases"


def aliases(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Maps every further name of a tensor to its first one.

    >>> import torch
    >>> weight = torch.zeros(2)
    >>> aliases({"embedding": weight, "bias": torch.zeros(2), "head": weight})
    {'head': 'embedding'}
    """
    first: dict[Any, str] = {}
    repeated: dict[str, str] = {}
    for name, t in tensors.items():
        address = t.untyped_storage().data_ptr() if t.numel() else 0
        memory = (address, t.storage_offset(), t.shape, t.stride(), t.dtype, t.device)
        if address and first.setdefault(memory, name) != name:
            repeated[name] = first[memory]
    return repeated


def export_weights(model: nn.Module, file: str | Path) -> Path:
    """Write the state dict as one safetensors file, tied tensors once.

    `safetensors.torch.load_model` and `load_weights` read it.
    """
    file = Path(file)
    if file.suffix != ".safetensors":
        raise InputError(f"export: {file.name}; name the file ....safetensors")
    tensors = dict(model.state_dict())
    names = aliases(tensors)
    new = file.with_name(f"{file.name}.{secrets.token_hex(4)}.new")  # several ranks may export
    with located("export"):
        for name, tensor in tensors.items():
            _check_writable(tensor, name)
        distinct = {name: tensor for name, tensor in tensors.items() if name not in names}
        file.parent.mkdir(parents=True, exist_ok=True)
        write_tensors(new, distinct, {_ALIASES: json.dumps(names)})
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
    tensors = {
        name.removeprefix("model."): tensor.clone()
        for name, tensor in checkpoint.tensors("model.").items()
    }
    with located(f"checkpoint: {checkpoint.path}"), well_formed("what trainer.save writes"):
        return with_aliases(tensors, [part["aliases"] for part in checkpoint.plain])


def with_aliases(
    tensors: Mapping[str, Tensor], aliases_of_ranks: Iterable[Mapping[str, str]]
) -> dict[str, Tensor]:
    """Tensors under all their names again."""
    pairs = [pair for names in aliases_of_ranks for pair in names.items()]
    return {**tensors, **{name: tensors[first] for name, first in pairs}}


def _exported(file: Path) -> dict[str, Tensor]:
    try:
        if not file.is_file():
            raise InputError("there is no such file")
        with open_tensors(file) as opened:
            tensors = {name: opened.read(name).clone() for name in opened.names}
            return with_aliases(tensors, [parse_json(opened.about.get(_ALIASES, "{}"))])
    except (InputError, OSError) as error:
        raise InputError(f"load_weights: {file} cannot be read ({error})") from error


def load_into(model: nn.Module, place: str | Path) -> None:
    """Load saved weights into a model; if they do not fit, nothing is changed."""
    weights = load_weights(place)
    problems = list(model_mismatches(model, weights))
    if problems:
        raise InputError(f"net.load: {place} holds another model: {first_few(problems)}")
    model.load_state_dict(weights)


def model_mismatches(model: nn.Module, saved: Mapping[str, Tensor]) -> Iterator[str]:
    """Where a state dict and a model differ in names or shapes."""
    present = model.state_dict()
    yield from (f"it lacks {name}" for name in present if name not in saved)
    yield from (f"the model has no {name}" for name in saved if name not in present)
    for name, value in present.items():
        if name in saved and isinstance(value, Tensor):
            here, there = tuple(value.shape), tuple(getattr(saved[name], "shape", ()))
            if here != there:
                yield f"{name} has shape {there} in it, {here} here"


def first_few(problems: Sequence[str], limit: int = 3) -> str:
    """The first problems, and how many more there are."""
    more = len(problems) - limit
    return "; ".join(problems[:limit]) + (f"; and {more} more" if more > 0 else "")


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
