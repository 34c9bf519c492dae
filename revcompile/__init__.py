"""revcompile: a graph compiler for reversible, pipelined training of PyTorch models."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from revcompile.api import (
        InversionReport,
        ReversibleModule,
        StagedModel,
        check_invertible,
        petrafy,
        reversify,
    )
    from revcompile.compiler.capture import capture
    from revcompile.errors import RevcompileError
    from revcompile.ir.types import Enter, Fuse, Leave, Policy

__all__ = [
    "Enter",
    "Fuse",
    "InversionReport",
    "Leave",
    "Policy",
    "RevcompileError",
    "ReversibleModule",
    "StagedModel",
    "capture",
    "check_invertible",
    "petrafy",
    "reversify",
]

__version__ = "0.1.0"

_ELSEWHERE = {"RevcompileError": "errors", "capture": "compiler.capture"} | dict.fromkeys(
    ("Enter", "Fuse", "Leave", "Policy"), "ir.types"
)


def __getattr__(name: str) -> Any:
    """Import what is asked for when it is first asked for: `revcompile --help` needs no torch."""
    if name in __all__:
        home = importlib.import_module(f"revcompile.{_ELSEWHERE.get(name, 'api')}")
        value = globals()[name] = getattr(home, name)
        return value
    try:
        return importlib.import_module(f"revcompile.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"revcompile.{name}":
            raise
    raise AttributeError(f"module 'revcompile' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
