"""Real runs as Chrome traces (chrome://tracing, ui.perfetto.dev): a row for every stage.

What was recorded is one `Happening` an action; a process (a rank) has a row for each of its stages.
Time that a stage waited for others is shown as its own kind of event.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from revcompile.schedule.action import Action, Op

__all__ = ["Happening", "Process", "busy_shares", "chrome_trace"]

_COMPUTE: Final = frozenset((Op.FORWARD, Op.BACKWARD, Op.UPDATE, Op.TRAIN))
_ARRIVES_AS: Final = {Op.SEND_Y: (Op.RECV_X, 1), Op.SEND_DX: (Op.RECV_DY, -1)}


@dataclass(frozen=True, slots=True)
class Happening:
    """An action of a stage: when it was first tried, when it could begin, and its end."""

    stage: int
    action: Action
    tried: float
    start: float
    end: float


@dataclass(frozen=True)
class Process:
    """What one process did, in seconds; `copy` says which copy of the pipeline it belongs to."""

    rank: int
    happenings: tuple[Happening, ...]
    copy: int = 0
    name: str = ""


def busy_shares(processes: Sequence[Process]) -> tuple[float, ...]:
    """Share of the whole run that each process spends computing.

    >>> first = Happening(0, Action(Op.FORWARD, 0), tried=0, start=0, end=3)
    >>> then = Happening(0, Action(Op.UPDATE, 0), tried=3, start=7, end=8)
    >>> busy_shares([Process(0, (first, then))])
    (0.5,)
    """
    everything = [one for process in processes for one in process.happenings]
    if not everything:
        return tuple(0.0 for _ in processes)
    length = max(one.end for one in everything) - min(one.tried for one in everything)
    return tuple(
        math.fsum(one.end - one.start for one in process.happenings if _computes(one)) / length
        if length
        else 0.0
        for process in processes
    )


def _computes(one: Happening) -> bool:
    return one.action.op in _COMPUTE


def chrome_trace(processes: Sequence[Process], title: str = "") -> dict[str, Any]:
    """The JSON object of a trace: metadata, complete events, and arrows for messages."""
    everything = [one for process in processes for one in process.happenings]
    origin = min((one.tried for one in everything), default=0.0)
    events: list[dict[str, Any]] = []
    for process in processes:
        events += _rows(process)
        for one in process.happenings:
            events += _slices(process, one, origin)
    events += _arrows(processes, origin)
    shares = busy_shares(processes)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "title": title,
            "busy": {str(p.rank): share for p, share in zip(processes, shares, strict=True)},
        },
    }


def _rows(process: Process) -> Iterator[dict[str, Any]]:
    """What the rows are called, and their order."""

    def named(what: str, tid: int, **args: Any) -> dict[str, Any]:
        return {"ph": "M", "name": what, "pid": process.rank, "tid": tid, "args": args}

    yield named("process_name", 0, name=process.name or f"rank {process.rank}")
    yield named("process_sort_index", 0, sort_index=process.rank)
    for stage in sorted({one.stage for one in process.happenings}):
        yield named("thread_name", stage, name=f"stage {stage}")
        yield named("thread_sort_index", stage, sort_index=stage)


def _slices(process: Process, one: Happening, origin: float) -> Iterator[dict[str, Any]]:
    where = {"ph": "X", "pid": process.rank, "tid": one.stage}
    args = {"op": one.action.op.value, "index": one.action.index}
    if one.start > one.tried:
        times = {"ts": _micro(one.tried - origin), "dur": _micro(one.start - one.tried)}
        yield where | times | {"name": f"wait {one.action}", "cat": "wait", "args": args}
    kind = "compute" if _computes(one) else "communication"
    times = {"ts": _micro(one.start - origin), "dur": _micro(one.end - one.start)}
    yield where | times | {"name": str(one.action), "cat": kind, "args": args}


def _micro(seconds: float) -> float:
    return round(1e6 * seconds, 3)


def _arrows(processes: Sequence[Process], origin: float) -> Iterator[dict[str, Any]]:
    """From each send to the receive that got it, where both were recorded."""
    arrivals = {
        (process.copy, one.stage, one.action.op, one.action.index): (process.rank, one)
        for process in processes
        for one in process.happenings
    }
    number = 0
    for process in processes:
        for one in process.happenings:
            if one.action.op not in _ARRIVES_AS:
                continue
            op, step = _ARRIVES_AS[one.action.op]
            found = arrivals.get((process.copy, one.stage + step, op, one.action.index))
            if found is None:
                continue
            rank, there = found
            about = {"name": "message", "cat": "message", "id": number}
            begins = {"ph": "s", "pid": process.rank, "tid": one.stage}
            ends = {"ph": "f", "bp": "e", "pid": rank, "tid": there.stage}
            yield about | begins | {"ts": _micro(one.start - origin)}
            yield about | ends | {"ts": _micro(there.start - origin)}
            number += 1
