"""List what in a model becomes reversible, and why the rest does not.

Exit code 1 if nothing in the model can be made reversible.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from revcompile.cli.models import add_model, load, rewired
from revcompile.cli.output import Answer

if TYPE_CHECKING:
    from revcompile.ir.types import Cost, Rewired


def add(parser: argparse.ArgumentParser) -> None:
    add_model(parser)


def run(args: argparse.Namespace) -> Answer:
    """The segments, their shares, and the reasons."""
    from revcompile.compiler.cost import segment_costs
    from revcompile.inspect.tables import summary_text

    net = rewired(load(args), args).rewired
    costs = segment_costs(net)
    return Answer(summary_text(net, costs), _facts(net, costs), 0 if net.couplings else 1)


def _facts(net: Rewired, segment_costs: tuple[Cost, ...]) -> dict[str, Any]:
    from revcompile.ir.types import Opaque

    segments = [
        {
            "name": segment.name,
            "reversible": not isinstance(segment, Opaque),
            "why": segment.reason if isinstance(segment, Opaque) else segment.kind.value,
            "parameters": cost.parameters,
            "flops": cost.flops,
        }
        for segment, cost in zip(net.body.segments, segment_costs, strict=True)
    ]
    return {
        "model": net.name,
        "segments": segments,
        "found": [{"path": b.path, "kind": b.kind.value} for b in net.residuals],
        "refused": [dataclasses.asdict(refusal) for refusal in net.refusals],
        "notes": list(net.notes),
    }
