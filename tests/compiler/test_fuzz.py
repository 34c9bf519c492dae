"""Random residual nets against autograd: a few in every run, thousands by `python -m tests.fuzz`.

The grammar and the oracle are in `tests/fuzz`; here Hypothesis draws the nets and makes failing
ones small. What fails prints as source.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import hypothesis
import pytest
from hypothesis import strategies as st

from revcompile.runtime.reversible.coupling import Chain
from revcompile.runtime.reversible.module import Reversible
from tests.fuzz.campaign import ENTRIES, main
from tests.fuzz.module import source
from tests.fuzz.net import CATALOGUE, Net, Part, draw_net
from tests.fuzz.oracle import METHODS, PHASES, Report, examine, shrink


def plain(kind: str, home: str = "inline", **options: Any) -> Part:
    """A part with the simplest options but for those given."""
    simplest = {name: values[0] for name, values in CATALOGUE[kind].options.items()}
    return Part(kind, simplest | options, home)


BLOCK: Final = plain("residual")

FOUND: Final[dict[str, Net]] = {
    # a custom function's own backward was lost where torch.export had to capture the model
    "custom function": Net("rows", (plain("custom", how="function"), BLOCK)),
    # gradients through values that are no tensors
    "chunk": Net("rows", (plain("modulated"), BLOCK), stages=3),
    "dict of an opaque module": Net(
        "rows", (plain("modulated", structure="dict", opaque=True),), stages=3
    ),
    "results of a recurrent layer": Net("rows", (plain("recurrent", read="both"),), stages=3),
    "nested in an opaque module": Net(
        "rows", (plain("modulated", structure="nested", opaque=True),)
    ),
    "keys and values": Net("words", (plain("cross"),)),
    "named result": Net("rows", (plain("reduced", whole=True),), stages=3),
    "complex": Net("rows", (plain("spectrum"),), stages=4),
    # in place
    "in place behind an identity": Net(
        "rows", (plain("inplace_layer", behind="nn.Identity()({})"),)
    ),
    "in place behind its own type": Net(
        "rows", (BLOCK, plain("inplace_layer", behind="{}.to({}.dtype)")), precision="bfloat16"
    ),
    "written through a view": Net("rows", (plain("written", what="v = h[:, 1:]; v.tanh_()"),)),
    "written through a transpose": Net(
        "rows", (plain("written", what="h.transpose(0, 1)[0] *= 2"),)
    ),
    "column": Net("rows", (plain("written", what="h[:, 0] = h[:, 1] * 2", before="branch"),)),
    # computed weights, regions, hooks
    "weight norm": Net("rows", (plain("parameters"), plain("parameters", how="old weight_norm"))),
    "checkpoints": Net("rows", tuple(plain("custom", how=f"checkpoint{s}") for s in ("", " old"))),
    "hook": Net("rows", (plain("custom", how="hook"), BLOCK)),
    "encoder layer": Net("tokens", (plain("attention", how="encoder layer"), BLOCK)),
    # buffers and modes
    "average of a submodule": Net("rows", (plain("average", "module"),)),
    "average within a loop": Net("rows", (plain("average", "list", place="inside"), BLOCK)),
    "average by data": Net(
        "rows", (plain("average", "module", update="{b}.data = 0.9 * {b}.data + {v}"), BLOCK)
    ),
    "lerp": Net("rows", (plain("average", "list", update="{b}.lerp_({v}, 0.1)"),)),
    "largest of a submodule": Net("tokens", (plain("recorded", "module", what="statistic"), BLOCK)),
    "average read behind its update": Net(
        "tokens", (plain("average", "module", read="after"), BLOCK)
    ),
    "counter that is assigned": Net("images", (plain("counter", "twice", change="{b} = {b} + 1"),)),
    "frozen batch norm": Net("rows", (plain("frozen_norm"), BLOCK)),
    # streams that read each other
    "two streams": Net("rows", (plain("streams", how="both"),)),
    # what steers
    "batch": Net("rows", (plain("by_size"), BLOCK)),
    "length": Net("tokens", (plain("by_size", condition="h.shape[{length}] > 6"), BLOCK)),
    "odd": Net("tokens", (plain("padded"), BLOCK)),
    "loop over time": Net("tokens", (plain("over_length"), BLOCK)),
    "loop over every second step": Net("images", (plain("over_length", how="while"), BLOCK)),
    "attribute": Net("rows", (plain("attribute", how="alpha"), BLOCK)),
    "step": Net("rows", (plain("attribute", how="step", change=True), BLOCK)),
    # ties
    "ties of a running maximum": Net(
        "tokens", (plain("rectified", "shared", how="max pool"), BLOCK), stages=3
    ),
    "ties of topk": Net("rows", (plain("rectified", how="relu"), BLOCK)),
    "experts": Net("rows", (plain("decided", how="topk", tied=True), BLOCK)),
    "rounded": Net(
        "rows",
        (
            plain("rectified", "list", how="round", read="max"),
            plain("viewed", "module", how="expand"),
        ),
    ),
    # a number that decides nothing is not drawn, so that those drawn later are others
    "layer drop, off and on": Net(
        "rows",
        tuple(
            plain("dropped", home, how="layer drop", p=p, place="stream")
            for home, p in (("module", 0.0), ("twice", 0.3))
        ),
    ),
}


REFUSED: Final = (
    "custom function",
    "written through a view",
    "written through a transpose",
    "step",
)
"""Of these, what cannot be compiled."""
REFUSED_BY_ROUNDING: Final = ("rounded",)
"""What some machines compile, and others refuse: a value near a step may round either way."""

QUICK: Final = tuple(phase for phase in PHASES if phase not in ("copied", "autocast"))

T = TypeVar("T")


class Drawn:
    """Choices that Hypothesis makes, and shrinks."""

    def __init__(self, draw: Any) -> None:
        self._draw = draw

    def integer(self, low: int, high: int) -> int:
        found: int = self._draw(st.integers(low, high))
        return found

    def pick(self, options: Sequence[T]) -> T:
        found: T = self._draw(st.sampled_from(options))
        return found


@st.composite
def nets(draw: Any) -> Net:
    return draw_net(Drawn(draw))


def described(net: Net, report: Report) -> str:
    """Every finding, and the net."""
    if report.discarded:
        return f"{net!r} fails by itself: {report.discarded}"
    lines = [f"{f.kind}, {f.check}: {f.what}" for f in report.findings]
    return "\n".join(["", *lines, "", repr(net), "", source(net)])


# -- nets -----------------------------------------------------------------------------------------


SETTINGS = hypothesis.settings(
    deadline=None,
    database=None,
    print_blob=False,
    suppress_health_check=list(hypothesis.HealthCheck),
)


@pytest.mark.parametrize("examples", [6, pytest.param(25, marks=pytest.mark.slow)])
@pytest.mark.parametrize("seed", range(4), indirect=True)
def test_random_nets_are_right_or_refused(seed: int, examples: int) -> None:
    """The seed fixes the nets."""

    @hypothesis.seed(seed)
    @hypothesis.settings(SETTINGS, max_examples=examples)
    @hypothesis.given(nets(), st.sampled_from(METHODS[1:]))
    def right_or_refused(net: Net, other: str) -> None:
        report = examine(net, ["petra", other], PHASES if examples > 6 else QUICK)
        hypothesis.assume(report.discarded is None)
        assert not report.findings, described(net, report)

    right_or_refused()


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_is_right_or_refused(name: str) -> None:
    report = examine(FOUND[name], ["petra", "backprop"], QUICK)
    assert report.discarded is None and not report.findings, described(FOUND[name], report)
    if name not in REFUSED_BY_ROUNDING:
        is_refused = any(refusal.check in ENTRIES for refusal in report.refusals)
        assert is_refused == (name in REFUSED), report.refusals


# -- the oracle -----------------------------------------------------------------------------------


def kinds(report: Report) -> set[tuple[str, str]]:
    return {(finding.kind, finding.check.split(",")[0]) for finding in report.findings}


GOOD = Net("rows", (plain("residual"), plain("residual", act="F.gelu({})")), stages=2)


def test_a_right_net_has_been_compared_everywhere() -> None:
    report = examine(GOOD)
    assert not report.findings and not report.refusals and report.discarded is None
    compared = {check.split(",")[0] for check in report.checks}
    methods = {f"petrafy {method}" for method in METHODS}
    assert compared == {"capture", "reversify", "copied", "autocast", *methods}


def unverified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the compiler's own comparison, so that only the oracle can find a fault."""
    monkeypatch.setattr("revcompile.api.why_not_compared", lambda *_: "not compared")


def test_a_wrong_gradient_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Chain.reversible

    def scaled(self: Chain, *args: Any, **kwargs: Any) -> Any:
        a, b, *extras = original(self, *args, **kwargs)
        b.register_hook(lambda gradient: gradient * 1.001)
        return a, b, *extras

    monkeypatch.setattr(Chain, "reversible", scaled)
    assert kinds(examine(GOOD, ["petra"])) == {("bug", "petrafy")}
    unverified(monkeypatch)
    assert ("wrong", "reversify") in kinds(examine(GOOD, ["petra"]))


def test_findings_are_small_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Reversible, *args: Any, **kwargs: Any) -> Any:
        raise KeyError("h")

    monkeypatch.setattr(Reversible, "_run", fails)
    net = Net("rows", (plain("residual"), plain("parallel")), result="dict", stages=4)
    (finding, *_) = examine(net, ["petra"], ["reversify"]).findings
    assert shrink(net, finding) == Net("rows", (plain("parallel"),))
    file = tmp_path / "findings.json"
    assert main(["--count", "1", "--json", str(file)]) == 1
    found = json.loads(file.read_text())
    assert found["summary"]["foreign tracebacks"] == 1
    assert found["findings"][0]["findings"][0]["what"] == "KeyError: 'h'"
