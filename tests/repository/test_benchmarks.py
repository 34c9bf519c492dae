"""Every benchmark runs in its smallest form; results have one format; sweeps see growth."""

from __future__ import annotations

import argparse
import doctest
import importlib
import json
import math
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import ROOT
from torch import Tensor, distributed, nn

import revcompile
from benchmarks.__main__ import main
from benchmarks.compiler.families import gradient_error
from benchmarks.compiler.families import loss as loss_of
from benchmarks.compiler.huggingface import _distance as distance
from benchmarks.coupled import Missing, couple
from benchmarks.models import create, of_depth
from benchmarks.one_device.peers import PLAIN, makers
from benchmarks.ranks.launch import on_ranks
from benchmarks.record import check, describe, read, write
from benchmarks.registry import Benchmark, Row, entries
from benchmarks.sweep import bytes_of, growth, seconds_of, swept
from revcompile.errors import InputError

SLOW = {"accounting", "kills", "pipeline"}
"""A whole RevNet-50, models of transformers, or ranks that have to be started."""


# -- all of them ----------------------------------------------------------------------------------


def every() -> list[Any]:
    slow = pytest.mark.slow
    return [pytest.param(n, marks=slow if n in SLOW else ()) for n in entries()]


@pytest.mark.parametrize("name", every())
def test_it_runs_in_its_smallest_form_or_says_what_it_needs(name: str, tmp_path: Path) -> None:
    benchmark = entries()[name].load()
    assert benchmark.name == name
    if benchmark.smallest is None:
        assert benchmark.needs
        return
    file = tmp_path / "out" / "rows.json"
    assert main(["run", name, *benchmark.smallest, "--json", str(file)]) == 0
    found = read(file)
    assert found["benchmark"] == name and found["rows"]
    assert found["versions"]["torch"] == torch.__version__
    if benchmark.sweeps:
        for row in found["rows"]:
            assert row["variant"]
            assert row.get("skipped") or (row["seconds"] and row["bytes"] > 0), row


def test_the_list_has_a_line_for_each_and_needs_no_torch() -> None:
    script = (
        "import sys\nfrom benchmarks.__main__ import main\nmain([])\n"
        "sys.exit('torch' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    for name, entry in entries().items():
        assert f"  {name} " in ended.stdout and entry.says in ended.stdout
        assert entry.says.endswith((".", "?")) and entry.folder in ended.stdout


def test_one_that_is_not_there_is_reported_with_the_nearest(capsys: Any) -> None:
    assert main(["run", "memmory"]) == 2
    assert "did you mean 'memory'" in capsys.readouterr().err


def test_two_of_one_name_are_refused(tmp_path: Path) -> None:
    place = tmp_path / "benchmarks"
    for folder in ("a", "b"):
        (place / folder).mkdir(parents=True)
        (place / folder / "__init__.py").write_text('"""A folder."""')
        (place / folder / "it.py").write_text('"""One."""\nBENCHMARK = Benchmark("it", f, g)\n')
    with pytest.raises(InputError, match=r"'it' is the name of benchmarks\.a\.it too"):
        entries(place)


@pytest.mark.parametrize("module", ["harness", "models"])
def test_examples_in_docstrings(module: str) -> None:
    found = doctest.testmod(importlib.import_module(f"benchmarks.{module}"))
    assert found.attempted and not found.failed


# -- results --------------------------------------------------------------------------------------


def test_a_result_is_read_as_it_was_written(tmp_path: Path) -> None:
    options = argparse.Namespace(json=tmp_path / "it.json", batch=3, data=Path("here"))
    rows = [{"variant": "a", "seconds": [0.5]}]
    write(options.json, describe("it", options, rows))
    found = read(options.json)
    assert found["rows"] == rows and found["options"] == {"batch": 3, "data": "here"}
    assert {"machine", "versions", "commit"} <= found.keys()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": None}, "'rows' is NoneType"),
        ({"rows": [3]}, "a row is not an object"),
        ({"result": {}}, "'result' is unknown"),
        ({"commit": 3}, "'commit' is int"),
    ],
)
def test_what_is_no_result_is_refused(change: dict[str, Any], message: str) -> None:
    record = describe("it", argparse.Namespace(), [])
    check(record, "it.json")
    with pytest.raises(InputError, match=f"it.json: {message}"):
        check(record | change, "it.json")
    del record["machine"]
    with pytest.raises(InputError, match="no 'machine'"):
        check(record, "it.json")
    with pytest.raises(InputError, match="list, but a result is an object"):
        check([], "it.json")


def test_rows_are_on_disk_as_they_come_and_a_failed_one_shows_in_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "rows.json"

    def rows(options: argparse.Namespace) -> Iterator[Row]:
        yield {"variant": "first"}
        assert read(file)["rows"] == [{"variant": "first"}]
        yield {"variant": "second", "failed": "it broke"}

    fake = Benchmark("accounting", lambda parser: None, rows)
    monkeypatch.setattr("benchmarks.stages.accounting.BENCHMARK", fake)
    assert main(["run", "accounting", "--json", str(file)]) == 1
    assert len(json.loads(file.read_text())["rows"]) == 2


# -- sweeps ---------------------------------------------------------------------------------------


def measured(options: argparse.Namespace) -> Iterator[Row]:
    """Known growth: the square, three times as much, not at all; and one without figures."""
    size = options.batch
    yield {"variant": "square", "seconds": [900.0, 0.1 * size**2, 0.0], "bytes": 3 * size}
    yield {"variant": "constant", "seconds": [0.5], "bytes": 7}
    yield {"variant": "absent", "skipped": "not here"}


FAKE = Benchmark("fake", lambda parser: None, measured, sweeps=("batch",))


def test_a_sweep_tells_the_exponents_of_time_and_memory(capsys: Any) -> None:
    options = argparse.Namespace(batch=1, sweep=[["batch", "2", "4", "16"]])
    rows = list(swept(FAKE, options))
    assert [(row["sweep"], row["value"]) for row in rows[::3]] == [
        ("batch", 2),
        ("batch", 4),
        ("batch", 16),
    ]
    times, memory = (growth(rows, (2, 4, 16), of) for of in (seconds_of, bytes_of))
    found = {one.variant: one.exponent for one in times}
    assert found == {"square": pytest.approx(2), "constant": pytest.approx(0), "absent": None}
    assert [one.exponent for one in memory[:2]] == [pytest.approx(1), pytest.approx(0)]
    out = capsys.readouterr().out
    assert "step time against batch" in out and "2.00" in out and "absent" not in out
    assert options.batch == 1


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        (["depth", "1", "2"], "fake can be swept over batch"),
        (["batch", "2"], "two or more different"),
        (["batch", "2", "2"], "two or more different"),
        (["batch", "2", "x"], "two or more different"),
        (["batch", "0", "1"], "two or more different"),
    ],
)
def test_a_sweep_without_a_clear_meaning_is_refused(sweep: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        list(swept(FAKE, argparse.Namespace(batch=1, sweep=[sweep])))


def test_a_real_sweep_over_the_batch(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    small = entries()["engine"].load().smallest
    assert small is not None
    sweep = ["--backends", "eager", "--sweep", "batch", "8", "64", "--json", str(file)]
    assert main(["run", "engine", *small, *sweep]) == 0
    (found,) = growth(read(file)["rows"], (8, 64), bytes_of)
    assert found.exponent is not None and 0.5 < found.exponent < 1.1


def test_only_stacks_have_a_depth() -> None:
    assert of_depth("transformer-2x16", 24) == "transformer-24x16"
    with pytest.raises(InputError, match="resnet18 has its own"):
        of_depth("resnet18", 24)
    with pytest.raises(InputError, match="no model 'resnet'"):
        create("resnet", 32)
    with pytest.raises(InputError, match="no stack of 'mlp' blocks"):
        create("mlp-2x3", 32)


# -- peers ----------------------------------------------------------------------------------------


class Alike(nn.Module):
    """What revlib's `ReversibleSequential` computes."""

    def __init__(self, *halves: nn.Module, split_dim: int) -> None:
        super().__init__()
        self.halves, self.split_dim = nn.ModuleList(halves), split_dim

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, self.split_dim)
        for half in self.halves:
            a, b = b, a + half(b)
        return torch.cat([a, b], self.split_dim)


def peers(file: Path, *options: str) -> dict[str, dict[str, Any]]:
    small = entries()["peers"].load().smallest
    assert small is not None
    assert main(["run", "peers", *small, *options, "--json", str(file)]) == 0
    assert not distributed.is_initialized()
    return {row["variant"]: row for row in read(file)["rows"]}


@pytest.fixture
def revlib(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("revlib")
    module.ReversibleSequential = Alike  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "revlib", module)


@pytest.mark.usefixtures("revlib")
def test_all_peers_train_the_same_function(tmp_path: Path) -> None:
    found = peers(tmp_path / "rows.json", "--model", "transformer-2x8", "--backends", "eager")
    loss = {name: row["loss"] for name, row in found.items() if "loss" in row}
    assert loss["checkpoint"] == loss["checkpoint, all"] == loss[PLAIN]
    schedules = {"torch GPipe", "torch 1F1B"}
    for name in schedules - loss.keys():
        assert "cannot send to its own rank" in found[name]["skipped"]
    rewired = {"reversify", "revlib", "petra, eager"} | (schedules & loss.keys())
    assert rewired <= loss.keys()
    for name in rewired | (loss.keys() & {"memcnn"}):
        assert loss[name] == pytest.approx(loss["reversify"], rel=1e-5), name


@pytest.mark.usefixtures("revlib")
def test_the_branches_of_timms_transformers_are_known() -> None:
    x = torch.randn(2, 3, 32, 32)
    net = revcompile.reversify(create("test_vit", 32), x, policy="same_parameters", check="off")
    torch.testing.assert_close(couple(create("test_vit", 32), "revlib")(x), net(x))


def test_peers_that_are_not_there_are_left_out_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    for package in ("memcnn", "revlib"):
        monkeypatch.setitem(sys.modules, package, None)
    found = peers(tmp_path / "rows.json", "--backends", "cudagraphs")
    out = capsys.readouterr().out
    for name, why in (("memcnn", "pip install memcnn"), ("petra, cudagraphs", "needs a GPU")):
        assert why in found[name]["skipped"]
        assert f"{name} is left out: {why}" in out
    assert makers(["cudagraphs"]).keys() == found.keys()


def test_branches_nobody_wrote_out_are_a_reason() -> None:
    with pytest.raises(Missing, match="branches of ResNet would have to be written out"):
        couple(create("test_resnet", 32), "memcnn")


# -- ranks ----------------------------------------------------------------------------------------


def stumble(rank: int, who: int) -> int:
    if rank == who:
        raise RuntimeError("stumbled")
    distributed.barrier()
    return rank


@pytest.mark.slow
def test_a_rank_that_fails_does_not_leave_the_other_waiting() -> None:
    assert on_ranks(stumble, -1) == [0, 1]
    with pytest.raises(RuntimeError, match=r"a rank gave no result .*rank 1: 1"):
        on_ranks(stumble, 1)


# -- comparisons ----------------------------------------------------------------------------------


def test_a_gradient_that_is_not_a_number_is_not_equal() -> None:
    net = nn.Linear(2, 1, bias=False)
    good = torch.ones(1, 2)
    loss_of(net(good), torch.zeros(1)).backward()
    assert net.weight.grad is not None
    for seen, expected in (
        (net.weight.grad.clone(), 0.0),
        (torch.full((1, 2), math.nan), math.inf),
    ):
        optimizer = types.SimpleNamespace(seen=[[seen]])
        updater = types.SimpleNamespace(optimizer=optimizer, parameters=["weight"])
        trainer = types.SimpleNamespace(executors=[types.SimpleNamespace(updater=updater)])
        assert gradient_error(trainer, net, 0, good, torch.zeros(1)) == expected


def test_an_output_that_is_not_a_number_is_not_equal() -> None:
    assert distance(torch.ones(2), torch.ones(2)) == 0.0
    assert distance(torch.ones(2), torch.tensor([1.0, math.nan])) == math.inf
