"""A trainer's state as plain values and tensors, by the original parameter names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from revcompile.errors import InputError
from revcompile.ir.program import StageProgram
from revcompile.ir.stage_ops import mix
from revcompile.runtime.executor.stage_executor import StageExecutor
from revcompile.runtime.executor.transport import Message, MessageKind
from revcompile.runtime.reversible.replay import Snapshot
from revcompile.runtime.stage.loss_scale import Scaling
from revcompile.runtime.stage.stage import InFlight, Stage
from revcompile.runtime.stage.strides import clone_preserving_strides
from revcompile.schedule import Keep, Schedule

if TYPE_CHECKING:
    from revcompile.runtime.trainer.trainer import Trainer

__all__ = [
    "check_fits",
    "check_savable",
    "load_trainer",
    "model_misfits",
    "referenced",
    "save_trainer",
    "share",
    "stages_with_graphs",
    "summed_up",
]

FORMAT = 1
_ENTRIES: Final = (
    *("cuts", "seed", "model", "optimizer", "groups"),
    *("lr_schedules", "schedule", "stages", "messages"),
)


Copy = Callable[[Any], Any]
"""From nested values to the same with other tensors."""


def save_trainer(trainer: Trainer, copy: Copy | None = None) -> dict[str, Any]:
    """Everything there is, as copies: nothing in it changes when training goes on.

    `copy` may do less, for somebody who is done with the state before training goes on.
    """
    copy = copy or _copied
    check_savable(trainer)
    return share(trainer, trainer.model.state_dict(), trainer.transport.queues, copy)


def check_savable(trainer: Trainer) -> None:
    """Refuse what no checkpoint can hold. All ranks come to the same result."""
    graphs = stages_with_graphs(trainer)
    if graphs:
        raise InputError(
            f"trainer.state_dict: stage {graphs[0]} keeps graphs of micro-batches in flight, which "
            "cannot be saved; call trainer.flush() first, or trainer.save(folder, drain=True)"
        )


def stages_with_graphs(trainer: Trainer) -> list[int]:
    """The stages, of all ranks, that have graphs of micro-batches in flight now."""
    outstanding = trainer.schedule.outstanding
    return [
        program.index
        for program in trainer.programs
        if outstanding[program.index] and any(unit.keep is Keep.GRAPH for unit in program.units)
    ]


Queues = Mapping[tuple[int, int, MessageKind], Iterable[Message]]


def share(trainer: Trainer, model: Mapping[str, Any], queues: Queues, copy: Copy) -> dict[str, Any]:
    """What the stages of this process hold, with the entries of the model that go with them."""
    optimizers = [executor.updater.state(copy) for executor in trainer.executors]
    return {
        "format": FORMAT,
        "cuts": _cuts(trainer),
        "seed": trainer.settings.seed,
        "replicas": trainer.replicas,
        "model": copy(dict(model)),
        "optimizer": {name: s for o in optimizers for name, s in o["state"].items()},
        "groups": [group for o in optimizers for group in o["groups"]],
        "lr_schedules": [o["lr_schedule"] for o in optimizers],
        "schedule": trainer.schedule.state(),
        "stages": [_executor_state(executor, queues, copy) for executor in trainer.executors],
        "messages": [
            [source, target, channel.value, _message_state(message, copy)]
            for (source, target, channel), queue in queues.items()
            for message in queue
        ],
    }


def load_trainer(trainer: Trainer, state: Mapping[str, Any]) -> None:
    """Take a state over. Checked first: a state that does not fit changes nothing."""
    check_fits(trainer, state)
    same, schedule = _same(trainer, state), Schedule.load(state["schedule"])
    _load_model(trainer.model, state["model"])
    _load_updaters(trainer, state, same)
    _clear(trainer, state["seed"])
    if same:
        trainer.schedule = schedule
        for executor in trainer.executors:
            _load_executor(executor, state["stages"][executor.index])
        for source, target, channel, message in state["messages"]:
            trainer.transport.deliver(source, target, MessageKind(channel), _message(message))
    else:
        trainer.schedule = _moved(trainer.schedule, schedule)
    _load_scalings(trainer, state, same)


def check_fits(trainer: Trainer, state: Mapping[str, Any]) -> None:
    """Refuse a state that this trainer cannot go on from; nothing is changed."""
    problems = list(_misfits(trainer, state))
    if problems:
        raise InputError(
            f"trainer.load_state_dict: the state does not fit this trainer: {summed_up(problems)}"
        )
    schedule, copies = Schedule.load(state["schedule"]), state.get("replicas", 1)
    if not schedule.idle and not (_same(trainer, state) and copies == trainer.replicas):
        raise InputError(
            f"trainer.load_state_dict: the state holds micro-batches in flight or gradients not "
            f"applied yet in {_said(schedule, copies)}, but this trainer has "
            f"{_said(trainer.schedule, trainer.replicas)}, cut or scheduled otherwise, or with "
            "another budget of memory. To move between them call flush() before state_dict(), or "
            "trainer.save(folder, drain=True); if the run that saved it is over, load it into a "
            "trainer like that one (one process will do) and save it from there with drain=True"
        )


def _load_model(model: nn.Module, saved: Mapping[str, Any]) -> None:
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if not isinstance(value, Tensor):  # what a module's get_extra_state has given
                owner = model.get_submodule(name.rpartition(".")[0])
                owner.set_extra_state(_copied(saved[name]))
            elif not value.is_meta:  # those are other ranks'
                value.copy_(saved[name])


def _said(schedule: Schedule, copies: int) -> str:
    method = f"{schedule.method.name}, accumulate={schedule.accumulate}"
    several = f", {copies} copies of the pipeline" if copies > 1 else ""
    return f"{schedule.stages} stages ({method}{several})"


def _misfits(trainer: Trainer, state: Mapping[str, Any]) -> Iterator[str]:
    """Why a state cannot be loaded."""
    if not isinstance(state, Mapping) or state.get("format") != FORMAT:
        got = state.get("format") if isinstance(state, Mapping) else type(state).__name__
        yield f"expected what trainer.state_dict() returns (format {FORMAT}), got {got!r}"
        return
    missing = [key for key in _ENTRIES if key not in state]
    if missing:
        yield f"it lacks the entry {missing[0]!r}; load what trainer.state_dict() returned as it is"
        return
    yield from model_misfits(trainer.model, state["model"])
    settings = _settings(state)
    for executor in trainer.executors:
        yield from executor.updater.misfits(settings)


def model_misfits(model: nn.Module, found: Mapping[str, Tensor]) -> Iterator[str]:
    """Where a state dict and a model differ in names or shapes."""
    mine = model.state_dict()
    yield from (f"it lacks {name}" for name in mine if name not in found)
    yield from (f"the model has no {name}" for name in found if name not in mine)
    for name in (name for name in mine if name in found and isinstance(mine[name], Tensor)):
        have, got = tuple(mine[name].shape), tuple(getattr(found[name], "shape", ()))
        if have != got:
            yield f"{name} has shape {got} in it, {have} here"


def summed_up(problems: Sequence[str], limit: int = 3) -> str:
    """The first few, and how many more there are."""
    more = len(problems) - limit
    return "; ".join(problems[:limit]) + (f"; and {more} more" if more > 0 else "")


def _same(trainer: Trainer, state: Mapping[str, Any]) -> bool:
    mine, found = trainer.schedule.state(), state["schedule"]
    is_same_cut = _cuts(trainer) == [list(cut) for cut in state["cuts"]]
    return is_same_cut and _method(mine) == _method(found) and _keeps_the_same(trainer, state)


def _keeps_the_same(trainer: Trainer, state: Mapping[str, Any]) -> bool:
    """Do stages need of a micro-batch in flight what was saved, under another budget maybe?"""
    pairs = zip(map(_needs, trainer.programs), state["stages"], strict=True)
    return all(needs == list(saved.get("needs", needs)) for needs, saved in pairs)


def _needs(program: StageProgram) -> list[str]:
    return [*program.kept, *program.needs_back]


def _settings(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: group for group in state["groups"] for name in group["params"]}


def _load_updaters(trainer: Trainer, state: Mapping[str, Any], same: bool) -> None:
    """By parameter name; with other cuts every stage is where the first one was."""
    schedules = state["lr_schedules"]
    if not same:
        first = next((found for found in schedules if found is not None), None)
        schedules = [first] * len(trainer.programs)
    for executor in trainer.executors:
        executor.updater.load(state["optimizer"], _settings(state), schedules[executor.index])


def _load_scalings(trainer: Trainer, state: Mapping[str, Any], same: bool) -> None:
    """Each stage's; with other cuts the last stage has the scale, and hears what all had to tell.

    A run that has not scaled its loss before begins to, if this one does; a scale that was given as
    a number is that number.
    """
    saved = [found for stage in state["stages"] if (found := stage.get("scaling")) is not None]
    for executor in trainer.executors:
        if executor.scaling is None:
            continue
        how = executor.scaling.how
        executor.scaling = Scaling(how, how.init_scale)
        if saved and how.dynamic and same:
            executor.scaling.load(saved[executor.index])
        elif saved and how.dynamic and executor.objective is not None:
            untold = min(found["overflow"] for found in saved)
            executor.scaling.load(saved[-1] | {"overflow": untold})


def _moved(mine: Schedule, other: Schedule) -> Schedule:
    """An empty schedule that counts on from where another was."""
    plain = Schedule(mine.method, mine.stages, mine.accumulate, mine.ties).state()
    plain["injected"] = other.injected
    for at in plain["progress"]:
        at["updates"] = max(other.updates)
    return Schedule.load(plain)


def _method(schedule: Mapping[str, Any]) -> tuple[Any, ...]:
    return schedule["method"], schedule["accumulate"], schedule["ties"]


def _cuts(trainer: Trainer) -> list[list[str]]:
    return [[piece.name for piece in part.pieces] for part in trainer.partition.parts]


def _clear(trainer: Trainer, seed: int) -> None:
    """Nothing in flight; replicas of tied parameters as the model has them."""
    trainer.transport.clear()
    trainer.settings = replace(trainer.settings, seed=seed)
    own = dict(trainer.model.named_parameters())
    for executor in trainer.executors:
        stage = executor.stage
        stage.seed = mix(trainer.stage_seed, executor.index)
        stage.in_flight.clear()
        stage.gradients = {}
        stage.reconstruction.clear()
        stage.updated()
        for mail in (executor.inputs, executor.outputs, executor.incoming, executor.outgoing):
            mail.clear()
        executor.gradients, executor.contributed, executor.failures = None, 0, []
        with torch.no_grad():
            for name in _replicas(executor):
                stage.parameters[name].copy_(own[name])


def _replicas(executor: StageExecutor) -> list[str]:
    return [name for names in executor.held.values() for name in names]


# -- one stage ------------------------------------------------------------------------------------


def _executor_state(executor: StageExecutor, queues: Queues, copy: Copy) -> dict[str, Any]:
    stage = executor.stage
    replicas: dict[str, Any] = {name: stage.parameters[name] for name in _replicas(executor)}
    for (_, target, channel), queue in queues.items():
        if target == executor.index and channel is MessageKind.TIED_WEIGHT:
            for message in queue:  # arrives before the replica is read again
                replicas |= message.values
    state: dict[str, Any] = {
        "gradients": copy(stage.gradients),
        "contributed": executor.contributed,
        "needs": _needs(executor.program),
        "replicas": copy(replicas),
        "in_flight": [[m, _held_state(stage, held, copy)] for m, held in stage.in_flight.items()],
        "versions": _versions(stage, copy),
        "incoming": [_message_state(message, copy) for message in executor.incoming.values()],
        "outputs": [[m, copy(values and dict(values))] for m, values in executor.outputs.items()],
        "scaling": executor.scaling and executor.scaling.state(),
    }
    if executor.gradient_predictor is not None:
        state["gradient_predictor"] = copy(executor.gradient_predictor.layers.state_dict())
        state["synthesiser_optimizer"] = executor.gradient_predictor.updater.state(copy)
    return state


def _versions(stage: Stage, copy: Copy) -> list[dict[str, Tensor]]:
    """Stashed parameters, each version once, oldest first."""
    found = {id(h.weights): h.weights for h in stage.in_flight.values() if h.weights is not None}
    return [copy(dict(version)) for version in found.values()]


def _held_state(stage: Stage, held: InFlight, copy: Copy) -> dict[str, Any]:
    ids = [id(h.weights) for h in stage.in_flight.values() if h.weights is not None]
    versions = list(dict.fromkeys(ids))
    return {
        "kept": copy(stage.keeper.plain(held.kept)),
        "version": versions.index(id(held.weights)) if held.weights is not None else None,
        "buffers": [[_path(stage, s), copy(s[4])] for s in held.buffers],
    }


def _path(stage: Stage, snapshot: Snapshot) -> str:
    names = {id(module): name for name, module in stage.root.named_modules()}
    return f"{names[id(snapshot[0])]}:{snapshot[1]}"


def _load_executor(executor: StageExecutor, saved: Mapping[str, Any]) -> None:
    stage = executor.stage
    stage.gradients = _copied(dict(saved["gradients"]))
    executor.contributed = saved["contributed"]
    with torch.no_grad():
        for name, value in saved["replicas"].items():
            stage.parameters[name].copy_(value)
    versions = [
        {n: t.clone().requires_grad_(stage.parameters[n].requires_grad) for n, t in version.items()}
        for version in saved["versions"]
    ]
    for microbatch, held in saved["in_flight"]:
        kept = stage.keeper.restored(_copied(list(held["kept"])), stage._device())
        stage.in_flight[microbatch] = InFlight(
            kept=kept,
            weights=versions[held["version"]] if held["version"] is not None else None,
            buffers=[_snapshot(stage, path, copy) for path, copy in held["buffers"]],
            versions=tuple(t._version if isinstance(t, Tensor) else 0 for t in kept),
        )
    executor.incoming = {m["index"]: _message(m) for m in saved["incoming"]}
    executor.outputs = {m: _copied(values) for m, values in saved["outputs"]}
    if executor.gradient_predictor is not None:
        executor.gradient_predictor.layers.load_state_dict(saved["gradient_predictor"])
        found = saved["synthesiser_optimizer"]
        settings = {name: group for group in found["groups"] for name in group["params"]}
        executor.gradient_predictor.updater.load(found["state"], settings, found["lr_schedule"])


def _snapshot(stage: Stage, path: str, copy: Tensor) -> Snapshot:
    owner, _, name = path.rpartition(":")
    module = stage.root.get_submodule(owner)
    buffer = module._buffers[name]
    assert buffer is not None
    return module, name, buffer, buffer._version, copy.clone()


# -- messages -------------------------------------------------------------------------------------


def _message_state(message: Message, copy: Copy) -> dict[str, Any]:
    return {
        "index": message.index,
        "values": copy(dict(message.values)),
        "gradients": copy(dict(message.gradients)),
        "void": message.void,
        "scale": message.scale,
    }


def _message(state: Mapping[str, Any]) -> Message:
    return Message(
        state["index"],
        _copied(dict(state["values"])),
        _copied(dict(state["gradients"])),
        state["void"],
        scale=state.get("scale"),
    )


def _copied(tree: Any) -> Any:
    return pytree.tree_map_only(Tensor, clone_preserving_strides, tree)


def referenced(tree: Any) -> Any:
    """The same tensors, for somebody who only reads them, and soon: costs no memory."""
    return pytree.tree_map_only(Tensor, lambda t: t.detach(), tree)
