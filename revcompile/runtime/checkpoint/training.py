"""A trainer's state: what it consists of, how ranks save it together, where it fits.

{"model": {name: ...}, "optimizer": {name: ...}, "stages": {0: ..., 3: ...}, ...}

--save_training-->  one such tree for each rank, with what no other rank has
<--merged_state---  all of them as one; tensors are not read yet
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from revcompile.errors import InputError
from revcompile.ir.coupling_ops import mix
from revcompile.ir.module_tree import device_of_model
from revcompile.ir.program import Partition, StageProgram
from revcompile.runtime.checkpoint.folder import Checkpoint, Gather, save_checkpoint
from revcompile.runtime.checkpoint.tree import StoredTensor, well_formed
from revcompile.runtime.executor.stage_executor import StageExecutor
from revcompile.runtime.executor.transport import Transport
from revcompile.runtime.reversible.module import Reversible
from revcompile.runtime.stage.tensors import TreeCopy, clone_tree
from revcompile.runtime.stage.update import Updater
from revcompile.schedule import Schedule

_FORMAT: Final = 2
_COMMON: Final = ("format", "cuts", "seed", "device", "schedule")
"""Entries that are the same on every rank."""
_PARTS: Final = ("model", "optimizer", "stages")
"""Entries of which a rank has some."""

State = Mapping[str, Any]


class TrainerState:
    """What a trainer saves and loads: the part of its state that is in this process."""

    model: Reversible
    partition: Partition
    programs: tuple[StageProgram, ...]
    settings: Any
    """The trainer's `Settings`."""
    schedule: Schedule
    executors: list[StageExecutor]
    transport: Transport
    rank: int
    replica: int
    """Which copy of the pipeline this is: it trains on its own part of the data."""
    replicas: int

    @property
    def stage_seed(self) -> int:
        """The seed of the stages' random numbers: copies of the pipeline drop other elements."""
        seed: int = self.settings.seed
        return mix(seed, self.replica) if self.replica else seed

    def _check_savable(self) -> None:
        """Refuse what no checkpoint can hold. All ranks come to the same result."""
        for program in self.programs:
            if self.schedule.outstanding[program.index] and program.keeps_graphs:
                raise InputError(
                    f"trainer.state_dict: stage {program.index} keeps graphs of micro-batches in "
                    "flight, which cannot be saved; call trainer.flush() first, or "
                    "trainer.save(folder, drain=True)"
                )

    def _state(self, weights: State, copy: TreeCopy) -> dict[str, Any]:
        """The states of this process's stages; `weights` are entries of the model's state dict."""
        optimizer: dict[str, Any] = {}
        stages: dict[int, Any] = {}
        messages = self.transport.state_dict(copy)
        for executor in self.executors:
            updater = executor.updater.state_dict(copy)
            optimizer |= updater.pop("state")
            waiting = [message for message in messages if message[1] == executor.index]
            stages[executor.index] = executor.state_dict(copy) | updater | {"messages": waiting}
        return {
            "format": _FORMAT,
            "cuts": _segment_names(self.partition),
            "seed": self.settings.seed,
            "device": device_of_model(self.model).type,
            "replicas": self.replicas,
            "schedule": self.schedule.state(),
            "model": copy(dict(weights)),
            "optimizer": optimizer,
            "stages": stages,
        }

    def _read_state(self, checkpoint: Checkpoint, device: torch.device, world: int = 1) -> Any:
        """The state in a checkpoint, with those tensors read that this process needs."""
        read, state = checkpoint.read, merged_state(checkpoint, self.replica)
        devices, rng = {state["device"]: device}, state["rng"]
        here = {n for n, v in self.model.state_dict().items() if not _is_elsewhere(v)}
        trained = {name for executor in self.executors for name in executor.updater.parameters}
        stages = {executor.index for executor in self.executors}
        return state | {
            "model": {n: read(v) if n in here else v for n, v in state["model"].items()},
            "optimizer": {n: read(s) for n, s in state["optimizer"].items() if n in trained},
            "stages": {
                index: (read(stage, devices) if index in stages else stage)
                | {key: read(stage[key]) for key in ("groups", "lr_schedule")}
                for index, stage in state["stages"].items()
            },
            "rng": read(rng[self.rank]) if len(rng) == world else None,
        }

    def _check_fits(self, state: State) -> None:
        """Refuse a state that this trainer cannot continue from; nothing is changed."""
        with well_formed("what trainer.state_dict() returns"):
            updaters = (executor.updater for executor in self.executors)
            if problems := list(_mismatches(state, self.model, updaters)):
                raise InputError(
                    "trainer.load_state_dict: the state does not fit this trainer: "
                    f"{first_few(problems)}"
                )
            self._check_in_flight(state)

    def _check_in_flight(self, state: State) -> None:
        """Refuse micro-batches in flight of another pipeline: only an empty one can be cut anew."""
        saved, replicas = Schedule.load(state["schedule"]), state["replicas"]
        if saved.idle or (self._is_same_pipeline(state) and replicas == self.replicas):
            return
        raise InputError(
            f"trainer.load_state_dict: the state holds micro-batches in flight or gradients not "
            f"applied yet in {_described(saved, replicas)}, but this trainer has "
            f"{_described(self.schedule, self.replicas)}, cut or scheduled otherwise, or with "
            "another budget of memory. To move between them call flush() before state_dict(), or "
            "trainer.save(folder, drain=True); if the run that saved it is over, load it into a "
            "trainer like that one (one process will do) and save it from there with drain=True"
        )

    def _is_same_pipeline(self, state: State) -> bool:
        """Were the same stages saved, with the same method and the same needs in flight?"""
        here, saved = self.schedule.state(), state["schedule"]
        if _segment_names(self.partition) != [list(names) for names in state["cuts"]]:
            return False
        if any(here[key] != saved[key] for key in ("method", "accumulate", "ties")):
            return False
        updates = min(progress["updates"] for progress in saved["progress"])
        starts = here["synchronous"], saved["synchronous"]
        if starts[0] != starts[1] and updates < max(starts):
            return False
        needs = ((p.needed_in_flight, state["stages"][p.index]["needs"]) for p in self.programs)
        return all(needed == list(saved_needs) for needed, saved_needs in needs)

    @well_formed("what trainer.state_dict() returns")
    def _load_state(self, state: State) -> None:
        """Load a state that fits."""
        same = self._is_same_pipeline(state)
        saved = Schedule.load(state["schedule"])
        self.schedule = saved if same else _continue_counting(self.schedule, saved)
        self.settings = replace(self.settings, seed=state["seed"])
        _load_model(self.model, state["model"])
        self._load_updaters(state, same)
        messages = [m for stage in state["stages"].values() for m in stage["messages"]]
        self.transport.load_state_dict(messages if same else ())
        weights = dict(self.model.named_parameters())
        for executor in self.executors:
            executor.reset(self.stage_seed, weights)
            # As the last update has left it: captured steps hold it fixed.
            executor.set_delay(self.schedule.updates[executor.index] - 1)
            if same:
                executor.load_state_dict(state["stages"][executor.index])
        if not same:
            self._load_scaling(state)

    def _load_updaters(self, state: State, same: bool) -> None:
        """Optimizers by parameter name; after a new cut, every schedule continues as the first."""
        schedules = {index: stage["lr_schedule"] for index, stage in state["stages"].items()}
        first = next((schedules[i] for i in sorted(schedules) if schedules[i] is not None), None)
        settings = _group_settings(state)
        for executor in self.executors:
            schedule = schedules[executor.index] if same else first
            executor.updater.load_state_dict(state["optimizer"], settings, schedule)

    def _load_scaling(self, state: State) -> None:
        """After a new cut: the last stage takes over the scale and overflows to be reported."""
        *_, last = saved = [state["stages"][index]["scaling"] for index in sorted(state["stages"])]
        for executor in self.executors:
            if last and executor.scaling is not None and executor.loss_head is not None:
                overflow = min(scaling["overflow"] for scaling in saved)
                executor.scaling.load_state_dict(last | {"overflow": overflow})


# -- does a state fit? ----------------------------------------------------------------------------


def _mismatches(state: State, model: nn.Module, updaters: Iterable[Updater]) -> Iterator[str]:
    """Why it is no trainer's state, or that of another model or optimizer."""
    if not isinstance(state, Mapping) or state.get("format") != _FORMAT:
        got = state.get("format") if isinstance(state, Mapping) else type(state).__name__
        yield f"expected what trainer.state_dict() returns (format {_FORMAT}), got {got!r}"
        return
    missing = [key for key in (*_COMMON, *_PARTS) if key not in state]
    if missing:
        yield f"it lacks the entry {missing[0]!r}; load what trainer.state_dict() returned as it is"
        return
    yield from model_mismatches(model, state["model"])
    settings = _group_settings(state)
    for updater in updaters:
        yield from updater.misfits(settings)


def model_mismatches(model: nn.Module, saved: State) -> Iterator[str]:
    """Where a state dict and a model differ in names, or in the shapes of what is read."""
    present = model.state_dict()
    yield from (f"it lacks {name}" for name in present if name not in saved)
    yield from (f"the model has no {name}" for name in saved if name not in present)
    for name, value in present.items():
        there = saved.get(name, value)
        if isinstance(value, Tensor) and not isinstance(there, StoredTensor):
            shapes = tuple(getattr(there, "shape", ())), tuple(value.shape)
            if shapes[0] != shapes[1]:
                yield f"{name} has shape {shapes[0]} in it, {shapes[1]} here"


def first_few(problems: Sequence[str], limit: int = 3) -> str:
    """The first problems, and how many more there are."""
    more = len(problems) - limit
    return "; ".join(problems[:limit]) + (f"; and {more} more" if more > 0 else "")


def _segment_names(partition: Partition) -> list[list[str]]:
    """The names of each stage's segments: where the model was cut."""
    return [[piece.name for piece in part.pieces] for part in partition.parts]


def _described(schedule: Schedule, replicas: int) -> str:
    weights = f"weights={schedule.method.weights.value!r}"
    method = f"{schedule.method.name}, {weights}, accumulate={schedule.accumulate}"
    several = f", {replicas} copies of the pipeline" if replicas > 1 else ""
    return f"{schedule.stages} stages ({method}{several})"


# -- loading --------------------------------------------------------------------------------------


def _is_elsewhere(value: Any) -> bool:
    """Whether a tensor's values are on another rank; here it is on the meta device."""
    return isinstance(value, Tensor) and value.is_meta


def _load_model(model: nn.Module, saved: State) -> None:
    """Copy saved weights into those tensors that are in this process."""
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if not isinstance(value, Tensor):  # from a module's get_extra_state
                owner = model.get_submodule(name.rpartition(".")[0])
                owner.set_extra_state(clone_tree(saved[name]))
            elif not _is_elsewhere(value):
                value.copy_(saved[name])


def _continue_counting(schedule: Schedule, saved: Schedule) -> Schedule:
    """An empty schedule of these stages that counts on where another one was."""
    plain = Schedule(
        schedule.method,
        schedule.stages,
        schedule.accumulate,
        schedule.ties,
        schedule.synchronous,
    ).state()
    plain["injected"] = saved.injected
    for progress in plain["progress"]:
        progress["updates"] = max(saved.updates)
    return Schedule.load(plain)


def _group_settings(state: State) -> dict[str, Any]:
    groups = (group for stage in state["stages"].values() for group in stage["groups"])
    return {name: group for group in groups for name in group["params"]}


# -- on disk --------------------------------------------------------------------------------------


def save_training(
    folder: Path,
    state: State,
    rank: int = 0,
    replica: int = 0,
    *,
    gather: Gather = lambda value: [value],
    keep: int = 2,
) -> Path:
    """Write a trainer's state. Every rank calls it, with what no other rank of its replica has.

    Replicas beyond the first have their own stages and buffers, and no weights or optimizers.
    """
    names = aliases(state["model"])
    distinct = {name: t for name, t in state["model"].items() if name not in names}
    own = {**{key: state[key] for key in _PARTS}, "model": distinct}
    if replica:
        own["optimizer"] = {}
    tree = {
        **{key: state[key] for key in _COMMON},
        **(own if not replica else {"copy": {replica: own}}),
        "aliases": names,
        "rng": {rank: _generators()},
    }
    step = state["schedule"]["injected"]
    return save_checkpoint(folder, tree, step=step, rank=rank, gather=gather, keep=keep)


def merged_state(checkpoint: Checkpoint, replica: int = 0) -> dict[str, Any]:
    """One state from those of all ranks: weights of the first replica, the rest of `replica`.

    Tensors are `StoredTensor`s. It has one more entry: `rng`, by rank.
    """
    trees = checkpoint.trees()
    first = [tree for tree in trees if "copy" not in tree]
    copies = [item for tree in trees for item in tree.get("copy", {}).items()]
    parts = [*first, *(part for number, part in copies if number == replica)]
    merged = {key: {k: v for p in parts for k, v in p[key].items()} for key in _PARTS}
    return {
        **{key: trees[0][key] for key in _COMMON},
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
    """The global ones, from which loaders and losses may draw; stages have their own seeds."""
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
