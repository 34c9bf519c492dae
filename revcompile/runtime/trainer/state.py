"""A trainer's state: what it consists of, where it fits, and how it moves to other stages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from revcompile.errors import InputError
from revcompile.ir.coupling_ops import mix
from revcompile.ir.program import Partition, StageProgram
from revcompile.runtime.checkpoint.codec import well_formed
from revcompile.runtime.checkpoint.weights import first_few, model_mismatches
from revcompile.runtime.executor.stage_executor import StageExecutor
from revcompile.runtime.executor.transport import Transport
from revcompile.runtime.reversible.module import Reversible
from revcompile.runtime.stage.tensors import TreeCopy, clone_tree
from revcompile.runtime.stage.update import Updater
from revcompile.runtime.trainer.settings import Settings
from revcompile.schedule import Schedule

_FORMAT: Final = 1
_ENTRIES: Final = (
    *("cuts", "seed", "model", "optimizer", "groups"),
    *("lr_schedules", "schedule", "stages", "messages"),
)

State = Mapping[str, Any]


def _segment_names(partition: Partition) -> list[list[str]]:
    """The names of each stage's segments: where the model was cut."""
    return [[piece.name for piece in part.pieces] for part in partition.parts]


def stages_with_graphs(programs: Iterable[StageProgram], schedule: Schedule) -> list[int]:
    """Stages, of all ranks, that hold autograd graphs of micro-batches in flight."""
    return [
        program.index
        for program in programs
        if schedule.outstanding[program.index] and program.keeps_graphs
    ]


class TrainerState:
    """What a trainer saves and loads: the part of its state that is in this process."""

    model: Reversible
    partition: Partition
    programs: tuple[StageProgram, ...]
    settings: Settings
    schedule: Schedule
    executors: list[StageExecutor]
    transport: Transport
    replica: int
    """Which copy of the pipeline this is: it trains on its own part of the data."""
    replicas: int

    @property
    def stage_seed(self) -> int:
        """The seed of the stages' random numbers: copies of the pipeline drop other elements."""
        seed = self.settings.seed
        return mix(seed, self.replica) if self.replica else seed

    def _check_savable(self) -> None:
        """Refuse what no checkpoint can hold. All ranks come to the same result."""
        graphs = stages_with_graphs(self.programs, self.schedule)
        if graphs:
            raise InputError(
                f"trainer.state_dict: stage {graphs[0]} keeps graphs of micro-batches in flight, "
                "which cannot be saved; call trainer.flush() first, or "
                "trainer.save(folder, drain=True)"
            )

    def _state(self, weights: Mapping[str, Any], copy: TreeCopy) -> dict[str, Any]:
        """The states of this process's stages; `weights` are entries of the model's state dict."""
        optimizers = [executor.updater.state_dict(copy) for executor in self.executors]
        return {
            "format": _FORMAT,
            "cuts": _segment_names(self.partition),
            "seed": self.settings.seed,
            "replicas": self.replicas,
            "model": copy(dict(weights)),
            "optimizer": {name: s for o in optimizers for name, s in o["state"].items()},
            "groups": [group for o in optimizers for group in o["groups"]],
            "lr_schedules": [o["lr_schedule"] for o in optimizers],
            "schedule": self.schedule.state(),
            "stages": [executor.state_dict(copy) for executor in self.executors],
            "messages": self.transport.state_dict(copy),
        }

    def _check_fits(self, state: Mapping[str, Any]) -> None:
        """Refuse a state that this trainer cannot continue from; nothing is changed."""
        with well_formed("what trainer.state_dict() returns"):
            updaters = (executor.updater for executor in self.executors)
            if problems := list(_mismatches(state, self.model, updaters)):
                raise InputError(
                    "trainer.load_state_dict: the state does not fit this trainer: "
                    f"{first_few(problems)}"
                )
            same = _is_same_pipeline(state, self.partition, self.programs, self.schedule)
            _check_in_flight(state, same, self.schedule, self.replicas)

    @well_formed("what trainer.state_dict() returns")
    def _load_state(self, state: Mapping[str, Any]) -> None:
        """Load a state that fits."""
        same = _is_same_pipeline(state, self.partition, self.programs, self.schedule)
        saved = Schedule.load(state["schedule"])
        self.schedule = saved if same else _continue_counting(self.schedule, saved)
        self.settings = replace(self.settings, seed=state["seed"])
        _load_model(self.model, state["model"])
        _load_updaters(self.executors, state, same)
        self.transport.load_state_dict(state["messages"] if same else ())
        weights = dict(self.model.named_parameters())
        for executor in self.executors:
            executor.reset(self.stage_seed, weights)
            # As the last update has left it: captured steps hold it fixed.
            executor.set_delay(self.schedule.updates[executor.index] - 1)
            if same:
                executor.load_state_dict(state["stages"][executor.index])
        if not same:
            _load_scaling(self.executors, state)


# -- does a state fit? ----------------------------------------------------------------------------


def _mismatches(state: State, model: nn.Module, updaters: Iterable[Updater]) -> Iterator[str]:
    """Why it is no trainer's state, or that of another model or optimizer."""
    if not isinstance(state, Mapping) or state.get("format") != _FORMAT:
        got = state.get("format") if isinstance(state, Mapping) else type(state).__name__
        yield f"expected what trainer.state_dict() returns (format {_FORMAT}), got {got!r}"
        return
    missing = [key for key in _ENTRIES if key not in state]
    if missing:
        yield f"it lacks the entry {missing[0]!r}; load what trainer.state_dict() returned as it is"
        return
    yield from model_mismatches(model, state["model"])
    settings = _group_settings(state)
    for updater in updaters:
        yield from updater.misfits(settings)


def _is_same_pipeline(
    state: State, partition: Partition, programs: Sequence[StageProgram], schedule: Schedule
) -> bool:
    """Were the same stages saved, with the same method and the same needs in flight?"""
    here, saved = schedule.state(), state["schedule"]
    if _segment_names(partition) != [list(names) for names in state["cuts"]]:
        return False
    if any(here[key] != saved[key] for key in ("method", "accumulate", "ties")):
        return False
    updates = min(progress["updates"] for progress in saved["progress"])
    starts = here["synchronous"], saved.get("synchronous", 0)
    if starts[0] != starts[1] and updates < max(starts):
        return False
    needed = [program.needed_in_flight for program in programs]
    pairs = zip(needed, state["stages"], strict=True)
    return all(names == list(stage.get("needs", names)) for names, stage in pairs)


def _check_in_flight(state: State, same: bool, schedule: Schedule, replicas: int) -> None:
    """Refuse micro-batches in flight of another pipeline: only an empty one can be cut anew."""
    saved, saved_replicas = Schedule.load(state["schedule"]), state.get("replicas", 1)
    if not saved.idle and not (same and saved_replicas == replicas):
        raise InputError(
            f"trainer.load_state_dict: the state holds micro-batches in flight or gradients not "
            f"applied yet in {_described(saved, saved_replicas)}, but this trainer has "
            f"{_described(schedule, replicas)}, cut or scheduled otherwise, or with "
            "another budget of memory. To move between them call flush() before state_dict(), or "
            "trainer.save(folder, drain=True); if the run that saved it is over, load it into a "
            "trainer like that one (one process will do) and save it from there with drain=True"
        )


def _described(schedule: Schedule, replicas: int) -> str:
    weights = f"weights={schedule.method.weights.value!r}"
    method = f"{schedule.method.name}, {weights}, accumulate={schedule.accumulate}"
    several = f", {replicas} copies of the pipeline" if replicas > 1 else ""
    return f"{schedule.stages} stages ({method}{several})"


# -- loading --------------------------------------------------------------------------------------


def _load_model(model: nn.Module, saved: Mapping[str, Any]) -> None:
    """Copy saved weights into those tensors that are in this process."""
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if not isinstance(value, Tensor):  # from a module's get_extra_state
                owner = model.get_submodule(name.rpartition(".")[0])
                owner.set_extra_state(clone_tree(saved[name]))
            elif not value.is_meta:  # on the meta device: another rank's
                value.copy_(saved[name])


def _load_updaters(executors: Iterable[StageExecutor], state: State, same: bool) -> None:
    """Optimizers by parameter name; after a new cut, every schedule continues as the first."""
    schedules = dict(enumerate(state["lr_schedules"]))
    first = next((saved for saved in schedules.values() if saved is not None), None)
    settings = _group_settings(state)
    for executor in executors:
        schedule = schedules[executor.index] if same else first
        executor.updater.load_state_dict(state["optimizer"], settings, schedule)


def _load_scaling(executors: Iterable[StageExecutor], state: State) -> None:
    """After a new cut: the last stage takes over the scale and what was still to be reported."""
    saved = [stage["scaling"] for stage in state["stages"] if stage.get("scaling") is not None]
    for executor in executors:
        if saved and executor.scaling is not None and executor.loss_head is not None:
            overflow = min(scaling["overflow"] for scaling in saved)
            executor.scaling.load_state_dict(saved[-1] | {"overflow": overflow})


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
    return {name: group for group in state["groups"] for name in group["params"]}
