"""The details of each stage as plain values, for the HTML page's script."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from revcompile.inspect.drawing.graph import Drawn, drawn_graph, operation, placed
from revcompile.inspect.drawing.picture import Picture
from revcompile.inspect.formatting import amount, listed, share, size, span
from revcompile.inspect.source import code_text
from revcompile.inspect.views import StageView
from revcompile.ir.program import Port, StageProgram
from revcompile.ir.types import PATH
from revcompile.schedule import Action, Method, Schedule, Tie, window

_PROGRAM: Final = re.compile(r"^def (\w+)\(", re.MULTILINE)


def details(picture: Picture) -> dict[str, Any]:
    """Everything the page's script shows, stage by stage."""
    method, count = picture.stages[0].program.method, len(picture.stages)
    steps = action_steps(method, count, picture.ties)
    return {"stages": [_stage(picture, stage, steps[stage.index]) for stage in picture.stages]}


def embedded(value: Any) -> str:
    """Values as JSON that is safe inside a script element, whatever strings they hold.

    >>> print(embedded(["</script><b>&"]))
    ["\\u003c/script\\u003e\\u003cb\\u003e\\u0026"]
    """
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _stage(picture: Picture, stage: StageView, steps: Sequence[Steps]) -> dict[str, Any]:
    flops = sum(every.flops for every in picture.stages)
    graph, note = _graph(stage.program)
    return {
        "name": span([block.name for block in stage.blocks]),
        "facts": list(_facts(picture, stage)),
        "blocks": [
            [
                block.name,
                int(block.reversible),
                block.why,
                f"{block.parameters:,}",
                share(block.flops, flops),
                share(block.work, picture.work),
            ]
            for block in stage.blocks
        ],
        "code": sections(code_text(picture.partition, stage.program)),
        "actions": [[step.count, step.first, step.last] for step in steps],
        "graph": graph,
        "note": note,
        "names": _names(stage),
    }


def _facts(picture: Picture, stage: StageView) -> Iterator[tuple[str, str]]:
    yield "takes", _ports(picture, stage.inputs)
    yield "gives", _ports(picture, stage.outputs)
    yield "parameters", f"{stage.parameters:,}"
    yield "forward FLOPs", amount(stage.flops)
    yield "work", share(stage.work, picture.work)
    yield "in flight", f"{stage.window} micro-batch{'es' if stage.window > 1 else ''}"
    yield "delay", f"{stage.delay} update{'' if stage.delay == 1 else 's'}"
    yield "keeps", size(stage.kept) if stage.kept else "nothing"
    if stage.memory is not None:
        yield "peak memory", size(stage.memory.total)
    for skip in picture.through(stage.index):
        names = ", ".join(skip.names)
        yield "skip values", f"{names} (stages {skip.first} to {skip.last})"
    for tie, shared in picture.ties.items():
        if stage.index in (tie.owner, tie.holder):
            other = tie.owner + tie.holder - stage.index
            yield "tied", f"{', '.join(shared)} with stage {other}"


def _ports(picture: Picture, ports: Sequence[Port]) -> str:
    kinds = [port.type for port in ports if port.type is not None]
    plain = len(ports) - len(kinds)
    parts = [listed(kinds)] if kinds else []
    parts += [f"{plain} plain value{'s'[: plain > 1]}"] if plain else []
    total = sum(map(picture.bytes_of, kinds))
    return " and ".join(parts) + (f" ({size(total)})" if total else "") if parts else "nothing"


def sections(code: str) -> list[tuple[str, str]]:
    """A stage's code cut at its functions; what comes before them is the interface.

    >>> sections("# stage 0\\n\\ndef forward(x): return x\\n\\ndef backward(x): return x")
    [('interface', '# stage 0'), ('forward', 'def forward(x): return x'),
     ('backward', 'def backward(x): return x')]
    """
    starts = [0, *(match.start() for match in _PROGRAM.finditer(code)), len(code)]
    parts = [code[a:b].strip("\n") for a, b in pairwise(starts)]
    named = ((_PROGRAM.match(part), part) for part in parts if part)
    return [(match[1] if match else "interface", part) for match, part in named]


def _graph(program: StageProgram) -> tuple[list[Any], str]:
    """The forward graph's layout in pixels, and a sentence about what is not drawn."""
    graph = drawn_graph(program.forward)
    every = len(program.forward.nodes)
    drawn = sum(len(one.nodes) for one in graph.vertices)
    note = f"{drawn} of the forward program's {every} operations"
    if drawn > len(graph.vertices):
        note += (
            f" in {len(graph.vertices)} boxes, operations of one module together: those with a "
            "thick border open"
        )
    if every > drawn:
        note += "; sizes, weights and bookkeeping are not drawn"
    return _layout(graph), note + "."


def _layout(graph: Drawn) -> list[Any]:
    """Width, height, boxes (each with the layout of what is inside, or None), and arrows."""
    where = placed(graph)
    boxes = [
        [*box, one.label, one.kind, one.about, None if one.inside is None else _layout(one.inside)]
        for box, one in zip(where.boxes, graph.vertices, strict=True)
    ]
    shapes: dict[int, set[str]] = {}  # what each box reads: only what it changes is written down
    for (_, target), (shape, _) in zip(graph.arrows, graph.carried, strict=True):
        shapes.setdefault(target, set()).add(shape)
    arrows = [
        [
            [value for point in points for value in point],
            *carried,
            carried[0] not in shapes.get(source, ()),
        ]
        for (source, _), points, carried in zip(
            graph.arrows, where.arrows, graph.carried, strict=True
        )
    ]
    return [where.width, where.height, boxes, arrows]


def _names(stage: StageView) -> list[str]:
    """Module paths and operations of a stage, for the search."""
    names = dict.fromkeys(block.name for block in stage.blocks)
    for node in stage.program.forward.nodes:
        if node.op == "call_module":
            names[str(node.target)] = None
        elif node.op.startswith("call"):
            names[operation(node)] = None
        if path := node.meta.get(PATH):
            names[str(path)] = None
    return list(names)


# -- actions --------------------------------------------------------------------------------------

_FULL: Final = 3
"""Steps to show once the pipeline is full."""
_ENDS: Final = 12
"""Actions to show at either end of a long list."""


@dataclass(frozen=True)
class Steps:
    """Steps in a row that do the same with one micro-batch after the other."""

    count: int
    first: str
    last: str


def action_steps(
    method: Method, stages: int, ties: Iterable[Tie] = ()
) -> tuple[tuple[Steps, ...], ...]:
    """For every stage: its steps while the pipeline fills, some when it is full, and the drain.

    >>> from revcompile.schedule import choose
    >>> for steps in action_steps(choose("petra"), 2)[0]:
    ...     print(steps.count, steps.first, "...", steps.last)
    1 F0 SY0 ... F0 SY0
    3 F1 SY1 RDY0 B0 U0 ... F3 SY3 RDY2 B2 U2
    1 RDY3 B3 U3 ... RDY3 B3 U3
    """
    schedule = Schedule(method, stages, ties=ties)
    steps = [schedule.inject() for _ in range(window(method, stages, 0) - 1 + _FULL)]
    steps.append(schedule.drain())
    return tuple(_merged([step[stage] for step in steps]) for stage in range(stages))


def _merged(steps: Sequence[Sequence[Action]]) -> tuple[Steps, ...]:
    """Steps of one stage, equal ones in a row together."""
    merged: list[Steps] = []
    last: object = None
    for actions in filter(None, steps):
        kind = [(action.op, action.peer) for action in actions]
        text = " ".join(_shortened([str(action) for action in actions]))
        if kind == last:
            merged[-1] = Steps(merged[-1].count + 1, merged[-1].first, text)
        else:
            merged.append(Steps(1, text, text))
        last = kind
    return tuple(merged)


def _shortened(names: list[str]) -> list[str]:
    return names if len(names) <= 2 * _ENDS else [*names[:_ENDS], "…", *names[-_ENDS:]]
