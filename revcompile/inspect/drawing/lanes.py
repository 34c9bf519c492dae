"""Lanes beside the blocks: tied weights above the frames, travelling values below."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from revcompile.inspect.drawing.facts import Picture, SkipValue, TiedWeight
from revcompile.inspect.drawing.svg import comment, element, path, text, width_of
from revcompile.inspect.drawing.theme import SMALL
from revcompile.inspect.words import listed, size

__all__ = ["LANE", "Lanes", "assigned"]

LANE: Final = 16.0
_ASIDE: Final = 9.0
_MOST: Final = 5
"""Lanes on a side; what does not fit shares the last one."""


def assigned(runs: Sequence[tuple[int, int]], most: int = _MOST) -> list[int]:
    """A lane for each run from one stage to another, so that no two in a lane meet.

    >>> assigned([(0, 3), (1, 2), (4, 5)])
    [0, 1, 0]
    """
    ends: list[int] = []
    lanes = []
    for first, last in runs:
        free = next((lane for lane, end in enumerate(ends) if end < first), len(ends))
        free = min(free, most - 1)
        if free == len(ends):
            ends.append(last)
        ends[free] = max(ends[free], last)
        lanes.append(free)
    return lanes


@dataclass(frozen=True)
class _Place:
    """Where a lane leaves a stage and reaches it, where the tile ends, and two heights."""

    start: float
    stop: float
    end: float
    y: float
    frame: float


class Lanes:
    """The lanes of a picture; each stage draws its own piece of them."""

    def __init__(self, picture: Picture) -> None:
        self.picture = picture
        self.skips = sorted(picture.travellers, key=lambda one: (one.first, one.last))
        self.ties = sorted(picture.treaties, key=lambda one: (one.owner, one.holder))
        self._skip_lanes = assigned([(one.first, one.last) for one in self.skips])
        self._tie_lanes = assigned([(one.owner, one.holder) for one in self.ties])
        self.skip_height = _height(self._skip_lanes)
        self.tie_height = _height(self._tie_lanes)

    def draw(
        self, stage: int, left: float, right: float, end: float, top: float, height: float
    ) -> str:
        """The lanes past one stage: its frame from `left` to `right`, its arrow to `end`."""
        found = []
        for skip, lane in zip(self.skips, self._skip_lanes, strict=True):
            if skip.first <= stage <= skip.last:
                y, beside = top + height + (lane + 0.8) * LANE, 12 + _ASIDE * lane
                at = _Place(right - beside, left + beside, end, y, top + height)
                found.append(self._skip(skip, stage, at))
        for tie, lane in zip(self.ties, self._tie_lanes, strict=True):
            if tie.owner <= stage <= tie.holder:
                y, beside = top - (lane + 0.4) * LANE, 12 + _ASIDE * lane
                at = _Place(right - beside, left + beside, end, y, top)
                found.append(self._tie(tie, stage, at))
        return "".join(found)

    def room(self, stage: int) -> float:
        """What the labels of the lanes that start at a stage need behind its frame."""
        starting = [self._label(one) for one in self.skips if one.first == stage]
        starting += [_tied(one) for one in self.ties if one.owner == stage]
        return max((width_of(label, SMALL) for label in starting), default=0.0)

    def _label(self, skip: SkipValue) -> str:
        total = size(len(skip.names) * self.picture.bytes_of(skip.kind))
        return f"{listed([skip.kind] * len(skip.names))} {total}"

    def _skip(self, skip: SkipValue, stage: int, at: _Place) -> str:
        names = ", ".join(skip.names)
        said = f"from stage {skip.first} to {skip.last}: {names}, {self._label(skip)}"
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
        return element("g", comment([said]), drawn, class_="rv-traveller", data_names=names)

    def _tie(self, tie: TiedWeight, stage: int, at: _Place) -> str:
        names = ", ".join(tie.names)
        said = f"stages {tie.owner} and {tie.holder} share {names}"
        if stage == tie.owner:
            drawn = path("M", at.start, at.frame - 6, "V", at.y, "H", at.end, class_="rv-tie")
            drawn += _tip(at.start, at.frame, -1, "rv-tie-end")
            drawn += text(_tied(tie), at.start + 5, at.y - 4, "rv-tie-label")
        elif stage == tie.holder:
            drawn = path("M", 0, at.y, "H", at.stop, "V", at.frame - 6, class_="rv-tie")
            drawn += _tip(at.stop, at.frame, -1, "rv-tie-end")
        else:
            drawn = path("M", 0, at.y, "H", at.end, class_="rv-tie")
        return element("g", comment([said]), drawn, class_="rv-tied", data_names=names)


def _tied(tie: TiedWeight) -> str:
    more = f" +{len(tie.names) - 1}" if len(tie.names) > 1 else ""
    return f"tied {tie.names[0]}{more}"


def _tip(x: float, y: float, side: int, class_: str) -> str:
    """An arrowhead that touches a frame's edge from below (1) or above (-1)."""
    return path("M", x, y, "l", 4, side * 7, "h", -8, "z", class_=class_)


def _height(lanes: Sequence[int]) -> float:
    return LANE * (max(lanes) + 1) + 4 if lanes else 0.0
