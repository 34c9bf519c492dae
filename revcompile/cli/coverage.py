"""revcompile coverage: which parts of a model become reversible."""

from __future__ import annotations

import argparse
import dataclasses

from revcompile.cli import Answer
from revcompile.cli.models import load, rewired
from revcompile.compiler.cost import segment_costs
from revcompile.inspect.tables import summary_text
from revcompile.ir.types import Opaque


def run(args: argparse.Namespace) -> Answer:
    """The segments, their shares, and the reasons; exit code 1 if nothing is reversible."""
    net = rewired(load(args), args).rewired
    costs = segment_costs(net)
    segments = [
        {
            "name": segment.name,
            "reversible": not isinstance(segment, Opaque),
            "why": segment.reason if isinstance(segment, Opaque) else segment.kind.value,
            "parameters": cost.parameters,
            "flops": cost.flops,
        }
        for segment, cost in zip(net.body.segments, costs, strict=True)
    ]
    facts = {
        "model": net.name,
        "segments": segments,
        "found": [{"path": b.path, "kind": b.kind.value} for b in net.residuals],
        "refused": [dataclasses.asdict(refusal) for refusal in net.refusals],
        "notes": list(net.notes),
    }
    return Answer(summary_text(net, costs, verbose=True), facts, 0 if net.couplings else 1)
