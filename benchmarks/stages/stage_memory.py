"""Does the memory accounting of stages tell the truth? Training in one process, bytes counted.

    python -m benchmarks run stage_memory --model resnet18 --stages 10 --batch 4 --size 64
    python -m benchmarks run stage_memory --device cuda --model resnet50 --stages 18 --batch 64

Each stage is measured as if it had a device of its own: what it holds when an action of its list
begins (parameters, optimizer state, older versions, micro-batches in flight, messages), and how
much more the action takes at its worst moment. The sum is compared with `MemoryModel`, and so is
the most that the whole process holds at any moment. The bar: within 15 %.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

import revcompile
from benchmarks.harness import LiveStorages, mib, show
from benchmarks.models import create
from benchmarks.registry import Benchmark, Row
from benchmarks.stages.holding import Bytes, CpuMeter, CudaMeter, Meter, Watch
from revcompile.compiler.cost import MemoryModel, Workload
from revcompile.ir.program import Partition, StageMemory
from revcompile.ir.types import TensorType
from revcompile.runtime.stage.activations import buffer_bytes
from revcompile.schedule import Method, Weights, choose, window
from revcompile.staged import StagedModel

BAR: Final = 0.15
OPTIMIZERS: Final[dict[str, tuple[Callable[[Any], torch.optim.Optimizer], int]]] = {
    "sgd": (lambda p: torch.optim.SGD(p, lr=1e-4, momentum=0.9), 1),
    "adamw": (lambda p: torch.optim.AdamW(p, lr=1e-5), 2),
}
"""By name: the optimizer, and how many numbers it keeps for a parameter."""
_BUFFERS: Final[dict[str, torch.dtype]] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


@dataclass(frozen=True)
class Setting:
    """What is trained, and how."""

    batch: int
    method: str = "petra"
    order: str | None = None
    optimizer: str = "sgd"
    accumulate: int = 1
    buffers: torch.dtype | None = None

    @property
    def chosen(self) -> Method:
        """The method in its order."""
        return choose(self.method, order=self.order)


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
        setting.accumulate,
        optimizer_copies=OPTIMIZERS[setting.optimizer][1],
        buffer_bytes=buffer_bytes(setting.buffers),
    )
    model = MemoryModel.of(partition, workload)
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
    gathers = setting.accumulate > 1
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
        waiting -= memory.buffers // window(setting.chosen, len(rows), index, setting.accumulate)
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
    stages = accounted(net.partition, setting)
    messages = arriving(net.partition, setting.batch)
    rows = tuple(map(StageRow, stages, messages, watch.held, watch.peaks))
    return Measured(rows, in_one_process(rows, setting), watch.peak - before)


def _trained(
    net: StagedModel,
    setting: Setting,
    batch: Callable[[], tuple[Any, Any]],
    loss: Callable[[Any, Any], Tensor],
    meter: Meter,
) -> Watch:
    optimizer, _ = OPTIMIZERS[setting.optimizer]
    trainer = net.trainer(
        optimizer,
        loss,
        method=setting.method,
        order=setting.order,
        accumulate=setting.accumulate,
        buffers=setting.buffers,
        backend="eager",  # captured steps perform no actions that could be watched
    )
    watch = Watch(trainer, meter)
    # Versions differ from the first update on, which comes when the pipeline is full.
    rounds = 2 if setting.chosen.weights is Weights.STASHED else 1
    for _ in range((rounds * max(trainer.delays) + 2) * setting.accumulate):
        trainer.step(*batch())
    watch.start()
    for _ in range(2 * setting.accumulate):
        trainer.step(*batch())
    watch.stop()
    return watch


# -- the command -----------------------------------------------------------------------------------


def report(title: str, found: Measured) -> None:
    """Print the stages and the process."""
    rows: list[list[object]] = []
    for index, row in enumerate(found.rows):
        lasting = (row.accounted.buffers, row.held.buffers)
        figures = (*lasting, row.expected, row.peak)
        rows.append([index, *map(mib, figures), f"{row.ratio:.3f}"])
    rows.append(["process", "", "", mib(found.accounted), mib(found.peak), f"{found.ratio:.3f}"])
    columns = ("stage", "kept: accounted", "kept: held", "peak: accounted", "peak: measured")
    show(title, (*columns, "ratio"), rows)
    verdict = "meets" if abs(found.ratio - 1) <= BAR else "MISSES"
    print(
        f"the process takes {found.ratio:.3f} of what is accounted ({verdict} the bar of {BAR:.0%})"
        f"; the stage furthest off {found.worst:.3f}\n"
    )


def staged(name: str, stages: int, size: int, device: torch.device) -> StagedModel:
    """A model, cut."""
    model = create(name, size, 1000).to(device)
    example = torch.zeros(2, 3, size, size, device=device)
    return revcompile.petrafy(model, stages, example, check="off")


def images(batch: int, size: int, device: torch.device) -> Callable[[], tuple[Tensor, Tensor]]:
    """A new batch at every call, as a loader gives it."""

    def make() -> tuple[Tensor, Tensor]:
        return (
            torch.randn(batch, 3, size, size, device=device),
            torch.zeros(batch, dtype=torch.long, device=device),
        )

    return make


def allocated(device: torch.device) -> int:
    """What a GPU holds now, the libraries' workspaces included."""
    if device.type != "cuda":
        return 0
    square = torch.ones(64, 64, device=device)
    (square @ square).sum().item()
    del square
    return torch.cuda.memory_allocated(device)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Its options."""
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", default="resnet18", help="a timm model")
    parser.add_argument("--stages", type=int, default=5)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--size", type=int, default=64, help="of the images")
    parser.add_argument("--method", default="petra")
    parser.add_argument("--order", nargs="+", choices=("1f1b", "paper"), help="one run for each")
    parser.add_argument("--optimizer", choices=tuple(OPTIMIZERS), default="sgd")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--buffers", choices=tuple(_BUFFERS))


def main(args: argparse.Namespace) -> Iterator[Row]:
    """Measure and print."""
    device = torch.device(args.device)
    torch.manual_seed(0)
    base = allocated(device)
    net = staged(args.model, args.stages, args.size, device)
    for order in args.order or [None]:
        how = (args.batch, args.method, order, args.optimizer, args.accumulate)
        setting = Setting(*how, _BUFFERS.get(args.buffers))
        found = measure(net, setting, images(args.batch, args.size, device), base=base)
        gc.collect()
        name = f"{args.method}, {order}" if order else args.method
        title = f"{args.model}, {args.stages} stages, batch {args.batch}, {name}, {args.optimizer}"
        title += f", buffers {args.buffers}" if args.buffers else ""
        report(f"{title}, {device}", found)
        yield {"title": title, "measured": found, "ratio": found.ratio, "worst": found.worst}


SMALLEST = ("--model", "conv-2x4", "--size", "8", "--stages", "2", "--batch", "2")
BENCHMARK = Benchmark("stage_memory", arguments, main, smallest=SMALLEST)
