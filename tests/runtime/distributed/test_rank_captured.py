"""Captured steps on ranks: the same training as in one process, whatever comes in between.

The sections between messages run over static buffers, but are called (`backend="static"`):
that works over gloo, on the CPU.
"""

import dataclasses
from pathlib import Path
from typing import Final

import pytest
from distributed_worker import Run, calls, differences, launch, trained
from rank_captured import copied, disturbed, undisturbed

pytestmark = pytest.mark.filterwarnings("ignore")


def pattern(captured: list[bool]) -> str:
    return "".join("-c"[each] for each in captured)


UNDISTURBED: Final = {
    Run(in_flight_per_stage=2, accumulation_steps=2, clip=0.1, steps=15): {},
    Run(method="petra_stashed", steps=11, stage_to_rank=(0, 1, 1, 1)): {},
    Run(model="words", accumulation_steps=2, clip=0.1, steps=15): {},
    Run(model="detached", steps=12): {},
    Run(steps=13): {"memory_budget": "1GiB"},
    Run(model="words", in_flight_per_stage=2, steps=16): {"memory_budget": "1GiB"},
}
"""The last micro-batch of each is smaller: it goes the ordinary way."""


def test_captured_copies_of_the_pipeline_average_their_gradients(tmp_path: Path) -> None:
    """As action by action, running statistics too; with one stage a rank, and with all stages."""
    runs = [
        Run(stages=2, steps=14, accumulation_steps=2, clip=0.1),
        Run(stages=2, steps=13, stage_to_rank=(0, 0)),
    ]
    both = [(copied, (run,), {"backend": b}) for run in runs for b in ("static", "eager")]
    results = launch(tmp_path, 4, calls, calls=both)
    for each in results:
        for static, eager in zip(each[::2], each[1::2], strict=True):
            assert not differences(eager["state"], static["state"])
            assert all(static["captured"][5:]) and not any(eager["captured"])
        for one, other in zip(each, results[0], strict=True):
            names = differences(other["state"], one["state"])
            assert all("running_" in name or "num_batches_tracked" in name for name in names)


def test_captured_ranks_train_as_one_process(tmp_path: Path) -> None:
    runs = [(undisturbed, (run,), {"backend": "static"} | how) for run, how in UNDISTURBED.items()]
    for backend in ("static", "eager"):
        runs += [(disturbed, (Run(), str(tmp_path / backend)), {"backend": backend})]
    results = launch(tmp_path, 2, calls, calls=runs)
    for number, (run, how) in enumerate(UNDISTURBED.items()):
        expected = trained(dataclasses.replace(run, stage_to_rank=None), **how)
        assert results[1][number]["losses"] == expected["losses"], run
        for each in results:
            found = each[number]
            assert not differences(expected["state"], found["state"]), run
            assert pattern(found["captured"]).rstrip("-").endswith("cccc"), run
            assert not found["captured"][-1]
    for each in results:
        static, eager = each[-2:]
        assert not differences(eager["state"], static["state"])
        assert static["evaluated"] == eager["evaluated"]
        assert static["failed"] == eager["failed"]
        assert not any(eager["captured"])
        assert pattern(static["captured"])[:18] == "----ccccc----ccccc"  # an odd micro-batch
        assert pattern(static["captured"])[18:26] == ("---ccccc" if each is results[0] else "-" * 8)
