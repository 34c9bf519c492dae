"""A training run in a checkpoint: every rank's share, and all shares put together again."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from revcompile.errors import InputError
from revcompile.ir.module_tree import device_of_model
from revcompile.runtime.checkpoint.codec import located
from revcompile.runtime.checkpoint.nested import put_together, take_apart
from revcompile.runtime.checkpoint.storage import (
    Barrier,
    Checkpoint,
    attend_save,
    find_checkpoint,
    save_checkpoint,
)
from revcompile.runtime.checkpoint.weights import aliases, with_aliases

__all__ = ["load_training", "save_training", "set_generators"]

_COMMON: Final = ("format", "cuts", "seed", "schedule")
"""The same on every rank."""
_BY_STAGE: Final = {"stages": "stage", "lr_schedules": "lr_schedule"}


def save_training(
    folder: str | Path,
    state: Mapping[str, Any],
    model: nn.Module,
    stages: Sequence[int],
    *,
    keep: int = 2,
    rank: int = 0,
    world: int = 1,
    replica: int = 0,
    barrier: Barrier = lambda: None,
) -> Path:
    """Write a trainer's state dict: with several ranks, each its own stages' share of it.

    A share has the entries of `Trainer.state_dict()`: `stages` and `lr_schedules` of the rank's
    own stages, whose numbers are `stages`; the messages to these; and only those entries of
    `model` and `optimizer` that no other rank saves. Of a further copy of the pipeline, `replica`,
    that is what it does not have in common with the first one: its micro-batches in flight and its
    buffers. `model` tells which names mean one tensor, and where tensors live.
    """
    also = {
        name: one
        for name, one in aliases(model.state_dict()).items()
        if {name, one} <= state["model"].keys()
    }
    messages: dict[int, list[Any]] = {}
    for message in state["messages"]:
        messages.setdefault(message[1], []).append(message)
    share = {
        "model": {name: t for name, t in state["model"].items() if name not in also},
        "optimizer": state["optimizer"],
        **{key: dict(zip(stages, state[listed], strict=True)) for listed, key in _BY_STAGE.items()},
        "message": messages,
    }
    tree = {
        **{key: state[key] for key in _COMMON},
        **(share if not replica else {"copy": {replica: share}}),
        "rank": {rank: {"groups": state["groups"], "rng": _generators()}},
    }
    try:
        with located("trainer.save"):
            plain, tensors = take_apart(tree)
    except InputError:
        attend_save(barrier)  # the others do not wait for this rank
        raise
    return save_checkpoint(
        folder,
        tensors,
        {"aliases": also, "device": device_of_model(model).type, "state": plain},
        step=state["schedule"]["injected"],
        rank=rank,
        world=world,
        barrier=barrier,
        keep=keep,
    )


def load_training(
    place: str | Path,
    device: torch.device | None = None,
    stages: Sequence[int] | None = None,
    replica: int = 0,
) -> tuple[Checkpoint, dict[str, Any]]:
    """The checkpoint that was found, and the state dict of all ranks' stages together.

    What the given stages (default: all) held on the saving run's device comes to `device`, all
    other tensors to the CPU. A further copy of the pipeline, `replica`, goes on with its own
    micro-batches and buffers if it was there. The entry `rng`, for `set_generators`, is not the
    trainer's.
    """
    checkpoint = Checkpoint(find_checkpoint(place))
    tensors = checkpoint.tensors()
    with located(f"checkpoint: {checkpoint.path}"):
        try:
            plain = checkpoint.plain
            parts = [_read(part, tensors, device, stages) for part in plain]
            state = _joined(parts, [part["aliases"] for part in plain], replica)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(
                f"it is not as trainer.save writes it ({type(error).__name__}: {error})"
            ) from error
    return checkpoint, state


def _read(
    part: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    device: torch.device | None,
    stages: Sequence[int] | None,
) -> dict[str, Any]:
    def home(name: str, kind: str) -> torch.device:
        owner, _, rest = name.partition(".")
        if owner == "copy":
            owner, _, rest = rest.partition(".")[2].partition(".")
        held = owner in ("stage", "message")
        here = held and (stages is None or int(rest.partition(".")[0]) in stages)
        return device if device and here and kind == part["device"] else torch.device("cpu")

    found: dict[str, Any] = put_together(part["state"], tensors, home)
    return found


def _joined(
    parts: Sequence[Any], also: Iterable[Mapping[str, str]], replica: int
) -> dict[str, Any]:
    state = {key: parts[0][key] for key in _COMMON}
    first = [part for part in parts if "copy" not in part]
    copies = [(number, share) for part in parts for number, share in part.get("copy", {}).items()]
    mine = [share for number, share in copies if number == replica]
    model = {name: t for part in (*first, *mine) for name, t in part["model"].items()}
    state["model"] = with_aliases(model, also)
    state["optimizer"] = {name: s for part in first for name, s in part["optimizer"].items()}
    schedules = {index: s for part in first for index, s in part["lr_schedule"].items()}
    stages = {index: s for part in mine or first for index, s in part["stage"].items()}
    state["lr_schedules"] = [schedules[index] for index in sorted(schedules)]
    state["stages"] = [stages[index] for index in sorted(stages)]
    state["messages"] = [
        m for part in mine or first for sent in part["message"].values() for m in sent
    ]
    state["replicas"] = 1 + len({number for number, _ in copies})
    own = [part["rank"][rank] for rank, part in enumerate(parts)]
    state["groups"] = [group for one in own for group in one["groups"]]
    state["rng"] = [one["rng"] for one in own]
    return state


# -- random generators ----------------------------------------------------------------------------


def _generators() -> dict[str, Any]:
    """Stages draw from their seeds; loaders and losses may draw from these."""
    version, words, spare = random.getstate()
    found = {"torch": torch.get_rng_state(), "python": [version, torch.tensor(words), spare]}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def set_generators(states: Sequence[Mapping[str, Any]], rank: int = 0, world: int = 1) -> None:
    """Torch's and Python's go on where this rank's were, if there were as many ranks."""
    if len(states) != world:
        return
    saved = states[rank]
    version, words, spare = saved["python"]
    random.setstate((version, tuple(words.tolist()), spare))
    torch.set_rng_state(saved["torch"].clone())
    if "cuda" in saved and torch.cuda.is_available():
        torch.cuda.set_rng_state(saved["cuda"].clone())
