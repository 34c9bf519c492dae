"""What is there only in a checkout of the repository: examples and benchmarks."""

from __future__ import annotations

from pathlib import Path

from revcompile.errors import InputError

__all__ = ["folder"]


def folder(name: str) -> Path:
    """A folder beside the package; InputError where only the package is installed."""
    found = Path(__file__).resolve().parent.parent.parent / name
    if not found.is_dir():
        raise InputError(
            f"{name}/ is not part of the installed package; clone the repository and run this from "
            "there (pip install -e .)"
        )
    return found
