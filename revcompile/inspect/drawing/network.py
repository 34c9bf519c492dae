"""The whole model as one SVG: stages from left to right, in as many rows as they need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from revcompile.inspect.drawing.facts import Picture
from revcompile.inspect.drawing.legend import legend
from revcompile.inspect.drawing.svg import document, element
from revcompile.inspect.drawing.theme import styles
from revcompile.inspect.drawing.tiles import Tile, Tiles
from revcompile.inspect.words import amount, share

__all__ = ["WIDTH", "headline", "network_svg", "scale_of", "totals"]

WIDTH: Final = 1000.0
_MARGIN: Final = 20.0
_TOP: Final = 66.0
_BETWEEN: Final = 22.0
_BLOCK: Final = 62.0
"""Width of a block of mean work, where there are few."""
_LONGEST: Final = 4200.0
"""All blocks side by side."""
_STRETCHES: Final = tuple(0.7 + 0.05 * step for step in range(21))


def scale_of(picture: Picture, room: float = WIDTH - 2 * _MARGIN) -> float:
    """Pixels for one unit of work: blocks wide enough to read, and no stage wider than a row."""
    blocks = sum(len(stage.blocks) for stage in picture.stages)
    wanted = min(_BLOCK * blocks, _LONGEST) / (picture.work or 1)
    largest = max(stage.work for stage in picture.stages)
    most = max(len(stage.blocks) for stage in picture.stages)
    widest = max(room - 140 - 8 * min(most, 40), 300.0)
    return min(wanted, widest / largest) if largest else wanted


def _filling(picture: Picture, room: float) -> tuple[Tiles, list[list[Tile]]]:
    """Tiles and rows at the scale that fills the rows best, of those that need the fewest."""
    scale = scale_of(picture, room)
    found: list[tuple[int, float, Tiles, list[list[Tile]]]] = []
    for stretch in _STRETCHES:
        tiles = Tiles(picture, stretch * scale)
        for rows in (_rows(tiles.all, room), _broken(tiles.all, room)):
            # In whole tens of pixels: among nearly equal ones the larger scale wins.
            loosest = max((_spare(row, room) for row in rows[:-1]), default=0.0) // 10
            found.append((len(rows), loosest - stretch, tiles, rows))
    _, _, tiles, rows = min(found, key=lambda one: one[:2])
    return tiles, rows


def _spare(row: Sequence[Tile], room: float) -> float:
    """What is left of a row, for each of its tiles."""
    return max(room - sum(tile.width for tile in row), 0.0) / len(row)


def network_svg(picture: Picture, width: float = WIDTH) -> str:
    """The drawing as a document of its own."""
    tiles, rows = _filling(picture, width - 2 * _MARGIN)
    y, drawn = _TOP, []
    for row in rows:
        x = _MARGIN
        spare = _spare(row, width - 2 * _MARGIN)
        spare = spare if row is not rows[-1] or spare < 12 else 0.0
        for tile in row:
            placed = f"translate({x:.2f} {y:.2f})"
            drawn.append(element("g", tiles.draw(tile, tile.arrow + spare), transform=placed))
            x += tile.width + spare
        y += tiles.height + _BETWEEN
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
    return f"{picture.name}: {len(picture.stages)} stages, {picture.method}"


def totals(picture: Picture) -> list[str]:
    """What is true of the whole model, a phrase each."""
    stages = picture.stages
    reversible = sum(stage.reversible for stage in stages)
    inside = sum(block.work for stage in stages for block in stage.blocks if block.reversible)
    blocks = sum(len(stage.blocks) for stage in stages)
    couplings = sum(block.reversible for stage in stages for block in stage.blocks)
    found = [
        f"{amount(sum(stage.parameters for stage in stages))} parameters",
        f"{couplings} of {blocks} blocks reversible ({share(inside, picture.work)} of the work)",
        f"{reversible} of {len(stages)} stages keep nothing",
        f"largest stage {picture.balance:.2f}× the mean",
    ]
    if picture.batch is not None:
        found.append(f"bytes at B = {picture.batch}")
    return found


def _rows(tiles: Sequence[Tile], room: float) -> list[list[Tile]]:
    """As few rows as there can be, and these about equally long."""
    count = len(_broken(tiles, room))
    low, high = max(tile.width for tile in tiles), max(room, max(tile.width for tile in tiles))
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (low, middle) if len(_broken(tiles, middle)) <= count else (middle, high)
    return _broken(tiles, high)


def _broken(tiles: Sequence[Tile], room: float) -> list[list[Tile]]:
    rows: list[list[Tile]] = [[]]
    for tile in tiles:
        if rows[-1] and sum(one.width for one in rows[-1]) + tile.width > room:
            rows.append([])
        rows[-1].append(tile)
    return rows
