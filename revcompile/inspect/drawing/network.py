"""The whole model as one SVG: stages from left to right, in as many rows as they need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from revcompile.inspect.drawing.blocks import legend
from revcompile.inspect.drawing.picture import Picture
from revcompile.inspect.drawing.stages import StageFigure, StageFigures
from revcompile.inspect.drawing.svg import document, element
from revcompile.inspect.drawing.theme import styles
from revcompile.inspect.formatting import amount, plural, share

WIDTH: Final = 1000.0
_MARGIN: Final = 20.0
_TOP: Final = 66.0
_BETWEEN: Final = 22.0
_BLOCK: Final = 62.0
"""Width of a block of mean work, if there are few."""
_LONGEST: Final = 4200.0
"""Most pixels for all blocks side by side."""
_SCALES: Final = tuple(0.7 + 0.05 * step for step in range(21))
_SHRINKS: Final = 12
"""Steps by which the scale falls, at most, until the widest stage fits into a row."""


def scale_of(picture: Picture, width: float = WIDTH - 2 * _MARGIN) -> float:
    """Pixels for one unit of work: blocks wide enough to read, and no stage wider than a row."""
    blocks = sum(len(stage.blocks) for stage in picture.stages)
    wanted = min(_BLOCK * blocks, _LONGEST) / (picture.work or 1)
    largest = max(stage.work for stage in picture.stages)
    most = max(len(stage.blocks) for stage in picture.stages)
    widest = max(width - 140 - 8 * min(most, 40), 300.0)
    return min(wanted, widest / largest) if largest else wanted


def _arranged(picture: Picture, width: float) -> tuple[StageFigures, list[list[StageFigure]]]:
    """Figures and rows: as few rows as possible, at the scale that fills them best."""
    scale = scale_of(picture, width)
    for _ in range(_SHRINKS):
        if _widest(StageFigures(picture, _SCALES[0] * scale)) <= width:
            break
        scale *= 0.9
    candidates: list[tuple[bool, int, float, StageFigures, list[list[StageFigure]]]] = []
    for factor in _SCALES:
        figures = StageFigures(picture, factor * scale)
        for rows in (_rows(figures.all, width), _break_rows(figures.all, width)):
            # In whole tens of pixels: among nearly equal ones the larger scale wins.
            loosest = max((_spare(row, width) for row in rows[:-1]), default=0.0) // 10
            overflows = _widest(figures) > width
            candidates.append((overflows, len(rows), loosest - factor, figures, rows))
    *_, figures, rows = min(candidates, key=lambda candidate: candidate[:3])
    return figures, rows


def _widest(figures: StageFigures) -> float:
    return max(figure.width for figure in figures.all)


def _spare(row: Sequence[StageFigure], width: float) -> float:
    """Width that is left in a row, for each of its figures."""
    return max(width - sum(figure.width for figure in row), 0.0) / len(row)


def network_svg(picture: Picture, width: float = WIDTH) -> str:
    """The drawing as a complete SVG."""
    figures, rows = _arranged(picture, width - 2 * _MARGIN)
    y, drawn = _TOP, []
    for row in rows:
        x = _MARGIN
        spare = _spare(row, width - 2 * _MARGIN)
        spare = spare if row is not rows[-1] or spare < 12 else 0.0
        for figure in row:
            placed = f"translate({x:.2f} {y:.2f})"
            drawn.append(element("g", figures.draw(figure, figure.arrow + spare), transform=placed))
            x += figure.width + spare
        y += figures.height + _BETWEEN
    key, key_height = legend(picture, _MARGIN, y + 4, width - 2 * _MARGIN)
    return document(
        headline(picture),
        " · ".join(totals(picture)),
        *drawn,
        key,
        width=width,
        height=y + key_height + 14,
        margin=_MARGIN,
        style=styles(),
    )


def headline(picture: Picture) -> str:
    """The model, and how it was cut."""
    return f"{picture.name}: {plural(len(picture.stages), 'stage')}, {picture.method}"


def totals(picture: Picture) -> list[str]:
    """Figures of the whole model, a phrase each."""
    stages = picture.stages
    inside = sum(block.work for stage in stages for block in stage.blocks if block.reversible)
    blocks = sum(len(stage.blocks) for stage in stages)
    couplings = sum(block.reversible for stage in stages for block in stage.blocks)
    phrases = [
        f"{amount(sum(stage.parameters for stage in stages))} parameters",
        f"{couplings} of {blocks} blocks reversible ({share(inside, picture.work)} of the work)",
        f"{sum(not stage.kept for stage in stages)} of {len(stages)} stages keep nothing",
        f"largest stage {picture.balance:.2f}× the mean",
    ]
    if picture.batch is not None:
        phrases.append(f"sizes for micro-batches of B = {picture.batch}")
    return phrases


def _rows(figures: Sequence[StageFigure], width: float) -> list[list[StageFigure]]:
    """As few rows as possible, about equally long."""
    count = len(_break_rows(figures, width))
    low = max(figure.width for figure in figures)
    high = max(width, low)
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (low, middle) if len(_break_rows(figures, middle)) <= count else (middle, high)
    return _break_rows(figures, high)


def _break_rows(figures: Sequence[StageFigure], width: float) -> list[list[StageFigure]]:
    rows: list[list[StageFigure]] = [[]]
    for figure in figures:
        if rows[-1] and sum(placed.width for placed in rows[-1]) + figure.width > width:
            rows.append([])
        rows[-1].append(figure)
    return rows
