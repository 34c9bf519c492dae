"""revcompile inspect: what of a model becomes reversible, its stages, or details of one."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Final

from revcompile.cli import Answer
from revcompile.cli.models import load, rewired, staged
from revcompile.compiler.cost import segment_costs
from revcompile.errors import InputError
from revcompile.inspect.code import CompiledStage
from revcompile.inspect.tables import summary_text
from revcompile.ir.types import Opaque, Rewired
from revcompile.staged import StagedModel

_FACTS: Final = (
    *("index", "pieces", "modules", "reversible", "opaque", "parameters", "work_share"),
    *("flops", "sends", "sent_bytes", "window", "delay", "batch"),
)


def run(args: argparse.Namespace) -> Answer:
    """The table of segments or of stages, or the detail that an option asks for."""
    if args.stages is None and args.explain is args.code is args.program is None:
        return _segments(args)
    net = staged(load(args), args)
    if args.explain is not None:
        explanation = net.explain(args.explain)
        return Answer(explanation, dataclasses.asdict(explanation))
    if args.code is not None:
        code = _stage(net, args.code).code
        return Answer(code, {"stage": args.code, "code": code})
    if args.program is not None:
        actions = _stage(net, args.program).program
        return Answer(actions, {"stage": args.program, "actions": [*map(str, actions)]})
    return Answer(net.summary(verbose=True), _facts(net))


def _segments(args: argparse.Namespace) -> Answer:
    """The segments, their shares, and the reasons; exit code 1 if nothing is reversible."""
    for name in ("method", "in_flight_per_stage", "weights", "microbatch_size"):
        if getattr(args, name) is not None:
            option = name.replace("_", "-")
            raise InputError(f"--{option} is about stages; give --stages N, too")
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
    found = [{"path": b.path, "kind": b.kind.value} for b in net.residuals]
    facts = {"model": net.name, "segments": segments, "found": found, **_reasons(net)}
    return Answer(summary_text(net, costs, verbose=True), facts, 0 if net.couplings else 1)


def _reasons(net: Rewired) -> dict[str, object]:
    """Why sums were not rewired, and other notes."""
    refused = [dataclasses.asdict(refusal) for refusal in net.refusals]
    return {"refused": refused, "notes": list(net.notes)}


def _stage(net: StagedModel, index: int) -> CompiledStage:
    if not 0 <= index < net.num_stages:
        raise InputError(f"stage {index}: there are stages 0 to {net.num_stages - 1}")
    return net.stages[index]


def _facts(net: StagedModel) -> dict[str, object]:
    model = net._partition.rewired
    return {
        "model": model.name,
        "method": net.method.name,
        "stages": [
            {name: getattr(stage, name) for name in _FACTS}
            | {"memory": dataclasses.asdict(stage.memory) | {"total": stage.memory.total}}
            for stage in net.facts()
        ],
        "ties": [
            {"owner": tie.owner, "holder": tie.holder, "parameters": list(names)}
            for tie, names in net._partition.ties.items()
        ],
        **_reasons(model),
    }
