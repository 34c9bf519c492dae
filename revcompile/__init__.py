"""revcompile: a graph compiler for reversible, pipelined training of PyTorch models."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from revcompile.api import ReversibleModule, check_invertible, petrafy, reversify
    from revcompile.errors import NonFiniteError, RankError, RevcompileError, RevcompileWarning
    from revcompile.runtime.stage.settings import TrainerOptions
    from revcompile.runtime.trainer.steps import Metrics
    from revcompile.runtime.trainer.trainer import Trainer
    from revcompile.staged import StagedModel

__all__ = [
    "Metrics",
    "NonFiniteError",
    "RankError",
    "RevcompileError",
    "RevcompileWarning",
    "ReversibleModule",
    "StagedModel",
    "Trainer",
    "TrainerOptions",
    "check_invertible",
    "petrafy",
    "reversify",
]

__version__ = "0.3.0"

_MODULES = {
    "Metrics": "runtime.trainer.steps",
    "NonFiniteError": "errors",
    "RankError": "errors",
    "RevcompileError": "errors",
    "RevcompileWarning": "errors",
    "StagedModel": "staged",
    "Trainer": "runtime.trainer.trainer",
    "TrainerOptions": "runtime.stage.settings",
}
"""The modules that define public names; all other names are in `api`."""


def __getattr__(name: str) -> Any:
    """Import a public name or submodule at its first use: `revcompile --help` needs no torch."""
    if name in __all__:
        home = importlib.import_module(f"revcompile.{_MODULES.get(name, 'api')}")
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
