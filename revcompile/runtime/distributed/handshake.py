"""Do all ranks train the same thing? What is compared before anything is started."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from revcompile.ir.program import Partition, StageProgram
from revcompile.runtime.reversible.graph_code import source_of

__all__ = ["facts"]


def facts(
    model: nn.Module,
    partition: Partition,
    programs: Sequence[StageProgram],
    settings: Any,
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """What must be the same everywhere, by name, as plain values."""
    method = programs[0].method
    found: dict[str, Any] = {
        "revcompile version": sys.modules[__name__.partition(".")[0]].__version__,
        "torch version": torch.__version__,
        "model": partition.rewired.name,
        "stages": len(programs),
        "method": ", ".join(_plain(getattr(method, f.name)) for f in dataclasses.fields(method)),
    }
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        found[field.name] = "a function" if callable(value) else str(value)
    found |= {name: str(value) for name, value in options.items()}
    for name, parameter in model.named_parameters():
        frozen = "" if parameter.requires_grad else ", frozen"
        found[f"parameter {name}"] = _described(parameter) + frozen
    for name, buffer in model.named_buffers():
        found[f"buffer {name}"] = _described(buffer)
    for part, program in zip(partition.parts, programs, strict=True):
        found[f"stage {part.index}"] = ", ".join(piece.name for piece in part.pieces)
        found[f"code of stage {part.index}"] = _digest(program)
    return found


def _plain(value: Any) -> str:
    return str(value.value if isinstance(value, enum.Enum) else value)


def _described(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _digest(program: StageProgram) -> str:
    text = source_of(program.forward) + source_of(program.backward)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
