"""The whole model as one HTML file: the drawing, and the details of every stage on a click.

The file loads nothing. The drawing and a table of all stages are plain markup that can be read and
printed without JavaScript; a stage's segments, graph, code and actions are made from data in the
file when the stage is opened.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Final

from revcompile.inspect.code import action_list
from revcompile.inspect.drawing.blocks import legend
from revcompile.inspect.drawing.graph import drawn_graph, layout, operation
from revcompile.inspect.drawing.network import headline, scale_of, totals
from revcompile.inspect.drawing.stages import StageFigure, StageFigures
from revcompile.inspect.drawing.svg import asset, element, escape
from revcompile.inspect.formatting import amount, listed, plural, share, size
from revcompile.inspect.source import code_text
from revcompile.inspect.tables import refusals
from revcompile.inspect.views import ModelView, StageView, tensors
from revcompile.ir.program import Port
from revcompile.ir.types import PATH
from revcompile.schedule import Action, actions

_NARROWEST: Final = 580.0
"""A stage fits a window of this width."""
_HELP: Final = (
    "<footer>Open a stage with a click or with <kbd>Enter</kbd>; <kbd>←</kbd> <kbd>→</kbd> go from"
    " stage to stage and from tab to tab, <kbd>/</kbd> searches, <kbd>Esc</kbd> closes.</footer>"
)
_SEARCH: Final = (
    '<div class="search"><label for="search">Find a module or an operation (press /)</label>'
    '<input id="search" type="search" autocomplete="off" spellcheck="false" '
    'aria-controls="found"/><output id="count" for="search"></output><ol id="found"></ol></div>'
)


def page(view: ModelView) -> str:
    """The page as text."""
    figures = StageFigures(view, scale_of(view, _NARROWEST))
    title = escape(headline(view))
    subtitle = escape(" · ".join(totals(view)))
    steps = actions(
        view.stages[0].program.method, len(view.stages), 2 * len(view.stages), ties=view.ties
    )
    key = element("svg", legend(view, 0, 1), width=960, height=28)
    data = {"stages": [_details(view, stage, steps[stage.index]) for stage in view.stages]}
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{title}</title>",
        f"<style>{asset('page.css')}\n{asset('drawing.css')}</style></head><body>",
        f'<header><div><h1>{title}</h1><p class="totals">{subtitle}</p></div>{_SEARCH}</header>',
        "<main>",
        '<div id="stages" class="strip rv-drawing" role="group" aria-label="stages">',
        *(_tile(figures, figure) for figure in figures.all),
        '<section id="details" aria-label="details of a stage" hidden></section>',
        "</div>",
        f'<div class="legend wide rv-drawing">{key}</div>',
        f'<h2>All stages</h2><div class="wide">{_table(view)}</div>',
        *_remarks(view),
        "</main>",
        _HELP,
        f'<script type="application/json" id="data">{embedded(data)}</script>',
        f"<script>{asset('page.js')}</script>",
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _tile(figures: StageFigures, figure: StageFigure) -> str:
    stage, measures = figure.stage, {"width": figure.width, "height": figures.height}
    kind = "reversible" if stage.reversible else "not reversible as a whole"
    work = f"{share(stage.work_share, 1)} of the work"
    view_box = f"0 0 {figure.width:g} {figures.height:g}"
    return element(
        "div",
        element("svg", figures.draw(figure), viewBox=view_box, **measures),
        class_="tile",
        id=f"stage-{stage.index}",
        role="button",
        tabindex=-1,
        aria_expanded="false",
        aria_controls="details",
        aria_label=f"stage {stage.index}: {stage.title}, {kind}, {work}",
    )


def _kind(stage: StageView) -> str:
    if stage.reversible:
        return element("span", "reversible", class_="kind reversible")
    blocks = len(stage.blocks) - len(stage.opaque)
    part = f"{blocks}/{len(stage.blocks)} reversible" if blocks else "opaque"
    return element("span", part, class_="kind")


_COLUMNS: Final = {
    "parameters": "number",
    "work": "number",
    "gives": "",
    "keeps": "number",
    "delay": "number",
}
"""Facts in the table of all stages, with the CSS class of each column."""


def _table(view: ModelView) -> str:
    columns = {"#": "number", "segments": "path", "kind": ""} | _COLUMNS
    names = (element("th", name, class_=class_, scope="col") for name, class_ in columns.items())
    rows = []
    for stage in view.stages:
        facts = _facts(view, stage)
        cells = str(stage.index), escape(stage.title), _kind(stage), *map(facts.get, _COLUMNS)
        row = zip(cells, columns.values(), strict=True)
        rows.append(element("tr", *(element("td", str(of), class_=class_) for of, class_ in row)))
    head = element("thead", element("tr", *names))
    return element("table", head, element("tbody", *rows))


def _remarks(view: ModelView) -> Iterator[str]:
    """The rewiring's notes, and the sums it refused, as HTML lists."""
    for title, lines in (("Notes", view.rewired.notes), ("Not rewired", refusals(view.rewired))):
        if lines:
            items = "".join(element("li", escape(line)) for line in lines)
            yield f'<h3>{title}</h3><ul class="plain">{items}</ul>'


# -- what opens on a click ------------------------------------------------------------------------


def embedded(value: Any) -> str:
    """Values as JSON that is safe inside a script element, whatever strings they hold.

    >>> print(embedded(["</script><b>&"]))
    ["\\u003c/script\\u003e\\u003cb\\u003e\\u0026"]
    """
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _details(view: ModelView, stage: StageView, steps: Sequence[Action]) -> dict[str, Any]:
    """All data that the page's script shows about a stage."""
    return {
        "name": stage.title,
        "facts": list(_facts(view, stage).items()),
        "blocks": [
            [
                block.name,
                int(block.reversible),
                block.why,
                f"{block.cost.parameters:,}",
                amount(block.cost.flops),
                share(block.work, view.work),
            ]
            for block in stage.blocks
        ],
        "code": code_text(view.partition, stage.program),
        "actions": action_list(stage.program, steps).lines,
        "graph": layout(drawn_graph(stage.program.forward)),
        "names": _names(stage),
    }


def _facts(view: ModelView, stage: StageView) -> dict[str, str]:
    facts = {
        "takes": _ports(view, stage.program.inputs),
        "gives": _ports(view, stage.program.outputs),
        "parameters": f"{stage.parameters:,}",
        "forward FLOPs": amount(stage.flops),
        "work": share(stage.work_share, 1),
        "in flight": plural(stage.window, "micro-batch"),
        "delay": plural(stage.delay, "update"),
        "keeps": stage.keeps,
        "peak memory": size(stage.memory.total),
    }
    skips = [
        f"{', '.join(skip.names)} (stages {skip.first} to {skip.last})"
        for skip in view.skips
        if skip.first <= stage.index <= skip.last
    ]
    tied = [
        f"{', '.join(shared)} with stage {tie.owner + tie.holder - stage.index}"
        for tie, shared in view.ties.items()
        if stage.index in (tie.owner, tie.holder)
    ]
    more = {"skip values": "; ".join(skips), "tied": "; ".join(tied)}
    return facts | {name: text for name, text in more.items() if text}


def _ports(view: ModelView, ports: Sequence[Port]) -> str:
    kinds = tensors(ports)
    plain = len(ports) - len(kinds)
    total = sum(kind.nbytes(view.batch) for kind in kinds)
    parts = [f"{listed(kinds)} ({size(total)})"] if kinds else []
    parts += [plural(plain, "plain value")] if plain else []
    return " and ".join(parts) or "nothing"


def _names(stage: StageView) -> list[str]:
    """Module paths and operations of a stage, for the search."""
    names = dict.fromkeys(stage.pieces)
    for node in stage.program.forward.nodes:
        if node.op.startswith("call"):
            names[str(node.target) if node.op == "call_module" else operation(node)] = None
        if path := node.meta.get(PATH):
            names[str(path)] = None
    return list(names)
