"""How long an update of a language model would take, by the planner, on a device for each stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from revcompile.compiler.cost import Workload
from revcompile.ir.types import Rewired
from revcompile.plan.cluster import Cluster, Device, NetworkLink, TimeModel
from revcompile.plan.forecast import plan_cluster
from revcompile.schedule import choose

LINK: Final = NetworkLink(bandwidth=400e9, latency=5e-6)
"""As between the GPUs of one machine."""
FLUSHED: Final = 8
"""Micro-batches to an update in 1F1B, which stands for backprop."""


def seconds_an_update(
    rewired: Rewired, samples: int, method: str, stages: int, accumulate: int, order: str | None
) -> float:
    """Of so many samples; backprop by 1F1B."""
    is_flushed = method == "backprop"
    parts = FLUSHED if is_flushed else accumulate
    workload = Workload(choose("petra"), samples // parts, optimizer_copies=2)
    _, (found, *_) = plan_cluster(
        rewired,
        Cluster(stages, LINK, TimeModel.on(Device(), 2)),
        workload,
        methods=["1f1b" if is_flushed else "petra"],
        stages=stages,
        accumulate=parts,
        alpha=None if is_flushed else choose("petra", order=order).alpha,
    )
    return samples / found.throughput


def updates_to(loss: float, log: Sequence[Mapping[str, float]]) -> float | None:
    """When a validation loss was reached, between two evaluations in proportion; None: never.

    >>> updates_to(1.5, [{"update": 50, "validation_loss": 2.0}])
    >>> updates_to(1.5, [{"update": n, "validation_loss": 2 - n / 100} for n in (40, 60)])
    50.0
    """
    before: Mapping[str, float] | None = None
    for line in log:
        now = line["validation_loss"]
        if now <= loss:
            if before is None:
                return float(line["update"])
            done = (before["validation_loss"] - loss) / (before["validation_loss"] - now)
            return before["update"] + done * (line["update"] - before["update"])
        before = line
    return None
