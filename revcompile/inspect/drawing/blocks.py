"""One block: a coupling as two crossing streams, an opaque block as a hatched box; and the legend.

a --.   .--+-- b           the stream that is read goes up unchanged,
     \\ /  [F]              the other comes down, and F is added to it:
     / \\   |
b --'   '--+-- a + F(b)    (a, b) -> (b, a + F(b)), PETRA Fig. 2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from revcompile.inspect.drawing.picture import Picture
from revcompile.inspect.drawing.svg import element, fitted, path, text, tooltip, width_of
from revcompile.inspect.drawing.theme import SMALL
from revcompile.inspect.formatting import amount, share
from revcompile.inspect.views import BlockView

BLOCK_HEIGHT: Final = 60.0
"""Height of a block."""
STREAM_HEIGHTS: Final = (14.0, 46.0)
"""Height of the upper and the lower stream inside a block."""
GAP: Final = 7.0
"""Between two blocks of a stage."""
_NARROWEST: Final = 3.0
"""Even a block without cost is visible."""
_MERGED: Final = 15.0
"""Couplings in a row that are narrower than this are drawn as one bar."""
_MERGED_WIDTH: Final = 110.0
"""Widest such bar."""
_WITH_F: Final = 30.0
"""Narrower couplings show the crossing only, without F."""
_HATCH: Final = 9.0
GLYPH: Final = 26.0
"""Width and height of a symbol in the legend."""
_LEGEND_SCALE: Final = 0.42


@dataclass(frozen=True)
class Bar:
    """A block, or couplings in a row too narrow to draw one by one; `width` is in pixels."""

    blocks: tuple[BlockView, ...]
    width: float

    @property
    def reversible(self) -> bool:
        """Is it made of couplings?"""
        return self.blocks[0].reversible

    @property
    def label(self) -> str:
        """Its path, or how many there are."""
        return self.blocks[0].name if len(self.blocks) == 1 else f"{len(self.blocks)} couplings"


def bars(blocks: Sequence[BlockView], scale: float) -> list[Bar]:
    """The blocks as bars, `scale` pixels for one unit of work."""
    drawn: list[Bar] = []
    for block in blocks:
        width = max(block.work * scale, _NARROWEST)
        last = drawn[-1] if drawn else None
        if (
            last is not None
            and block.reversible
            and last.reversible
            and max(width, last.blocks[-1].work * scale) < _MERGED
            and last.width + width <= _MERGED_WIDTH
        ):
            drawn[-1] = Bar((*last.blocks, block), last.width + width)
        else:
            drawn.append(Bar((block,), width))
    return drawn


def line_heights(lines: int) -> tuple[float, ...]:
    """Where one line or two streams run."""
    return STREAM_HEIGHTS if lines == 2 else (sum(STREAM_HEIGHTS) / 2,)


def draw_bar(bar: Bar, x: float, y: float, swapped: bool, work: float, label: bool) -> str:
    """The block at a place. `swapped`: the upper stream has the second colour."""
    inside = _shape(bar, x, y, swapped)
    name = fitted(bar.label, bar.width + GAP - 2, SMALL) if label else ""
    if name:
        inside += text(name, x + bar.width / 2, y - 4, "rv-small rv-middle")
    paths = " ".join(block.name for block in bar.blocks)
    kind = "reversible" if bar.reversible else "opaque"
    return element(
        "g",
        tooltip(_described(block, work) for block in bar.blocks),
        inside,
        class_="rv-block",
        data_path=paths,
        data_kind=kind,
    )


def _shape(bar: Bar, x: float, y: float, swapped: bool, plain: bool = False) -> str:
    """The block's shape alone; `plain`: without F."""
    return _coupling(bar, x, y, swapped, plain) if bar.reversible else _opaque(bar, x, y)


def _described(block: BlockView, work: float) -> str:
    kind = f"reversible ({block.why})" if block.reversible else f"opaque: {block.why}"
    return (
        f"{block.name}: {kind}; {share(block.work, work)} of the work, "
        f"{amount(block.parameters)} parameters"
    )


def _coupling(bar: Bar, x: float, y: float, swapped: bool, plain: bool) -> str:
    top, bottom = (y + height for height in STREAM_HEIGHTS)
    width, end = bar.width, x + bar.width
    if len(bar.blocks) > 1:
        return _box(bar, x, y) + _crossings(bar, x, y, swapped)
    if plain or width < _WITH_F:
        return _box(bar, x, y) + _crossing(x, end, top, bottom, swapped)
    over = x + min(0.55 * width, width - 20)
    branch = (over + end) / 2
    lines = _crossing(x, over, top, bottom, swapped)
    for level, colour in zip((top, bottom), stream_classes(2, not swapped), strict=True):
        lines += path("M", over, level, "H", end, class_=colour)
    return _box(bar, x, y) + lines + _branch(branch, top, bottom, min(end - over - 4, 22))


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


def _crossings(bar: Bar, x: float, y: float, swapped: bool) -> str:
    """As many crossings as fit, an odd number if the couplings are: the streams end as they do."""
    most = max(int(bar.width / 8), 2)
    count = len(bar.blocks)
    shown = count if count <= most else most - (count - most) % 2
    top, bottom = (y + height for height in STREAM_HEIGHTS)
    step = bar.width / shown
    return "".join(
        _crossing(x + i * step, x + (i + 1) * step, top, bottom, swapped ^ bool(i % 2))
        for i in range(shown)
    )


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


def _box(bar: Bar, x: float, y: float) -> str:
    kind = "rv-coupling" if bar.reversible else "rv-opaque"
    corner = min(4.0, bar.width / 3)
    return element("rect", x=x, y=y, width=bar.width, height=BLOCK_HEIGHT, rx=corner, class_=kind)


def _opaque(bar: Bar, x: float, y: float) -> str:
    """A hatched box: recognisable without its colour too."""
    strokes: list[object] = []
    place = x - BLOCK_HEIGHT
    while place < x + bar.width:
        # From (place, bottom) to (place + BLOCK_HEIGHT, top), cut off at the box's sides.
        low, high = max(place, x), min(place + BLOCK_HEIGHT, x + bar.width)
        if high - low > 1:
            bottom = y + BLOCK_HEIGHT + place
            strokes += ["M", low, bottom - low, "L", high, bottom - high]
        place += _HATCH
    hatch = path(*strokes, class_="rv-hatch") if strokes else ""
    outline = element(
        "rect",
        x=x,
        y=y,
        width=bar.width,
        height=BLOCK_HEIGHT,
        rx=min(4.0, bar.width / 3),
        class_="rv-opaque",
        fill_opacity=0,
    )
    return _box(bar, x, y) + hatch + outline


# -- legend ---------------------------------------------------------------------------------------


def legend_items(picture: Picture) -> list[tuple[str, str]]:
    """Each shape, at most `GLYPH` wide and high, and what it means."""
    streams = path("M", 0, 8, "H", 22, class_="rv-one") + path("M", 0, 16, "H", 22, class_="rv-two")
    items = [
        (_small(True), "reversible: (a, b) → (b, a + F(b))"),
        (_small(False), "opaque: keeps its input"),
        (streams, "the two streams"),
    ]
    if picture.skip_values:
        items.append((path("M", 0, 12, "H", 22, class_="rv-skip"), "skip value"))
    if picture.ties:
        items.append((path("M", 0, 12, "H", 22, class_="rv-tie"), "tied weights"))
    items.append((_measure(), "a block's width is its share of the work"))
    return items


def legend(picture: Picture, x: float, y: float, width: float) -> tuple[str, float]:
    """The legend at a place, and its height."""
    drawn, left, line = [], 0.0, 0.0
    for glyph, label in legend_items(picture):
        taken = GLYPH + 6 + width_of(label, SMALL) + 10
        if left and left + taken > width:
            left, line = 0.0, line + 30
        words = text(label, GLYPH + 5, 16, "rv-small")
        placed = f"translate({x + left:.2f} {y + line:.2f})"
        drawn.append(element("g", glyph, words, transform=placed))
        left += taken
    return element("g", *drawn, class_="rv-legend"), line + 28


def _measure() -> str:
    return path("M", 1, 7, "v", 10, "m", 0, -5, "h", 20, "m", 0, -5, "v", 10, class_="rv-message")


def _small(reversible: bool) -> str:
    """A block of the drawing at the size of a line of text."""
    block = BlockView("", reversible, "", 0, 0, 1.0, 2, 2)
    whole = _shape(Bar((block,), 54.0), 0.0, 0.0, False, plain=True)
    return element("g", whole, transform=f"scale({_LEGEND_SCALE})")
