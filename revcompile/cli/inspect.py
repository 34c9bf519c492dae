"""Show a model's stages: what each computes, sends and keeps, and why it is reversible or not.

The model is built on the meta device, so that even large ones take no memory.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING, Final

from revcompile.cli.models import add_model, add_stages, load, staged
from revcompile.cli.output import say, say_json
from revcompile.errors import InputError

if TYPE_CHECKING:
    from revcompile.inspect.code import CompiledStage
    from revcompile.staged import StagedModel


_FACTS: Final = (
    *("index", "pieces", "modules", "reversible", "opaque", "parameters", "work_share"),
    *("flops", "sends", "sent_bytes", "window", "delay", "batch"),
)


def add(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_stages(parser, default=1)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--explain", metavar="PATH", help="how a module was rewired, where it runs")
    what.add_argument("--code", type=int, metavar="STAGE", help="a stage's generated Python")
    what.add_argument("--program", type=int, metavar="STAGE", help="a stage's list of actions")


def run(args: argparse.Namespace) -> int:
    """Print the table of stages, or the detail that an option names."""
    net = staged(load(args), args)
    if args.explain is not None:
        explanation = net.explain(args.explain)
        say_json(dataclasses.asdict(explanation)) if args.json else say(explanation)
    elif args.code is not None:
        code = _stage(net, args.code).code
        say_json({"stage": args.code, "code": code}) if args.json else say(code)
    elif args.program is not None:
        actions = _stage(net, args.program).program
        listed = {"stage": args.program, "actions": [str(action) for action in actions]}
        say_json(listed) if args.json else say(actions)
    elif args.json:
        say_json(_facts(net, args.microbatch_size))
    else:
        say(net.summary(args.microbatch_size))
    return 0


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
