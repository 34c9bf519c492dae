"""Schedules side by side on one time axis, drawn from dry runs.

In the manner of PETRA's Fig. 1: a row a stage, a box a forward or backward pass with the number of
its micro-batch. A method that keeps the graph of its forward pass need not compute it again: its
backward pass is drawn, and counted, that much shorter.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from revcompile.errors import InputError
from revcompile.inspect.drawing.svg import document, element, path, text, width_of
from revcompile.inspect.drawing.theme import SMALL, TINY, styles
from revcompile.inspect.formatting import plural
from revcompile.schedule import (
    Costs,
    Keep,
    Method,
    Op,
    Timeline,
    actions,
    choose,
    dry_run,
    period,
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
    """A method before the default ones."""
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
"""Micro-batches that plain backpropagation finishes in the time that is drawn."""
_STEPS: Final = 48
"""Longest time that is drawn, in forward-and-backward passes of the slowest stage."""
_TICKS: Final = 12
_GROUP: Final = 16


@dataclass(frozen=True)
class Run:
    """One method's dry run."""

    name: str
    costs: Costs
    timeline: Timeline
    rate: float
    """Micro-batches per unit of time once the pipeline is full."""
    updates: float
    """Updates per micro-batch."""
    window: int
    """Most micro-batches in flight at the first stage."""

    def busy(self, stage: int) -> float:
        """Share of the time at which a stage computes once the pipeline is full."""
        costs = self.costs
        work = costs.forward[stage] + costs.backward[stage] + costs.update[stage] * self.updates
        return min(work * self.rate, 1.0)


def dry_runs(
    costs: Costs, methods: Mapping[str, Method], accumulation_steps: int, until: float
) -> tuple[Run, ...]:
    """Every method's dry run, longer than `until`, so that none drains in the drawing."""
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
        runs.append(Run(name, own, dry_run(lists, own), rate, 1 / accumulation_steps, most))
    return tuple(runs)


def _own(costs: Costs, method: Method) -> Costs:
    """The costs as one method has them: with its graph kept, it does not compute forward again."""
    if method.keep is not Keep.GRAPH:
        return costs
    pairs = zip(costs.forward, costs.backward, strict=True)
    return dataclasses.replace(costs, backward=tuple(max(b - f, 0.0) for f, b in pairs))


def timeline_svg(
    costs: Costs,
    methods: Mapping[str, Method] | None = None,
    *,
    accumulation_steps: int | None = None,
    title: str | None = None,
) -> str:
    """The schedules of several methods at the same costs as one SVG.

    `costs.backward` computes forward again; `accumulation_steps` micro-batches lie between
    two updates, and between two drains of 1F1B and GPipe (default: one a stage, 16 at most);
    `title` names the model.
    """
    methods = METHODS if methods is None else methods
    stages = len(costs.forward)
    slowest = max((f + b for f, b in zip(costs.forward, costs.backward, strict=True)), default=0)
    if not slowest or not methods:
        raise InputError(
            "draw_schedule: nothing to draw; give at least one method and one cost > 0"
        )
    group = min(stages, _GROUP) if accumulation_steps is None else accumulation_steps
    until = min(_PASSES * _one_pass(_own(costs, choose("backprop"))), _STEPS * slowest)
    runs = dry_runs(costs, methods, group, until)
    scale = (_WIDTH - _LEFT - _RIGHT) / until
    panel = _Panel(runs, until, scale, _row_height(stages))
    y, drawn = _TOP, []
    for run in runs:
        drawn.append(panel.draw(run, y))
        y += _HEAD + panel.row * stages + _BETWEEN
    axis = _axis(until, slowest, scale, _TOP + _HEAD, y)
    named = f"{title}, " if title else ""
    heading = f"{named}{plural(stages, 'stage')}: schedules at the same costs"
    return document(
        heading,
        _subtitle(costs, group),
        text("busy", _WIDTH - _MARGIN, 66, "rv-small rv-end"),
        axis,
        *drawn,
        _legend(y + 22),
        width=_WIDTH,
        height=y + 52,
        margin=_MARGIN,
        style=styles(),
    )


def _one_pass(costs: Costs) -> float:
    """A micro-batch alone, all the way and back."""
    parts = (costs.forward, costs.backward, costs.link_forward, costs.link_backward)
    return math.fsum(sum(part) for part in parts) + max(costs.update, default=0.0)


def _row_height(stages: int) -> float:
    return max(3.0, min(19.0, 240 / stages))


@dataclass(frozen=True)
class _Panel:
    """How every method's rows are drawn."""

    runs: Sequence[Run]
    until: float
    scale: float
    row: float

    def draw(self, run: Run, y: float) -> str:
        """One method: a line of figures, and a row a stage."""
        top = y + _HEAD
        stages = len(run.costs.forward)
        rows = "".join(self._row(run, stage, top + stage * self.row) for stage in range(stages))
        drawn = (self._head(run, y), rows, self._messages(run, top), self._boxes(run, top))
        return element("g", *drawn, class_="rv-method", data_method=run.name)

    def _head(self, run: Run, y: float) -> str:
        stages = len(run.costs.forward)
        busy = sum(map(run.busy, range(stages))) / stages
        slowest = self.runs[-1]
        label = f"once full: stages {busy:.0%} busy, {run.window} in flight at stage 0"
        if run is not slowest:
            label += f", {run.rate / slowest.rate:.1f}× the speed of {slowest.name}"
        name = text(run.name, _MARGIN, y + 14, "rv-label")
        right = text(label, _WIDTH - _MARGIN, y + 14, "rv-small rv-end")
        return name + right

    def _row(self, run: Run, stage: int, y: float) -> str:
        width = self.until * self.scale
        height = self.row - min(2.0, 0.2 * self.row)
        back = element("rect", x=_LEFT, y=y, width=width, height=height, class_="rv-idle")
        if self.row < 9 and stage % 4:
            return back
        middle = y + height / 2 + 3.6
        label = text(f"stage {stage}", _LEFT - 8, middle, "rv-small rv-end")
        busy = text(f"{run.busy(stage):.0%}", _WIDTH - _MARGIN, middle, "rv-small rv-end")
        return back + label + busy

    def _boxes(self, run: Run, top: float) -> str:
        shapes: dict[Op, list[object]] = {Op.FORWARD: [], Op.BACKWARD: [], Op.UPDATE: []}
        numbers = []
        # Boxes of one width show their numbers all, or none does.
        most = max(span.action.index for span in run.timeline.spans if span.start < self.until)
        number_width = width_of("0" * len(str(most)), TINY)
        height = self.row - min(2.0, 0.2 * self.row)
        for span in run.timeline.spans:
            op = span.action.op
            if op not in shapes or span.start >= self.until:
                continue
            y = top + span.stage * self.row
            x, end = (_LEFT + min(time, self.until) * self.scale for time in (span.start, span.end))
            # An update that costs nothing is still an event.
            width = max(end - x, 1.6 if op is Op.UPDATE else 0.0)
            shapes[op] += ["M", x, y, "h", width, "v", height, "h", -width, "z"]
            if op is not Op.UPDATE and self.row >= 11 and number_width + 1 < width:
                middle = "rv-tiny rv-middle"
                numbers.append(text(span.action.index, x + width / 2, y + height / 2 + 3.2, middle))
        classes = {Op.FORWARD: "rv-forward", Op.BACKWARD: "rv-backward", Op.UPDATE: "rv-update"}
        drawn = [path(*shape, class_=classes[op]) for op, shape in shapes.items() if shape]
        return "".join(drawn + numbers)

    def _messages(self, run: Run, top: float) -> str:
        """A line from where a message is sent to where it arrives, if that takes time."""
        lines: list[object] = []
        for span in run.timeline.spans:
            step = {Op.SEND_Y: 1, Op.SEND_DX: -1}.get(span.action.op)
            if step is None:
                continue
            links = run.costs.link_forward if step > 0 else run.costs.link_backward
            arrival = span.start + links[span.stage - (step < 0)]
            if span.start < arrival <= self.until:
                y = top + (span.stage + 0.5) * self.row
                x, end = (_LEFT + time * self.scale for time in (span.start, arrival))
                lines += ["M", x, y, "L", end, y + step * self.row]
        return path(*lines, class_="rv-message") if lines else ""


def _axis(until: float, slowest: float, scale: float, top: float, bottom: float) -> str:
    """Time in forward-and-backward passes of the slowest stage, marked over all panels."""
    passes = until / slowest
    step = next(s for s in (1, 2, 5, 10, 20, 50) if passes / s <= _TICKS or s == 50)
    drawn = []
    for tick in range(0, int(passes) + 1, step):
        x = _LEFT + tick * slowest * scale
        drawn.append(path("M", x, top - 4, "V", bottom - 6, class_="rv-axis"))
        drawn.append(text(tick, x, bottom + 8, "rv-small rv-middle"))
    label = "time, in passes forward and back of the slowest stage"
    drawn.append(text(label, _WIDTH - _MARGIN, bottom + 32, "rv-small rv-end"))
    return "".join(drawn)


def _subtitle(costs: Costs, accumulation_steps: int) -> str:
    """The costs in words, where they are the same everywhere, and the group."""
    group = f"accumulation_steps={accumulation_steps}"
    if any(len(set(part)) > 1 for part in (costs.forward, costs.backward)):
        return f"the stages' own costs, less computing again where the graph is kept; {group}"
    f, b, u = costs.forward[0], costs.backward[0], costs.update[0]
    link = max((*costs.link_forward, *costs.link_backward), default=0.0)
    label = f"forward {f:g}, backward {b:g} ({max(b - f, 0):g} where the graph is kept)"
    label += f", update {u:g}" if u else ""
    return f"{label}{f', message {link:g}' if link else ''}; {group}"


def _legend(y: float) -> str:
    items = (
        ("rv-forward", "forward"),
        ("rv-backward", "backward"),
        ("rv-update", "update"),
        ("rv-idle", "idle, or waiting for a message"),
    )
    drawn, x = [], _LEFT
    for class_, label in items:
        drawn.append(element("rect", x=x, y=y, width=18, height=12, class_=class_))
        drawn.append(text(label, x + 24, y + 10, "rv-small"))
        x += 40 + width_of(label, SMALL)
    drawn.append(path("M", x, y + 2, "L", x + 18, y + 11, class_="rv-message"))
    drawn.append(text("message", x + 24, y + 10, "rv-small"))
    return element("g", *drawn, class_="rv-legend")
