"""Speed over memory: a labelled point per method, and a curve for one method's choices."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from revcompile.inspect.drawing.svg import SMALL, document, element, path, text, width_of
from revcompile.inspect.formatting import amount

Point = tuple[float, float]
"""Bytes, and samples per second or time."""
Box = tuple[float, float, float, float]
"""Left, top, right and bottom."""

_WIDTH: Final = 900.0
_MARGIN: Final = 20.0
_TOP: Final = 84.0
_ONE: Final = _WIDTH, 380.0 + _TOP + 56.0
_MANY: Final = _WIDTH / 2, 300.0
"""Size of a single panel, with the title, and of one of several."""
_RADIUS: Final = 5.0


@dataclass(frozen=True)
class Panel:
    """What is drawn in one pair of axes; the methods on `curve` have its colour."""

    points: Mapping[str, Point]
    curve: Sequence[Point]
    title: str = ""
    rivals: Collection[str] = ()
    """Labels of points with a colour of their own."""


def frontier_svg(title: str, subtitle: str, *panels: Panel, time: str = "") -> str:
    """Draw the panels, two in a row.

    The curve has the fastest choice in each memory, as a staircase of samples per second from 0 on.
    With `time`, the name of the vertical axis, it joins what was measured.
    """
    one = len(panels) == 1
    width, height = _ONE if one else _MANY
    drawn: list[str] = []
    for index, panel in enumerate(panels):
        left, top = index % 2 * width, 0.0 if one else 62 + index // 2 * height
        frame = left + 78, top + (_TOP if one else 44), left + width - 40, top + height - 56
        drawn += _panel(panel, frame, time)
    rows = math.ceil(len(panels) / 2)
    whole = height if one else 62 + rows * height
    return document(title, subtitle, *drawn, width=_WIDTH, height=whole, margin=_MARGIN)


def _panel(panel: Panel, frame: Box, time: str) -> Iterator[str]:
    left, top, right, bottom = frame
    points, curve = panel.points, panel.curve
    everything = (*points.values(), *curve)
    sizes, heights = [size for size, _ in everything], [height for _, height in everything]
    low, high = math.floor(math.log2(min(sizes))), math.ceil(math.log2(max(sizes)))
    high = max(high, low + 1)
    least = min(heights) if time else 0.0
    most = max(heights if time else [height for _, height in points.values()])
    step = _round_step((max(heights) - least or most) / 5)
    decimals = max(0, -math.floor(math.log10(step)))
    first, last = math.floor(least / step), math.ceil(most * (1 if time else 1.05) / step)

    def placed(point: Point) -> Point:
        across = (math.log2(point[0]) - low) / (high - low)
        up = (point[1] / step - first) / max(last - first, 1)
        return left + across * (right - left), bottom - up * (bottom - top)

    for power in range(low, high + 1):
        x, _ = placed((2.0**power, 0))
        yield path("M", x, top, "V", bottom, class_="rv-axis")
        scale, unit = next((s, u) for s, u in ((30, "GiB"), (20, "MiB"), (10, "KiB")) if power >= s)
        yield text(f"{2 ** (power - scale)} {unit}", x, bottom + 18, "rv-small rv-middle")
    for tick in range(first, last + 1):
        _, y = placed((2.0**low, tick * step))
        yield path("M", left, y, "H", right, class_="rv-axis")
        value = f"{tick * step:.{decimals}f}" if time else amount(tick * step)
        yield text(value, left - 8, y + 3.6, "rv-small rv-end")
    if panel.title:
        yield text(panel.title, left, top - 28, "rv-label")
    yield text(time or "samples per second", left - 58, top - 10, "rv-small")
    where = "peak of activations" if time else "memory of the device that needs the most"
    yield text(where, right, bottom + 38, "rv-small rv-end")
    along = [placed(point) for point in curve]
    taken = []
    if time:
        line = ["M", *along[0], *(item for x, y in along[1:] for item in ("L", x, y))]
        taken = [piece for start, end in pairwise(along) for piece in _along(start, end)]
    else:
        line = ["M", *along[0], *(item for x, y in along[1:] for item in ("H", x, "V", y))]
        for start, end in pairwise(along):
            corner = end[0], start[1]
            taken += [_around(start, corner), _around(corner, end)]
    yield path(*line, class_="rv-one")
    for x, y in along if time else ():
        yield element("circle", cx=x, cy=y, r=0.6 * _RADIUS, class_="rv-forward")
    spots = {label: placed(point) for label, point in points.items()}
    taken += [_around(spot, spot) for spot in spots.values()]
    for label, (x, y) in spots.items():
        on_curve = points[label] in curve
        kind = "rv-backward" if label in panel.rivals else "rv-forward" if on_curve else "rv-tip"
        yield element("circle", cx=x, cy=y, r=_RADIUS, class_=kind)
        wide = 1.08 if on_curve else 1.0  # bold
        box = _free_box((x, y), wide * width_of(label, SMALL), taken, frame)
        taken.append(box)
        yield text(label, box[0], box[3] - 3, "rv-strong" if on_curve else "rv-small")


def _round_step(wanted: float) -> float:
    """The least of 1, 2 and 5 times powers of ten that is at least `wanted`.

    >>> _round_step(300.0), _round_step(1100.0)
    (500.0, 2000.0)
    """
    power = 10.0 ** math.floor(math.log10(wanted))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= wanted)


def _around(start: Point, end: Point) -> Box:
    """The box around a straight line whose `end` is to the right of `start` or above it."""
    return start[0] - _RADIUS, end[1] - _RADIUS, end[0] + _RADIUS, start[1] + _RADIUS


def _along(start: Point, end: Point) -> list[Box]:
    """Boxes around a sloping line, in pieces."""
    pieces = max(1, round(math.dist(start, end) / 12))
    steps = [i / pieces for i in range(pieces + 1)]
    spots = [tuple(a + share * (b - a) for a, b in zip(start, end, strict=True)) for share in steps]
    return [_around(spot, spot) for spot in spots]  # type: ignore[arg-type]


def _free_box(spot: Point, width: float, taken: Sequence[Box], frame: Box) -> Box:
    """A free place for a label: beside the point, else above or below it, at growing distance."""
    (x, y), height = spot, SMALL + 4
    boxes = [
        (left, y + dy - height / 2, left + width, y + dy + height / 2)
        for far in range(24)
        for dy in ([0.0] if not far else [-8.0 - 4 * far, 8.0 + 4 * far])
        for left in ([x + 9, x - 9 - width] if not far else [x + 4, x - 4 - width, x - width / 2])
    ]
    left, top, right, bottom = frame
    inside = [
        box
        for box in boxes
        if box[0] >= left and box[2] <= right + 40 and box[1] >= top - 8 and box[3] <= bottom
    ]
    free = (box for box in inside if not any(_overlap(box, other) for other in taken))
    return next(free, (inside or boxes)[0])


def _overlap(one: Box, other: Box) -> bool:
    apart = one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
    return not apart
