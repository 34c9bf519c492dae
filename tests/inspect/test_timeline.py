"""Timelines and action lists: what is drawn is what the dry run does."""

import re
import xml.etree.ElementTree as ET

import pytest
from drawn import groups, shown
from paths import ROOT

from revcompile.inspect.drawing.frontier import Panel, _overlap, frontier_svg
from revcompile.inspect.drawing.svg import SMALL, width_of
from revcompile.inspect.drawing.timeline import METHODS, dry_runs, timeline_svg
from revcompile.schedule import Costs, Op, actions, choose, dry_run

# -- timelines ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def timeline() -> ET.Element:
    return ET.fromstring(
        timeline_svg(Costs.uniform(4, forward=1, backward=3, update=0.2, link=0.1))
    )


def test_every_method_has_a_row_a_stage_and_prints_its_busy_share(timeline: ET.Element) -> None:
    panels = groups(timeline, "rv-method")
    assert [panel.get("data-method") for panel in panels] == list(METHODS)
    for panel in panels:
        texts = shown(panel)
        assert [text for text in texts if text.startswith("stage ")] == [
            f"stage {i}" for i in range(4)
        ]
        assert sum(bool(re.fullmatch(r"\d+%", text)) for text in texts) == 4


def test_the_figures_of_a_panel_are_those_of_the_dry_run(timeline: ET.Element) -> None:
    said = {p.get("data-method"): shown(p)[1] for p in groups(timeline, "rv-method")}
    assert "4 in flight at stage 0" in said["PETRA, 1F1B order"]
    assert "7 in flight at stage 0" in said["PETRA, paper order"]
    assert said["backprop"].endswith("1 in flight at stage 0")
    costs = Costs.uniform(4)
    (run,) = dry_runs(costs, {"petra": choose("petra")}, 1, until=40.0)
    assert run.busy == (1.0,) * 4


def test_boxes_stand_where_the_dry_run_puts_them() -> None:
    costs = Costs.uniform(3, forward=1, backward=3)
    root = ET.fromstring(timeline_svg(costs, {"petra": choose("petra")}))
    forward = groups(root, "rv-forward")[0].get("d", "")
    starts = [float(x) for x in re.findall(r"M (\S+) ", forward)]
    widths = [float(x) for x in re.findall(r" h (\d\S*) ", forward)]
    scale = max(widths)
    spans = dry_run(actions("petra", 3, 60), costs)
    first = [span.start for span in spans if span.action.op is Op.FORWARD and span.stage == 0][:6]
    left = min(starts)
    drawn = sorted({round((x - left) / scale, 1) for x in starts})
    assert set(first) <= set(drawn)


def test_the_picture_in_the_documents_is_up_to_date() -> None:
    drawn = timeline_svg(Costs.uniform(5, forward=1, backward=3, update=0.2, link=0.1))
    assert (ROOT / "docs/timeline.svg").read_text(encoding="utf-8") == drawn


# -- frontiers ------------------------------------------------------------------------------------


def test_labels_of_a_frontier_touch_neither_each_other_nor_points() -> None:
    names = ["data parallel", "gpipe", "1f1b", "interleaved", "zero-bubble", "petra"]
    points = {name: (2.0**30 * (1 + i / 20), 1000.0 + 3 * i) for i, name in enumerate(names)}
    curve = [(2.0**29, 900.0), points["petra"], (2.0**33, 1200.0)]
    root = ET.fromstring(frontier_svg("title", "below", Panel(points, curve)))
    dots = [
        (float(c.get("cx", 0)), float(c.get("cy", 0)))
        for c in root.iter("{http://www.w3.org/2000/svg}circle")
    ]
    boxes = [(x - 5, y - 5, x + 5, y + 5) for x, y in dots]
    for label in root.iter("{http://www.w3.org/2000/svg}text"):
        if label.text in names:
            x, y = float(label.get("x", 0)), float(label.get("y", 0))
            boxes.append((x, y - SMALL, x + width_of(label.text, SMALL), y))
    labels = boxes[len(names) :]
    assert len(dots) == len(labels) == len(names)
    for one in labels:
        others = [box for box in boxes if box is not one]
        assert not any(_overlap(one, other) for other in others)
