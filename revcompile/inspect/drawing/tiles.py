"""One stage as a tile: its frame with the blocks inside, and the arrow to the next stage.

Tiles stand in a row, or in several; the page lets the browser break the rows, the SVG breaks them
itself. All of one picture are equally high, so that streams, skips and tied weights run on from
one to the next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from revcompile.inspect.drawing.facts import Picture
from revcompile.inspect.drawing.glyphs import BAND, GAP, Bar, bars, draw_bar, lane_heights
from revcompile.inspect.drawing.lanes import Lanes
from revcompile.inspect.drawing.svg import comment, element, fitted, path, text, width_of
from revcompile.inspect.drawing.theme import LABEL, SMALL
from revcompile.inspect.facts import Stage
from revcompile.inspect.words import amount, dtype, listed, shape, share, size, span
from revcompile.ir.program import Port
from revcompile.ir.types import TensorType

__all__ = ["Tile", "Tiles"]

_PAD: Final = 9.0
_HEADER: Final = 24.0
_NAMES: Final = 14.0
_FOOTER: Final = 46.0
_LINE: Final = 13.0
_SLIMMEST: Final = 66.0
_ARROW: Final = 46.0
_TIP: Final = 7.0


@dataclass(frozen=True)
class Tile:
    """A stage's place: the frame's width, and what the arrow behind it needs at least."""

    stage: Stage
    bars: tuple[Bar, ...]
    swapped: bool
    entry: float
    frame: float
    arrow: float

    @property
    def width(self) -> float:
        """With its arrows."""
        return self.entry + self.frame + self.arrow


class Tiles:
    """All tiles of a picture, and how each is drawn. `scale`: pixels for one unit of work."""

    def __init__(self, picture: Picture, scale: float) -> None:
        self.picture = picture
        self.lanes = Lanes(picture)
        self.named = any(len(stage.blocks) > 1 for stage in picture.stages)
        self.top = self.lanes.tie_height
        self.band = self.top + _HEADER + (_NAMES if self.named else 0)
        self.frame_height = self.band - self.top + BAND + _FOOTER
        self.height = self.top + self.frame_height + self.lanes.skip_height
        self.all = tuple(self._measured(scale))

    def _measured(self, scale: float) -> list[Tile]:
        tiles, swapped = [], False
        for stage in self.picture.stages:
            drawn = tuple(bars(stage.blocks, scale))
            inside = sum(bar.width for bar in drawn) + GAP * (len(drawn) - 1) + 2 * _PAD
            title = _badge(stage) + width_of(self._title(stage), LABEL) + 22
            # A long name may be cut; a tile is widened for a short one only.
            frame = max(inside, min(title, 110.0), self._footer_width(stage), _SLIMMEST)
            entry = self._arrow_width(stage.inputs) if stage.index == 0 else 0.0
            arrow = max(self._arrow_width(stage.outputs), self.lanes.room(stage.index))
            tiles.append(Tile(stage, drawn, swapped, entry, frame, arrow))
            swapped = _swapped_after(stage, swapped)
        return tiles

    def draw(self, tile: Tile, arrow: float | None = None) -> str:
        """The tile at the origin, its arrow as long as asked for."""
        arrow = tile.arrow if arrow is None else arrow
        stage, left = tile.stage, tile.entry
        right = left + tile.frame
        parts = [
            element(
                "rect",
                x=left,
                y=self.top + 0.5,
                width=tile.frame,
                height=self.frame_height - 1,
                rx=7,
                class_="rv-frame",
            ),
            comment(self._said(stage)),
            self._blocks(tile, left),
            self._header(tile, left),
            self._footer(stage, left),
            self._arrow(stage.outputs, stage.blocks[-1].leaves, right, arrow, tile, last=True),
            self.lanes.draw(stage.index, left, right, right + arrow, self.top, self.frame_height),
        ]
        if tile.entry:
            entry = self._arrow(stage.inputs, stage.blocks[0].enters, 0.0, left, tile, last=False)
            parts.append(entry)
        return element("g", *parts, class_="rv-stage", data_stage=stage.index)

    def _blocks(self, tile: Tile, left: float) -> str:
        """The bars in the middle of the frame, and the streams from edge to edge."""
        inside = sum(bar.width for bar in tile.bars) + GAP * (len(tile.bars) - 1)
        x, swapped = left + (tile.frame - inside) / 2, tile.swapped
        drawn = [self._lines(tile.bars[0].blocks[0].enters, left, x, swapped)]
        for bar in tile.bars:
            label = len(tile.bars) > 1 or len(bar.blocks) > 1
            drawn.append(draw_bar(bar, x, self.band, swapped, self.picture.work, label))
            swapped = swapped ^ bool(len(bar.blocks) % 2) if bar.reversible else False
            x += bar.width
            after = GAP if bar is not tile.bars[-1] else left + tile.frame - x
            drawn.append(self._lines(bar.blocks[-1].leaves, x, x + after, swapped))
            x += after
        return "".join(drawn)

    def _lines(self, count: int, x: float, end: float, swapped: bool) -> str:
        return "".join(
            path("M", x, self.band + height, "H", end, class_=colour)
            for height, colour in zip(lane_heights(count), _colours(count, swapped), strict=True)
        )

    def _header(self, tile: Tile, left: float) -> str:
        wide = _badge(tile.stage)
        after = left + 6 + wide + 5
        title = _ranged(self._title(tile.stage), left + tile.frame - after - 4)
        y = self.top + 17
        size_ = {"width": wide, "height": 15}
        badge = element("rect", x=left + 6, y=y - 11.5, rx=4, class_="rv-badge", **size_)
        number = text(tile.stage.index, left + 6 + wide / 2, y, "rv-number rv-middle")
        return badge + number + text(title, after, y, "rv-label")

    def _title(self, stage: Stage) -> str:
        return span([block.name for block in stage.blocks])

    def _footer(self, stage: Stage, left: float) -> str:
        y = self.band + BAND + 15
        classes = ("rv-strong", "rv-small", "rv-small")
        lines = zip(self._facts(stage), classes, strict=True)
        return "".join(
            text(line, left + _PAD, y + place * _LINE, class_)
            for place, (line, class_) in enumerate(lines)
        )

    def _facts(self, stage: Stage) -> tuple[str, str, str]:
        kept = f"keeps {size(stage.kept)}" if stage.kept else "keeps nothing"
        return share(stage.work, self.picture.work), f"delay {stage.delay}", kept

    def _footer_width(self, stage: Stage) -> float:
        return max(width_of(line, SMALL) for line in self._facts(stage)) + 2 * _PAD - 4

    def _direct(self, ports: Sequence[Port]) -> list[TensorType]:
        """The tensors of a border that the next stage is there for."""
        travelling = {name for one in self.picture.travellers for name in one.names}
        return [p.type for p in ports if p.type is not None and p.name not in travelling]

    def _arrow_text(self, ports: Sequence[Port]) -> tuple[str, str, str]:
        kinds = self._direct(ports)
        if not kinds:
            return "", "", ""
        counted = Counter((dtype(kind), shape(kind)) for kind in kinds)
        (name, dims), count = counted.most_common(1)[0]
        first = f"{count}×{name}" if count > 1 else name
        if len(counted) > 1:
            first += f" +{len(kinds) - count}"
        return first, dims, size(sum(self.picture.bytes_of(kind) for kind in kinds))

    def _arrow_width(self, ports: Sequence[Port]) -> float:
        return max(_ARROW, max(width_of(line, SMALL) for line in self._arrow_text(ports)) + 8)

    def _arrow(
        self, ports: Sequence[Port], lines: int, x: float, width: float, tile: Tile, last: bool
    ) -> str:
        """From one frame to the next: the streams, and what they are."""
        swapped = _swapped_after(tile.stage, tile.swapped) if last else False
        end, middle = x + width, x + width / 2
        drawn = [self._lines(lines, x, end - _TIP, swapped)]
        heights = [self.band + height for height in lane_heights(lines)]
        drawn += [path("M", end, y, "l", -8, -4.5, "v", 9, "z", class_="rv-tip") for y in heights]
        first, dims, total = self._arrow_text(ports)
        above, below = heights[0] - 7, heights[-1] + 14
        places = ((first, above - 12), (dims, above), (total, below))
        drawn += [text(said, middle, y, "rv-small rv-middle") for said, y in places if said]
        tensors = listed([port.type for port in ports if port.type is not None])
        plain = sum(port.type is None for port in ports)
        said = [tensors, f"and {plain} sizes or other plain values"][: 2 if plain else 1]
        return element("g", comment(said), *drawn, class_="rv-arrow")

    def _said(self, stage: Stage) -> Iterator[str]:
        blocks = len(stage.blocks)
        yield f"stage {stage.index}: {self._title(stage)} ({blocks} block{'s'[: blocks > 1]})"
        yield f"{amount(stage.parameters)} parameters, {amount(stage.flops)} FLOPs forward"
        yield f"{stage.window} micro-batches in flight, delay {stage.delay}"
        if stage.memory is not None:
            yield f"holds {size(stage.memory.total)} at its peak"


def _badge(stage: Stage) -> float:
    """Width of the stage's number."""
    return width_of(str(stage.index), LABEL) + 7


def _ranged(title: str, room: float) -> str:
    """A stage's title in the room there is: of a range, the first if need be."""
    first = title.split(" – ")[0]
    candidates = (title, fitted(first, room - width_of(" …", LABEL), LABEL) + " …")
    return title if width_of(title, LABEL) <= room else candidates[first != title]


def _colours(count: int, swapped: bool) -> tuple[str, ...]:
    if count == 1:
        return ("rv-single",)
    return ("rv-two", "rv-one") if swapped else ("rv-one", "rv-two")


def _swapped_after(stage: Stage, swapped: bool) -> bool:
    """Which stream is above behind a stage: every coupling crosses them."""
    for block in stage.blocks:
        swapped = not swapped if block.reversible else False
    return swapped
