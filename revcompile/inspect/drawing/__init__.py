"""Drawings of what the compiler did: the model as stages, and the pipeline in time.

blocks.py    one block, and the legend
stages.py    one stage, with the lines that pass it
network.py   all stages as one SVG
page.py      the same as one HTML file (graph.py: the graph of a stage)
timeline.py  schedules side by side, from dry runs
frontier.py  speed over memory, of several methods
svg.py       SVG as text; colours and fonts
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from revcompile.errors import InputError
from revcompile.inspect.drawing.frontier import Panel, frontier_svg
from revcompile.inspect.drawing.network import network_svg
from revcompile.inspect.drawing.page import page
from revcompile.inspect.drawing.timeline import beside_others, timeline_svg
from revcompile.inspect.views import ModelView
from revcompile.ir.program import Partition
from revcompile.schedule import Costs

__all__ = [
    "Panel",
    "beside_others",
    "costs_of",
    "draw",
    "fragment",
    "frontier_svg",
    "timeline_svg",
    "write",
]


def write(caller: str, path: str | Path, drawings: Mapping[str, Callable[[], str]]) -> Path:
    """Write a drawing; `drawings` has a function for each suffix that the file may have."""
    target = Path(path)
    if target.suffix not in drawings:
        ending, wanted = target.suffix or "nothing", " or ".join(drawings)
        raise InputError(
            f"{caller}: {str(path)!r} ends in {ending}; give the file a name that ends in {wanted}"
        )
    target.write_text(drawings[target.suffix](), encoding="utf-8")
    return target


def draw(view: ModelView, path: str | Path) -> Path:
    """Draw a model's stages: `.svg` is a picture, `.html` a page with details of each stage."""
    drawings = {".svg": partial(network_svg, view), ".html": partial(page, view)}
    return write("draw", path, drawings)


def fragment(view: ModelView) -> str:
    """The drawing for a notebook: an SVG that scrolls in a narrow cell."""
    return f'<div style="max-width:1000px;overflow-x:auto">{network_svg(view)}</div>'


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
