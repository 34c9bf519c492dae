"""drawing: every stage and block is there, wide as its work, joined as in the model; pages hold."""

import copy
import itertools
import json
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import pytest
from drawn import Compiled, compiled, groups, parsed, shown
from helpers import refuses

from revcompile.errors import InputError
from revcompile.inspect.drawing import draw, write
from revcompile.inspect.drawing.graph import HEIGHT, drawn_graph, layout
from revcompile.inspect.drawing.page import embedded, page
from revcompile.inspect.drawing.timeline import timeline_svg
from revcompile.inspect.source import code_text
from revcompile.schedule import Costs, choose

# -- the model as stages --------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "stages"), [("tower", 3), ("hourglass", 4), ("gpt", 4)])
def test_every_stage_and_every_segment_is_drawn_once(model: str, stages: int) -> None:
    net = compiled(model, stages)
    root = parsed(net.picture())
    numbers = [one.get("data-stage") for one in groups(root, "rv-stage")]
    assert numbers == [str(stage) for stage in range(stages)]
    drawn = [p for one in groups(root, "rv-block") for p in one.get("data-path", "").split(" ")]
    names = [piece.name for part in net.partition.parts for piece in part.pieces]
    assert " ".join(drawn).split() == " ".join(names).split()


def ends(path: ET.Element) -> list[tuple[float, float]]:
    """Where a curve begins and ends."""
    numbers = [float(n) for n in re.findall(r"-?\d+(?:\.\d+)?", path.get("d", ""))]
    return [(numbers[0], numbers[1]), (numbers[-2], numbers[-1])]


@pytest.mark.parametrize("method", ["backprop", "gpipe", "pipedream", "dni", "petra"])
def test_the_stages_of_any_method_can_be_drawn(method: str) -> None:
    net = copy.copy(compiled("gpt", 4).net)
    net.method = choose(method)
    facts = Compiled(net).picture()
    assert f"TinyGPT: 4 stages, {method}" in shown(parsed(facts))
    read(page(facts))


HOSTILE = "</script><script>alert('&\"x\"')</script>\x00"


def test_names_are_escaped_wherever_they_stand() -> None:
    net = compiled("tower", 3)
    texts = shown(parsed(net.picture(name=HOSTILE)))
    assert f"{HOSTILE[:-1]}\ufffd: 3 stages, petra" in texts
    html = page(net.picture(name=HOSTILE))
    assert html.count("</script>") == 2 and "<script>alert" not in html
    data = embedded([HOSTILE])
    assert json.loads(data) == [HOSTILE] and "<" not in data


def test_a_drawing_is_the_same_every_time(tmp_path: Path) -> None:
    net = compiled("hourglass", 4)
    for suffix in ("svg", "html"):
        twice = [draw(net.picture(), tmp_path / f"{i}.{suffix}").read_bytes() for i in range(2)]
        assert twice[0] == twice[1]


def test_mistakes_say_what_to_do(tmp_path: Path) -> None:
    net = compiled("tower", 3)
    with pytest.raises(InputError, match=r"ends in \.png.*\.svg or \.html"):
        draw(net.picture(), tmp_path / "net.png")
    refuses(
        InputError,
        r"ends in nothing.*\.svg",
        write,
        "draw_schedule",
        tmp_path / "timeline",
        {".svg": str},
    )
    refuses(InputError, "nothing to draw", timeline_svg, Costs.uniform(2, 0, 0))


# -- the page -------------------------------------------------------------------------------------


class Balanced(HTMLParser):
    """Fails where an element is closed that is not the one last opened."""

    VOID = ("meta", "input", "br")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.scripts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        assert tag in self.VOID or "svg" in self.open, f"<{tag}/> is no HTML"

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)


def read(html: str) -> Balanced:
    parser = Balanced()
    parser.feed(html)
    parser.close()
    assert parser.open == []
    return parser


def test_the_page_is_balanced_and_needs_nothing_from_anywhere() -> None:
    html = page(compiled("hourglass", 4).picture())
    parser = read(html)
    assert not [name for name, _ in parser.attributes if name in ("src", "href")]
    assert "@import" not in html and "url(" not in html
    ids = [value for name, value in parser.attributes if name == "id"]
    assert len(ids) == len(set(ids))


def test_a_stage_opens_into_its_segments_code_actions_and_graph() -> None:
    net = compiled("tower", 3)
    (stages,) = json.loads(read(page(net.picture())).scripts[0]).values()
    for part, program, stage in zip(net.partition.parts, net.programs, stages, strict=True):
        assert [block[0] for block in stage["blocks"]] == [piece.name for piece in part.pieces]
        assert stage["code"] == code_text(net.partition, program)
        assert len(stage["graph"][2]) == len(drawn_graph(program.forward).vertices)
        assert "FORWARD m0" in stage["actions"][0]
    assert stages[0]["blocks"][0][2] == "no additive shortcut"


# -- a stage's graph ------------------------------------------------------------------------------


def test_a_large_graph_is_drawn_by_modules() -> None:
    program = compiled("tower", 2).programs[0]
    whole, small = (drawn_graph(program.forward, most) for most in (48, 8))
    assert len(small.vertices) <= 8 < len(whole.vertices)
    together = [one for one in small.vertices if one.kind == "group"]
    assert together and all(len(one.nodes) > 1 for one in together)
    assert sum(len(one.nodes) for one in small.vertices) == len(whole.vertices)
    height = [y for _, y, *_ in layout(small)[2]]
    assert all(height[a] < height[b] for a, b in small.arrows)
    for vertex in small.vertices:  # a box opens into all that it stands for
        inside = vertex.inside.vertices if vertex.inside is not None else ()
        assert not inside or [n for one in inside for n in one.nodes] == list(vertex.nodes)
    assert any(vertex.inside is not None for vertex in small.vertices)


def test_no_two_boxes_of_a_graph_overlap() -> None:
    for program in (*compiled("hourglass", 4).programs, *compiled("gpt", 4).programs):
        graph = drawn_graph(program.forward)
        width, _, boxes, arrows = layout(graph)
        for (x1, y1, w1, *_), (x2, y2, w2, *_) in itertools.combinations(boxes, 2):
            assert abs(y1 - y2) >= HEIGHT or abs(x1 - x2) >= (w1 + w2) / 2
        for (source, target), (points, *_) in zip(graph.arrows, arrows, strict=True):
            assert (points[:2], points[-2:]) == (boxes[source][:2], boxes[target][:2])
        assert all(x - w / 2 >= 0 and x + w / 2 <= width for x, _, w, *_ in boxes)
