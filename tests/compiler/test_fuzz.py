"""Random residual nets against autograd: a few in every run, thousands by `python -m tests.fuzz`.

The grammar and the oracle are in `tests/fuzz`; here Hypothesis draws the nets and makes failing
ones small. What fails prints as source.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import hypothesis
import pytest
from fuzzed_nets import FOUND, plain
from hypothesis import strategies as st

from revcompile.errors import InputError
from revcompile.runtime.reversible.coupling import Chain
from revcompile.runtime.reversible.module import Reversible
from tests.fuzz.campaign import main
from tests.fuzz.module import arguments, build, source
from tests.fuzz.net import CATALOGUE, Net, Part, draw_net, net_of, simpler
from tests.fuzz.oracle import METHODS, Report, examine, shrink

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
        report = examine(net, ["petra", other])
        hypothesis.assume(report.discarded is None)
        assert not report.findings, described(net, report)

    right_or_refused()


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_is_right_or_refused(name: str) -> None:
    report = examine(FOUND[name], ["petra", "backprop"])
    assert report.discarded is None and not report.findings, described(FOUND[name], report)


# -- the grammar ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CATALOGUE)
def test_every_part_is_a_net_that_trains(kind: str) -> None:
    for layout in CATALOGUE[kind].layouts:
        net = Net(layout, (plain(kind), plain("residual")))
        assert examine_original(net), source(net)


def examine_original(net: Net) -> bool:
    args, kwargs = arguments(net, (3, 5), 0)
    output = build(net)(*args, **kwargs)
    output.sum().backward()
    return bool(output.isfinite().all())


@pytest.mark.parametrize("index", range(20))
def test_a_net_is_its_repr_and_its_seed(index: int) -> None:
    net = net_of(3, index)
    again = eval(repr(net), {"Net": Net, "Part": Part})
    assert again == net == net_of(3, index) and source(again) == source(net)
    assert all(len(repr(one)) != len(repr(net)) or one != net for one in simpler(net))


# -- the oracle -----------------------------------------------------------------------------------


def kinds(report: Report) -> set[tuple[str, str]]:
    return {(finding.kind, finding.check.split(",")[0]) for finding in report.findings}


GOOD = Net("rows", (plain("residual"), plain("residual", act="F.gelu({})")), stages=2)


def test_a_right_net_has_been_compared_everywhere() -> None:
    report = examine(GOOD)
    assert not report.findings and not report.refusals and report.discarded is None
    compared = {check.split(",")[0] for check in report.checks}
    assert compared == {"capture", "reversify", *(f"petrafy {method}" for method in METHODS)}


def unverified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the compiler's own comparison, so that only the oracle can find a fault."""
    monkeypatch.setattr("revcompile.api.why_not_compared", lambda *_: "not compared")


def test_a_wrong_gradient_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Chain.reversible

    def scaled(self: Chain, *args: Any) -> Any:
        a, b, *extras = original(self, *args)
        b.register_hook(lambda gradient: gradient * 1.001)
        return a, b, *extras

    monkeypatch.setattr(Chain, "reversible", scaled)
    assert kinds(examine(GOOD, ["petra"])) == {("bug", "petrafy")}
    unverified(monkeypatch)
    assert ("wrong", "reversify") in kinds(examine(GOOD, ["petra"]))


def test_a_lost_buffer_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Reversible.forward

    def forgets(self: Reversible, *args: Any, **kwargs: Any) -> Any:
        before = {name: buffer.clone() for name, buffer in self.named_buffers()}
        output = original(self, *args, **kwargs)
        for name, buffer in self.named_buffers():
            buffer.data.copy_(before[name])  # behind the back of autograd
        return output

    monkeypatch.setattr(Reversible, "forward", forgets)
    net = Net("rows", (plain("batch_norm"), plain("residual")))
    found = [f.what for f in examine(net, ["petra"]).findings]
    assert any("moves in the original and not here" in what for what in found)


def test_a_foreign_exception_is_a_finding_and_our_own_a_refusal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(self: Reversible, *args: Any, **kwargs: Any) -> Any:
        raise error

    for error in (KeyError("h"), InputError("Net: not this net of 3 layers")):
        monkeypatch.setattr(Reversible, "_run", fail)
        report = examine(GOOD, ["petra"])
        if isinstance(error, KeyError):
            assert ("foreign", "petrafy") in kinds(report)
        else:
            assert not report.findings
            assert {r.reason for r in report.refusals} == {
                "InputError: Net: not this net of # layers"
            }


def test_findings_are_made_small_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
