"""revcompile: a graph compiler for reversible, pipelined training of PyTorch models."""

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
from revcompile.ir import Enter, Fuse, Leave, Policy

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
