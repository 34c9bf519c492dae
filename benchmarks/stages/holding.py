"""What the stages of a trainer hold: bytes by kind, and the peak of each stage's actions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from benchmarks.harness import LiveStorages
from revcompile.ir.program import StageMemory
from revcompile.runtime.executor.executor import StageExecutor
from revcompile.runtime.executor.messages import Message, Transport
from revcompile.runtime.stage.stage import InFlight, Stage
from revcompile.runtime.stage.weights import at_versions
from revcompile.runtime.trainer.trainer import Trainer
from revcompile.schedule import Action

__all__ = ["Bytes", "CpuMeter", "CudaMeter", "Meter", "Watch", "held_by", "saved_by"]


class Meter(Protocol):
    """Counts allocated bytes."""

    def now(self) -> int:
        """Bytes allocated at this moment."""
        ...

    def peak(self) -> int:
        """The most since the last reset."""
        ...

    def reset(self) -> None:
        """Count the peak anew."""
        ...


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
    """Asks torch's allocator."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def now(self) -> int:
        """Bytes allocated."""
        return torch.cuda.memory_allocated(self.device)

    def peak(self) -> int:
        """The most since the last reset."""
        return torch.cuda.max_memory_allocated(self.device)

    def reset(self) -> None:
        """Count the peak anew."""
        torch.cuda.reset_peak_memory_stats(self.device)


class Bytes:
    """Adds storages up, each once however many tensors and kinds it belongs to."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def of(self, values: Any) -> int:
        """Bytes of what was not counted before; graphs count with all they saved."""
        total = 0
        for tensor in saved_by(values):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._seen:
                self._seen.add(storage._cdata)
                total += storage.nbytes()
        return total


def saved_by(values: Any) -> Iterator[Tensor]:
    """All tensors, and what the graphs behind them hold."""
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


def held_by(executor: StageExecutor, transport: Transport) -> StageMemory:
    """What a stage holds at this moment. Messages belong to the stage they are sent to."""
    stage, count = executor.stage, Bytes()
    own = count.of(stage.parameters)
    count.of(dict(stage.root.named_buffers()))
    optimizer = executor.updater.optimizer
    state = optimizer.state if optimizer is not None else {}
    flights = stage.in_flight.values()
    return StageMemory(
        parameters=own,
        optimizer=count.of(list(state.values())),
        stashed=count.of(list(map(dict, stage.stashed()))),
        gradients=count.of([stage.gradients, executor.updates.gradients]),
        buffers=sum(_in_flight(stage, flight, count) for flight in flights),
        messages=count.of(list(_mail(executor, transport))),
    )


def _in_flight(stage: Stage, flight: InFlight, count: Bytes) -> int:
    """Of a micro-batch; its graph may refer to parameters that have been updated since."""
    with at_versions(stage._saved_by_reference(), flight.parameter_versions):
        return count.of(list(flight.kept))


def _mail(executor: StageExecutor, transport: Transport) -> Iterator[Any]:
    yield from (dict(values or {}) for values in executor.inputs.values())
    for (_, target, _), queue in transport.queues.items():
        if target == executor.index:
            yield from map(_contents, queue)
    yield from map(_contents, executor.incoming.values())


def _contents(message: Message) -> Any:
    return [dict(message.values), dict(message.gradients)]


class Watch:
    """Looks on while stages perform their actions, and remembers the most each one held."""

    def __init__(self, trainer: Trainer, meter: Meter) -> None:
        self.meter, self.on = meter, False
        self.peaks = [0] * len(trainer.executors)
        self.held = [StageMemory()] * len(trainer.executors)
        self.peak = 0
        self._transport = trainer.transport
        for executor in trainer.executors:
            setattr(executor, "perform", self._watched(executor, executor.perform))  # noqa: B010

    def _watched(
        self, executor: StageExecutor, perform: Callable[[Action], bool]
    ) -> Callable[[Action], bool]:
        def watched(action: Action) -> bool:
            if not self.on:
                return perform(action)
            before = self._look(executor)
            start = self._begin()
            done = perform(action)
            extra = self._end() - start
            self.peaks[executor.index] = max(self.peaks[executor.index], before.total + extra)
            self._look(executor)
            return done

        return watched

    def _look(self, executor: StageExecutor) -> StageMemory:
        now, most = held_by(executor, self._transport), self.held[executor.index]
        names = [field.name for field in fields(StageMemory)]
        largest = {name: max(getattr(now, name), getattr(most, name)) for name in names}
        self.held[executor.index] = StageMemory(**largest)
        return now

    def start(self) -> None:
        """Look from here on."""
        self.meter.reset()
        self.on = True

    def stop(self) -> None:
        """Enough seen."""
        self._end()
        self.on = False

    def _begin(self) -> int:
        self._end()
        return self.meter.now()

    def _end(self) -> int:
        found = self.meter.peak()
        self.peak = max(self.peak, found)
        self.meter.reset()
        return found
