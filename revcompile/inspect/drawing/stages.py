"""One stage: a frame with the blocks inside, the arrow to the next stage, and lines that pass it.

              .......... tied weights ..........
    +--------------+                +--------------+
    | 0  stem      |  2xf32[B,64]   | 1  layer1    |
    |   [blocks]   | =============> |   [blocks]   |
    | 12 %         |    3.1 MiB     | 24 %         |
    +--------------+                +--------------+
          `------------ skip value ---------^

Figures of stages stand in rows: the HTML page lets the browser break them, the SVG breaks them
itself. All are equally high, so that lines continue from one to the next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from revcompile.inspect.drawing.blocks import (
    BLOCK_HEIGHT,
    GAP,
    Bar,
    bars,
    draw_bar,
    line_heights,
    stream_classes,
)
from revcompile.inspect.drawing.picture import Picture, SkipValue
from revcompile.inspect.drawing.svg import element, fitted, path, text, tooltip, width_of
from revcompile.inspect.drawing.theme import LABEL, SMALL
from revcompile.inspect.formatting import amount, dtype, listed, shape, share, size, span
from revcompile.inspect.views import StageView
from revcompile.ir.program import Port
from revcompile.ir.types import TensorType
from revcompile.schedule import Tie

_PAD: Final = 9.0
_HEADER: Final = 24.0
_NAMES: Final = 14.0
_FOOTER: Final = 46.0
_LINE: Final = 13.0
_NARROWEST: Final = 66.0
_ARROW: Final = 46.0
_TIP: Final = 7.0


@dataclass(frozen=True)
class StageFigure:
    """A stage and its measures: width of the frame, least width of the arrow behind it."""

    stage: StageView
    bars: tuple[Bar, ...]
    swapped: bool
    entry: float
    frame: float
    arrow: float

    @property
    def width(self) -> float:
        """With its arrows."""
        return self.entry + self.frame + self.arrow


class StageFigures:
    """The figures of all stages of a picture. `scale`: pixels for one unit of work."""

    def __init__(self, picture: Picture, scale: float) -> None:
        self.picture = picture
        self.lines = _PassingLines(picture)
        self.named = any(len(stage.blocks) > 1 for stage in picture.stages)
        self.top = self.lines.tie_height
        self.blocks_y = self.top + _HEADER + (_NAMES if self.named else 0)
        self.frame_height = self.blocks_y - self.top + BLOCK_HEIGHT + _FOOTER
        self.height = self.top + self.frame_height + self.lines.skip_height
        self.all = tuple(self._measured(scale))

    def _measured(self, scale: float) -> list[StageFigure]:
        figures, swapped = [], False
        for stage in self.picture.stages:
            drawn = tuple(bars(stage.blocks, scale))
            inside = sum(bar.width for bar in drawn) + GAP * (len(drawn) - 1) + 2 * _PAD
            title = _badge(stage) + width_of(self._title(stage), LABEL) + 22
            # A long name may be cut; a figure is widened for a short one only.
            frame = max(inside, min(title, 110.0), self._footer_width(stage), _NARROWEST)
            entry = self._arrow_width(stage.inputs) if stage.index == 0 else 0.0
            arrow = max(self._arrow_width(stage.outputs), self.lines.label_width(stage.index))
            figures.append(StageFigure(stage, drawn, swapped, entry, frame, arrow))
            swapped = _swapped_after(stage, swapped)
        return figures

    def draw(self, figure: StageFigure, arrow: float | None = None) -> str:
        """The figure at the origin; `arrow` is the arrow's length, by default the least."""
        arrow = figure.arrow if arrow is None else arrow
        stage, left = figure.stage, figure.entry
        right = left + figure.frame
        parts = [
            element(
                "rect",
                x=left,
                y=self.top + 0.5,
                width=figure.frame,
                height=self.frame_height - 1,
                rx=7,
                class_="rv-frame",
            ),
            tooltip(self._tooltip(stage)),
            self._blocks(figure, left),
            self._header(figure, left),
            self._footer(stage, left),
            self._arrow(stage.outputs, stage.blocks[-1].leaves, right, arrow, figure, last=True),
            self.lines.draw(stage.index, left, right, right + arrow, self.top, self.frame_height),
        ]
        if figure.entry:
            entry = self._arrow(stage.inputs, stage.blocks[0].enters, 0.0, left, figure, last=False)
            parts.append(entry)
        return element("g", *parts, class_="rv-stage", data_stage=stage.index)

    def _blocks(self, figure: StageFigure, left: float) -> str:
        """The bars in the middle of the frame, and the streams from edge to edge."""
        inside = sum(bar.width for bar in figure.bars) + GAP * (len(figure.bars) - 1)
        x, swapped = left + (figure.frame - inside) / 2, figure.swapped
        drawn = [self._lines(figure.bars[0].blocks[0].enters, left, x, swapped)]
        for bar in figure.bars:
            label = len(figure.bars) > 1 or len(bar.blocks) > 1
            drawn.append(draw_bar(bar, x, self.blocks_y, swapped, self.picture.work, label))
            swapped = swapped ^ bool(len(bar.blocks) % 2) if bar.reversible else False
            x += bar.width
            after = GAP if bar is not figure.bars[-1] else left + figure.frame - x
            drawn.append(self._lines(bar.blocks[-1].leaves, x, x + after, swapped))
            x += after
        return "".join(drawn)

    def _lines(self, count: int, x: float, end: float, swapped: bool) -> str:
        return "".join(
            path("M", x, self.blocks_y + height, "H", end, class_=colour)
            for height, colour in zip(
                line_heights(count), stream_classes(count, swapped), strict=True
            )
        )

    def _header(self, figure: StageFigure, left: float) -> str:
        badge_width = _badge(figure.stage)
        after = left + 6 + badge_width + 5
        title = _fitted_title(self._title(figure.stage), left + figure.frame - after - 4)
        y = self.top + 17
        size_ = {"width": badge_width, "height": 15}
        badge = element("rect", x=left + 6, y=y - 11.5, rx=4, class_="rv-badge", **size_)
        number = text(figure.stage.index, left + 6 + badge_width / 2, y, "rv-number rv-middle")
        return badge + number + text(title, after, y, "rv-label")

    def _title(self, stage: StageView) -> str:
        return span([block.name for block in stage.blocks])

    def _footer(self, stage: StageView, left: float) -> str:
        y = self.blocks_y + BLOCK_HEIGHT + 15
        classes = ("rv-strong", "rv-small", "rv-small")
        lines = zip(self._facts(stage), classes, strict=True)
        return "".join(
            text(line, left + _PAD, y + place * _LINE, class_)
            for place, (line, class_) in enumerate(lines)
        )

    def _facts(self, stage: StageView) -> tuple[str, str, str]:
        kept = f"keeps {size(stage.kept)}" if stage.kept else "keeps nothing"
        late = {0: "no delay", 1: "1 update late"}.get(stage.delay, f"{stage.delay} updates late")
        return f"{share(stage.work, self.picture.work)} of work", late, kept

    def _footer_width(self, stage: StageView) -> float:
        return max(width_of(line, SMALL) for line in self._facts(stage)) + 2 * _PAD - 4

    def _direct(self, ports: Sequence[Port]) -> list[TensorType]:
        """Tensors sent to the next stage, skip values that only pass it left out."""
        skipping = {name for one in self.picture.skip_values for name in one.names}
        return [p.type for p in ports if p.type is not None and p.name not in skipping]

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
        self,
        ports: Sequence[Port],
        lines: int,
        x: float,
        width: float,
        figure: StageFigure,
        last: bool,
    ) -> str:
        """From one frame to the next: the streams, and what they are."""
        swapped = _swapped_after(figure.stage, figure.swapped) if last else False
        end, middle = x + width, x + width / 2
        drawn = [self._lines(lines, x, end - _TIP, swapped)]
        heights = [self.blocks_y + height for height in line_heights(lines)]
        drawn += [path("M", end, y, "l", -8, -4.5, "v", 9, "z", class_="rv-tip") for y in heights]
        first, dims, total = self._arrow_text(ports)
        above, below = heights[0] - 7, heights[-1] + 14
        places = ((first, above - 12), (dims, above), (total, below))
        drawn += [text(label, middle, y, "rv-small rv-middle") for label, y in places if label]
        tensors = listed([port.type for port in ports if port.type is not None])
        plain = sum(port.type is None for port in ports)
        label = [tensors, f"and {plain} sizes or other plain values"][: 2 if plain else 1]
        return element("g", tooltip(label), *drawn, class_="rv-arrow")

    def _tooltip(self, stage: StageView) -> Iterator[str]:
        blocks = len(stage.blocks)
        yield f"stage {stage.index}: {self._title(stage)} ({blocks} block{'s'[: blocks > 1]})"
        yield f"{amount(stage.parameters)} parameters, {amount(stage.flops)} FLOPs forward"
        yield f"{stage.window} micro-batches in flight, delay {stage.delay}"
        if stage.memory is not None:
            yield f"peak memory {size(stage.memory.total)}"


def _badge(stage: StageView) -> float:
    """Width of the stage's number."""
    return width_of(str(stage.index), LABEL) + 7


def _fitted_title(title: str, width: float) -> str:
    """A title cut to a width: of a range of blocks, the first one."""
    first = title.split(" – ")[0]
    candidates = (title, fitted(first, width - width_of(" …", LABEL), LABEL) + " …")
    return title if width_of(title, LABEL) <= width else candidates[first != title]


def _swapped_after(stage: StageView, swapped: bool) -> bool:
    """Which stream is above behind a stage: every coupling crosses them."""
    for block in stage.blocks:
        swapped = not swapped if block.reversible else False
    return swapped


# -- lines past the stages ------------------------------------------------------------------------

_LINE_DISTANCE: Final = 16.0
_INDENT: Final = 9.0
_MOST: Final = 5
"""Levels above or below the frames; further lines share the last one."""


def _levels(lines: Sequence[tuple[int, int]], most: int = _MOST) -> list[int]:
    """A level for each line from one stage to another, so that lines of a level do not overlap.

    >>> _levels([(0, 3), (1, 2), (4, 5)])
    [0, 1, 0]
    """
    ends: list[int] = []
    levels = []
    for first, last in lines:
        free = next((level for level, end in enumerate(ends) if end < first), len(ends))
        free = min(free, most - 1)
        if free == len(ends):
            ends.append(last)
        ends[free] = max(ends[free], last)
        levels.append(free)
    return levels


@dataclass(frozen=True)
class _Place:
    """Where a line leaves a stage's frame, reaches one and ends; its height and the frame's."""

    start: float
    stop: float
    end: float
    y: float
    frame: float


class _PassingLines:
    """Tied weights above the frames, skip values below; each stage draws its part of them."""

    def __init__(self, picture: Picture) -> None:
        self.picture = picture
        self.skips = sorted(picture.skip_values, key=lambda one: (one.first, one.last))
        self.ties = sorted(picture.ties, key=lambda tie: (tie.owner, tie.holder))
        self._skip_levels = _levels([(skip.first, skip.last) for skip in self.skips])
        self._tie_levels = _levels([(tie.owner, tie.holder) for tie in self.ties])
        self.skip_height = _height(self._skip_levels)
        self.tie_height = _height(self._tie_levels)

    def draw(
        self, stage: int, left: float, right: float, end: float, top: float, height: float
    ) -> str:
        """The lines at one stage: its frame from `left` to `right`, its arrow to `end`."""
        drawn = []
        for skip, level in zip(self.skips, self._skip_levels, strict=True):
            if skip.first <= stage <= skip.last:
                y, indent = top + height + (level + 0.8) * _LINE_DISTANCE, 12 + _INDENT * level
                at = _Place(right - indent, left + indent, end, y, top + height)
                drawn.append(self._skip(skip, stage, at))
        for tie, level in zip(self.ties, self._tie_levels, strict=True):
            if tie.owner <= stage <= tie.holder:
                y, indent = top - (level + 0.4) * _LINE_DISTANCE, 12 + _INDENT * level
                at = _Place(right - indent, left + indent, end, y, top)
                drawn.append(self._tie(tie, stage, at))
        return "".join(drawn)

    def label_width(self, stage: int) -> float:
        """Width of the labels of the lines that start at a stage, drawn behind its frame."""
        starting = [self._label(one) for one in self.skips if one.first == stage]
        starting += [self._tied(tie) for tie in self.ties if tie.owner == stage]
        return max((width_of(label, SMALL) for label in starting), default=0.0)

    def _label(self, skip: SkipValue) -> str:
        total = size(len(skip.names) * self.picture.bytes_of(skip.kind))
        return f"{listed([skip.kind] * len(skip.names))} {total}"

    def _skip(self, skip: SkipValue, stage: int, at: _Place) -> str:
        names = ", ".join(skip.names)
        label = f"from stage {skip.first} to {skip.last}: {names}, {self._label(skip)}"
        if stage == skip.first:
            drawn = path("M", at.start, at.frame, "V", at.y, "H", at.end, class_="rv-skip")
            drawn += element("circle", cx=at.start, cy=at.frame, r=3, class_="rv-skip-end")
            drawn += text(self._label(skip), at.start + 5, at.y - 4, "rv-skip-label")
        else:
            drawn = path(
                "M", 0, at.y, "H", at.stop if stage == skip.last else at.end, class_="rv-skip"
            )
            if stage in skip.readers:
                drawn += path("M", at.stop, at.y, "V", at.frame + 6, class_="rv-skip")
                drawn += _tip(at.stop, at.frame, 1, "rv-skip-end")
        return element("g", tooltip([label]), drawn, class_="rv-skip-value", data_names=names)

    def _tied(self, tie: Tie) -> str:
        first, *others = self.picture.ties[tie]
        return f"tied {first} +{len(others)}" if others else f"tied {first}"

    def _tie(self, tie: Tie, stage: int, at: _Place) -> str:
        names = ", ".join(self.picture.ties[tie])
        label = f"stages {tie.owner} and {tie.holder} share {names}"
        if stage == tie.owner:
            drawn = path("M", at.start, at.frame - 6, "V", at.y, "H", at.end, class_="rv-tie")
            drawn += _tip(at.start, at.frame, -1, "rv-tie-end")
            drawn += text(self._tied(tie), at.start + 5, at.y - 4, "rv-tie-label")
        elif stage == tie.holder:
            drawn = path("M", 0, at.y, "H", at.stop, "V", at.frame - 6, class_="rv-tie")
            drawn += _tip(at.stop, at.frame, -1, "rv-tie-end")
        else:
            drawn = path("M", 0, at.y, "H", at.end, class_="rv-tie")
        return element("g", tooltip([label]), drawn, class_="rv-tied", data_names=names)


def _tip(x: float, y: float, side: int, class_: str) -> str:
    """An arrowhead that touches a frame's edge from below (1) or above (-1)."""
    return path("M", x, y, "l", 4, side * 7, "h", -8, "z", class_=class_)


def _height(levels: Sequence[int]) -> float:
    return _LINE_DISTANCE * (max(levels) + 1) + 4 if levels else 0.0
