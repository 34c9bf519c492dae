"""What stages hold while they train in one process, beside what the memory model says.

Each stage is measured as if it had a device of its own: what it holds when an action of its list
begins (parameters, optimizer state, older versions, micro-batches in flight, messages), and how
much more the action takes at its worst moment.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from revcompile import TrainerOptions
from revcompile.compiler.cost import MemoryModel, Workload
from revcompile.ir.program import Partition, StageMemory
from revcompile.ir.types import TensorType
from revcompile.runtime.executor.executor import StageExecutor
from revcompile.runtime.executor.messages import Message, Transport
from revcompile.runtime.stage.activations import InFlight, buffer_bytes
from revcompile.runtime.stage.stage import Stage
from revcompile.runtime.stage.weights import at_versions
from revcompile.runtime.trainer.trainer import Trainer
from revcompile.schedule import Action, Method, Weights, choose, window
from revcompile.staged import StagedModel
from tests.support.measuring import LiveStorages

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
    in_flight_per_stage: float | None = None
    optimizer: str = "sgd"
    accumulation_steps: int = 1
    buffers: torch.dtype | None = None

    @property
    def chosen(self) -> Method:
        """The method in its order."""
        return choose(self.method, in_flight_per_stage=self.in_flight_per_stage)


@dataclass(frozen=True)
class StageRow:
    """One stage: what the accounting says, the most it held of each kind, and its real peak."""

    accounted: StageMemory
    arriving: int
    """Of the accounted messages, the forward one: in one process none is on its way in backward."""
    held: StageMemory
    peak: int

    @property
    def expected(self) -> int:
        """The accounted peak of a backward pass in one process."""
        return self.accounted.total - self.arriving

    @property
    def ratio(self) -> float:
        """Measured by accounted."""
        return self.peak / self.expected


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
    workload = Workload(
        setting.chosen,
        setting.batch,
        setting.accumulation_steps,
        optimizer_copies=OPTIMIZERS[setting.optimizer][1],
        buffer_bytes=buffer_bytes(setting.buffers),
    )
    model = MemoryModel(partition, workload)
    return tuple(model.stage(j, *ends) for j, ends in enumerate(partition.ranges))


def arriving(partition: Partition, batch: int) -> tuple[int, ...]:
    """The size of the forward message to every stage; the first gets none."""
    names = [part.inputs if part.index else () for part in partition.parts]
    return tuple(sum(_size(partition.types.get(n), batch) for n in some) for some in names)


def in_one_process(rows: Sequence[StageRow], setting: Setting) -> int:
    """The stages' memory where they take turns: the largest moment of the backward passes.

    They run from the last stage to the first. A stage that is done has one micro-batch less in
    flight and has updated, so that its gradients are there only if they accumulate.
    """
    gathers = setting.accumulation_steps > 1
    lasting = waiting = most = 0
    for row in rows:
        memory = row.accounted
        lasting += memory.parameters + memory.optimizer + memory.stashed + memory.waiting
        lasting += memory.newest
        lasting += memory.gradients if gathers else 0
        waiting += memory.buffers
    for index, row in reversed(list(enumerate(rows))):
        memory, message = row.accounted, row.accounted.messages - row.arriving
        work = memory.working + memory.between + memory.summing
        work += 0 if gathers else memory.gradients
        most = max(most, lasting + waiting + message + work)
        waiting -= memory.buffers // window(
            setting.chosen, len(rows), index, setting.accumulation_steps
        )
    return most


def _size(kind: Any, batch: int) -> int:
    if not isinstance(kind, TensorType):
        return 0
    return torch.Size(kind.at(batch)).numel() * kind.dtype.itemsize


# -- measuring -------------------------------------------------------------------------------------


def measure(
    net: StagedModel,
    setting: Setting,
    batch: Callable[[], tuple[Any, Any]],
    loss: Callable[[Any, Any], Tensor] = nn.functional.cross_entropy,
    base: int = 0,
) -> Measured:
    """Train until the pipeline is full, then watch every stage through two updates.

    `batch` makes inputs and target; on a GPU, `base` is what was allocated before the model.
    """
    device = next(net.model.parameters()).device
    mode: AbstractContextManager[Any] = nullcontext()
    meter: Meter
    if device.type == "cuda":
        meter, before = CudaMeter(device), base
    else:
        mode = storages = LiveStorages()
        meter, before = CpuMeter(storages), -Bytes().of(net.model.state_dict())
    with mode:
        watch = _trained(net, setting, batch, loss, meter)
    stages = accounted(net._partition, setting)
    messages = arriving(net._partition, setting.batch)
    rows = tuple(map(StageRow, stages, messages, watch.held, watch.peaks))
    return Measured(rows, in_one_process(rows, setting), watch.peak - before)


def _trained(
    net: StagedModel,
    setting: Setting,
    batch: Callable[[], tuple[Any, Any]],
    loss: Callable[[Any, Any], Tensor],
    meter: "Meter",
) -> "Watch":
    optimizer, _ = OPTIMIZERS[setting.optimizer]
    trainer = net.trainer(
        optimizer,
        loss,
        method=setting.method,
        accumulation_steps=setting.accumulation_steps,
        backend="eager",
        options=TrainerOptions(
            in_flight_per_stage=setting.in_flight_per_stage, kept_input_dtype=setting.buffers
        ),
    )
    watch = Watch(trainer, meter)
    # Versions differ from the first update on, which comes when the pipeline is full.
    rounds = 2 if setting.chosen.weights is Weights.STASHED else 1
    for _ in range((rounds * max(trainer.delays) + 2) * setting.accumulation_steps):
        trainer.step(*batch())
    watch.start()
    for _ in range(2 * setting.accumulation_steps):
        trainer.step(*batch())
    watch.stop()
    return watch


def images(batch: int, size: int, device: torch.device) -> Callable[[], tuple[Tensor, Tensor]]:
    """A new batch at every call, as a loader gives it."""

    def make() -> tuple[Tensor, Tensor]:
        return (
            torch.randn(batch, 3, size, size, device=device),
            torch.zeros(batch, dtype=torch.long, device=device),
        )

    return make


# -- what stages hold ------------------------------------------------------------------------------


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


Meter = CpuMeter | CudaMeter


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
    state = executor.updater.optimizer.state
    flights, stash = stage.in_flight.values(), stage.weights.stash
    copies = [dict(flight.used.copies or {}) for flight in flights]
    return StageMemory(
        parameters=own,
        optimizer=count.of(list(state.values())),
        stashed=count.of([list(map(dict, stash.past)) if stash else [], copies]),
        gradients=count.of([stage.gradients, executor.updates.gradients]),
        buffers=sum(_in_flight(stage, flight, count) for flight in flights),
        messages=count.of(list(_mail(executor, transport))),
    )


def _in_flight(stage: Stage, flight: InFlight, count: Bytes) -> int:
    """Of a micro-batch; its graph may refer to parameters that have been updated since."""
    latest = tuple(stage._saved_by_reference().values())
    with at_versions(latest, flight.parameter_versions):
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
        self.peaks = [0] * len(trainer._executors)
        self.held = [StageMemory()] * len(trainer._executors)
        self.peak = 0
        self._transport = trainer._transport
        for executor in trainer._executors:
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
