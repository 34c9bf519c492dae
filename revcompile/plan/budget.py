"""plan_memory: choose what each stage keeps, within the memory budget of each device.

    keep       memory                                                      work
    nothing    what cannot be rebuilt, and the graph of one block          4N: forward, rebuild, 2N
    input      the stage's inputs, and the whole graph of one micro-batch  4N: forward, again, 2N
    graph      the whole graph of every micro-batch in flight              3N: forward, 2N

What one stage keeps does not affect the others. A stage that has a device for itself takes the
first choice that fits, in order of work. Several stages of a device begin with the least memory;
those that save the most work for a byte are first to take more. Stages of a device take turns, so
only the largest of their transient memories (needed only while they compute) counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch
from torch import Tensor, distributed, nn

from revcompile.compiler.cost import MemoryModel, Workload
from revcompile.errors import InputError
from revcompile.ir.module_tree import device_of_model
from revcompile.ir.program import Partition, StageMemory
from revcompile.runtime.distributed.layout import gather_plain, join, new_group, world_size
from revcompile.runtime.distributed.rank_weights import last_device
from revcompile.runtime.stage.optimizers import OptimizerFactory, ParamGroups
from revcompile.runtime.stage.settings import TrainerOptions
from revcompile.runtime.stage.update import COUNTERS, Updater
from revcompile.schedule import Keep, Method, Order, Weights
from revcompile.units import format_size

_USED: Final = 0.8
"""Share of a device's free memory that "auto" uses; workspaces and fragmentation take some."""
_EVEN: Final = 1.03
"""The largest ratio of a device's work to the mean that counts as balanced."""
_KEEPS: Final = (Keep.NOTHING, Keep.INPUT, Keep.GRAPH)
_KEEP_NAMES: Final = {
    Keep.NOTHING: "nothing but what cannot be rebuilt",
    Keep.INPUT: "its input",
    Keep.GRAPH: "its graph",
}


@dataclass(frozen=True)
class Choice:
    """One choice of what a stage keeps, with its peak memory and its work for a micro-batch."""

    stage: int
    keep: Keep
    memory: StageMemory
    work: float


@dataclass(frozen=True)
class MemoryPlan:
    """What every stage keeps under a memory budget.

    `print(plan)` shows it; `plan.keeps` has the choices, `plan.memory(device)` the estimate.
    """

    memory_budget: int
    """Bytes per device."""
    microbatch_size: int
    """Samples per micro-batch."""
    stage_to_rank: tuple[int, ...]
    """The device of each stage."""
    chosen: tuple[Choice, ...]
    peaks: tuple[int, ...]
    """Peak memory of each device, in bytes."""
    full_work: float
    """All stages' work if backward computed every forward pass again."""
    balanced_for: tuple[Keep, ...]
    """What each stage was expected to keep when the model was cut."""

    @property
    def keeps(self) -> tuple[Keep, ...]:
        """What each stage keeps."""
        return tuple(choice.keep for choice in self.chosen)

    @property
    def work(self) -> float:
        """All stages' work for a micro-batch, in the unit of the costs."""
        return math.fsum(choice.work for choice in self.chosen)

    @property
    def balance(self) -> float:
        """The largest device's work, divided by the mean of all devices."""
        works = [
            math.fsum(c.work for c in self.chosen if self.stage_to_rank[c.stage] == device)
            for device in sorted(set(self.stage_to_rank))
        ]
        return max(works) * len(works) / (math.fsum(works) or 1.0)

    def memory(self, device: int) -> int:
        """Peak memory of a device, in bytes."""
        return self.peaks[device]

    def __str__(self) -> str:
        budget = format_size(self.memory_budget)
        lines = [f"at most {budget} a device, micro-batches of {self.microbatch_size}"]
        for choice, device in zip(self.chosen, self.stage_to_rank, strict=True):
            lines.append(
                f"stage {choice.stage} (device {device}) keeps {_KEEP_NAMES[choice.keep]}: "
                f"{format_size(choice.memory.total)}, {100 * choice.work / self.full_work:.1f} % "
                "of the work of keeping nothing"
            )
        held = ", ".join(f"device {i} {format_size(peak)}" for i, peak in enumerate(self.peaks))
        lines.append(f"in all {100 * self.work / self.full_work:.1f} %; {held}")
        if self.balance > _EVEN and self.keeps[:-1] != self.balanced_for[:-1]:
            names = [keep.value for keep in self.keeps]
            lines.append(
                f"the largest device has {self.balance:.2f}x the mean work; petrafy(..., "
                f"keep={names[0] if len({*names}) == 1 else names!r}) balances for this plan"
            )
        return "\n".join(lines)


def plan_memory(
    partition: Partition,
    memory_budget: int,
    workload: Workload,
    stage_to_rank: Sequence[int] | None = None,
    keeps: Sequence[Keep] | None = None,
) -> MemoryPlan:
    """Choose what each stage keeps, so that the work is little and the budget holds.

    Args:
        partition: The stages.
        memory_budget: Bytes that one device may hold.
        workload: Batch size, method, optimizer and precision.
        stage_to_rank: The device of each stage. Default: one device per stage.
        keeps: What the stages keep, if that is decided; then the budget is only checked.

    Raises:
        InputError: Some device cannot hold its stages.
    """
    devices = tuple(range(len(partition.parts)) if stage_to_rank is None else stage_to_rank)
    options = choices(partition, workload, keeps)
    by_stage: dict[int, Choice] = {}
    peaks = []
    for number in sorted(set(devices)):
        own = [of for of, device in zip(options, devices, strict=True) if device == number]
        device = _Device(own, workload, is_only=len(own) == len(devices))
        chosen = device.chosen(memory_budget)
        peaks.append(device.peak([choice.memory for choice in chosen]))
        if peaks[-1] > memory_budget:
            raise _too_small(memory_budget, number, peaks[-1], chosen, workload)
        by_stage |= {choice.stage: choice for choice in chosen}
    recomputed = (work for part in partition.parts for work in partition.works(part, Keep.INPUT))
    return MemoryPlan(
        memory_budget,
        workload.microbatch_size,
        devices,
        tuple(by_stage[stage] for stage in range(len(devices))),
        tuple(peaks),
        math.fsum(recomputed) or 1.0,
        partition.keeps,
    )


def free_memory(
    model: nn.Module, device: torch.device | None, timeout: float = TrainerOptions.timeout
) -> int:
    """`memory_budget="auto"`: bytes that a device has free for this model, less a margin.

    With several ranks, the least of all: what a stage keeps decides what its neighbours send.

    Args:
        device: Where to train. Default: where the model is.
        timeout: Seconds within which all ranks must call it.

    Raises:
        InputError: A device does not report its memory.
    """
    limit, reports = timedelta(seconds=timeout), list[Any]()
    if (world := world_size()) > 1:
        device = join(model, device or last_device(model), limit)
        group = new_group(range(world), "gloo", limit)
        reports = gather_plain(_report(model, device), group)
        distributed.destroy_process_group(group)
    else:
        reports = [_report(model, device or device_of_model(model))]
    devices = [report and report[0] for report in reports]
    if None in devices:
        raise InputError(
            'memory_budget="auto": the device does not report its memory, as CUDA devices do; give '
            'a size like memory_budget="8GiB"'
        )
    # Ranks may share a device.
    least = min(free // devices.count(device) for device, free in reports)
    return int(_USED * least)


def _report(model: nn.Module, device: torch.device) -> tuple[str, int] | None:
    """The device's UUID, and its free bytes, including those that the model's tensors occupy."""
    if device.type != "cuda":
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    own = {id(t): t for t in (*model.parameters(), *model.buffers()) if t.is_cuda}
    cached = torch.cuda.memory_reserved(index) - torch.cuda.memory_allocated(index)
    held = sum(t.nbytes for t in own.values() if t.get_device() == index)
    free = torch.cuda.mem_get_info(index)[0] + cached + held
    return str(torch.cuda.get_device_properties(index).uuid), free


def decides(method: Method) -> bool:
    """Whether the method says what stages keep: its backward needs that, or other weights."""
    return method.keep is not Keep.NOTHING or method.weights is not Weights.LATEST


def choices(
    partition: Partition, workload: Workload, keeps: Sequence[Keep] | None = None
) -> tuple[tuple[Choice, ...], ...]:
    """The choices of each stage, with the memory and work of each."""
    model, method = MemoryModel(partition, workload), workload.method
    if keeps is None and decides(method):
        keeps = [method.keep] * len(partition.parts)
    return tuple(
        tuple(
            Choice(
                part.index,
                keep,
                model.stage(part.index, *pieces, keep),
                math.fsum(partition.works(part, keep)),
            )
            for keep in (_KEEPS if keeps is None else (keeps[part.index],))
        )
        for part, pieces in zip(partition.parts, partition.ranges, strict=True)
    )


# -- one device -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Device:
    """The stages of one device with their choices."""

    options: Sequence[Sequence[Choice]]
    workload: Workload
    is_only: bool
    """Whether no other device has stages; messages then stay within this process."""

    def split(self, memory: StageMemory) -> tuple[int, int]:
        """Bytes that a stage holds all the time, and bytes that it holds only while it computes.

        Gradients that are not summed are freed once applied. Messages from other devices may arrive
        at any time.
        """
        method = self.workload.method
        sums_gradients = (
            self.workload.accumulation_steps > 1 or method.order is not Order.CONTINUOUS
        )
        transient = memory.working + memory.between + memory.summing
        transient += 0 if sums_gradients else memory.gradients
        transient += memory.messages if self.is_only else 0
        return memory.total - transient, transient

    def peak(self, memories: Sequence[StageMemory]) -> int:
        """The most the device holds: stages take turns, so only one is computing."""
        split = [self.split(memory) for memory in memories]
        return sum(lasting for lasting, _ in split) + max(transient for _, transient in split)

    def chosen(self, budget: int) -> list[Choice]:
        """What each stage keeps within the budget; the least of each if that is too much."""
        chosen = [min(of, key=lambda choice: choice.memory.total) for of in self.options]

        def by_gain(index: int) -> float:
            """Bytes for each unit of work that keeping the graph saves."""
            least, most = chosen[index], max(self.options[index], key=lambda c: c.memory.total)
            saved = least.work - most.work
            return (most.memory.total - least.memory.total) / saved if saved else math.inf

        for index in sorted(range(len(chosen)), key=by_gain):
            for choice in sorted(self.options[index], key=lambda c: (c.work, c.memory.total)):
                plan = [*chosen[:index], choice, *chosen[index + 1 :]]
                if self.peak([each.memory for each in plan]) <= budget:
                    chosen = plan
                    break
        return chosen


def _too_small(
    memory_budget: int, number: int, need: int, least: Sequence[Choice], workload: Workload
) -> InputError:
    """Why the smallest plan does not fit: the largest stage, what it needs, and what to do."""
    largest = max(least, key=lambda choice: choice.memory.total)
    memory, count = largest.memory, len(least)
    stages = f"its {count} stages" if count > 1 else f"stage {largest.stage}"
    owned = memory.parameters + memory.gradients + memory.optimizer
    return InputError(
        f"memory_budget={memory_budget}: at {workload.microbatch_size} samples per "
        f"micro-batch device {number} needs {format_size(need)} ({need} bytes) for {stages} with "
        f"as little kept as possible, but has {format_size(memory_budget)}. Stage {largest.stage} "
        f"needs the most, {format_size(memory.total)}: {format_size(owned)} for parameters, "
        f"gradients and optimizer, {format_size(memory.buffers)} for micro-batches in flight, "
        f"{format_size(memory.working)} while it computes. Use smaller micro-batches "
        "(microbatch_size=), more stages or devices, or kept_input_dtype=torch.bfloat16"
    )


def state_copies(
    parameters: Mapping[str, Tensor],
    factory: OptimizerFactory,
    groups: ParamGroups | None,
    delay: float = 0.0,
) -> float:
    """Bytes of optimizer state per byte of parameters.

    Measured by one step on small parameters with the same names. No dimension is larger than 24,
    which can be split as optimizers split fused matrices. Only state with the shape of its
    parameter counts. Some optimizers have more state under a delay.

    >>> weights = {"weight": torch.zeros(300, 200, requires_grad=True)}
    >>> state_copies(weights, lambda p: torch.optim.SGD(p, lr=0.1), None)
    0.0
    >>> state_copies(weights, lambda p: torch.optim.AdamW(p), None)
    2.0
    """
    small = {
        name: nn.Parameter(torch.zeros([min(size, 24) for size in p.shape], dtype=p.dtype))
        for name, p in parameters.items()
        if p.requires_grad
    }
    updater = Updater("memory_budget=", small, factory, groups=groups, delay=delay)
    updater.apply({name: torch.zeros_like(p) for name, p in small.items()})
    state = updater.optimizer.state
    state_bytes = parameter_bytes = 0
    for name, parameter in small.items():
        size = parameters[name].numel()
        alike = [
            value
            for key, value in state.get(parameter, {}).items()
            if isinstance(value, Tensor) and value.shape == parameter.shape and key not in COUNTERS
        ]
        state_bytes += size * sum(value.element_size() for value in alike)
        parameter_bytes += size * parameter.element_size()
    return state_bytes / parameter_bytes if parameter_bytes else 0.0
