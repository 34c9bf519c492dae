"""Schedules side by side on one time axis, drawn from dry runs.

The drawing follows PETRA's Fig. 1: one row per stage, one box per pass, with the number of its
micro-batch. A method that keeps the graph of its forward pass does not compute it again, so its
backward pass is shorter.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from revcompile.errors import InputError
from revcompile.inspect.drawing.svg import SMALL, TINY, document, element, path, text, width_of
from revcompile.inspect.formatting import plural
from revcompile.schedule import (
    Costs,
    Keep,
    Method,
    Op,
    Span,
    actions,
    choose,
    dry_run,
    period,
    stage_work,
    window,
)

METHODS: Final[Mapping[str, Method]] = {
    "PETRA, 1F1B order": choose("petra"),
    "PETRA, paper order": choose("petra", in_flight_per_stage=2),
    "1F1B": choose("1f1b"),
    "GPipe": choose("gpipe"),
    "backprop": choose("backprop"),
}
"""The default methods."""


def beside_others(method: Method) -> dict[str, Method]:
    """The default methods, with `method` before them."""
    label = next((name for name, other in METHODS.items() if other == method), None)
    far = method.in_flight_per_stage > 1
    order = f", in_flight_per_stage={method.in_flight_per_stage:g}" if far else ""
    return {label or f"{method.name}{order}": method} | dict(METHODS)


_WIDTH: Final = 1000.0
_MARGIN: Final = 20.0
_LEFT: Final = 74.0
_RIGHT: Final = 62.0
_TOP: Final = 74.0
_HEAD: Final = 22.0
_BETWEEN: Final = 16.0
_PASSES: Final = 4
"""Micro-batches that plain backpropagation finishes in the time drawn."""
_STEPS: Final = 48
"""The longest time drawn, in forward-and-backward passes of the slowest stage."""
_TICKS: Final = 12
_GROUP: Final = 16
_BOXES: Final = {Op.FORWARD: "rv-forward", Op.BACKWARD: "rv-backward", Op.UPDATE: "rv-update"}


@dataclass(frozen=True)
class Run:
    """One method's dry run."""

    name: str
    spans: tuple[Span, ...]
    rate: float
    """Micro-batches per unit of time once the pipeline is full."""
    busy: tuple[float, ...]
    """Share of the time that each stage computes once the pipeline is full."""
    window: int
    """Most micro-batches in flight at the first stage."""


def dry_runs(
    costs: Costs, methods: Mapping[str, Method], accumulation_steps: int, until: float
) -> tuple[Run, ...]:
    """Every method's dry run, with enough micro-batches that none drains before `until`."""
    stages = len(costs.forward)
    runs = []
    for name, method in methods.items():
        own = _own(costs, method)
        fastest = max(f + b for f, b in zip(own.forward, own.backward, strict=True))
        most = window(method, stages, 0, accumulation_steps)
        wanted = math.ceil(until / fastest) + 2 * most
        groups = -(-wanted // accumulation_steps) + 1
        lists = actions(method, stages, groups * accumulation_steps, accumulation_steps)
        rate = 1 / period(method, own, accumulation_steps)
        busy = tuple(min(work * rate, 1.0) for work in stage_work(own, accumulation_steps))
        runs.append(Run(name, dry_run(lists, own), rate, busy, most))
    return tuple(runs)


def _own(costs: Costs, method: Method) -> Costs:
    """The costs of one method: backward computes forward again unless the graph is kept."""
    if method.keep is not Keep.GRAPH:
        return costs
    pairs = zip(costs.forward, costs.backward, strict=True)
    return dataclasses.replace(costs, backward=tuple(max(b - f, 0.0) for f, b in pairs))


def timeline_svg(
    costs: Costs,
    methods: Mapping[str, Method] = METHODS,
    accumulation_steps: int | None = None,
    title: str | None = None,
) -> str:
    """The schedules of several methods at the same costs as one SVG.

    `costs.backward` includes computing forward again. `accumulation_steps` is the number of
    micro-batches per update, and per drain of 1F1B and GPipe (default: one per stage, 16 at most).
    `title` names the model.
    """
    stages = len(costs.forward)
    slowest = max((f + b for f, b in zip(costs.forward, costs.backward, strict=True)), default=0)
    if not slowest or not methods:
        raise InputError(
            "draw_schedule: nothing to draw; give at least one method and one cost > 0"
        )
    group = min(stages, _GROUP) if accumulation_steps is None else accumulation_steps
    alone = _own(costs, choose("backprop"))
    passes = (alone.forward, alone.backward, alone.link_forward, alone.link_backward)
    one_pass = math.fsum(map(sum, passes)) + max(alone.update, default=0.0)
    until = min(_PASSES * one_pass, _STEPS * slowest)
    runs = dry_runs(costs, methods, group, until)
    row = max(3.0, min(19.0, 240 / stages))
    y, drawn = _TOP, []
    for run in runs:
        drawn.append(_panel(run, runs[-1], y, row, until))
        y += _HEAD + row * stages + _BETWEEN
    named = f"{title}, " if title else ""
    return document(
        f"{named}{plural(stages, 'stage')}: schedules at the same costs",
        "backward passes recompute forward, but for methods that keep its graph; "
        f"accumulation_steps={group}",
        text("busy", _WIDTH - _MARGIN, 66, "rv-small rv-end"),
        _axis(until, slowest, y),
        *drawn,
        _legend(y + 22),
        width=_WIDTH,
        height=y + 52,
        margin=_MARGIN,
    )


def _panel(run: Run, slowest: Run, y: float, row: float, until: float) -> str:
    """One method: a line of numbers, and one row per stage."""
    busy = sum(run.busy) / len(run.busy)
    label = f"once full: stages {busy:.0%} busy, {run.window} in flight at stage 0"
    if run is not slowest:
        label += f", {run.rate / slowest.rate:.1f}× the speed of {slowest.name}"
    head = text(run.name, _MARGIN, y + 14, "rv-label")
    head += text(label, _WIDTH - _MARGIN, y + 14, "rv-small rv-end")
    height, width = row - min(2.0, 0.2 * row), _WIDTH - _LEFT - _RIGHT
    rows = []
    for stage, each in enumerate(run.busy):
        top = y + _HEAD + stage * row
        middle = top + height / 2 + 3.6
        rows.append(element("rect", x=_LEFT, y=top, width=width, height=height, class_="rv-idle"))
        if row >= 9 or stage % 4 == 0:
            rows.append(text(f"stage {stage}", _LEFT - 8, middle, "rv-small rv-end"))
            rows.append(text(f"{each:.0%}", _WIDTH - _MARGIN, middle, "rv-small rv-end"))
    boxes = _boxes(run, y + _HEAD, row, height, until)
    return element("g", head, *rows, boxes, class_="rv-method", data_method=run.name)


def _boxes(run: Run, top: float, row: float, height: float, until: float) -> str:
    shapes: dict[Op, list[object]] = {op: [] for op in _BOXES}
    numbers = []
    scale = (_WIDTH - _LEFT - _RIGHT) / until
    spans = [span for span in run.spans if span.action.op in shapes and span.start < until]
    # Either all boxes of the same width show their numbers, or none does.
    number_width = width_of("0" * len(str(max(span.action.index for span in spans))), TINY)
    for span in spans:
        op, y = span.action.op, top + span.stage * row
        x, end = (_LEFT + min(time, until) * scale for time in (span.start, span.end))
        # An update that costs nothing is still an event.
        width = max(end - x, 1.6 if op is Op.UPDATE else 0.0)
        shapes[op] += ["M", x, y, "h", width, "v", height, "h", -width, "z"]
        if op is not Op.UPDATE and row >= 11 and number_width + 1 < width:
            middle = "rv-tiny rv-middle"
            numbers.append(text(span.action.index, x + width / 2, y + height / 2 + 3.2, middle))
    drawn = [path(*shape, class_=_BOXES[op]) for op, shape in shapes.items() if shape]
    return "".join(drawn + numbers)


def _axis(until: float, slowest: float, bottom: float) -> str:
    """A time axis in forward-and-backward passes of the slowest stage, across all panels."""
    passes, drawn = until / slowest, []
    step = next(s for s in (1, 2, 5, 10, 20, 50) if passes / s <= _TICKS or s == 50)
    for tick in range(0, int(passes) + 1, step):
        x = _LEFT + tick / passes * (_WIDTH - _LEFT - _RIGHT)
        drawn.append(path("M", x, _TOP + _HEAD - 4, "V", bottom - 6, class_="rv-axis"))
        drawn.append(text(tick, x, bottom + 8, "rv-small rv-middle"))
    label = "time, in passes forward and back of the slowest stage"
    drawn.append(text(label, _WIDTH - _MARGIN, bottom + 32, "rv-small rv-end"))
    return "".join(drawn)


def _legend(y: float) -> str:
    items = {"rv-idle": "idle, or waiting for a message"}
    items |= {class_: op.name.lower() for op, class_ in _BOXES.items()}
    drawn, x = [], _LEFT
    for class_, label in items.items():
        drawn.append(element("rect", x=x, y=y, width=18, height=12, class_=class_))
        drawn.append(text(label, x + 24, y + 10, "rv-small"))
        x += 40 + width_of(label, SMALL)
    return element("g", *drawn, class_="rv-legend")
