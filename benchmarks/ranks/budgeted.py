"""PETRA under a memory budget on two ranks, for `pipeline --memory-budget`: its tables.

Two ranks that compute all the time suffer more from other people's load than two that wait for
each other. So beside the clock there is processor time, and what each schedule would take if every
rank had a core of its own: its passes, at the processor time they took in the least disturbed
round, played by the dry run.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks.harness import mib, show
from revcompile.schedule import Costs, period

__all__ = ["IDEAL", "PLANNED", "TORCH", "Spent", "report", "slowest"]

PLANNED = "petra, budget"
IDEAL = "ideal, budget"
TORCH = "torch 1F1B"


class Spent:
    """Processor time of one rank, turn by turn: of its passes, and in all."""

    def __init__(self, stage: Any, forward: str, backward: str) -> None:
        self.turns: list[tuple[float, float, float]] = []
        self._passes = {"forward": 0.0, "backward": 0.0}
        self._began = 0.0
        self._watch(stage, forward, "forward")
        self._watch(stage, backward, "backward")

    def _watch(self, stage: Any, method: str, kind: str) -> None:
        call = getattr(stage, method)

        def counted(*args: Any, **kwargs: Any) -> Any:
            began = time.process_time()
            try:
                return call(*args, **kwargs)
            finally:
                self._passes[kind] += time.process_time() - began

        setattr(stage, method, counted)

    def __enter__(self) -> None:
        self._passes = dict.fromkeys(self._passes, 0.0)
        self._began = time.process_time()

    def __exit__(self, *_: object) -> None:
        total = time.process_time() - self._began
        self.turns.append((total, self._passes["forward"], self._passes["backward"]))

    def least(self, microbatches: int) -> tuple[float, float, float]:
        """Seconds a micro-batch in the least disturbed turn: forward, backward, and the rest."""
        total, forward, backward = min(self.turns)
        rest = max(total - forward - backward, 0.0)
        return forward / microbatches, backward / microbatches, rest / microbatches


def slowest(results: dict[int, Any]) -> dict[str, list[float]]:
    """Of every variant the slower rank's time, round by round."""
    return {
        name: [
            max(pair) for pair in zip(*(r["times"][name] for r in results.values()), strict=True)
        ]
        for name in results[0]["times"]
    }


def on_free_cores(results: dict[int, Any], name: str, microbatches: int) -> float:
    """Seconds a micro-batch if every rank had a core of its own and links took no time.

    All that is neither forward nor backward pass counts as the rank's update.
    """
    if name == IDEAL:
        return max(min(r["busy"][name]) for r in results.values())
    forward, backward, rest = zip(*(r["spent"][name] for r in results.values()), strict=True)
    accumulate = microbatches if name == TORCH or "every" in name else 1
    links = (0.0,) * (len(forward) - 1)
    costs = Costs(forward, backward, tuple(accumulate * one for one in rest), links, links)
    return period("1f1b" if name == TORCH else "petra", costs, accumulate)


def report(title: str, microbatches: int, results: dict[int, Any]) -> dict[str, Any]:
    """Against the plan's own ideal and against 1F1B, as timed and on free cores; memory by rank."""
    times, rows = slowest(results), []
    free = {name: on_free_cores(results, name, microbatches) for name in times}
    for name, found in times.items():
        peaks = [mib(r["memory"][name]) if name in r["memory"] else "" for r in results.values()]
        work = " + ".join(f"{1e3 * min(r['busy'][name]):.0f}" for r in results.values())
        timed = (_spread(times[one], found) for one in (IDEAL, TORCH))
        freed = (f"{free[one] / free[name]:.3f}" for one in (IDEAL, TORCH))
        rows.append((name, f"{1e3 * median(found):.0f}", *timed, work, *freed, *peaks))
    columns = ("", "ms", "of ideal", "x 1F1B", "processor", "free: ideal", "x 1F1B")
    show(title, (*columns, "rank 0", "rank 1"), rows)
    plan = results[0]["plans"][0]
    print(plan, flush=True)
    return {"times": times, "free": free, "rows": rows, "plan": plan}


def _spread(theirs: Sequence[float], ours: Sequence[float]) -> str:
    """The median of the rounds' ratios, with the least and the largest."""
    found = sorted(a / b for a, b in zip(theirs, ours, strict=True))
    return f"{median(found):.2f} ({found[0]:.2f}-{found[-1]:.2f})"
