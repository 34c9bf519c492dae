"""What the scripts share: options and JSON, interleaved timing, peak memory, tables.

Times are compared only within one run. Variants take turns, round by round, and a ratio is the
median of the ratios of all rounds. A machine that slows down then slows all variants.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from tests.support.measuring import LiveStorages

Row = dict[str, Any]


# -- scripts ---------------------------------------------------------------------------------------


class _Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Shows the docstring as it is written, and every option's default."""


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options that every script has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=_Help)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here")
    return parser


def save(args: argparse.Namespace, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the rows with device, versions and commit; the file is replaced atomically."""
    if args.json is None:
        return
    device = torch.device(getattr(args, "device", None) or "cpu")
    record = {
        "options": {name: value for name, value in vars(args).items() if name != "json"},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": _commit(),
        "rows": rows,
    }
    args.json.parent.mkdir(parents=True, exist_ok=True)
    beside = args.json.with_name(f"{args.json.name}.tmp")
    beside.write_text(json.dumps(record, indent=1, default=_plain) + "\n")
    beside.replace(args.json)


def _commit() -> str | None:
    """The checkout's commit, with a `+` if something has changed since; None outside of git."""
    command = ["git", "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
    try:
        ended = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    return ended.stdout.strip() or None


def _plain(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)


# -- time ------------------------------------------------------------------------------------------


def interleave(
    variants: Mapping[str, Callable[[], object]],
    rounds: int,
    warmup: int,
    device: torch.device,
    prepare: Callable[[str], object] = lambda name: None,
) -> dict[str, list[float]]:
    """Seconds of every variant in every round; each round starts with the next variant.

    `prepare` is called with a variant's name before each of its timed runs.

    A single thread on the CPU is timed by its processor time, on which other load of the machine
    has less effect.
    """
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.process_time if alone else time.perf_counter
    for _ in range(warmup):
        for run in variants.values():
            run()
    names = list(variants)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            prepare(name)
            synchronize(device)
            start = clock()
            variants[name]()
            synchronize(device)
            seconds[name].append(clock() - start)
    return seconds


@dataclass(frozen=True)
class Ratio:
    """How much longer one variant takes than another: the rounds' median and quartiles."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} – {self.high:.3f})"


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """The ratio `ours / theirs`, round by round.

    >>> print(ratio([1.0, 2.0, 6.0], [1.0, 1.0, 2.0]))
    2.000 (1.500 – 2.500)
    """
    each = [a / b for a, b in zip(ours, theirs, strict=True)]
    low, _, high = quantiles(each, n=4, method="inclusive") if len(each) > 1 else each * 3
    return Ratio(median(each), low, high)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done everything asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# -- memory ----------------------------------------------------------------------------------------


def measure_peak(run: Callable[[], object], device: torch.device) -> int:
    """The most bytes that `run` adds at any moment, including those that it leaves behind.

    The allocator does not count the memory of CUDA graphs, so on a GPU the result is at least the
    device memory that is taken afterwards and was free before.
    """
    if device.type != "cuda":
        with LiveStorages() as storages:
            run()
        return int(storages.peak)
    taken, before = device_bytes(device), torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    peak = torch.cuda.max_memory_allocated(device) - before
    return max(peak, device_bytes(device) - taken)


def device_bytes(device: torch.device) -> int:
    """Bytes in use on a GPU, without caches."""
    synchronize(device)
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def mib(size: float) -> str:
    """Bytes for a table.

    >>> mib(3 * 2**19)
    '1.50 MiB'
    """
    return f"{size / 2**20:,.2f} MiB"


# -- tables ----------------------------------------------------------------------------------------


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table: names left, figures right."""
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(str, row))
    Console(width=130, force_jupyter=False).print(table)


def markdown(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """The same as Markdown.

    >>> print(markdown(["way", "time"], [["plain", 1.0]]))
    | way | time |
    |---|---|
    | plain | 1.0 |
    """
    lines = [columns, *rows]
    head, *rest = ("| " + " | ".join(map(str, line)) + " |" for line in lines)
    return "\n".join([head, "|---" * len(columns) + "|", *rest])
