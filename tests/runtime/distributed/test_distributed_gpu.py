"""Several NCCL ranks on one GPU train what one process trains there, and end well."""

import dataclasses
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from distributed_memory import holdings
from distributed_worker import ONE_GPU, Run, calls, launch, launched, trained
from helpers import worst
from rank_captured import copied, disturbed, undisturbed
from rank_targets import TARGETS, trained_on

from revcompile.schedule import METHODS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# NCCL wants a GPU for each rank, unless the ranks claim to be on different machines.
TOLERANCE: Final = 1e-2
"""Sums are added up in another order, and differences grow with the steps."""


@pytest.fixture(autouse=True)
def full_precision() -> None:
    """As the ranks compute."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


AS_RANKS: Final[dict[str, Any]] = {"start": "spawn", "device": "cuda", "env": ONE_GPU}
"""Processes of their own: what has used CUDA cannot be forked."""


def ranks(folder: Path, count: int, scenario: Any, limit: float = 90, **options: Any) -> list[Any]:
    return launch(folder, count, scenario, limit=limit, **AS_RANKS, **options)


def assert_close(expected: dict[str, Any], found: dict[str, Any], what: Any) -> None:
    assert found.keys() == expected.keys()
    error, where = worst(expected, found)
    assert error < TOLERANCE, (what, where, error)


EVERY_METHOD: Final = [
    Run(device="cuda", method=method, accumulation_steps=2, steps=7) for method in METHODS
]
SOME: Final = [
    Run(device="cuda", model="words", method="1f1b", accumulation_steps=2, steps=7),
    Run(device="cuda", method="backprop", clip=0.1, steps=5),
    Run(device="cuda", steps=200),
]


@pytest.mark.parametrize(("count", "runs"), [(2, EVERY_METHOD), (4, SOME)])
def test_nccl_ranks_train_as_one_process(tmp_path: Path, count: int, runs: list[Run]) -> None:
    """The last run of all is there to come to its end."""
    results = ranks(tmp_path, count, "train_all", runs=runs)
    for number, run in enumerate(runs):
        expected = trained(run)
        losses = results[-1][number]["losses"]
        early = min(len(losses), 20)
        assert losses[:early] == pytest.approx(expected["losses"][:early], rel=1e-3), run
        assert len(losses) == run.steps
        for found in results:
            if run.steps <= 20:
                assert_close(expected["state"], found[number]["state"], run)


def test_captured_nccl_ranks_train_as_a_captured_process(tmp_path: Path) -> None:
    """Sections between messages are replayed, a smaller micro-batch at the end is not."""
    runs = [
        Run(device="cuda", steps=24),
        Run(device="cuda", model="vit", steps=24),
        Run(device="cuda", in_flight_per_stage=2, accumulation_steps=2, clip=0.1, steps=24),
        Run(device="cuda", method="petra_stashed", steps=24, stage_to_rank=(0, 1, 1, 1)),
        Run(device="cuda", model="words", steps=24),
        Run(device="cuda", steps=26),
        Run(device="cuda", model="vit", accumulation_steps=2, steps=26),
    ]
    kept = {run: {"memory_budget": "auto"} for run in runs[-2:]}
    todo = [(undisturbed, (run,), {"backend": "cudagraphs", **kept.get(run, {})}) for run in runs]
    results = ranks(tmp_path, 2, calls, limit=200, calls=todo)
    for number, run in enumerate(runs):
        how = {"backend": "cudagraphs", **kept.get(run, {})}
        expected = trained(dataclasses.replace(run, stage_to_rank=None), **how)
        assert results[1][number]["losses"] == pytest.approx(expected["losses"], rel=1e-3), run
        for found in results:
            assert_close(expected["state"], found[number]["state"], run)
            assert all(found[number]["captured"][15:-1])


def test_a_target_of_any_form_reaches_the_last_gpu(tmp_path: Path) -> None:
    """In captured steps, too: by way of a rank in the middle."""
    runs = [(kind, backend) for kind in TARGETS for backend in ("eager", "cudagraphs")]
    todo = [(trained_on, (kind, 3, "cuda"), {"backend": backend}) for kind, backend in runs]
    first, middle, last = ranks(tmp_path, 3, calls, limit=300, calls=todo)
    for number, (kind, backend) in enumerate(runs):
        expected = trained_on(kind, 3, "cuda", backend=backend)
        losses, samples = last[number]["losses"], last[number]["samples"]
        assert losses == pytest.approx(expected["losses"], rel=1e-3), (kind, backend)
        assert first[number]["samples"] == samples == expected["samples"], (kind, backend)
        assert any(last[number]["captured"]) == any(expected["captured"]), (kind, backend)
        for each in (first, middle, last):
            assert_close(expected["state"], each[number]["state"], (kind, backend))


def test_captured_ranks_go_on_after_whatever_comes_between(tmp_path: Path) -> None:
    run = Run(device="cuda")
    todo = [
        (disturbed, (run, str(tmp_path / backend)), {"backend": backend})
        for backend in ("cudagraphs", "eager")
    ]
    results = ranks(tmp_path, 2, calls, calls=todo)
    for captured, eager in results:
        assert_close(eager["state"], captured["state"], run)
        assert captured["failed"] == eager["failed"]
        assert captured["evaluated"] == pytest.approx(eager["evaluated"], rel=1e-3)
        assert any(captured["captured"])


def test_captured_copies_of_the_pipeline_average_their_gradients(tmp_path: Path) -> None:
    """One stage a rank, and all stages on a rank, as action by action; bad data in one or all."""
    runs = [
        Run(device="cuda", stages=2, steps=18, accumulation_steps=2, clip=0.1),
        Run(device="cuda", stages=2, steps=16, stage_to_rank=(0, 0)),
    ]
    todo = [
        (copied, (run,), {"backend": backend})
        for run in runs
        for backend in ("cudagraphs", "eager")
    ]
    results = ranks(tmp_path, 4, calls, limit=200, calls=todo)
    for each in results:
        for run, captured, eager in zip(runs, each[::2], each[1::2], strict=True):
            assert_close(eager["state"], captured["state"], run)
            assert all(captured["captured"][12:]) and not any(eager["captured"])


def test_copies_of_the_pipeline_train_with_the_mean_gradient(tmp_path: Path) -> None:
    """Two copies of two stages are one pipeline that gathers two micro-batches."""
    run = Run(device="cuda", method="backprop", stages=2, steps=10)
    results = ranks(tmp_path, 4, "copies", run=run)
    expected = trained(dataclasses.replace(run, accumulation_steps=2))["state"]
    weights = {n for n in expected if "running" not in n and "num_batches" not in n}
    first, *others = ({n: found[n] for n in weights} for found in results)
    assert_close({n: expected[n] for n in weights}, first, run)
    for found in others:
        assert worst(first, found)[0] < 1e-5


@pytest.mark.parametrize("run", [Run(model="wide", stages=2, steps=4), Run(model="words", steps=4)])
def test_a_gpu_holds_only_the_weights_of_its_rank(tmp_path: Path, run: Run) -> None:
    """The model is made on the CPU, and never as a whole on a GPU."""
    stage_to_rank = (0, 1) * (run.stages // 2)
    how = {"device": "cuda"}
    results = ranks(tmp_path, 2, holdings, run=run, other=stage_to_rank[::-1], trainer=how)
    whole = sum(value.numel() * value.element_size() for value in results[0]["state"].values())
    for found in results:
        assert found["elsewhere"] == 0
        assert 0 < found["bytes"] < 0.75 * whole
        if run.model == "wide":  # small tensors take more than their bytes
            assert found["peak"] < 0.75 * whole
    assert results[0]["names"] != results[1]["names"]
    assert worst(results[0]["state"], results[1]["state"])[0] == 0.0


@pytest.mark.parametrize(
    ("doomed", "count", "backend"), [(1, 2, "eager"), (0, 4, "eager"), (1, 2, "cudagraphs")]
)
def test_the_others_stop_when_a_rank_is_killed(
    tmp_path: Path, doomed: int, count: int, backend: str
) -> None:
    how = "killed" if backend == "eager" else "killed in a late step"
    trainer = {"backend": backend}
    options = {"doomed": doomed, "how": how, "method": "petra", "timeout": 30, "trainer": trainer}
    results, codes = launched(tmp_path, count, "end", limit=90, **AS_RANKS, **options)
    for rank in set(range(count)) - {doomed}:
        assert codes[rank] is not None, f"rank {rank} hangs"
        assert results[rank] is not None, f"rank {rank} ended with {codes[rank]}"
        assert f"rank {doomed} (stage" in results[rank]
        assert "last completed micro-batch here" in results[rank]
