"""Does the memory accounting of stages tell the truth? Training in one process, bytes counted.

    python -m benchmarks.stage_memory --model resnet18 --stages 10 --batch 4 --size 64
    python -m benchmarks.stage_memory --device cuda --model resnet50 --stages 18 --batch 64

Each stage is measured as if it had a device of its own: what it holds when an action of its list
begins (parameters, optimizer state, older versions, micro-batches in flight, messages), and how
much more the action takes at its worst moment. The sum is compared with `MemoryModel`, and so is
the most that the whole process holds at any moment. The bar: within 15 %.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import revcompile
from benchmarks.harness import LiveStorages, mib, save, show
from revcompile.compiler.cost import MemoryModel, StageMemory
from revcompile.ir import TensorType
from revcompile.program import Partition
from revcompile.runtime.trainer import Trainer
from revcompile.runtime.transport import InProcess, Message
from revcompile.runtime.worker import Actor
from revcompile.schedule import Action, Method, Op, choose
from revcompile.staged import StagedModel

BAR: Final = 0.15
OPTIMIZERS: Final[dict[str, tuple[Callable[[Any], torch.optim.Optimizer], int]]] = {
    "sgd": (lambda p: torch.optim.SGD(p, lr=1e-4, momentum=0.9), 1),
    "adamw": (lambda p: torch.optim.AdamW(p, lr=1e-5), 2),
}
"""By name: the optimizer, and how many numbers it keeps for a parameter."""


@dataclass(frozen=True)
class Setting:
    """What is trained, and how."""

    batch: int
    method: str = "petra"
    order: str | None = None
    optimizer: str = "sgd"
    accumulate: int = 1

    @property
    def chosen(self) -> Method:
        """The method in its order."""
        return choose(self.method, order=self.order)


@dataclass(frozen=True)
class StageRow:
    """One stage: what the accounting says, the most it held of each kind, and its real peak."""

    accounted: StageMemory
    held: StageMemory
    peak: int

    @property
    def ratio(self) -> float:
        """Measured by accounted."""
        return self.peak / self.accounted.total


@dataclass(frozen=True)
class Measured:
    """All stages, and the process: the sum of what the stages hold with one of them at work."""

    rows: tuple[StageRow, ...]
    accounted: int
    peak: int

    @property
    def ratio(self) -> float:
        """Measured by accounted, for the whole process."""
        return self.peak / self.accounted

    @property
    def worst(self) -> float:
        """The stage's ratio that is furthest from 1."""
        return max((row.ratio for row in self.rows), key=lambda ratio: abs(ratio - 1))


# -- the accounting --------------------------------------------------------------------------------


def accounted(partition: Partition, setting: Setting) -> tuple[StageMemory, ...]:
    """What the accounting says of every stage, as the runtime keeps it."""
    parts = partition.parts
    model = MemoryModel(
        [piece for part in parts for piece in part.pieces],
        partition.types,
        [cost for part in parts for cost in part.costs],
        setting.chosen,
        len(parts),
        batch=setting.batch,
        optimizer_copies=OPTIMIZERS[setting.optimizer][1],
        group=setting.accumulate,
        first_input_free=False,
    )
    found, start = [], 0
    for part in parts:
        end = start + len(part.pieces)
        found.append(model.stage(part.index, start, end))
        start = end
    return tuple(found)


def in_one_process(partition: Partition, stages: Sequence[StageMemory], setting: Setting) -> int:
    """The stages' memory where they take turns.

    One is at work at a time. All forward passes of a round come before the first backward pass,
    so that no forward message is on its way then; and every stage updates after its own backward
    pass, so that gradients of several stages exist only where they accumulate.
    """
    held, at_work = 0, 0
    for part, memory in zip(partition.parts, stages, strict=True):
        arriving = [partition.types.get(name) for name in part.inputs] if part.index else []
        work = memory.working + memory.between
        work += memory.gradients if setting.accumulate == 1 else 0
        held += memory.total - work - sum(_size(kind, setting.batch) for kind in arriving)
        at_work = max(at_work, work)
    return held + at_work


def _size(kind: Any, batch: int) -> int:
    if not isinstance(kind, TensorType):
        return 0
    return torch.Size(kind.at(batch)).numel() * kind.dtype.itemsize


# -- counting --------------------------------------------------------------------------------------


class Meter(Protocol):
    """Bytes allocated now, and the most since it was last reset."""

    def now(self) -> int: ...

    def peak(self) -> int: ...

    def reset(self) -> None: ...


class CpuMeter:
    """Counts storages; runs under a dispatch mode."""

    def __init__(self, mode: LiveStorages) -> None:
        self.mode = mode

    def now(self) -> int:
        """Bytes alive that were made under the mode."""
        return self.mode.live

    def peak(self) -> int:
        """The most since the last reset."""
        return self.mode.peak

    def reset(self) -> None:
        """Count the peak anew."""
        self.mode.peak = self.mode.live


class CudaMeter:
    """Asks torch's allocator; what was there before does not count."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.before = device, torch.cuda.memory_allocated(device)

    def now(self) -> int:
        """Bytes allocated."""
        return torch.cuda.memory_allocated(self.device) - self.before

    def peak(self) -> int:
        """The most since the last reset."""
        return torch.cuda.max_memory_allocated(self.device) - self.before

    def reset(self) -> None:
        """Count the peak anew."""
        torch.cuda.reset_peak_memory_stats(self.device)


class _Bytes:
    """Adds storages up, each once however many tensors and kinds it belongs to."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def of(self, values: Any) -> int:
        """Bytes of what was not counted before; graphs count with all they saved."""
        total = 0
        for tensor in _tensors(values):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._seen:
                self._seen.add(storage._cdata)
                total += storage.nbytes()
        return total


def _tensors(values: Any) -> Iterator[Tensor]:
    leaves = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]
    yield from leaves
    yield from _saved(leaf.grad_fn for leaf in leaves)


def _saved(functions: Iterable[Any]) -> Iterator[Tensor]:
    """What the graphs behind some tensors hold."""
    todo, seen = [f for f in functions if f is not None], set()
    while todo:
        function = todo.pop()
        if function in seen:
            continue
        seen.add(function)
        todo += [f for f, _ in function.next_functions if f is not None]
        names = [name for name in dir(function) if name.startswith("_saved_")]
        found = [getattr(function, name) for name in names]
        yield from (leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, Tensor))


def held_by(actor: Actor, transport: InProcess) -> StageMemory:
    """What a stage holds at this moment. Messages belong to the stage they are sent to."""
    stage, count = actor.stage, _Bytes()
    own = count.of(stage.parameters)
    count.of(dict(stage.root.named_buffers()))
    optimizer = actor.updater.optimizer
    state = optimizer.state if optimizer is not None else {}
    flights = stage.in_flight.values()
    return StageMemory(
        parameters=own,
        optimizer=count.of([s for s in state.values()]),
        stashed=count.of([dict(flight.weights) for flight in flights if flight.weights]),
        gradients=count.of([stage.gradients, actor.gradients]),
        buffers=count.of([list(flight.kept) for flight in flights]),
        messages=count.of(list(_mail(actor, transport))),
    )


def _mail(actor: Actor, transport: InProcess) -> Iterator[Any]:
    yield from (dict(values) for values in actor.inputs.values())
    for (_, target, _), queue in transport.queues.items():
        if target == actor.index:
            yield from map(_contents, queue)
    yield from map(_contents, actor.incoming.values())


def _contents(message: Message) -> Any:
    return [dict(message.values), dict(message.gradients)]


# -- measuring -------------------------------------------------------------------------------------


class Watch:
    """Looks on while stages perform their actions, and remembers the most each one held."""

    def __init__(self, trainer: Trainer, meter: Meter) -> None:
        self.meter, self.on = meter, False
        self.peaks = [0] * len(trainer.actors)
        self.worst_at: list[str] = [""] * len(trainer.actors)
        self.held = [StageMemory()] * len(trainer.actors)
        self.peak = 0
        self._transport = trainer.transport
        for actor in trainer.actors:
            setattr(actor, "perform", self._watched(actor, actor.perform))  # noqa: B010

    def _watched(self, actor: Actor, perform: Callable[[Action], bool]) -> Callable[[Action], bool]:
        def watched(action: Action) -> bool:
            if not self.on:
                return perform(action)
            self._look(actor)
            before = held_by(actor, self._transport)
            start = self._begin()
            done = perform(action)
            extra = self._end() - start
            if before.total + extra > self.peaks[actor.index]:
                self.peaks[actor.index] = before.total + extra
                self.worst_at[actor.index] = f"{action} {before} + {extra}"
            self._look(actor)
            return done

        return watched

    def _look(self, actor: Actor) -> None:
        now, most = held_by(actor, self._transport), self.held[actor.index]
        names = [field.name for field in fields(StageMemory)]
        largest = {name: max(getattr(now, name), getattr(most, name)) for name in names}
        self.held[actor.index] = StageMemory(**largest)

    def _begin(self) -> int:
        self._end()
        return self.meter.now()

    def _end(self) -> int:
        found = self.meter.peak()
        self.peak = max(self.peak, found)
        self.meter.reset()
        return found


def measure(
    net: StagedModel,
    setting: Setting,
    loss: Callable[[Any, Any], Tensor],
    batch: Callable[[], tuple[Any, Any]],
    device: torch.device,
    base: int = 0,
) -> Measured:
    """Train until the pipeline is full, then watch whole updates of every stage."""
    optimizer, _ = OPTIMIZERS[setting.optimizer]
    mode: AbstractContextManager[Any] = nullcontext()
    meter: Meter
    if device.type == "cuda":
        meter = CudaMeter(device)
        meter.before = base
    else:
        mode = storages = LiveStorages()
        meter = CpuMeter(storages)
        base = -_Bytes().of([*net.model.parameters(), *net.model.buffers()])
    with mode:
        trainer = net.trainer(
            optimizer,
            loss,
            method=setting.method,
            order=setting.order,
            accumulate=setting.accumulate,
            check_finite=False,
        )
        watch = Watch(trainer, meter)
        full = max(trainer.delays) * setting.accumulate + 2 * setting.accumulate
        for _ in range(full):
            trainer.step(*batch())
        watch.on = True
        watch.meter.reset()
        for _ in range(2 * setting.accumulate):
            trainer.step(*batch())
            watch._end()
    print(*watch.worst_at, sep="\n")
    if device.type != "cuda":
        watch.peak -= base
        seen = storages.largest
        print(seen[:12])
    stages = accounted(net.partition, setting)
    rows = tuple(map(StageRow, stages, watch.held, watch.peaks))
    return Measured(rows, in_one_process(net.partition, stages, setting), watch.peak)
