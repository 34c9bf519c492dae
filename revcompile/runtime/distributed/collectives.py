"""What all ranks do together: gather values, and agree on what to train."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import distributed, nn

from revcompile.errors import InputError
from revcompile.ir.program import Partition, StageProgram
from revcompile.ir.python_code import source_of
from revcompile.runtime.stage.loss_head import described


def gather_plain(value: Any, group: Any) -> list[Any]:
    """Every rank's value (plain, as JSON can hold it), on every rank."""
    encoded = json.dumps(value).encode()
    world = distributed.get_world_size(group)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
    distributed.all_gather(lengths, torch.tensor([len(encoded)]), group=group)
    longest = max(int(length) for length in lengths)
    padded = torch.frombuffer(bytearray(encoded.ljust(longest)), dtype=torch.uint8)
    gathered = [torch.empty(longest, dtype=torch.uint8) for _ in range(world)]
    distributed.all_gather(gathered, padded, group=group)
    return [json.loads(text.numpy().tobytes()) for text in gathered]


# -- do all ranks train the same thing? -----------------------------------------------------------


def run_facts(
    model: nn.Module,
    partition: Partition,
    programs: Sequence[StageProgram],
    settings: Any,
    device: str,
) -> dict[str, Any]:
    """What must be the same on every rank, by name, as plain values.

    Args:
        settings: A trainer's `Settings`.
        device: The type of the device that a rank trains on.
    """
    method = programs[0].method
    values = (getattr(method, field.name) for field in dataclasses.fields(method))
    named: dict[str, Any] = {
        "revcompile version": sys.modules[__name__.partition(".")[0]].__version__,
        "torch version": torch.__version__,
        "model": partition.rewired.name,
        "stages": len(programs),
        "method": ", ".join(str(v.value if isinstance(v, enum.Enum) else v) for v in values),
    }
    for name, value in (vars(settings.options) | vars(settings) | {"device": device}).items():
        if name != "options":
            named[name] = "a function" if callable(value) else str(value)
    for name, parameter in model.named_parameters():
        frozen = "" if parameter.requires_grad else ", frozen"
        named[f"parameter {name}"] = described(parameter) + frozen
    for name, buffer in model.named_buffers():
        named[f"buffer {name}"] = described(buffer)
    for part, program in zip(partition.parts, programs, strict=True):
        named[f"stage {part.index}"] = ", ".join(piece.name for piece in part.pieces)
        code = source_of(program.forward) + source_of(program.backward)
        digest = hashlib.sha256(code.encode()).hexdigest()[:12]
        named[f"code of stage {part.index}"] = digest
    return named


def check_ranks_agree(facts_of_ranks: Sequence[Mapping[str, Any]], limit: int = 5) -> None:
    """Refuse to start when ranks differ; the first differences are listed, with the ranks."""
    lines, advice = [], ""
    for name in dict.fromkeys(name for found in facts_of_ranks for name in found):
        ranks: dict[str, list[int]] = {}
        for rank, found in enumerate(facts_of_ranks):
            value = found.get(name, "nothing")
            text = value if isinstance(value, str) else json.dumps(value)
            ranks.setdefault(text, []).append(rank)
        if len(ranks) > 1:
            shown = "; ".join(f"{text} on {_listed(who)}" for text, who in ranks.items())
            lines.append(f"  {name}: {shown}")
            if name.startswith("stage "):
                advice = (
                    ' Costs measured on each rank (cost="measured") cut differently: measure on '
                    "one, and give its numbers as cost= to all."
                )
    if lines:
        more = [f"  ... and {len(lines) - limit} more"] if len(lines) > limit else []
        text = "\n".join([*lines[:limit], *more])
        raise InputError(
            f"trainer: the ranks do not agree, so nothing was started:\n{text}\n"
            f"Run the same script with the same versions and settings on every rank.{advice}"
        )


def _listed(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
