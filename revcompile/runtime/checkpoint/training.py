"""How ranks save a trainer's state, or only the weights, and how both are read again.

{"model": {name: ...}, "optimizer": {name: ...}, "stages": {0: ..., 3: ...}, ...}

--save_training-->  one such tree for each rank, with what no other rank has
<--merged_state---  all of them as one; tensors are not read yet
"""

from __future__ import annotations

import json
import os
import random
import secrets
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from revcompile.errors import InputError
from revcompile.ir.policy import POLICY_MARK, Policy
from revcompile.runtime.checkpoint.folder import (
    Checkpoint,
    Gather,
    find_checkpoint,
    save_checkpoint,
)
from revcompile.runtime.checkpoint.tree import StoredTensor, TensorFile, write_tensors

COMMON: Final = ("format", "policy", "cuts", "seed", "device", "schedule")
"""Entries that are the same on every rank."""
PARTS: Final = ("model", "optimizer", "stages")
"""Entries that are spread over the ranks."""

State = Mapping[str, Any]


def model_mismatches(model: nn.Module, saved: State) -> Iterator[str]:
    """Where a state dict and a model differ in names, or in the shapes of tensors already read."""
    present = model.state_dict()
    yield from (f"it lacks {name}" for name in present if name not in saved)
    yield from (f"the model has no {name}" for name in saved if name not in present)
    for name, value in present.items():
        there = saved.get(name, value)
        if isinstance(value, Tensor) and not isinstance(there, StoredTensor):
            shapes = tuple(getattr(there, "shape", ())), tuple(value.shape)
            if shapes[0] != shapes[1]:
                yield f"{name} has shape {shapes[0]} in it, {shapes[1]} here"


def first_few(problems: Sequence[str]) -> str:
    """The first problems, and how many more there are."""
    more = len(problems) - 3
    return "; ".join(problems[:3]) + (f"; and {more} more" if more > 0 else "")


def save_training(
    folder: Path,
    state: State,
    rank: int = 0,
    replica: int = 0,
    *,
    gather: Gather = lambda value: [value],
    keep_last: int = 2,
) -> Path:
    """Write a trainer's state. Every rank calls it, with what no other rank of its replica has.

    Replicas after the first save their own stages and buffers, but no weights or optimizers.
    """
    names = aliases(state["model"])
    distinct = {name: t for name, t in state["model"].items() if name not in names}
    own = {**{key: state[key] for key in PARTS}, "model": distinct}
    if replica:
        own["optimizer"] = {}
    tree = {
        **{key: state[key] for key in COMMON},
        **(own if not replica else {"copy": {replica: own}}),
        "aliases": names,
        "rng": {rank: _generators()},
    }
    step = state["schedule"]["injected"]
    return save_checkpoint(folder, tree, step=step, rank=rank, gather=gather, keep_last=keep_last)


def merged_state(checkpoint: Checkpoint, replica: int = 0) -> dict[str, Any]:
    """Merge the states of all ranks: weights of the first replica, buffers and stages of `replica`.

    Tensors are `StoredTensor`s. An additional entry `rng` has the random states of each rank.
    """
    trees = checkpoint.trees()
    first = [tree for tree in trees if "copy" not in tree]
    copies = [item for tree in trees for item in tree.get("copy", {}).items()]
    parts = [*first, *(part for number, part in copies if number == replica)]
    merged = {key: {k: v for p in parts for k, v in p[key].items()} for key in PARTS}
    return {
        **{key: trees[0][key] for key in COMMON},
        **merged,
        "model": with_aliases(merged["model"], (tree["aliases"] for tree in trees)),
        "replicas": 1 + len({number for number, _ in copies}),
        "rng": [tree["rng"][rank] for rank, tree in enumerate(trees)],
    }


def aliases(tensors: State) -> dict[str, str]:
    """Maps every further name of a tensor to its first one.

    >>> import torch
    >>> weight = torch.zeros(2)
    >>> aliases({"embedding": weight, "bias": torch.zeros(2), "head": weight})
    {'head': 'embedding'}
    """
    first: dict[Any, str] = {}
    repeated: dict[str, str] = {}
    for name, t in tensors.items():
        if not isinstance(t, Tensor):  # from a module's get_extra_state
            continue
        address = t.untyped_storage().data_ptr() if t.numel() else 0
        memory = (address, t.storage_offset(), t.shape, t.stride(), t.dtype, t.device)
        if address and first.setdefault(memory, name) != name:
            repeated[name] = first[memory]
    return repeated


def with_aliases(tensors: State, aliases_of_ranks: Iterable[Mapping[str, str]]) -> dict[str, Any]:
    """Tensors under all their names again."""
    pairs = [pair for names in aliases_of_ranks for pair in names.items()]
    return {**tensors, **{name: tensors[first] for name, first in pairs}}


def _generators() -> dict[str, Any]:
    """States of the global generators: loaders and losses may draw there, stages are seeded."""
    version, words, spare = random.getstate()
    states = {"torch": torch.get_rng_state(), "python": [version, torch.tensor(words), spare]}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_generators(saved: Mapping[str, Any] | None) -> None:
    """Restore torch's and Python's generators of a rank; None: there were more or fewer ranks."""
    if saved is None:
        return
    version, words, spare = saved["python"]
    random.setstate((version, tuple(words.tolist()), spare))
    torch.set_rng_state(saved["torch"].clone())
    if "cuda" in saved and torch.cuda.is_available():
        torch.cuda.set_rng_state(saved["cuda"].clone())


# -- weights alone --------------------------------------------------------------------------------


_ALIASES: Final = "revcompile.aliases"


def export_weights(model: nn.Module, file: Path) -> Path:
    """Write the state dict as one safetensors file, tied tensors once.

    `safetensors.torch.load_model` and `load_weights` read it.
    """
    if file.suffix != ".safetensors":
        raise InputError(f"export: {file.name}; name the file ....safetensors")
    state = model.state_dict()
    policy = state._metadata.get("", {}).get(POLICY_MARK)  # type: ignore[attr-defined]
    tensors = dict(state)
    names = aliases(tensors)
    for name, t in tensors.items():
        is_plain = type(t) in (Tensor, nn.Parameter) and t.layout is torch.strided
        if not is_plain or t.is_quantized or t.is_meta:
            kind = f"a {type(t).__name__}, not a dense tensor with values"
            raise InputError(f"export: {name} is {kind}, and cannot be written")
    distinct = {name: tensor for name, tensor in tensors.items() if name not in names}
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(f"{file.name}.{secrets.token_hex(4)}.new")  # several ranks may export
    about = {} if policy is None else {POLICY_MARK: policy}
    write_tensors(new, distinct, {_ALIASES: json.dumps(names), **about})
    os.replace(new, file)
    return file


def load_weights(place: str | Path) -> dict[str, Any]:
    """A state dict, from a folder of checkpoints (the newest), a checkpoint, or an export.

    It can be loaded into `net.to_module()`, into the result of `reversify` for the same model, and
    into `net.model` with any number of stages.
    """
    place = Path(place)
    if place.is_file() or place.suffix == ".safetensors":
        try:
            opened = TensorFile(place)
            tensors = {name: opened.read(name).clone() for name in opened.names}
            weights = with_aliases(tensors, [json.loads(opened.about.get(_ALIASES, "{}"))])
            return _marked(weights, opened.about.get(POLICY_MARK))
        except Exception as error:  # of the system, of safetensors, of torch
            raise InputError(f"load_weights: {place} cannot be read ({error})") from error
    checkpoint = Checkpoint(find_checkpoint(place))
    state = merged_state(checkpoint)
    weights = checkpoint.read(state["model"])
    cloned = {name: w.clone() if isinstance(w, Tensor) else w for name, w in weights.items()}
    return _marked(cloned, state["policy"])


def _marked(weights: dict[str, Any], policy: str | None) -> dict[str, Any]:
    """Weights as a state dict whose metadata name the policy they were trained with."""
    state = OrderedDict(weights)
    if policy is not None and not Policy(policy).averaged:
        vars(state)["_metadata"] = {"": {POLICY_MARK: policy}}
    return state


def load_into(model: nn.Module, place: str | Path) -> None:
    """Load saved weights into a model; if they do not fit, nothing is changed."""
    weights = load_weights(place)
    problems = list(model_mismatches(model, weights))
    if problems:
        raise InputError(f"net.load_weights: {place} holds another model: {first_few(problems)}")
    model.load_state_dict(weights)
