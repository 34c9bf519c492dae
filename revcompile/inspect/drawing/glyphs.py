"""One block: a coupling as two crossing streams, an opaque block as a hatched box.

a --.   .--+-- b           the stream that is read goes up unchanged,
     \\ /  [F]              the other comes down, and F is added to it:
     / \\   |
b --'   '--+-- a + F(b)    (a, b) -> (b, a + F(b)), PETRA Fig. 2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from revcompile.inspect.drawing.svg import comment, element, fitted, path, text
from revcompile.inspect.drawing.theme import SMALL
from revcompile.inspect.facts import Block
from revcompile.inspect.words import amount, share

__all__ = ["BAND", "GAP", "LANES", "Bar", "bars", "draw_bar", "lane_heights", "shape_of"]

BAND: Final = 60.0
"""Height of a block."""
LANES: Final = (14.0, 46.0)
"""Heights of the upper and the lower stream inside it."""
GAP: Final = 7.0
"""Between two blocks of a stage."""
THINNEST: Final = 3.0
"""A block of no cost can still be seen."""
CROWDED: Final = 15.0
"""Couplings in a row that are thinner than this are drawn as one."""
_BUNDLE: Final = 110.0
_LADDER: Final = 30.0
"""Narrower couplings show the crossing only."""
_HATCH: Final = 9.0


@dataclass(frozen=True)
class Bar:
    """A block, or couplings in a row that are too thin to be told apart; `width` is its work's."""

    blocks: tuple[Block, ...]
    width: float

    @property
    def reversible(self) -> bool:
        """Is it made of couplings?"""
        return self.blocks[0].reversible

    @property
    def label(self) -> str:
        """Its path, or how many there are."""
        return self.blocks[0].name if len(self.blocks) == 1 else f"{len(self.blocks)} couplings"


def bars(blocks: Sequence[Block], scale: float) -> list[Bar]:
    """The blocks as bars, `scale` pixels for one unit of work."""
    found: list[Bar] = []
    for block in blocks:
        width = max(block.work * scale, THINNEST)
        last = found[-1] if found else None
        thin = block.reversible and width < CROWDED
        if (
            last is not None
            and thin
            and last.reversible
            and last.width + width <= _BUNDLE
            and last.blocks[-1].work * scale < CROWDED
        ):
            found[-1] = Bar((*last.blocks, block), last.width + width)
        else:
            found.append(Bar((block,), width))
    return found


def lane_heights(lines: int) -> tuple[float, ...]:
    """Where one line or two streams run."""
    return LANES if lines == 2 else (sum(LANES) / 2,)


def draw_bar(bar: Bar, x: float, y: float, swapped: bool, work: float, label: bool) -> str:
    """The block at a place. `swapped`: the upper stream has the second colour."""
    inside = shape_of(bar, x, y, swapped)
    name = fitted(bar.label, bar.width + GAP - 2, SMALL) if label else ""
    if name:
        inside += text(name, x + bar.width / 2, y - 4, "rv-small rv-middle")
    paths = " ".join(block.name for block in bar.blocks)
    kind = "reversible" if bar.reversible else "opaque"
    return element(
        "g",
        comment(_said(block, work) for block in bar.blocks),
        inside,
        class_="rv-block",
        data_path=paths,
        data_kind=kind,
    )


def shape_of(bar: Bar, x: float, y: float, swapped: bool, plain: bool = False) -> str:
    """The block's shape alone; `plain`: without F."""
    return _coupling(bar, x, y, swapped, plain) if bar.reversible else _opaque(bar, x, y)


def _said(block: Block, work: float) -> str:
    kind = f"reversible ({block.why})" if block.reversible else f"opaque: {block.why}"
    return (
        f"{block.name}: {kind}; {share(block.work, work)} of the work, "
        f"{amount(block.parameters)} parameters"
    )


def _coupling(bar: Bar, x: float, y: float, swapped: bool, plain: bool) -> str:
    top, bottom = (y + lane for lane in LANES)
    width, end = bar.width, x + bar.width
    if len(bar.blocks) > 1:
        return _box(bar, x, y) + _braid(bar, x, y, swapped)
    if plain or width < _LADDER:
        return _box(bar, x, y) + _crossing(x, end, top, bottom, swapped)
    over = x + min(0.55 * width, width - 20)
    ladder = (over + end) / 2
    lines = _crossing(x, over, top, bottom, swapped)
    for level, colour in zip((top, bottom), _colours(not swapped), strict=True):
        lines += path("M", over, level, "H", end, class_=colour)
    return _box(bar, x, y) + lines + _ladder(ladder, top, bottom, min(end - over - 4, 22))


def _ladder(x: float, top: float, bottom: float, width: float) -> str:
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


def _braid(bar: Bar, x: float, y: float, swapped: bool) -> str:
    """Several crossings; as many as there is room for, and an odd number if they are odd."""
    room = max(int(bar.width / 8), 2)
    count = len(bar.blocks)
    shown = count if count <= room else room - (count - room) % 2
    top, bottom = (y + lane for lane in LANES)
    step = bar.width / shown
    return "".join(
        _crossing(x + i * step, x + (i + 1) * step, top, bottom, swapped ^ bool(i % 2))
        for i in range(shown)
    )


def _colours(swapped: bool) -> tuple[str, str]:
    """Classes of the upper and the lower stream."""
    return ("rv-two", "rv-one") if swapped else ("rv-one", "rv-two")


def _crossing(x: float, end: float, top: float, bottom: float, swapped: bool) -> str:
    middle = (x + end) / 2
    upper, lower = _colours(swapped)
    falls = ("M", x, top, "C", middle, top, middle, bottom, end, bottom)
    rises = ("M", x, bottom, "C", middle, bottom, middle, top, end, top)
    return path(*falls, class_=f"rv-falls {upper}") + path(*rises, class_=f"rv-rises {lower}")


def _box(bar: Bar, x: float, y: float) -> str:
    kind = "rv-coupling" if bar.reversible else "rv-opaque"
    corner = min(4.0, bar.width / 3)
    return element("rect", x=x, y=y, width=bar.width, height=BAND, rx=corner, class_=kind)


def _opaque(bar: Bar, x: float, y: float) -> str:
    """A box that lines end and begin at, hatched for those who do not see its colour."""
    strokes: list[object] = []
    place = x - BAND
    while place < x + bar.width:
        # From (place, bottom) to (place + BAND, top), cut off at the box's sides.
        low, high = max(place, x), min(place + BAND, x + bar.width)
        if high - low > 1:
            strokes += ["M", low, y + BAND - (low - place), "L", high, y + BAND - (high - place)]
        place += _HATCH
    hatch = path(*strokes, class_="rv-hatch") if strokes else ""
    outline = element(
        "rect",
        x=x,
        y=y,
        width=bar.width,
        height=BAND,
        rx=min(4.0, bar.width / 3),
        class_="rv-opaque",
        fill_opacity=0,
    )
    return _box(bar, x, y) + hatch + outline
