"""Recording a real run: when each stage did what, without making it wait.

On a GPU times are CUDA events, resolved at the end, so that nothing is synchronised meanwhile.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol

import torch

from revcompile.arguments import file_path
from revcompile.errors import InputError
from revcompile.schedule import Action
from revcompile.schedule.chrome import Process, TraceEvent, busy_shares, chrome_trace

__all__ = ["Recorder", "Trace", "Traced"]

_HANDSHAKES: Final = 5

Everyone = Callable[[Any], Sequence[Any]]
"""From a plain value of this process to those of all, in the order of the ranks."""


class Recorder:
    """Notes when actions begin and end; the observer of a process's stages."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._tried: dict[tuple[int, Action], Any] = {}
        self._began: Any = None
        self._noted: list[tuple[int, Action, Any, Any, Any]] = []
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self._origin, self._host = self._now(), time.perf_counter()

    def begins(self, stage: int, action: Action) -> None:
        """An action is tried, perhaps again."""
        self._began = self._now()
        self._tried.setdefault((stage, action), self._began)

    def ends(self, stage: int, action: Action, done: bool) -> None:
        """It is done, or has to wait."""
        if done:
            tried = self._tried.pop((stage, action))
            self._noted.append((stage, action, tried, self._began, self._now()))

    def events(self) -> tuple[TraceEvent, ...]:
        """All that was noted, in seconds of this process's clock."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return tuple(
            TraceEvent(stage, action, *map(self._seconds, times))
            for stage, action, *times in self._noted
        )

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _seconds(self, moment: Any) -> float:
        if isinstance(moment, float):
            return moment
        passed: float = self._origin.elapsed_time(moment)
        return self._host + 1e-3 * passed


class Traced(Protocol):
    """What is traced: a trainer."""

    @property
    def executors(self) -> Sequence[Any]:
        """Its stages in this process."""
        ...

    @property
    def rank(self) -> int:
        """Which of the processes this is."""
        ...

    @property
    def replica(self) -> int:
        """Which copy of the pipeline its stages belong to."""
        ...

    def everyone(self, value: Any) -> Sequence[Any]:
        """The values of all processes."""
        ...

    def untraced(self) -> None:
        """Its trace has ended."""
        ...


class Trace:
    """A recording that has begun. It is written when the `with` block or the last step ends.

    Every rank begins and ends together; rank 0 writes the file. `busy` then tells which share of
    the time each rank computed.
    """

    def __init__(
        self, trainer: Traced, path: str | Path, steps: int | None = None, title: str = ""
    ) -> None:
        self.path = file_path("trainer.trace", path, "run.json")
        if not self.path.absolute().parent.is_dir():
            raise InputError(f"trainer.trace: there is no folder {self.path.absolute().parent}")
        if steps is not None and steps < 1:
            raise InputError(f"trainer.trace: steps={steps}; a trace has at least 1")
        self._trainer, self._left = trainer, steps
        self._rank, self._title = trainer.rank, title
        self.busy: tuple[float, ...] | None = None
        """By rank, once the trace has ended."""
        self._behind = _clock_offset(trainer.everyone)
        self._recorder: Recorder | None = Recorder(trainer.executors[0].stage._device())
        for executor in trainer.executors:
            executor.observer = self._recorder

    @property
    def running(self) -> bool:
        """Is it still recording?"""
        return self._recorder is not None

    def stepped(self) -> None:
        """The trainer has done a step."""
        if self._left is not None:
            self._left -= 1
            if not self._left:
                self.stop()

    def stop(self) -> None:
        """End the recording and write it. Every rank calls it."""
        mine = self._end()
        if mine is None:
            return
        found = [_unpacked(one) for one in self._trainer.everyone(_packed(mine))]
        self.busy = busy_shares(found)
        if self._rank == 0:
            _write(self.path, found, self._title)

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
        mine = self._end()  # the others may not come any more: each rank saves what it has
        if mine is not None:
            own = f"{self.path.stem}.rank{self._rank}{self.path.suffix}"
            _write(self.path.with_name(own), [mine], self._title)

    def _end(self) -> Process | None:
        """What this process did; None if that was asked before."""
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return None
        for executor in self._trainer.executors:
            executor.observer = None
        self._trainer.untraced()
        moved = tuple(
            TraceEvent(h.stage, h.action, *(t - self._behind for t in (h.tried, h.start, h.end)))
            for h in recorder.events()
        )
        name = f"rank {self._rank} ({socket.gethostname()})"
        return Process(self._rank, moved, self._trainer.replica, name)


def _write(path: Path, processes: Sequence[Process], title: str) -> None:
    path.write_text(json.dumps(chrome_trace(processes, title)), encoding="utf-8")


def _packed(process: Process) -> list[Any]:
    """As plain values; times as whole nanoseconds."""
    happened = [
        [h.stage, str(h.action), *(round(1e9 * t) for t in (h.tried, h.start, h.end))]
        for h in process.events
    ]
    return [process.rank, process.replica, process.name, happened]


def _unpacked(packed: Sequence[Any]) -> Process:
    rank, copy, name, happened = packed
    return Process(
        rank,
        tuple(
            TraceEvent(stage, Action.parse(action), *(1e-9 * t for t in times))
            for stage, action, *times in happened
        ),
        copy,
        name,
    )


def _clock_offset(everyone: Everyone) -> float:
    """How much later this process's clock is than rank 0's.

    Processes of one machine share a clock. Between machines: an exchange ends for all at about the
    same time, so the clocks right after a few of them are compared.
    """
    machines = everyone(_machine())
    if all(machine == machines[0] for machine in machines):
        return 0.0
    clocks = []
    for _ in range(_HANDSHAKES):
        everyone(0)
        clocks.append(time.perf_counter())
    first: list[float] = everyone(clocks)[0]
    if _machine() == machines[0]:
        return 0.0
    return statistics.median(mine - theirs for mine, theirs in zip(clocks, first, strict=True))


def _machine() -> str:
    """What processes of one machine, since it was started, have in common."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    started = boot.read_text(encoding="utf-8").strip() if boot.exists() else ""
    return f"{socket.gethostname()} {started} {os.name}"
