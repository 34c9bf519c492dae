"""Why is my model not reversible? Every block and every sum: taken, or refused with a reason.

Exit code 1 if nothing in the model can be made reversible.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from revcompile.cli.models import add_model, load, rewired
from revcompile.cli.output import say, say_json

if TYPE_CHECKING:
    from revcompile.ir.types import Cost, Rewired

__all__ = ["add", "run"]


def add(parser: argparse.ArgumentParser) -> None:
    """Its options."""
    add_model(parser)


def run(args: argparse.Namespace) -> int:
    """Print the segments, their shares, and the reasons."""
    from revcompile.compiler.cost import segment_costs
    from revcompile.inspect.tables import summary_text

    found = rewired(load(args), args).rewired
    priced = segment_costs(found)
    say_json(_facts(found, priced)) if args.json else say(summary_text(found, priced))
    return 0 if found.couplings else 1


def _facts(found: Rewired, priced: tuple[Cost, ...]) -> dict[str, Any]:
    from revcompile.ir.types import Opaque

    segments = [
        {
            "name": segment.name,
            "reversible": not isinstance(segment, Opaque),
            "why": segment.reason if isinstance(segment, Opaque) else segment.kind.value,
            "parameters": cost.parameters,
            "flops": cost.flops,
        }
        for segment, cost in zip(found.body.segments, priced, strict=True)
    ]
    return {
        "model": found.name,
        "segments": segments,
        "found": [{"path": b.path, "kind": b.kind.value} for b in found.residuals],
        "refused": [dataclasses.asdict(refusal) for refusal in found.refusals],
        "notes": list(found.notes),
    }
