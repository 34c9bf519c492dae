"""revcompile inspect: the stages of a model, or details of one."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Final

from revcompile.cli import Answer
from revcompile.cli.models import load, staged
from revcompile.errors import InputError
from revcompile.inspect.code import CompiledStage
from revcompile.staged import StagedModel

_FACTS: Final = (
    *("index", "pieces", "modules", "reversible", "opaque", "parameters", "work_share"),
    *("flops", "sends", "sent_bytes", "window", "delay", "batch"),
)


def run(args: argparse.Namespace) -> Answer:
    """The table of stages, or the detail that an option asks for."""
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
    return Answer(
        net.summary(args.microbatch_size, verbose=True), _facts(net, args.microbatch_size)
    )


def _stage(net: StagedModel, index: int) -> CompiledStage:
    if not 0 <= index < net.num_stages:
        raise InputError(f"stage {index}: there are stages 0 to {net.num_stages - 1}")
    return net.stages[index]


def _facts(net: StagedModel, microbatch_size: int | None) -> dict[str, object]:
    rewired = net._partition.rewired
    return {
        "model": rewired.name,
        "method": net.method.name,
        "stages": [
            {name: getattr(stage, name) for name in _FACTS}
            | {"memory": dataclasses.asdict(stage.memory) | {"total": stage.memory.total}}
            for stage in net.facts(microbatch_size)
        ],
        "ties": [
            {"owner": tie.owner, "holder": tie.holder, "parameters": list(names)}
            for tie, names in net._partition.ties.items()
        ],
        "refusals": [dataclasses.asdict(refusal) for refusal in rewired.refusals],
        "notes": list(rewired.notes),
    }
