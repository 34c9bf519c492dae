"""What the shapes and colours of the model's drawing mean."""

from __future__ import annotations

from typing import Final

from revcompile.inspect.drawing.facts import Picture
from revcompile.inspect.drawing.glyphs import Bar, shape_of
from revcompile.inspect.drawing.svg import element, path, text, width_of
from revcompile.inspect.drawing.theme import SMALL
from revcompile.inspect.facts import Block

__all__ = ["GLYPH", "legend", "legend_items"]


_SHRUNK: Final = 0.42
GLYPH: Final = 26.0


def legend_items(picture: Picture) -> list[tuple[str, str]]:
    """Each shape, at most `GLYPH` wide and high, and what it means."""
    streams = path("M", 0, 8, "H", 22, class_="rv-one") + path("M", 0, 16, "H", 22, class_="rv-two")
    items = [
        (_small(True), "reversible: (a, b) → (b, a + F(b))"),
        (_small(False), "opaque: keeps its input"),
        (streams, "the two streams"),
    ]
    if picture.travellers:
        items.append((path("M", 0, 12, "H", 22, class_="rv-skip"), "travelling skip value"))
    if picture.treaties:
        items.append((path("M", 0, 12, "H", 22, class_="rv-tie"), "tied weights"))
    items.append((_measure(), "a block's width is its share of the work"))
    return items


def legend(picture: Picture, x: float, y: float, room: float) -> tuple[str, float]:
    """The legend at a place, and its height."""
    drawn, left, line = [], 0.0, 0.0
    for glyph, said in legend_items(picture):
        taken = GLYPH + 6 + width_of(said, SMALL) + 10
        if left and left + taken > room:
            left, line = 0.0, line + 30
        words = text(said, GLYPH + 5, 16, "rv-small")
        placed = f"translate({x + left:.2f} {y + line:.2f})"
        drawn.append(element("g", glyph, words, transform=placed))
        left += taken
    return element("g", *drawn, class_="rv-legend"), line + 28


def _measure() -> str:
    return path("M", 1, 7, "v", 10, "m", 0, -5, "h", 20, "m", 0, -5, "v", 10, class_="rv-message")


def _small(reversible: bool) -> str:
    """A block of the drawing at the size of a line of text."""
    block = Block("", reversible, "", 0, 0, 1.0, 2, 2)
    whole = shape_of(Bar((block,), 54.0), 0.0, 0.0, False, plain=True)
    return element("g", whole, transform=f"scale({_SHRUNK})")
