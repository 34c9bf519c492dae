"""The whole model as one HTML file: the drawing, and the details of every stage on a click.

The file loads nothing. The drawing and a table of all stages are plain markup that can be read and
printed without JavaScript; a stage's segments, graph, code and actions are made from data in the
file when the stage is opened.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.resources import files
from typing import Final

from revcompile.inspect.drawing.blocks import GLYPH, legend_items
from revcompile.inspect.drawing.details import details, embedded
from revcompile.inspect.drawing.network import headline, scale_of, totals
from revcompile.inspect.drawing.picture import Picture
from revcompile.inspect.drawing.stages import StageFigure, StageFigures
from revcompile.inspect.drawing.svg import element, escape
from revcompile.inspect.drawing.theme import styles
from revcompile.inspect.formatting import listed, share, size, span
from revcompile.inspect.views import StageView, refusals_by_reason

_NARROWEST: Final = 580.0
"""A stage fits a window of this width."""
_COLUMNS: Final = (
    ("#", "number"),
    ("segments", "path"),
    ("kind", None),
    ("parameters", "number"),
    ("work", "number"),
    ("sends", None),
    ("keeps", "number"),
    ("updates late", "number"),
)
_HELP: Final = (
    "<footer>Open a stage with a click or with <kbd>Enter</kbd>; <kbd>←</kbd> <kbd>→</kbd> go from"
    " stage to stage and from tab to tab, <kbd>/</kbd> searches, <kbd>Esc</kbd> closes.</footer>"
)


def page(picture: Picture) -> str:
    """The page as text."""
    figures = StageFigures(picture, scale_of(picture, _NARROWEST))
    title = escape(headline(picture))
    subtitle = escape(" · ".join(totals(picture)))
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{title}</title>",
        f"<style>{_asset('page.css')}\n{styles()}</style></head><body>",
        f'<header><div><h1>{title}</h1><p class="totals">{subtitle}</p></div>',
        f"{_search(picture)}</header>",
        "<main>",
        '<div id="stages" class="strip rv-drawing" role="group" aria-label="stages">',
        *(_figure(picture, figures, figure) for figure in figures.all),
        '<section id="details" aria-label="details of a stage" hidden></section>',
        "</div>",
        _legend(picture),
        f'<h2>All stages</h2><div class="wide">{_table(picture)}</div>',
        *_remarks(picture),
        "</main>",
        _HELP,
        f'<script type="application/json" id="data">{embedded(details(picture))}</script>',
        f"<script>{_asset('page.js')}</script>",
        "</body></html>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


def _search(picture: Picture) -> str:
    example = picture.stages[len(picture.stages) // 2].blocks[0].name
    field = element(
        "input",
        id="search",
        type="search",
        autocomplete="off",
        spellcheck="false",
        placeholder=example,
        aria_controls="found",
    )
    label = '<label for="search">Find a module or an operation (press /)</label>'
    found = '<output id="count" for="search"></output><ol id="found"></ol>'
    return f'<div class="search">{label}{field}{found}</div>'


def _asset(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _figure(picture: Picture, figures: StageFigures, figure: StageFigure) -> str:
    stage = figure.stage
    kind = "reversible" if stage.reversible else "not reversible as a whole"
    name = span([block.name for block in stage.blocks])
    label = f"stage {stage.index}: {name}, {kind}, {share(stage.work, picture.work)} of the work"
    drawn = element(
        "svg",
        figures.draw(figure),
        viewBox=f"0 0 {figure.width:g} {figures.height:g}",
        width=figure.width,
        height=figures.height,
    )
    return element(
        "div",
        drawn,
        class_="tile",
        id=f"stage-{stage.index}",
        role="button",
        tabindex=-1,
        aria_expanded="false",
        aria_controls="details",
        aria_label=label,
    )


def _legend(picture: Picture) -> str:
    size_ = {"width": GLYPH, "height": GLYPH}
    items = (
        element("li", element("svg", glyph, **size_), element("span", escape(label)))
        for glyph, label in legend_items(picture)
    )
    return element("ul", *items, class_="legend rv-drawing", aria_label="legend")


def _table(picture: Picture) -> str:
    head = "".join(
        element("th", escape(name), class_=class_, scope="col") for name, class_ in _COLUMNS
    )
    rows = "".join(_row(picture, stage) for stage in picture.stages)
    body = element("tbody", rows)
    return element("table", element("thead", element("tr", head)), body)


def _row(picture: Picture, stage: StageView) -> str:
    blocks = sum(block.reversible for block in stage.blocks)
    kind = f"{blocks}/{len(stage.blocks)} reversible" if blocks else "opaque"
    full = stage.reversible
    cells = (
        str(stage.index),
        span([block.name for block in stage.blocks]),
        "reversible" if full else kind,
        f"{stage.parameters:,}",
        share(stage.work, picture.work),
        listed([port.type for port in stage.outputs if port.type is not None]),
        size(stage.kept) if stage.kept else "nothing",
        str(stage.delay),
    )
    return element("tr", *_cells(cells, full))


def _cells(cells: Sequence[str], reversible: bool) -> Iterator[str]:
    for (name, class_), cell in zip(_COLUMNS, cells, strict=True):
        inside = escape(cell)
        if name == "kind":
            inside = element("span", inside, class_="kind reversible" if reversible else "kind")
        yield element("td", inside or " ", class_=class_)


def _remarks(picture: Picture) -> Iterator[str]:
    """Notes of the rewiring, and the sums it refused, grouped by reason."""
    rewired = picture.partition.rewired
    refused = [f"{', '.join(paths)}: {why}" for why, paths in refusals_by_reason(rewired).items()]
    for title, lines in (("Notes", rewired.notes), ("Not rewired", refused)):
        if lines:
            items = "".join(element("li", escape(line)) for line in lines)
            yield f'<h3>{title}</h3><ul class="plain">{items}</ul>'
