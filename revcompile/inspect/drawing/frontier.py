"""Throughput over memory: a labelled point per method, and a curve for one method's choices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final

from revcompile.inspect.drawing.svg import SMALL, document, element, path, text, width_of
from revcompile.inspect.formatting import amount

Point = tuple[float, float]
"""Bytes and samples per second."""
Box = tuple[float, float, float, float]
"""Left, top, right and bottom."""

_WIDTH: Final = 900.0
_HEIGHT: Final = 520.0
_MARGIN: Final = 20.0
_LEFT: Final = 78.0
_TOP: Final = 84.0
_RIGHT: Final = _WIDTH - 40.0
_BOTTOM: Final = _HEIGHT - 56.0
_RADIUS: Final = 5.0


def frontier_svg(
    title: str, subtitle: str, points: Mapping[str, Point], curve: Sequence[Point]
) -> str:
    """Draw `points` by label; those on `curve`, the fastest in their memory, have its colour."""
    sizes = [size for size, _ in (*points.values(), *curve)]
    low, high = math.floor(math.log2(min(sizes))), math.ceil(math.log2(max(sizes)))
    step = _round_step(max(rate for _, rate in (*points.values(), *curve)) / 5)
    most = step * math.ceil(max(rate for _, rate in points.values()) * 1.05 / step)

    def placed(point: Point) -> Point:
        share = (math.log2(point[0]) - low) / max(high - low, 1)
        return _LEFT + share * (_RIGHT - _LEFT), _BOTTOM - point[1] / most * (_BOTTOM - _TOP)

    drawn = []
    for power in range(low, high + 1):
        x, _ = placed((2.0**power, 0))
        drawn.append(path("M", x, _TOP, "V", _BOTTOM, class_="rv-axis"))
        scale, unit = next((s, u) for s, u in ((30, "GiB"), (20, "MiB"), (10, "KiB")) if power >= s)
        drawn.append(text(f"{2 ** (power - scale)} {unit}", x, _BOTTOM + 18, "rv-small rv-middle"))
    for tick in range(round(most / step) + 1):
        _, y = placed((2.0**low, tick * step))
        drawn.append(path("M", _LEFT, y, "H", _RIGHT, class_="rv-axis"))
        drawn.append(text(amount(tick * step), _LEFT - 8, y + 3.6, "rv-small rv-end"))
    drawn.append(text("samples per second", _MARGIN, _TOP - 10, "rv-small"))
    where = "memory of the device that needs the most"
    drawn.append(text(where, _RIGHT, _BOTTOM + 38, "rv-small rv-end"))
    along = [placed(point) for point in curve]
    line = ["M", *along[0], *(item for x, y in along[1:] for item in ("H", x, "V", y))]
    drawn.append(path(*line, class_="rv-one"))
    spots = {label: placed(point) for label, point in points.items()}
    taken = [_around(spot, spot) for spot in spots.values()]
    for start, end in pairwise(along):
        taken += [_around(start, (end[0], start[1])), _around((end[0], start[1]), end)]
    for label, (x, y) in spots.items():
        on_curve = points[label] in curve
        drawn.append(
            element("circle", cx=x, cy=y, r=_RADIUS, class_="rv-forward" if on_curve else "rv-tip")
        )
        wide = 1.08 if on_curve else 1.0  # bold
        box = _free_box((x, y), wide * width_of(label, SMALL), taken)
        taken.append(box)
        drawn.append(text(label, box[0], box[3] - 3, "rv-strong" if on_curve else "rv-small"))
    return document(title, subtitle, *drawn, width=_WIDTH, height=_HEIGHT, margin=_MARGIN)


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


def _free_box(spot: Point, width: float, taken: Sequence[Box]) -> Box:
    """A free place for a label: beside the point, else above or below it, at growing distance."""
    (x, y), height = spot, SMALL + 4
    boxes = [
        (left, y + dy - height / 2, left + width, y + dy + height / 2)
        for far in range(24)
        for dy in ([0.0] if not far else [-8.0 - 4 * far, 8.0 + 4 * far])
        for left in ([x + 9, x - 9 - width] if not far else [x + 4, x - 4 - width, x - width / 2])
    ]
    inside = [box for box in boxes if box[0] >= _LEFT and box[2] <= _WIDTH and box[1] >= _TOP - 8]
    free = (box for box in inside if not any(_overlap(box, other) for other in taken))
    return next(free, inside[0])


def _overlap(one: Box, other: Box) -> bool:
    apart = one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
    return not apart
