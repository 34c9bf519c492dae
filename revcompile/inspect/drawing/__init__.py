"""Drawings of what the compiler did: the model as stages, and the pipeline in time.

blocks.py    one block, and the legend
stages.py    one stage, with the lines that pass it
network.py   all stages as one SVG
page.py      the same as one HTML file (graph.py: the graph of a stage)
timeline.py  schedules side by side, from dry runs
frontier.py  throughput over memory, of several methods
svg.py       SVG as text; colours and fonts
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from revcompile.errors import InputError
from revcompile.inspect.drawing.frontier import Point, frontier_svg
from revcompile.inspect.drawing.network import network_svg
from revcompile.inspect.drawing.page import page
from revcompile.inspect.drawing.timeline import METHODS, beside_others, timeline_svg
from revcompile.inspect.views import ModelView
from revcompile.ir.program import Partition
from revcompile.schedule import Costs, Method

__all__ = ["beside_others", "costs_of", "draw", "draw_frontier", "draw_schedule", "fragment"]


def draw(view: ModelView, path: str | Path) -> Path:
    """Draw a model's stages: an `.svg` to look at, an `.html` to open stage by stage."""
    writers = {".svg": network_svg, ".html": page}
    target = _target("draw", path, writers)
    target.write_text(writers[target.suffix](view), encoding="utf-8")
    return target


def fragment(view: ModelView) -> str:
    """The drawing for a notebook: an SVG that scrolls where the cell is narrow."""
    return f'<div style="max-width:1000px;overflow-x:auto">{network_svg(view)}</div>'


def draw_schedule(
    costs: Costs,
    path: str | Path,
    methods: Mapping[str, Method] = METHODS,
    *,
    accumulation_steps: int | None = None,
    title: str | None = None,
) -> Path:
    """Draw the pipelines of several methods on one time axis, as an `.svg`.

    By default PETRA in both orders, 1F1B, GPipe and backprop. `costs.backward` is a pass that
    computes forward again; methods that keep their graph are drawn without that. `title` names
    the model.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     print(draw_schedule(Costs.uniform(4), f"{folder}/timeline.svg").name)
    timeline.svg
    """
    target = _target("draw_schedule", path, (".svg",))
    drawn = timeline_svg(costs, methods, accumulation_steps=accumulation_steps, title=title)
    target.write_text(drawn, encoding="utf-8")
    return target


def draw_frontier(
    path: str | Path, title: str, subtitle: str, points: Mapping[str, Point], curve: Sequence[Point]
) -> Path:
    """Draw throughput over memory, as an `.svg`: labelled points, and a curve of one method."""
    target = _target("draw_frontier", path, (".svg",))
    target.write_text(frontier_svg(title, subtitle, points, curve), encoding="utf-8")
    return target


def costs_of(partition: Partition) -> Costs:
    """What each stage's passes cost, in the unit of the partition's costs; links cost nothing."""
    none = (0.0,) * (len(partition.parts) - 1)
    forward = tuple(sum(cost.forward for cost in part.costs) for part in partition.parts)
    update = tuple(sum(cost.update for cost in part.costs) for part in partition.parts)
    backward = tuple(
        sum(partition.works(part)) - forward[part.index] - update[part.index]
        for part in partition.parts
    )
    return Costs(forward, backward, update, none, none)


def _target(who: str, path: str | Path, known: Collection[str]) -> Path:
    target = Path(path)
    if target.suffix in known:
        return target
    ending, wanted = target.suffix or "nothing", " or ".join(known)
    raise InputError(
        f"{who}: {str(path)!r} ends in {ending}; give the file a name that ends in {wanted}"
    )
