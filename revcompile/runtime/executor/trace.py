"""Traces of a real run: when each stage performed which action.

On a GPU times are CUDA events that are read at the end: traced steps do not synchronise.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from revcompile.arguments import new_file
from revcompile.schedule import Action
from revcompile.schedule.chrome import Process, TraceEvent, busy_shares, chrome_trace


class Trace:
    """A trace that has begun. It is written when the `with` block ends, or by `stop`.

    Every rank begins and ends it together; rank 0 writes the file.

    Args:
        trainer: What is traced.
        path: The file to write, for chrome://tracing or Perfetto.
        title: Shown in the trace.
    """

    def __init__(self, trainer: Any, path: str | Path, title: str = "") -> None:
        self.path = new_file("trainer.trace", path, "run.json")
        self._trainer, self._rank, self._title = trainer, trainer.rank, title
        self.busy: tuple[float, ...] | None = None
        """The share of the time that each rank computed, once the trace has ended."""
        # Clocks of different machines agree only as well as NTP synchronises them.
        self._to_wall_clock = time.time() - time.perf_counter()
        self._device: torch.device = trainer._executors[0].stage.device
        self._first_tried: dict[tuple[int, Action], Any] = {}
        self._began: Any = None
        self._records: list[tuple[int, Action, Any, Any, Any]] = []
        self._synchronize()
        self._origin, self._host = self._now(), time.perf_counter()
        self.running = True
        for executor in trainer._executors:
            executor.observer = self

    # -- when the actions of this process's stages begin and end ------------------------------

    def begins(self, stage: int, action: Action) -> None:
        """An action is tried, perhaps again after it had to wait."""
        self._began = self._now()
        self._first_tried.setdefault((stage, action), self._began)

    def ends(self, stage: int, action: Action, done: bool) -> None:
        """The action is done, or has to wait."""
        if done:
            tried = self._first_tried.pop((stage, action))
            self._records.append((stage, action, tried, self._began, self._now()))

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _seconds(self, moment: Any) -> float:
        if not isinstance(moment, float):
            moment = self._host + 1e-3 * self._origin.elapsed_time(moment)
        return float(moment + self._to_wall_clock)

    # -- the end of the trace -----------------------------------------------------------------

    def stop(self) -> None:
        """End the trace and write it. Every rank has to call this."""
        recorded = self._end()
        if recorded is None:
            return
        processes = list(map(_process, self._trainer._placement.gather(recorded)))
        self.busy = busy_shares(processes)
        if self._rank == 0:
            _write(self.path, processes, self._title)

    def __enter__(self) -> Trace:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.stop()
            return
        recorded = self._end()  # other ranks may have failed: each writes a file of its own
        if recorded is not None:
            name = f"{self.path.stem}.rank{self._rank}{self.path.suffix}"
            _write(self.path.with_name(name), [_process(recorded)], self._title)

    def _end(self) -> list[Any] | None:
        """What this process did, as plain values; None if the trace has ended before."""
        if not self.running:
            return None
        self.running = False
        for executor in self._trainer._executors:
            executor.observer = None
        self._synchronize()
        events = [
            [s, str(action), *map(self._seconds, times)] for s, action, *times in self._records
        ]
        return [self._rank, events, self._trainer.replica, socket.gethostname()]


def _write(path: Path, processes: Sequence[Process], title: str) -> None:
    path.write_text(json.dumps(chrome_trace(processes, title)), encoding="utf-8")


def _process(recorded: Sequence[Any]) -> Process:
    rank, events, replica, host = recorded
    made = (TraceEvent(stage, Action.parse(action), *times) for stage, action, *times in events)
    return Process(rank, tuple(made), replica, f"rank {rank} ({host})")
