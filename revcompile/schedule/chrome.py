"""Recorded runs as Chrome traces (chrome://tracing, ui.perfetto.dev): a row for every stage.

Every action of a run is a `TraceEvent`; a process (a rank) has a row for each of its stages. Time
that a stage waited for others is shown as an event of its own category.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from revcompile.schedule.action import Action, Op

_COMPUTE: Final = frozenset((Op.FORWARD, Op.BACKWARD, Op.UPDATE, Op.TRAIN))
_ARRIVES_AS: Final = {Op.SEND_Y: (Op.RECV_X, 1), Op.SEND_DX: (Op.RECV_DY, -1)}


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """An action of a stage: when it was first tried, when it could start, and when it ended."""

    stage: int
    action: Action
    tried: float
    start: float
    end: float


@dataclass(frozen=True)
class Process:
    """The events of one process, in seconds, and which replica of the pipeline it belongs to."""

    rank: int
    events: tuple[TraceEvent, ...]
    replica: int = 0
    name: str = ""


def busy_shares(processes: Sequence[Process]) -> tuple[float, ...]:
    """Share of the whole run that each process spends computing.

    >>> first = TraceEvent(0, Action(Op.FORWARD, 0), tried=0, start=0, end=3)
    >>> then = TraceEvent(0, Action(Op.UPDATE, 0), tried=3, start=7, end=8)
    >>> busy_shares([Process(0, (first, then))])
    (0.5,)
    """
    everything = [event for process in processes for event in process.events]
    begin = min((event.tried for event in everything), default=0.0)
    length = max((event.end for event in everything), default=0.0) - begin
    return tuple(
        math.fsum(event.end - event.start for event in process.events if _computes(event)) / length
        if length
        else 0.0
        for process in processes
    )


def _computes(event: TraceEvent) -> bool:
    return event.action.op in _COMPUTE


def chrome_trace(processes: Sequence[Process], title: str = "") -> dict[str, Any]:
    """The trace as a JSON object: metadata, complete events, and arrows for messages."""
    everything = [event for process in processes for event in process.events]
    origin = min((event.tried for event in everything), default=0.0)
    events: list[dict[str, Any]] = []
    for process in processes:
        events += _rows(process)
        for event in process.events:
            events += _slices(process, event, origin)
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
    """Names and order of the rows."""

    def metadata(what: str, tid: int, **args: Any) -> dict[str, Any]:
        return {"ph": "M", "name": what, "pid": process.rank, "tid": tid, "args": args}

    yield metadata("process_name", 0, name=process.name or f"rank {process.rank}")
    yield metadata("process_sort_index", 0, sort_index=process.rank)
    for stage in sorted({event.stage for event in process.events}):
        yield metadata("thread_name", stage, name=f"stage {stage}")
        yield metadata("thread_sort_index", stage, sort_index=stage)


def _slices(process: Process, event: TraceEvent, origin: float) -> Iterator[dict[str, Any]]:
    where = {"ph": "X", "pid": process.rank, "tid": event.stage}
    args = {"op": event.action.op.value, "index": event.action.index}
    if event.start > event.tried:
        times = {"ts": _micro(event.tried - origin), "dur": _micro(event.start - event.tried)}
        yield where | times | {"name": f"wait {event.action}", "cat": "wait", "args": args}
    kind = "compute" if _computes(event) else "communication"
    times = {"ts": _micro(event.start - origin), "dur": _micro(event.end - event.start)}
    yield where | times | {"name": str(event.action), "cat": kind, "args": args}


def _micro(seconds: float) -> float:
    return round(1e6 * seconds, 3)


def _arrows(processes: Sequence[Process], origin: float) -> Iterator[dict[str, Any]]:
    """From each send to the receive that got it, where both were recorded."""
    arrivals = {
        (process.replica, event.stage, event.action.op, event.action.index): (process.rank, event)
        for process in processes
        for event in process.events
    }
    number = 0
    for process in processes:
        for event in process.events:
            if event.action.op not in _ARRIVES_AS:
                continue
            op, step = _ARRIVES_AS[event.action.op]
            arrival = arrivals.get((process.replica, event.stage + step, op, event.action.index))
            if arrival is None:
                continue
            rank, receive = arrival
            about = {"name": "message", "cat": "message", "id": number}
            begins = {"ph": "s", "pid": process.rank, "tid": event.stage}
            ends = {"ph": "f", "bp": "e", "pid": rank, "tid": receive.stage}
            yield about | begins | {"ts": _micro(event.start - origin)}
            yield about | ends | {"ts": _micro(receive.start - origin)}
            number += 1
