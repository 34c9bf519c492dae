"""What all ranks do together: compare and gather plain values."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import distributed

from revcompile.errors import InputError

__all__ = ["compare", "gather_plain"]


def gather_plain(value: Any, group: Any) -> list[Any]:
    """Every rank's value (anything JSON has a word for), on every rank."""
    mine = json.dumps(value).encode()
    world = distributed.get_world_size(group)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
    distributed.all_gather(lengths, torch.tensor([len(mine)]), group=group)
    longest = max(int(length) for length in lengths)
    padded = torch.frombuffer(bytearray(mine.ljust(longest)), dtype=torch.uint8)
    found = [torch.empty(longest, dtype=torch.uint8) for _ in range(world)]
    distributed.all_gather(found, padded, group=group)
    return [json.loads(bytes(one.tolist())) for one in found]


def compare(facts: Sequence[Mapping[str, Any]], limit: int = 5) -> None:
    """Refuse to start when ranks differ in a fact; the difference is printed, with the ranks."""
    names = list(dict.fromkeys(name for found in facts for name in found))
    lines, advice = [], ""
    for name in names:
        ranks: dict[str, list[int]] = {}
        for rank, found in enumerate(facts):
            ranks.setdefault(_shown(found.get(name, "nothing")), []).append(rank)
        if len(ranks) > 1:
            shown = "; ".join(f"{what} on {_listed(who)}" for what, who in ranks.items())
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


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _listed(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
