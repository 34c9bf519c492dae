"""The one format of results: what was run, on which machine, from which commit, and its rows."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.registry import Row
from revcompile.errors import InputError

__all__ = ["check", "describe", "read", "write"]

FIELDS: Final[dict[str, type | tuple[type, ...]]] = {
    "benchmark": str,
    "options": dict,
    "machine": dict,
    "versions": dict,
    "commit": (str, type(None)),
    "rows": list,
}
PACKAGES: Final = ("timm", "torchvision", "transformers", "memcnn", "revlib", "revcompile")


def describe(benchmark: str, options: argparse.Namespace, rows: Sequence[Row]) -> dict[str, Any]:
    """A result with all that is needed to judge it."""
    device = torch.device(getattr(options, "device", "cpu"))
    return {
        "benchmark": benchmark,
        "options": {name: value for name, value in vars(options).items() if name != "json"},
        "machine": {
            "device": _device_name(device),
            "cpu": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            **_versions(),
        },
        "commit": _commit(),
        "rows": list(rows),
    }


def write(path: Path, record: dict[str, Any]) -> None:
    """As JSON; a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.tmp")
    beside.write_text(json.dumps(record, indent=1, default=_plain) + "\n")
    beside.replace(path)


def read(path: Path) -> dict[str, Any]:
    """What `write` wrote."""
    record: dict[str, Any] = json.loads(path.read_text())
    check(record, str(path))
    return record


def check(record: Any, where: str) -> None:
    """Refuse what is not a result, with everything that is wrong with it."""
    if not isinstance(record, dict):
        raise InputError(f"{where}: {type(record).__name__}, but a result is an object")
    wrong = [f"no {name!r}" for name in FIELDS if name not in record]
    wrong += [f"{name!r} is unknown" for name in record if name not in FIELDS]
    for name, kind in FIELDS.items():
        if name in record and not isinstance(record[name], kind):
            wrong.append(f"{name!r} is {type(record[name]).__name__}")
    rows = record.get("rows")
    if isinstance(rows, list) and not all(isinstance(row, dict) for row in rows):
        wrong.append("a row is not an object")
    if wrong:
        raise InputError(f"{where}: {', '.join(wrong)}; is it a file of `--json`?")


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def _versions() -> dict[str, str]:
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _commit() -> str | None:
    """The checkout's commit, with a `+` if something has changed since; None outside of git."""
    here = Path(__file__).parent
    command = ["git", "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
    try:
        ended = subprocess.run(command, cwd=here, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return ended.stdout.strip() or None


def _plain(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)
