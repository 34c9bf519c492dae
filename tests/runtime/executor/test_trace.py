"""A real run as a Chrome trace: every action once, in its row, and nothing of the run changed."""

import json
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed_worker import Run, batches, launch, trainer_of
from helpers import refuses

from revcompile.errors import InputError
from revcompile.schedule import Action, actions

RUN = Run(stages=3, steps=6)


def check_format(trace: dict[str, Any]) -> None:
    """The rules of the Trace Event Format that viewers rely on."""
    assert trace["displayTimeUnit"] in ("ms", "ns")
    flows: Counter[tuple[int, str]] = Counter()
    rows: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in trace["traceEvents"]:
        kind, row = event["ph"], (int(event["pid"]), int(event["tid"]))
        if kind == "M":
            assert event["name"].endswith(("_name", "_sort_index")) and event["args"]
        elif kind == "X":
            assert event["ts"] >= 0 and event["dur"] >= 0 and event["name"] and event["cat"]
            rows.setdefault(row, []).append((event["ts"], event["dur"]))
        else:
            flows[event["id"], kind] += 1
    assert set(flows.values()) <= {1} and {kind for _, kind in flows} == {"s", "f"}
    assert len({number for number, _ in flows}) == len(flows) // 2, "arrows begin and end once"
    for row in rows.values():  # one that overlaps cannot be drawn
        for (start, length), (following, _) in pairwise(sorted(row)):
            assert start + length <= following + 0.01  # times are rounded to nanoseconds


def slices(trace: dict[str, Any], *kinds: str) -> list[dict[str, Any]]:
    found = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    return [event for event in found if event["cat"] in kinds] if kinds else found


def by_stage(trace: dict[str, Any], stages: int) -> list[list[str]]:
    """What each stage did, in the order of time."""
    done = sorted(slices(trace, "compute", "communication"), key=lambda event: event["ts"])
    return [[e["name"] for e in done if e["tid"] == stage] for stage in range(stages)]


def spelled(lists: Iterable[Iterable[Action]]) -> list[list[str]]:
    return [[str(action) for action in stage] for stage in lists]


def test_a_traced_run_shows_every_action_of_every_stage_in_order(tmp_path: Path) -> None:
    _, trainer = trainer_of(RUN)
    with trainer.trace(tmp_path / "run.json") as found:
        for x, y in batches(RUN):
            trainer.step(x, y)
        trainer.flush()
    trace = json.loads((tmp_path / "run.json").read_text())
    check_format(trace)
    assert by_stage(trace, 3) == spelled(actions("petra", 3, RUN.steps))
    messages = 2 * 2 * RUN.steps  # two borders, there and back
    assert sum(event["ph"] == "s" for event in trace["traceEvents"]) == messages
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"]
    assert names == ["stage 0", "stage 1", "stage 2"]
    assert found.busy is not None and 0 < found.busy[0] <= 1
    assert trace["otherData"]["busy"]["0"] == found.busy[0]


def test_tracing_changes_nothing(tmp_path: Path) -> None:
    def trained(traced: bool) -> dict[str, torch.Tensor]:
        net, trainer = trainer_of(RUN)
        found = trainer.trace(tmp_path / "few.json") if traced else None
        for number, (x, y) in enumerate(batches(RUN)):
            trainer.step(x, y)
            if found is not None and number == 1:
                found.stop()
        trainer.flush()
        return {name: value.clone() for name, value in net.to_module().state_dict().items()}

    plain, traced = trained(False), trained(True)
    assert all(torch.equal(plain[name], traced[name]) for name in plain)
    trace = json.loads((tmp_path / "few.json").read_text())
    forwards = [e for e in slices(trace) if e["args"]["op"] == "FORWARD" and e["tid"] == 0]
    assert [event["name"] for event in forwards] == ["F0", "F1"]


def test_a_trace_is_refused_where_it_cannot_be_written_or_is_at_work(tmp_path: Path) -> None:
    _, trainer = trainer_of(RUN)
    refuses(InputError, r"got None; write e.g. trainer.trace\('run.json'\)", trainer.trace, None)
    refuses(InputError, "no folder", trainer.trace, tmp_path / "nowhere" / "run.json")
    trainer.trace(tmp_path / "run.json")
    refuses(InputError, r"already at work on .*run\.json", trainer.trace, tmp_path / "other.json")


@pytest.mark.filterwarnings("ignore")
def test_two_ranks_write_one_trace(tmp_path: Path) -> None:
    run = Run(stages=3, steps=6, stage_to_rank=(0, 0, 1))
    file = tmp_path / "run.json"
    results = launch(tmp_path, 2, "trace", run=run, file=str(file))
    trace = json.loads(file.read_text())
    check_format(trace)
    assert by_stage(trace, 3) == spelled(actions("petra", 3, 6))
    assert {(e["pid"], e["tid"]) for e in slices(trace)} == {(0, 0), (0, 1), (1, 2)}
    assert results[0] == results[1] and all(0 < share <= 1 for share in results[0])
    # Nothing arrives before it was sent: the ranks' clocks agree.
    ends = {e["id"]: e["ts"] for e in trace["traceEvents"] if e["ph"] == "f"}
    starts = {e["id"]: e["ts"] for e in trace["traceEvents"] if e["ph"] == "s"}
    assert all(starts[number] <= ends[number] for number in starts)
    # The last rank has nothing to do before the first has sent, and is seen waiting for it.
    waits = [e for e in slices(trace, "wait") if e["pid"] == 1]
    assert "wait RX0" in {event["name"] for event in waits}


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["eager", "auto"])
def test_on_a_gpu_every_action_is_timed_by_the_device(tmp_path: Path, backend: str) -> None:
    """Also where steps are captured: they are run action by action while traced."""
    run = Run(stages=3, steps=12, device="cuda")
    _, trainer = trainer_of(run, backend=backend)
    data = batches(run)
    for x, y in data[:6]:
        trainer.step(x, y)
    with trainer.trace(tmp_path / "run.json") as found:
        for x, y in data[6:10]:
            trainer.step(x, y)
    for x, y in data[10:]:
        trainer.step(x, y)
    trainer.flush()
    trace = json.loads((tmp_path / "run.json").read_text())
    check_format(trace)
    names = [event["name"] for event in slices(trace, "compute") if event["tid"] == 0]
    assert [name for name in names if name.startswith("F")] == ["F6", "F7", "F8", "F9"]
    assert all(event["dur"] > 0 for event in slices(trace, "compute"))
    assert found.busy is not None and 0 < found.busy[0] <= 1
