"""One block: a coupling as two crossing streams, an opaque block as a hatched box; and the legend.

a --.   .--+-- b           the stream that is read goes up unchanged,
     \\ /  [F]              the other comes down, and F is added to it:
     / \\   |
b --'   '--+-- a + F(b)    (a, b) -> (b, a + F(b)), PETRA Fig. 2
"""

from __future__ import annotations

from typing import Final

from revcompile.inspect.drawing.svg import SMALL, element, fitted, path, text, tooltip, width_of
from revcompile.inspect.formatting import amount, share
from revcompile.inspect.views import BlockView, ModelView

BLOCK_HEIGHT: Final = 60.0
"""Height of a block."""
STREAM_HEIGHTS: Final = (14.0, 46.0)
"""Height of the upper and the lower stream inside a block."""
GAP: Final = 7.0
"""Distance between two blocks of a stage."""
_NARROWEST: Final = {True: 10.0, False: 3.0}
"""Least width of a coupling (True) and of an opaque block (False)."""
_WITH_F: Final = 30.0
"""Narrower couplings show the crossing only, without F."""
_HATCH: Final = 9.0
_GLYPH: Final = 26.0
"""Width of a symbol in the legend."""


def block_width(block: BlockView, scale: float) -> float:
    """Width of a block in pixels; `scale`: pixels per unit of work."""
    return max(block.work * scale, _NARROWEST[block.reversible])


def line_heights(lines: int) -> tuple[float, ...]:
    """Heights of one line, or of two streams, inside a block."""
    return STREAM_HEIGHTS if lines == 2 else (sum(STREAM_HEIGHTS) / 2,)


def draw_block(
    block: BlockView, x: float, y: float, width: float, swapped: bool, work: float, label: bool
) -> str:
    """Draw a block at (x, y). `swapped`: the upper stream has the second colour."""
    shape = _coupling(x, y, width, swapped) if block.reversible else _opaque(x, y, width)
    name = fitted(block.name, width + GAP - 2, SMALL) if label else ""
    kind = f"reversible ({block.why})" if block.reversible else f"opaque: {block.why}"
    about = f"{share(block.work, work)} of the work, {amount(block.cost.parameters)} parameters"
    return element(
        "g",
        tooltip([f"{block.name}: {kind}; {about}"]),
        shape,
        text(name, x + width / 2, y - 4, "rv-small rv-middle") if name else "",
        class_="rv-block",
        data_path=block.name,
        data_kind="reversible" if block.reversible else "opaque",
    )


def _coupling(x: float, y: float, width: float, swapped: bool) -> str:
    top, bottom = (y + height for height in STREAM_HEIGHTS)
    box, end = _box(x, y, width, "rv-coupling"), x + width
    if width < _WITH_F:
        return box + _crossing(x, end, top, bottom, swapped)
    over = x + min(0.55 * width, width - 20)
    lines = _crossing(x, over, top, bottom, swapped)
    for level, colour in zip((top, bottom), stream_classes(2, not swapped), strict=True):
        lines += path("M", over, level, "H", end, class_=colour)
    return box + lines + _branch((over + end) / 2, top, bottom, min(end - over - 4, 22))


def _branch(x: float, top: float, bottom: float, width: float) -> str:
    """F reads the upper stream and is added to the lower one."""
    middle = (top + bottom) / 2
    rung = path("M", x, top, "V", bottom, class_="rv-single")
    dot = element("circle", cx=x, cy=top, r=2.6, class_="rv-tip")
    size = {"width": width, "height": 14}
    box = element("rect", x=x - width / 2, y=middle - 7, rx=3, class_="rv-branch", **size)
    name = text("F", x, middle + 3.6, "rv-strong rv-middle")
    ring = element("circle", cx=x, cy=bottom, r=4.6, class_="rv-sum")
    plus = path("M", x - 2.6, bottom, "h", 5.2, "M", x, bottom - 2.6, "v", 5.2, class_="rv-sum")
    return rung + dot + box + name + ring + plus


def stream_classes(lines: int, swapped: bool) -> tuple[str, ...]:
    """CSS classes of one line, or of the upper and the lower stream."""
    if lines == 1:
        return ("rv-single",)
    return ("rv-two", "rv-one") if swapped else ("rv-one", "rv-two")


def _crossing(x: float, end: float, top: float, bottom: float, swapped: bool) -> str:
    middle = (x + end) / 2
    upper, lower = stream_classes(2, swapped)
    falls = ("M", x, top, "C", middle, top, middle, bottom, end, bottom)
    rises = ("M", x, bottom, "C", middle, bottom, middle, top, end, top)
    return path(*falls, class_=f"rv-falls {upper}") + path(*rises, class_=f"rv-rises {lower}")


def _box(x: float, y: float, width: float, class_: str, **more: object) -> str:
    size = {"width": width, "height": BLOCK_HEIGHT, "rx": min(4.0, width / 3)}
    return element("rect", x=x, y=y, **size, class_=class_, **more)


def _opaque(x: float, y: float, width: float) -> str:
    """A hatched box, recognisable even without colour."""
    strokes: list[object] = []
    place = x - BLOCK_HEIGHT
    while place < x + width:
        # From (place, bottom) to (place + BLOCK_HEIGHT, top), clipped to the box.
        low, high = max(place, x), min(place + BLOCK_HEIGHT, x + width)
        bottom = y + BLOCK_HEIGHT + place
        strokes += ["M", low, bottom - low, "L", high, bottom - high]
        place += _HATCH
    hatch = path(*strokes, class_="rv-hatch")
    return _box(x, y, width, "rv-opaque") + hatch + _box(x, y, width, "rv-opaque", fill_opacity=0)


# -- legend ---------------------------------------------------------------------------------------


def legend(view: ModelView, x: float, y: float) -> str:
    """Each shape with its meaning, in a row that starts at (x, y)."""

    def small(shape: str) -> str:
        return element("g", shape, transform="scale(0.42)")

    crossing = _crossing(0, 54, *STREAM_HEIGHTS, False)
    streams = path("M", 0, 8, "H", 22, class_="rv-one") + path("M", 0, 16, "H", 22, class_="rv-two")
    measure = ("M", 1, 7, "v", 10, "m", 0, -5, "h", 20, "m", 0, -5, "v", 10)
    items = [
        (small(_box(0, 0, 54, "rv-coupling") + crossing), "reversible: (a, b) → (b, a + F(b))"),
        (small(_opaque(0, 0, 54)), "opaque: keeps its input"),
        (streams, "the two streams"),
    ]
    if view.skips:
        items.append((path("M", 0, 12, "H", 22, class_="rv-skip"), "skip value"))
    if view.ties:
        items.append((path("M", 0, 12, "H", 22, class_="rv-tie"), "tied weights"))
    items.append((path(*measure, class_="rv-message"), "a block's width is its share of work"))
    drawn = []
    for glyph, label in items:
        words = text(label, _GLYPH + 5, 16, "rv-small")
        drawn.append(element("g", glyph, words, transform=f"translate({x:.2f} {y:.2f})"))
        x += _GLYPH + 16 + width_of(label, SMALL)
    return element("g", *drawn, class_="rv-legend")
