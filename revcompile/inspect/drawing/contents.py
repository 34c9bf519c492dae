"""What the page knows of each stage, as plain values for its script."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Final

from revcompile.inspect.code import code_text
from revcompile.inspect.drawing.facts import Picture
from revcompile.inspect.drawing.graphs import drawn_graph, operation
from revcompile.inspect.drawing.layout import placed
from revcompile.inspect.drawing.orders import Rounds, action_rounds
from revcompile.inspect.facts import Stage
from revcompile.inspect.words import amount, listed, share, size, span
from revcompile.ir.program import Port, StageProgram
from revcompile.ir.types import PATH
from revcompile.schedule import Tie

__all__ = ["contents", "embedded", "sections"]

_PROGRAM: Final = re.compile(r"^def (\w+)\(", re.MULTILINE)


def contents(picture: Picture) -> dict[str, Any]:
    """Everything the page's script shows, in the order of the stages."""
    method, count = picture.stages[0].program.method, len(picture.stages)
    ties = [Tie(treaty.owner, treaty.holder) for treaty in picture.treaties]
    rounds = action_rounds(method, count, ties)
    return {"stages": [_stage(picture, stage, rounds[stage.index]) for stage in picture.stages]}


def embedded(value: Any) -> str:
    """Values as JSON that can stand inside a script element, whatever names they hold.

    >>> print(embedded(["</script><b>&"]))
    ["\\u003c/script\\u003e\\u003cb\\u003e\\u0026"]
    """
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _stage(picture: Picture, stage: Stage, rounds: Sequence[Rounds]) -> dict[str, Any]:
    flops = sum(one.flops for one in picture.stages)
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
        "actions": [[one.count, one.first, one.last] for one in rounds],
        "graph": graph,
        "hidden": note,
        "words": _words(stage),
    }


def _facts(picture: Picture, stage: Stage) -> Iterator[tuple[str, str]]:
    yield "takes", _ports(picture, stage.inputs)
    yield "gives", _ports(picture, stage.outputs)
    yield "parameters", f"{stage.parameters:,}"
    yield "forward FLOPs", amount(stage.flops)
    yield "work", share(stage.work, picture.work)
    yield "in flight", f"{stage.window} micro-batch{'es' if stage.window > 1 else ''}"
    yield "delay", f"{stage.delay} update{'' if stage.delay == 1 else 's'}"
    yield "keeps", size(stage.kept) if stage.kept else "nothing"
    if stage.memory is not None:
        yield "holds at its peak", size(stage.memory.total)
    for traveller in picture.through(stage.index):
        names = ", ".join(traveller.names)
        yield "travelling", f"{names} (stages {traveller.first} to {traveller.last})"
    for treaty in picture.treaties:
        if stage.index in (treaty.owner, treaty.holder):
            other = treaty.owner + treaty.holder - stage.index
            yield "tied", f"{', '.join(treaty.names)} with stage {other}"


def _ports(picture: Picture, ports: Sequence[Port]) -> str:
    kinds = [port.type for port in ports if port.type is not None]
    plain = len(ports) - len(kinds)
    said = [listed(kinds)] if kinds else []
    said += [f"{plain} plain value{'s'[: plain > 1]}"] if plain else []
    total = sum(map(picture.bytes_of, kinds))
    return " and ".join(said) + (f" ({size(total)})" if total else "") if said else "nothing"


def sections(code: str) -> list[tuple[str, str]]:
    """A stage's code in its parts: what it takes and gives, then each program.

    >>> sections("# stage 0\\n\\ndef forward(x): return x\\n\\ndef backward(x): return x")
    [('interface', '# stage 0'), ('forward', 'def forward(x): return x'),
     ('backward', 'def backward(x): return x')]
    """
    starts = [0, *(found.start() for found in _PROGRAM.finditer(code)), len(code)]
    parts = [code[a:b].strip("\n") for a, b in pairwise(starts)]
    named = ((_PROGRAM.match(part), part) for part in parts if part)
    return [(found[1] if found else "interface", part) for found, part in named]


def _graph(program: StageProgram) -> tuple[list[Any], str]:
    """The forward graph's places in whole pixels, and a sentence on what it leaves out."""
    graph = drawn_graph(program.forward)
    where = placed(graph)
    boxes = [
        [*box, one.label, one.kind, one.about]
        for box, one in zip(where.boxes, graph.vertices, strict=True)
    ]
    arrows = [[value for point in arrow for value in point] for arrow in where.arrows]
    every = len(program.forward.nodes)
    drawn = sum(len(one.nodes) for one in graph.vertices)
    note = f"{drawn} of the forward program's {every} operations"
    if drawn > len(boxes):
        note += f" in {len(boxes)} boxes, operations of one module together"
    if every > drawn:
        note += "; sizes, weights and bookkeeping are not drawn"
    return [where.width, where.height, boxes, arrows], note + "."


def _words(stage: Stage) -> list[str]:
    """Module paths and operations of a stage, to search."""
    found = dict.fromkeys(block.name for block in stage.blocks)
    for node in stage.program.forward.nodes:
        if node.op == "call_module":
            found[str(node.target)] = None
        elif node.op.startswith("call"):
            found[operation(node)] = None
        if path := node.meta.get(PATH):
            found[str(path)] = None
    return list(found)
