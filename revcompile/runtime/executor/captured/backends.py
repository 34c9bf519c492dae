"""Which backend runs a trainer's rounds, and why not a faster one."""

from __future__ import annotations

import difflib
import enum
from collections.abc import Iterator, Sequence
from typing import Final

import torch

from revcompile.errors import InputError
from revcompile.runtime.executor.captured.optimizers import optimizer_problem
from revcompile.runtime.executor.stage_executor import StageExecutor
from revcompile.schedule import Keep, Order, Schedule, window

__all__ = ["Backend", "backend_of", "why_not_capturable"]


class Backend(enum.Enum):
    """How the rounds of a full pipeline are run. All give the same training."""

    AUTO = "auto"
    """The fastest that is known to be safe where the model is."""
    EAGER = "eager"
    """Action by action."""
    CUDAGRAPHS = "cudagraphs"
    """A whole round as one CUDA graph."""
    INDUCTOR = "inductor"
    """The same, with what surrounds convolutions and products compiled: takes a minute first."""
    RECORDED = "recorded"
    """As CUDA graphs do, but calling the round each time: to test and to debug, on any device."""


def backend_of(name: str | Backend) -> Backend:
    """Look a backend up.

    >>> backend_of("cudagraphs")
    <Backend.CUDAGRAPHS: 'cudagraphs'>
    """
    if isinstance(name, Backend):
        return name
    names = [backend.value for backend in Backend]
    if name in names:
        return Backend(name)
    near = difflib.get_close_matches(str(name), names, 1)
    hint = f"did you mean {near[0]!r}?" if near else "use one of: " + ", ".join(names)
    raise InputError(f"backend={name!r} does not exist; {hint}")


MOST_KINDS: Final = 16
"""Rounds with and without updates are recorded each for itself: so many and no more."""


def why_not_capturable(
    executors: Sequence[StageExecutor], schedule: Schedule, backend: Backend
) -> str | None:
    """Why rounds cannot be recorded; None if they can."""
    return next(_obstacles(executors, schedule, backend), None)


def _obstacles(
    executors: Sequence[StageExecutor], schedule: Schedule, backend: Backend
) -> Iterator[str]:
    devices = {p.device for executor in executors for p in executor.stage.parameters.values()}
    if backend is not Backend.RECORDED and any(device.type != "cuda" for device in devices):
        yield "the model is not on a CUDA device; move it there before you call petrafy"
    if len(devices) != 1:
        yield f"the model is on {len(devices)} devices; a round is recorded on one"
    method = schedule.method
    if method.order not in (Order.CONTINUOUS, Order.LOCKED):
        yield f"rounds of {method.name!r} differ from each other; use 'petra' or 'backprop'"
    if schedule.ties:
        yield "stages share parameters; compile with fewer stages, or so that they share a stage"
    if schedule.accumulate > MOST_KINDS:
        yield f"accumulate={schedule.accumulate}; at most {MOST_KINDS} kinds of rounds are recorded"
    if any(executor.scaling is not None for executor in executors):
        yield "the loss is scaled, which waits for what the gradients say; bfloat16 needs no scale"
    if any(executor.stage.keeper.offloads for executor in executors):
        yield "buffers='offload' has inputs come and go, and a recorded round finds all in place"
    for executor in executors:
        count = window(method, schedule.stages, executor.index, schedule.accumulate)
        if count > 1 and any(unit.keep is Keep.GRAPH for unit in executor.program.units):
            own = method.keep is Keep.GRAPH
            cause = f"as {method.name!r} has it" if own else "which its memory budget allows"
            advice = "use 'pipedream' or 'petra_stashed'" if own else "leave out memory_budget="
            yield (
                f"stage {executor.index} keeps graphs of micro-batches in flight, {cause}; "
                f"{advice} to have rounds recorded"
            )
        if executor.updater.optimizer is not None and (
            why := optimizer_problem(executor.updater.optimizer)
        ):
            yield why


def device_of(executors: Sequence[StageExecutor]) -> torch.device:
    """Where the stages are."""
    return next((d for a in executors if (d := a.stage._device())), torch.device("cpu"))
