"""The whole model as one SVG: stages from left to right, in as many rows as they need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from revcompile.inspect.drawing.blocks import legend
from revcompile.inspect.drawing.stages import StageFigure, StageFigures
from revcompile.inspect.drawing.svg import document, element
from revcompile.inspect.formatting import amount, plural, share
from revcompile.inspect.views import ModelView

_WIDTH: Final = 1000.0
_MARGIN: Final = 20.0
_INSIDE: Final = _WIDTH - 2 * _MARGIN
_TOP: Final = 66.0
_BETWEEN: Final = 22.0
_BLOCK: Final = 62.0
"""Width of a block of mean work, in models with few blocks."""
_LONGEST: Final = 4200.0
"""Largest width of all blocks together."""
_SCALES: Final = tuple(0.05 * step for step in range(4, 35))
_SMALLEST: Final = 0.7
"""Smaller scales are used only for stages that would otherwise be wider than a row."""


def scale_of(view: ModelView, width: float) -> float:
    """Pixels per unit of work: blocks wide enough to read, and no stage wider than a row."""
    wanted = min(_BLOCK * len(view.blocks), _LONGEST)
    most = max(len(stage.blocks) for stage in view.stages)
    widest = max(width - 140 - 8 * min(most, 40), 300.0)
    largest = max(stage.work_share for stage in view.stages)
    return min(wanted, widest / largest if largest else wanted) / view.work


def _arranged(view: ModelView) -> tuple[StageFigures, list[list[StageFigure]]]:
    """Figures and rows: as few rows as possible, at the scale that fills them best."""
    candidates = []
    for factor in _SCALES:
        figures = StageFigures(view, factor * scale_of(view, _INSIDE))
        rows = _rows(figures.all)
        overflow = max(max(figure.width for figure in figures.all) - _INSIDE, 0.0)
        # In tens of pixels: among nearly equal arrangements the larger scale wins.
        loosest = max(map(_spare, rows)) // 10
        is_small = factor < _SMALLEST
        candidates.append((overflow, is_small, len(rows), loosest - factor, figures, rows))
    *_, figures, rows = min(candidates, key=lambda candidate: candidate[:4])
    return figures, rows


def _rows(figures: Sequence[StageFigure]) -> list[list[StageFigure]]:
    rows: list[list[StageFigure]] = [[]]
    for figure in figures:
        if rows[-1] and sum(placed.width for placed in rows[-1]) + figure.width > _INSIDE:
            rows.append([])
        rows[-1].append(figure)
    return rows


def _spare(row: Sequence[StageFigure]) -> float:
    """Unused width of a row, per figure."""
    return max(_INSIDE - sum(figure.width for figure in row), 0.0) / len(row)


def network_svg(view: ModelView) -> str:
    """The drawing as a complete SVG."""
    figures, rows = _arranged(view)
    y, drawn = _TOP, []
    for row in rows:
        x, spare = _MARGIN, _spare(row)
        spare = spare if row is not rows[-1] or spare < 12 else 0.0
        for figure in row:
            placed = f"translate({x:.2f} {y:.2f})"
            drawn.append(element("g", figures.draw(figure, figure.arrow + spare), transform=placed))
            x += figure.width + spare
        y += figures.height + _BETWEEN
    return document(
        headline(view),
        " · ".join(totals(view)),
        *drawn,
        legend(view, _MARGIN, y + 4),
        width=_WIDTH,
        height=y + 42,
        margin=_MARGIN,
    )


def headline(view: ModelView) -> str:
    """The model, and how it was cut."""
    return f"{view.name}: {plural(len(view.stages), 'stage')}, {view.method}"


def totals(view: ModelView) -> list[str]:
    """Numbers about the whole model, one phrase each."""
    stages, blocks = view.stages, view.blocks
    inside = [block.work for block in blocks if block.reversible]
    reversible = f"({share(sum(inside), view.work)} of the work)"
    return [
        f"{amount(sum(stage.parameters for stage in stages))} parameters",
        f"{len(inside)} of {len(blocks)} blocks reversible {reversible}",
        f"{sum(not stage.memory.buffers for stage in stages)} of {len(stages)} stages keep nothing",
        f"largest stage {view.balance:.2f}× the mean",
        f"sizes for micro-batches of B = {view.batch}",
    ]
