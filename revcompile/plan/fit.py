"""Stages on devices: which live where, what they keep there, and whether their schedule runs."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence

from torch import Tensor

from revcompile.compiler.partition.balance import balance
from revcompile.ir.program import Partition
from revcompile.plan.budget import MemoryPlan, Terms, plan_memory
from revcompile.runtime.distributed.placement import make_layout, pipeline_ranks
from revcompile.runtime.distributed.process_groups import world_size
from revcompile.runtime.stage.update import OptimizerFactory, state_copies
from revcompile.runtime.trainer.settings import Settings
from revcompile.schedule import Costs, Method, actions, dry_run, window

__all__ = ["assign_contiguous", "check_schedule", "plan_trainer_memory"]


def assign_contiguous(partition: Partition, ranks: int) -> list[int]:
    """Stages in a row on so many ranks, balanced by cost."""
    costs = [math.fsum(partition.works(part)) for part in partition.parts]
    ends = balance(costs, ranks)
    assert ends is not None
    return [bisect_right(ends, stage) for stage in range(len(costs))]


def plan_trainer_memory(
    partition: Partition,
    method: Method,
    settings: Settings,
    optimizer: OptimizerFactory,
    *,
    parameters: Mapping[str, Tensor],
    batch: int,
    places: Sequence[int] | None,
) -> MemoryPlan | None:
    """What stages keep where they will live, in this world of ranks; None without a budget."""
    if settings.memory is None:
        return None
    terms = Terms(
        method,
        batch,
        settings.accumulate,
        state_copies(parameters, optimizer, settings.param_groups),
        settings.buffers.bytes_each,
        settings.autocast,
    )
    count, world = len(partition.parts), world_size()
    devices: Sequence[int] = [0] * count
    if world > 1:
        default = () if places else assign_contiguous(partition, pipeline_ranks(count, world))
        devices = make_layout(count, world, places, default).stage_to_rank
    return plan_memory(partition, settings.memory, terms, devices)


def check_schedule(partition: Partition, method: Method, accumulate: int) -> None:
    """Play the schedule without tensors: it must not lock up."""
    count = len(partition.parts)
    longest = max(window(method, count, j, accumulate) for j in range(count))
    lists = actions(method, count, longest + 2, accumulate, partition.ties)
    dry_run(lists, Costs.uniform(count))
