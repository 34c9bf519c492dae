"""When steps can be captured, and what stages store in slots for that."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from revcompile.runtime.executor.executor import StageExecutor
from revcompile.runtime.executor.messages import MessageKind, MessageSlots
from revcompile.runtime.stage.optimizers import why_not_capturable_optimizer
from revcompile.schedule import Keep, Order, Schedule, delay, window
from revcompile.units import format_size

_MOST_KINDS: Final = 16
"""Each position of a step between two updates is captured for itself: at most so many."""


class Backend(enum.Enum):
    """How the steps of a full pipeline are run. All give the same training."""

    AUTO = "auto"
    """The fastest that is known to be safe on the model's device."""
    EAGER = "eager"
    """Action by action."""
    CUDAGRAPHS = "cudagraphs"
    """A whole step as one CUDA graph."""
    INDUCTOR = "inductor"
    """The same, with what surrounds convolutions and matrix products compiled, which takes a
    minute at the start."""
    STATIC = "static"
    """Over the same static buffers as CUDA graphs, but each step is called: for tests and for
    debugging, on any device."""


def why_not_capturable(
    executors: Sequence[StageExecutor], schedule: Schedule, backend: Backend
) -> str | None:
    """Why steps cannot be captured; None if they can."""
    devices = {p.device for executor in executors for p in executor.stage.parameters.values()}
    if backend is not Backend.STATIC and any(device.type != "cuda" for device in devices):
        return "the model is not on a CUDA device; net.trainer(device='cuda') moves it there"
    if len(devices) != 1:
        return f"the model is on {len(devices)} devices; a step is captured on one"
    method = schedule.method
    stages = [executor.index for executor in executors]
    if len(stages) < schedule.stages:
        if method.order is not Order.CONTINUOUS:
            return f"{method.name!r} on several ranks is not captured; use a method like 'petra'"
        if stages != list(range(stages[0], stages[-1] + 1)):
            return f"the stages of a rank must follow each other, but they are {stages}"
        if any(executor.scaling is not None for executor in executors):
            return "the loss is scaled on several ranks; bfloat16 needs no scale"
        if any(tie.owner in stages and tie.holder in stages for tie in schedule.ties):
            return "stages of one of several ranks share parameters; put them on different ranks"
    if method.order not in (Order.CONTINUOUS, Order.LOCKED):
        return f"steps of {method.name!r} differ from each other; use 'petra' or 'backprop'"
    is_stashing = any(e.stage.weights.has_past for e in executors)
    if schedule.ties and schedule.accumulation_steps > 1 and is_stashing:
        return "stashed weights: tied ones change between two updates; use accumulation_steps=1"
    if (count := schedule.accumulation_steps) > _MOST_KINDS:
        return f"accumulation_steps={count}; at most {_MOST_KINDS} kinds of steps are captured"
    for executor in executors:
        count = window(method, schedule.stages, executor.index, schedule.accumulation_steps)
        if count > 1 and executor.program.keeps_graphs:
            is_method = method.keep is Keep.GRAPH
            cause = f"as {method.name!r} does" if is_method else "which its memory budget allows"
            advice = (
                "use 'pipedream' or 'petra_stashed'" if is_method else "leave out memory_budget="
            )
            return (
                f"stage {executor.index} keeps graphs of micro-batches in flight, {cause}; "
                f"{advice} to have steps captured"
            )
        optimizer = executor.updater.optimizer
        if optimizer is not None and (why := why_not_capturable_optimizer(optimizer)):
            return why
    return None


def use_slots(executors: Sequence[StageExecutor], schedule: Schedule) -> None:
    """Have stages and their transport store in slots whatever outlives a step."""
    method, count, accumulation_steps = (
        schedule.method,
        schedule.stages,
        schedule.accumulation_steps,
    )
    windows = [window(method, count, j, accumulation_steps) for j in range(count)]
    stages, transport = [e.index for e in executors], executors[0].transport
    device, flagged = executors[0].stage._device(), has_flags(executors, schedule)
    for executor in executors:
        at, updates = (
            windows[executor.index],
            delay(method, count, executor.index, accumulation_steps),
        )
        executor.updater.use_device()
        executor.stage.use_slots(at if at > 1 else 0, updates, accumulation_steps > 1)
    for stage in stages[:-1]:
        if waiting := windows[stage] - windows[stage + 1]:
            route = stage + 1, stage, MessageKind.DY
            transport.slots[route] = MessageSlots(waiting, device, flagged)
    for tie in schedule.ties:
        if tie.owner in stages and tie.holder in stages:
            route = tie.owner, tie.holder, MessageKind.TIED_WEIGHT
            transport.slots[route] = MessageSlots(1, device)
            if late := windows[tie.owner] - windows[tie.holder]:  # else received in the same step
                slots = MessageSlots(
                    1 + math.ceil(late / accumulation_steps), device, flagged, True
                )
                transport.slots[tie.holder, tie.owner, MessageKind.TIED_GRAD] = slots


def use_no_slots(executors: Sequence[StageExecutor]) -> None:
    """Steps will not be captured."""
    executors[0].transport.slots.clear()
    for executor in executors:
        executor.stage.use_slots(0, None, False)
        executor.updater.stay_on_host()


def has_flags(executors: Sequence[StageExecutor], schedule: Schedule) -> bool:
    """Whether micro-batches have flags; other ranks may have set them."""
    is_alone = len(executors) == schedule.stages and not executors[0].transport.averages
    return executors[0].stage.check_finite or not is_alone


def missing_memory(copied: Any, snapshots: int, device: torch.device) -> str | None:
    """Why captured steps would not fit into the device's memory; None if they do.

    They need copies of what a step is given, and twice what one step allocates for itself: in the
    ordinary pool during the warm-up, and in the pool of the graphs.

    Args:
        snapshots: Bytes that updates copy to be able to restore them.
    """
    if device.type != "cuda":
        return None
    allocated = torch.cuda.memory_allocated(device)
    transient = torch.cuda.max_memory_allocated(device) - allocated
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - allocated
    tensors = (leaf for leaf in pytree.tree_leaves(copied) if isinstance(leaf, Tensor))
    copies = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    need = copies + 2 * (transient + snapshots)
    if need <= free:
        return None
    return f"they need about {format_size(need)} more, but {format_size(free)} are free"
