"""What a trainer saves and loads: its state, and whether a state fits it.

Trainers write to the model's own parameters. Two trainers that take turns would train each other's
weights, so only the latest one can continue. A trainer that cannot continue raises when it is used
again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from revcompile.errors import InputError, TrainerStoppedError
from revcompile.ir.coupling_ops import mix
from revcompile.ir.module_tree import device_of_model
from revcompile.ir.program import Partition
from revcompile.runtime.checkpoint.folder import Checkpoint
from revcompile.runtime.checkpoint.training import (
    COMMON,
    PARTS,
    State,
    first_few,
    merged_state,
    model_mismatches,
)
from revcompile.runtime.checkpoint.tree import well_formed
from revcompile.runtime.stage.settings import Task
from revcompile.runtime.stage.tensors import TreeCopy, clone_tree
from revcompile.runtime.trainer.placement import Placement
from revcompile.runtime.trainer.steps import Steps
from revcompile.schedule import Schedule

_FORMAT: Final = 4


class TrainerState:
    """What a trainer saves and loads: the part of its state that is in this process."""

    def __init__(self, task: Task, placement: Placement) -> None:
        self.model, self._partition, self._settings = task.model, task.partition, task.settings
        self._programs = programs = tuple(task.programs)
        self._placement, self._transport = placement, placement.transport
        self.rank, self.replica = placement.rank, placement.replica
        """`replica`: which copy of the pipeline this is; each has its own part of the data."""
        self.replicas = placement.replicas
        row = programs[0].method, len(programs), task.settings.accumulation_steps
        self._schedule = Schedule(*row, task.partition.ties)
        self._steps = steps = Steps(task, placement, self._schedule, self._stage_seed)
        self._executors, self._runner = steps.executors, steps.runner
        self._stop_reason: str | None = None
        """Why this trainer cannot continue; None if it can."""

    @property
    def _stage_seed(self) -> int:
        """The seed of the stages' random numbers (dropout): each replica has another one."""
        seed: int = self._settings.seed
        return mix(seed, self.replica) if self.replica else seed

    def _check_savable(self) -> None:
        """Refuse graphs in flight, which no checkpoint can hold. All ranks decide alike."""
        for program in self._programs:
            if self._schedule.outstanding[program.index] and program.keeps_graphs:
                raise InputError(
                    f"trainer.state_dict: stage {program.index} keeps graphs of micro-batches in "
                    "flight, which cannot be saved; call trainer.flush() first, or "
                    "trainer.save(folder, drain=True)"
                )

    def _state(self, weights: State, copy: TreeCopy) -> dict[str, Any]:
        """The states of this process's stages; `weights` are entries of the model's state dict."""
        optimizer: dict[str, Any] = {}
        stages: dict[int, Any] = {}
        messages = self._transport.state_dict(copy)
        for executor in self._executors:
            updater = executor.updater.state_dict(copy)
            optimizer |= updater.pop("state")
            waiting = [message for message in messages if message[1] == executor.index]
            stages[executor.index] = executor.state_dict(copy) | updater | {"messages": waiting}
        return {
            "format": _FORMAT,
            "policy": self._partition.rewired.policy.value,
            "cuts": _segment_names(self._partition),
            "seed": self._settings.seed,
            "device": device_of_model(self.model).type,
            "replicas": self.replicas,
            "schedule": self._schedule.state(),
            "model": copy(dict(weights)),
            "optimizer": optimizer,
            "stages": stages,
        }

    def _read_state(self, checkpoint: Checkpoint) -> Any:
        """The state in a checkpoint; only the tensors that this process needs are read."""
        read, state = checkpoint.read, merged_state(checkpoint, self.replica)
        devices, rng = {state["device"]: self._placement.device}, state["rng"]
        entries = self.model.state_dict().items()
        here = {n for n, v in entries if not (isinstance(v, Tensor) and v.is_meta)}
        trained = {name for executor in self._executors for name in executor.updater.parameters}
        stages = {executor.index for executor in self._executors}
        return state | {
            "model": {n: read(v) if n in here else v for n, v in state["model"].items()},
            "optimizer": {n: read(s) for n, s in state["optimizer"].items() if n in trained},
            "stages": {
                index: (read(stage, devices) if index in stages else stage)
                | {key: read(stage[key]) for key in ("groups", "lr_schedule")}
                for index, stage in state["stages"].items()
            },
            "rng": read(rng[self.rank]) if len(rng) == self._placement.world else None,
        }

    def _check_fits(self, state: State) -> None:
        """Refuse a state that this trainer cannot continue from; nothing is changed."""
        with well_formed("what trainer.state_dict() returns"):
            problems = list(_mismatches(state, self.model)) or list(self._misfits(state))
            policy = self._partition.rewired.policy.value
            if not problems and state["policy"] != policy:
                problems = [
                    f"it was saved with policy={state['policy']!r}, but this net has {policy!r}, "
                    "and computes something else with the same weights"
                ]
            if problems:
                raise InputError(
                    "trainer.load_state_dict: the state does not fit this trainer: "
                    f"{first_few(problems)}"
                )
            self._check_in_flight(state)

    def _misfits(self, state: State) -> Iterator[str]:
        """Why optimizers and schedules do not fit; in another cut all continue one schedule."""
        settings = _group_settings(state)
        is_same, stages = self._is_same_pipeline(state), state["stages"].values()
        schedules = [] if is_same else [stage["lr_schedule"] for stage in stages]
        for executor in self._executors:
            yield from executor.updater.misfits(settings, schedules)

    def _check_in_flight(self, state: State) -> None:
        """Refuse micro-batches in flight from another pipeline: only an empty one can be recut."""
        saved, replicas = Schedule.load(state["schedule"]), state["replicas"]
        if saved.idle or (self._is_same_pipeline(state) and replicas == self.replicas):
            return
        raise InputError(
            f"trainer.load_state_dict: the state holds micro-batches in flight or gradients not "
            f"applied yet in {_described(saved, replicas)}, but this trainer has "
            f"{_described(self._schedule, self.replicas)}, cut or scheduled otherwise, or with "
            "another budget of memory. To move between them call flush() before state_dict(), or "
            "trainer.save(folder, drain=True); if the run that saved it is over, load it into a "
            "trainer like that one (one process will do) and save it from there with drain=True"
        )

    def _is_same_pipeline(self, state: State) -> bool:
        """Whether the same stages were saved, with the same method and the same needs in flight."""
        here, saved = self._schedule.state(), state["schedule"]
        if _segment_names(self._partition) != [list(names) for names in state["cuts"]]:
            return False
        if any(here[key] != saved[key] for key in ("method", "accumulation_steps", "ties")):
            return False
        needs = ((p.needed_in_flight, state["stages"][p.index]["needs"]) for p in self._programs)
        return all(needed == list(saved_needs) for needed, saved_needs in needs)

    @well_formed("what trainer.state_dict() returns")
    def _load_state(self, state: State) -> None:
        """Load a state that fits."""
        same = self._is_same_pipeline(state)
        saved = Schedule.load(state["schedule"])
        if not same:  # nothing is in flight; all stages continue the count of updates
            progress = [{"updates": max(saved.updates)}] * self._schedule.stages
            counts = {"injected": saved.injected, "progress": progress}
            saved = Schedule.load(self._schedule.state() | counts)
        self._schedule = saved
        self._settings = replace(self._settings, seed=state["seed"])
        _load_model(self.model, state["model"])
        self._load_updaters(state, same)
        messages = [m for stage in state["stages"].values() for m in stage["messages"]]
        self._transport.load_state_dict(messages if same else ())
        weights = dict(self.model.named_parameters())
        for executor in self._executors:
            executor.reset(self._stage_seed, weights)
            if same:
                executor.load_state_dict(state["stages"][executor.index])

    def _load_updaters(self, state: State, same: bool) -> None:
        """Load optimizers by parameter name; after a new cut all continue the first schedule."""
        schedules = {index: stage["lr_schedule"] for index, stage in state["stages"].items()}
        first = next((schedules[i] for i in sorted(schedules) if schedules[i] is not None), None)
        settings = _group_settings(state)
        for executor in self._executors:
            schedule = schedules[executor.index] if same else first
            executor.updater.load_state_dict(state["optimizer"], settings, schedule)


# -- whether a state fits --------------------------------------------------------------------------


def _mismatches(state: State, model: nn.Module) -> Iterator[str]:
    """Why a state is not a trainer's state, or is from another model."""
    if not isinstance(state, Mapping) or state.get("format") != _FORMAT:
        got = state.get("format") if isinstance(state, Mapping) else type(state).__name__
        yield f"expected what trainer.state_dict() returns (format {_FORMAT}), got {got!r}"
        return
    missing = [key for key in (*COMMON, *PARTS) if key not in state]
    if missing:
        yield f"it lacks the entry {missing[0]!r}; load what trainer.state_dict() returned as it is"
        return
    yield from model_mismatches(model, state["model"])


def _segment_names(partition: Partition) -> list[list[str]]:
    """The names of each stage's segments: where the model was cut."""
    return [[piece.name for piece in part.pieces] for part in partition.parts]


def _described(schedule: Schedule, replicas: int) -> str:
    weights = f"weights={schedule.method.weights.value!r}"
    method = f"{schedule.method.name}, {weights}, accumulation_steps={schedule.accumulation_steps}"
    several = f", {replicas} copies of the pipeline" if replicas > 1 else ""
    return f"{schedule.stages} stages ({method}{several})"


# -- loading --------------------------------------------------------------------------------------


def _load_model(model: nn.Module, saved: State) -> None:
    """Copy saved weights into the tensors of this process; others are on the meta device."""
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if not isinstance(value, Tensor):  # from a module's get_extra_state
                owner = model.get_submodule(name.rpartition(".")[0])
                owner.set_extra_state(clone_tree(saved[name]))
            elif not value.is_meta:
                value.copy_(saved[name])


def _group_settings(state: State) -> dict[str, Any]:
    groups = (group for stage in state["stages"].values() for group in stage["groups"])
    return {name: group for group in groups for name in group["params"]}


# -- which trainer trains a model -----------------------------------------------------------------


_latest: Final[WeakKeyDictionary[nn.Module, ref[Any]]] = WeakKeyDictionary()


def make_latest(trainer: Any, model: nn.Module) -> None:
    """Let a trainer train a model from now on."""
    _latest[model] = ref(trainer)


def check_latest(trainer: Any, model: nn.Module, to_read: bool) -> None:
    """Raise if another trainer has taken over; until that one trains, the state can be read."""
    found = _latest.get(model)  # None if trainer and model are copies
    latest = trainer if found is None else found()
    is_unused = latest is not None and latest.microbatches_seen == 0
    if latest is not trainer and not (to_read and is_unused):
        raise TrainerStoppedError(
            "net.trainer(...) has been called again, and the new trainer trains the model since; "
            "use that one, or call petrafy once more for a model of its own"
        )
