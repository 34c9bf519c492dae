"""One stage: a frame with the blocks inside, the arrow to the next stage, and lines that pass it.

              .......... tied weights ..........
    +--------------+                +--------------+
    | 0  stem      |  2xf32[B,64]   | 1  layer1    |
    |   [blocks]   | =============> |   [blocks]   |
    | 12 %         |    3.1 MiB     | 24 %         |
    +--------------+                +--------------+
          `------------ skip value ---------^

Figures of stages stand in rows. The browser wraps the rows of the HTML page; the SVG wraps its own.
All figures have the same height, and lines continue from one figure to the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from revcompile.inspect.drawing.blocks import (
    BLOCK_HEIGHT,
    GAP,
    block_width,
    draw_block,
    line_heights,
    stream_classes,
)
from revcompile.inspect.drawing.svg import (
    LABEL,
    SMALL,
    element,
    fitted,
    path,
    text,
    tooltip,
    width_of,
)
from revcompile.inspect.formatting import amount, counted, listed, plural, size
from revcompile.inspect.views import ModelView, StageView, tensors
from revcompile.ir.program import Port

_PAD: Final = 9.0
_HEADER: Final = 38.0
"""Height of a frame's header, with the names of its blocks."""
_FOOTER: Final = 46.0
_LINE: Final = 13.0
_NARROWEST: Final = 66.0
_ARROW: Final = 46.0
_TIP: Final = 7.0


@dataclass(frozen=True)
class StageFigure:
    """A stage and its measures: `arrow` is the least width of the arrow after the frame."""

    stage: StageView
    widths: tuple[float, ...]
    """Widths of its blocks."""
    inside: float
    """Width of all blocks, with the gaps between them."""
    swapped: bool
    entry: float
    frame: float
    arrow: float

    @property
    def width(self) -> float:
        """Width of the frame with its arrows."""
        return self.entry + self.frame + self.arrow

    @property
    def swapped_after(self) -> bool:
        """Whether the streams are swapped after the stage: every coupling crosses them."""
        swapped = self.swapped
        for block in self.stage.blocks:
            swapped = not swapped if block.reversible else False
        return swapped


class StageFigures:
    """The figures of all stages of a model. `scale`: pixels per unit of work."""

    def __init__(self, view: ModelView, scale: float) -> None:
        self.view = view
        self.lines = _passing_lines(view)
        self.top = _height(line for line in self.lines if line.side < 0)
        self.blocks_y = self.top + _HEADER
        self.frame_height = _HEADER + BLOCK_HEIGHT + _FOOTER
        self.height = (
            self.top + self.frame_height + _height(line for line in self.lines if line.side > 0)
        )
        self.all: list[StageFigure] = []
        for stage in view.stages:
            self.all.append(self._measured(stage, scale))

    def _measured(self, stage: StageView, scale: float) -> StageFigure:
        widths = tuple(block_width(block, scale) for block in stage.blocks)
        title = _badge(stage) + width_of(stage.title, LABEL) + 22
        footer = max(width_of(line, SMALL) for line in _facts(stage)) - 4
        swapped = self.all[-1].swapped_after if self.all else False
        labels = [width_of(line.label, SMALL) for line in self.lines if line.first == stage.index]
        inside = sum(widths) + GAP * (len(widths) - 1)
        return StageFigure(
            stage,
            widths,
            inside,
            swapped,
            entry=0.0 if stage.index else self._arrow_width(stage.program.inputs),
            # The frame widens for a short title only; a long title is cut.
            frame=max(inside + 2 * _PAD, footer + 2 * _PAD, min(title, 110.0), _NARROWEST),
            arrow=max(self._arrow_width(stage.program.outputs), *labels, 0.0),
        )

    def draw(self, figure: StageFigure, arrow: float | None = None) -> str:
        """Draw a figure at the origin; `arrow` is the arrow's length, by default the least."""
        stage, left = figure.stage, figure.entry
        right = left + figure.frame
        end = right + (figure.arrow if arrow is None else arrow)
        frame = {"width": figure.frame, "height": self.frame_height - 1, "rx": 7}
        program = stage.program
        parts = [
            element("rect", x=left, y=self.top + 0.5, **frame, class_="rv-frame"),
            tooltip(_about(stage)),
            self._blocks(figure),
            self._header(figure),
            self._footer(stage, left),
            self._arrow(program.outputs, stage.blocks[-1].leaves, right, end, figure.swapped_after),
            *(self._line(line, stage.index, left, right, end) for line in self.lines),
        ]
        if figure.entry:
            parts.append(self._arrow(program.inputs, stage.blocks[0].enters, 0.0, left, False))
        return element("g", *parts, class_="rv-stage", data_stage=stage.index)

    def _blocks(self, figure: StageFigure) -> str:
        """The blocks in the middle of the frame, and the streams from edge to edge."""
        blocks, left, swapped = figure.stage.blocks, figure.entry, figure.swapped
        x, end = left + (figure.frame - figure.inside) / 2, left + figure.frame
        drawn = [self._lines(blocks[0].enters, left, x, swapped)]
        for block, width in zip(blocks, figure.widths, strict=True):
            place, named = (x, self.blocks_y, width, swapped), len(blocks) > 1
            drawn.append(draw_block(block, *place, self.view.work, named))
            swapped = not swapped if block.reversible else False
            x += width
            after = end if block is blocks[-1] else x + GAP
            drawn.append(self._lines(block.leaves, x, after, swapped))
            x = after
        return "".join(drawn)

    def _lines(self, count: int, x: float, end: float, swapped: bool) -> str:
        return "".join(
            path("M", x, self.blocks_y + height, "H", end, class_=colour)
            for height, colour in zip(
                line_heights(count), stream_classes(count, swapped), strict=True
            )
        )

    def _header(self, figure: StageFigure) -> str:
        left, width, y = figure.entry, _badge(figure.stage), self.top + 17
        after = left + 11 + width
        title = _fitted_title(figure.stage.title, left + figure.frame - after - 4)
        size_ = {"width": width, "height": 15}
        badge = element("rect", x=left + 6, y=y - 11.5, rx=4, class_="rv-badge", **size_)
        number = text(figure.stage.index, left + 6 + width / 2, y, "rv-number rv-middle")
        return badge + number + text(title, after, y, "rv-label")

    def _footer(self, stage: StageView, left: float) -> str:
        y = self.blocks_y + BLOCK_HEIGHT + 15
        return "".join(
            text(line, left + _PAD, y + place * _LINE, "rv-small" if place else "rv-strong")
            for place, line in enumerate(_facts(stage))
        )

    def _arrow_text(self, ports: Sequence[Port]) -> tuple[str, str, str]:
        """Number and type, shape, and bytes of the tensors sent, without skip values."""
        skipping = {name for skip in self.view.skips for name in skip.names}
        kinds = tensors([port for port in ports if port.name not in skipping])
        if not kinds:
            return "", "", ""
        first, *others = counted(kinds)
        name, _, dims = first.partition("[")
        total = size(sum(kind.nbytes(self.view.batch) for kind in kinds))
        return f"{name}{f' +{len(others)}' if others else ''}", f"[{dims}", total

    def _arrow_width(self, ports: Sequence[Port]) -> float:
        return max(_ARROW, max(width_of(line, SMALL) for line in self._arrow_text(ports)) + 8)

    def _arrow(self, ports: Sequence[Port], lines: int, x: float, end: float, swapped: bool) -> str:
        """The arrow from one frame to the next: the streams, with their types and bytes."""
        heights = [self.blocks_y + height for height in line_heights(lines)]
        first, dims, total = self._arrow_text(ports)
        places = ((first, heights[0] - 19), (dims, heights[0] - 7), (total, heights[-1] + 14))
        plain = sum(port.type is None for port in ports)
        more = [f"and {plain} sizes or other plain values"] if plain else []
        return element(
            "g",
            tooltip([listed(tensors(ports)), *more]),
            self._lines(lines, x, end - _TIP, swapped),
            *(path("M", end, y, "l", -8, -4.5, "v", 9, "z", class_="rv-tip") for y in heights),
            *(text(label, (x + end) / 2, y, "rv-small rv-middle") for label, y in places if label),
            class_="rv-arrow",
        )

    def _line(self, line: _Line, stage: int, left: float, right: float, end: float) -> str:
        """A line's part at a stage with a frame from `left` to `right` and an arrow up to `end`."""
        if not line.first <= stage <= line.last:
            return ""
        frame = self.top + (self.frame_height if line.side > 0 else 0)
        y, indent = frame + line.side * (line.level + 0.6) * _DISTANCE, 12 + 9 * line.level
        if stage == line.first:
            x = right - indent
            drawn = path("M", x, frame, "V", y, "H", end, class_=f"rv-{line.kind}")
            drawn += element("circle", cx=x, cy=frame, r=3, class_=f"rv-{line.kind}-end")
            drawn += text(line.label, x + 5, y - 4, f"rv-{line.kind}-label")
        else:
            x = left + indent
            to = x if stage == line.last else end
            drawn = path("M", 0, y, "H", to, class_=f"rv-{line.kind}")
            if stage in line.readers:
                drawn += path("M", x, y, "V", frame + 6 * line.side, class_=f"rv-{line.kind}")
                tip = ("M", x, frame, "l", 4, line.side * 7, "h", -8, "z")
                drawn += path(*tip, class_=f"rv-{line.kind}-end")
        about = f"{line.kind} from stage {line.first} to {line.last}: {line.names}, {line.label}"
        return element(
            "g", tooltip([about]), drawn, class_=f"rv-{line.kind}-line", data_names=line.names
        )


def _facts(stage: StageView) -> tuple[str, str, str]:
    late = f"{plural(stage.delay, 'update')} late" if stage.delay else "no delay"
    return f"{100 * stage.work_share:.1f} % of work", late, f"keeps {stage.keeps}"


def _about(stage: StageView) -> Iterator[str]:
    yield f"stage {stage.index}: {stage.title} ({plural(len(stage.blocks), 'block')})"
    yield f"{amount(stage.parameters)} parameters, {amount(stage.flops)} FLOPs forward"
    yield f"{plural(stage.window, 'micro-batch')} in flight, delay {stage.delay}"
    yield f"peak memory {size(stage.memory.total)}"


def _badge(stage: StageView) -> float:
    """Width of the badge with the stage's number."""
    return width_of(str(stage.index), LABEL) + 7


def _fitted_title(title: str, width: float) -> str:
    """A title cut to a width: a range of blocks is cut to the first one."""
    first, dash, _ = title.partition(" – ")
    if width_of(title, LABEL) <= width or not dash:
        return title
    return fitted(first, width - width_of(" …", LABEL), LABEL) + " …"


# -- lines past the stages ------------------------------------------------------------------------

_DISTANCE: Final = 16.0
_MOST: Final = 5
"""Levels above or below the frames; further lines share the last one."""


@dataclass(frozen=True)
class _Line:
    """Tied weights above the frames (side -1), or skip values below (1); each stage draws its part.

    Lines of one side and level do not overlap.
    """

    first: int
    last: int
    readers: frozenset[int]
    kind: str
    names: str
    label: str
    side: int
    level: int = 0


def _passing_lines(view: ModelView) -> list[_Line]:
    found = []
    for tie, (first, *more) in view.ties.items():
        label = f"tied {first}" + (f" +{len(more)}" if more else "")
        names, readers = ", ".join((first, *more)), frozenset((tie.holder,))
        found.append(_Line(tie.owner, tie.holder, readers, "tie", names, label, -1))
    for skip in view.skips:
        total = size(len(skip.names) * skip.kind.nbytes(view.batch))
        label = f"{listed([skip.kind] * len(skip.names))} {total}"
        names = ", ".join(skip.names)
        found.append(_Line(skip.first, skip.last, skip.readers, "skip", names, label, 1))
    lines: list[_Line] = []
    for line in sorted(found, key=lambda line: (line.first, line.last)):
        taken = {one.level for one in lines if one.side == line.side and one.last >= line.first}
        level = next(n for n in range(_MOST) if n not in taken or n == _MOST - 1)
        lines.append(replace(line, level=level))
    return lines


def _height(lines: Iterable[_Line]) -> float:
    return max((_DISTANCE * (line.level + 1) + 4 for line in lines), default=0.0)
