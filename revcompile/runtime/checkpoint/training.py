"""A trainer's state in a checkpoint: each rank writes its stages, anybody reads all of them.

state_dict --save_training--> {"model": ..., "optimizer": ..., "stage": {0: ..., 3: ...}, ...}
                                one such tree a rank, written by storage.save_checkpoint
state_dict <--load_training-- the trees of all ranks, merged
"""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn

from revcompile.errors import InputError
from revcompile.ir.module_tree import device_of_model
from revcompile.runtime.checkpoint.codec import decode_tree, encode_tree, located, well_formed
from revcompile.runtime.checkpoint.storage import (
    Barrier,
    Checkpoint,
    find_checkpoint,
    join_barriers,
    save_checkpoint,
)
from revcompile.runtime.checkpoint.weights import aliases, with_aliases

_COMMON: Final = ("format", "cuts", "seed", "schedule")
"""Entries that are the same on every rank."""
_BY_STAGE: Final = {"stages": "stage", "lr_schedules": "lr_schedule"}
"""Lists with an entry a stage, and their names in the file."""


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
    """Write a trainer's state; with several ranks, each calls it with the state of its own stages.

    Args:
        folder: where checkpoints are.
        state: the entries of `Trainer.state_dict()`, for this rank's stages: their `stages` and
            `lr_schedules`, the messages to them, and those entries of `model` and `optimizer` that
            no other rank saves. Replicas beyond the first save what they do not have in common
            with it: micro-batches in flight and buffers.
        model: tells which names are one tensor, and the device.
        stages: the numbers of this rank's stages.
        keep: how many checkpoints stay.
        rank: this rank.
        world: how many ranks save.
        replica: this rank's copy of the pipeline.
        barrier: returns when every rank has called it.

    Returns:
        The path of the new checkpoint.
    """
    repeated = {
        name: first
        for name, first in aliases(model.state_dict()).items()
        if {name, first} <= state["model"].keys()
    }
    messages: dict[int, list[Any]] = {}
    for message in state["messages"]:
        messages.setdefault(message[1], []).append(message)
    own = {
        "model": {name: t for name, t in state["model"].items() if name not in repeated},
        "optimizer": state["optimizer"],
        **{key: dict(zip(stages, state[listed], strict=True)) for listed, key in _BY_STAGE.items()},
        "message": messages,
    }
    tree = {
        **{key: state[key] for key in _COMMON},
        **(own if not replica else {"copy": {replica: own}}),
        "rank": {rank: {"groups": state["groups"], "rng": _generators()}},
    }
    try:
        with located("trainer.save"):
            plain, tensors = encode_tree(tree)
    except InputError:
        join_barriers(barrier)  # so that the other ranks do not wait
        raise
    return save_checkpoint(
        folder,
        tensors,
        {"aliases": repeated, "device": device_of_model(model).type, "state": plain},
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
    """Read a checkpoint: the states of all ranks' stages, merged into one.

    Args:
        place: a checkpoint, or a folder of them (the newest is read).
        device: where tensors go that the given stages held on the device of the saving run; all
            others go to the CPU.
        stages: numbers of stages (default: all).
        replica: which copy of the pipeline continues; it gets its own micro-batches and buffers
            if that copy was saved.

    Returns:
        The checkpoint, and a trainer's state with one more entry, `rng`, for `set_generators`.
    """
    checkpoint = Checkpoint(find_checkpoint(place))
    tensors = checkpoint.tensors()
    with located(f"checkpoint: {checkpoint.path}"), well_formed("what trainer.save writes"):
        plain = checkpoint.plain
        parts = [_read(part, tensors, device, stages) for part in plain]
        state = _merged(parts, [part["aliases"] for part in plain], replica)
    return checkpoint, state


def _read(
    part: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    device: torch.device | None,
    stages: Sequence[int] | None,
) -> dict[str, Any]:
    def device_for(name: str, kind: str) -> torch.device:
        # Names are like stage.2.in_flight... or, of further replicas, copy.1.stage.2.in_flight...
        owner, _, rest = name.partition(".")
        if owner == "copy":
            owner, _, rest = rest.partition(".")[2].partition(".")
        is_of_stage = owner in ("stage", "message")
        is_here = is_of_stage and (stages is None or int(rest.partition(".")[0]) in stages)
        return device if device and is_here and kind == part["device"] else torch.device("cpu")

    tree: dict[str, Any] = decode_tree(part["state"], tensors, device_for)
    return tree


def _merged(
    parts: Sequence[Any], repeated: Iterable[Mapping[str, str]], replica: int
) -> dict[str, Any]:
    """One state from those of all ranks: weights of the first replica, the rest of `replica`."""
    first = [part for part in parts if "copy" not in part]
    copies = [(number, part) for p in parts for number, part in p.get("copy", {}).items()]
    own = [part for number, part in copies if number == replica]
    weights = {name: t for part in (*first, *own) for name, t in part["model"].items()}
    schedules = {index: s for part in first for index, s in part["lr_schedule"].items()}
    stages = {index: s for part in own or first for index, s in part["stage"].items()}
    of_ranks = [part["rank"][rank] for rank, part in enumerate(parts)]
    return {
        **{key: parts[0][key] for key in _COMMON},
        "replicas": 1 + len({number for number, _ in copies}),
        "model": with_aliases(weights, repeated),
        "optimizer": {name: s for part in first for name, s in part["optimizer"].items()},
        "groups": [group for entry in of_ranks for group in entry["groups"]],
        "lr_schedules": [schedules[index] for index in sorted(schedules)],
        "stages": [stages[index] for index in sorted(stages)],
        "messages": [m for part in own or first for sent in part["message"].values() for m in sent],
        "rng": [entry["rng"] for entry in of_ranks],
    }


# -- random generators ----------------------------------------------------------------------------


def _generators() -> dict[str, Any]:
    """The global ones, from which loaders and losses may draw; stages have their own seeds."""
    version, words, spare = random.getstate()
    states = {"torch": torch.get_rng_state(), "python": [version, torch.tensor(words), spare]}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_generators(states: Sequence[Mapping[str, Any]], rank: int = 0, world: int = 1) -> None:
    """Restore torch's and Python's generators of this rank, if there were as many ranks."""
    if len(states) != world:
        return
    saved = states[rank]
    version, words, spare = saved["python"]
    random.setstate((version, tuple(words.tolist()), spare))
    torch.set_rng_state(saved["torch"].clone())
    if "cuda" in saved and torch.cuda.is_available():
        torch.cuda.set_rng_state(saved["cuda"].clone())


# -- saving on a signal ----------------------------------------------------------------------------


T = TypeVar("T")


def until_signal(
    loader: Iterable[T],
    save: Callable[[], Any],
    agree: Callable[[bool], bool] = lambda received: received,
    agree_at_end: Callable[[], bool] = lambda: False,
) -> Iterator[T]:
    """The loader's batches; after a SIGTERM, at the end of the step, save and exit.

    The exit status is a shell's for the signal: 143.

    Args:
        loader: the batches.
        save: writes a checkpoint.
        agree: called after every step with "has this rank received a signal?"; on several ranks
            it returns whether any rank had, then or some steps earlier.
        agree_at_end: returns at the end of the loader whether any rank had, where `agree` has not
            said so yet.
    """
    if threading.current_thread() is not threading.main_thread():
        raise InputError(
            "trainer.save_on_signal: Python delivers signals to the main thread, but this is "
            f"{threading.current_thread().name}; train there"
        )
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        for batch in loader:
            yield batch
            if agree(bool(received)):
                break
        else:
            if not agree_at_end():
                return
        save()
        raise SystemExit(128 + signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
