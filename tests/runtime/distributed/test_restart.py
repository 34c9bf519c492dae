"""Ranks that are killed or asked to stop: training goes on as if nothing were.

What the ranks do is in `restart_worker`. Every step after a restart is compared with a run in one
process that nobody disturbed: the loss, and digests of each stage's parameters, buffers, gradients
and optimizer state. Learning rates follow a schedule, and every batch is changed at random.
"""

import dataclasses
import os
import random
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest
from distributed_worker import Run
from helpers import cases
from restart_worker import Course, End, Ended, on_ranks, undisturbed

Lines = list[dict[str, Any]]


def assert_steps(ranks: Sequence[Lines], expected: Lines, first: int) -> None:
    """From that step on to the end, every rank went the way of one process."""
    whole = {line["step"]: line for line in expected if "step" in line}
    known = 0
    for lines in ranks:
        assert lines[0]["from"] == first
        steps = [line for line in lines if "step" in line]
        assert [line["step"] for line in steps] == [step for step in whole if step >= first]
        for line in [*steps, lines[-1]]:
            other = whole[line["step"]] if "step" in line else expected[-1]
            assert line["digests"].items() <= other["digests"].items(), line
            assert line.get("loss") in (None, other.get("loss")), line
            known += line.get("loss") is not None
        assert lines[-1]["evaluated"] == expected[-1]["evaluated"]
    assert known == sum(step >= first for step in whole)
    assert {stage for lines in ranks for stage in lines[-1]["digests"]} == {"0", "1", "2", "3"}


def assert_named(ended: Sequence[Ended], dead: int, completed: int) -> None:
    """The killed rank is gone, and the others say so and how far they have come."""
    assert ended[dead].code == -signal.SIGKILL
    for rank, one in enumerate(ended):
        if rank != dead:
            assert one.code == 1
            assert f"rank {dead} (stage" in one.error and "is gone" in one.error
            last = int(one.error.rsplit(": ", 1)[1])
            assert f"last completed micro-batch here (rank {rank} (" in one.error
            assert last == max(line.get("step", line.get("from", 0) - 1) for line in one.lines)
            assert completed <= last <= completed + 3  # as far as the pipeline lets it run ahead


@cases(
    "ranks, course, ends",
    (4, Course(Run(steps=12), saves=(5, 9)), (End(2, step=7),)),
    # The second time before any step is over.
    (2, Course(Run(method="1f1b", steps=12), (4, 8)), (End(0, step=10), End(1, step=8))),
    (2, Course(Run("words", "ddg", accumulation_steps=3, steps=10), (3, 6)), (End(1, step=8),)),
    ids=["petra", "1f1b", "ddg"],
)
def test_after_a_kill_every_step_is_the_undisturbed_runs(
    tmp_path: Path, ranks: int, course: Course, ends: Sequence[End]
) -> None:
    expected = undisturbed(course, tmp_path / "alone")
    for end in ends:
        ended = on_ranks(dataclasses.replace(course, end=end), ranks, tmp_path / "ranks")
        assert_named(ended, end.rank, end.step - 1)
    ended = on_ranks(course, ranks, tmp_path / "ranks")
    assert [one.code for one in ended] == [0] * ranks
    first = max(step for step in course.saves if step <= ends[0].step)
    assert_steps([one.lines for one in ended], expected, first)


KILLS: Final = int(os.environ.get("REVCOMPILE_KILLS", "8"))
"""How many ranks are killed at random, four in each course."""
_DEVICES: Final = [
    pytest.param("cpu", marks=pytest.mark.slow),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize("seed", range(-(-KILLS // 4)))
@pytest.mark.parametrize("device", _DEVICES)
def test_after_kills_at_any_moment(tmp_path: Path, device: str, seed: int) -> None:
    """Also while a checkpoint is written, which is done after every second step."""
    chance = random.Random(seed)
    accumulated, ranks = chance.choice([1, 2, 3]), 2 if device == "cuda" else chance.choice([2, 4])
    method = "petra" if device == "cuda" else chance.choice(["petra", "1f1b", "ddg"])
    backend = "cudagraphs" if device == "cuda" and seed % 2 else "eager"
    run = Run(method=method, accumulation_steps=accumulated, steps=20, device=device)
    course = Course(run, tuple(range(2, 20, 2)), backend=backend)
    expected = {line["step"]: line for line in undisturbed(course, tmp_path / "alone")[1:-1]}
    first, killed = 0, 0
    for is_last in (False, False, False, False, True):
        after = 0.3 * chance.random() ** 2
        end = End(chance.randrange(ranks), first + chance.randrange(3), after=after)
        doomed = dataclasses.replace(course, end=None if is_last else end)
        ended = on_ranks(doomed, ranks, tmp_path / "ranks")
        codes = [one.code for one in ended]
        killed += -signal.SIGKILL in codes
        assert not is_last or codes == [0] * ranks, [one.error for one in ended]
        for one in ended:
            begun = [line["from"] for line in one.lines if "from" in line]
            assert all(step >= first and step % 2 == 0 for step in begun)
            for line in (line for line in one.lines if "step" in line):
                other = expected[line["step"]]
                if device == "cpu":
                    assert line["digests"].items() <= other["digests"].items(), line
                close = pytest.approx(other["loss"], rel=0 if device == "cpu" else 1e-3)
                assert line["loss"] is None or line["loss"] == close
        first = max([first, *begun])
    assert killed
    print(f"{killed} ranks killed")


def test_a_sigterm_to_one_rank_has_all_save_and_leave(tmp_path: Path) -> None:
    course = Course(Run(steps=14), (4,), End(1, step=6, signal=signal.SIGTERM))
    ended = on_ranks(course, 2, tmp_path / "ranks")
    assert [one.code for one in ended] == [143, 143]
    (last,) = {one.lines[-1]["step"] for one in ended}
    assert last == 9  # ranks ask each other after ten steps
    expected = undisturbed(dataclasses.replace(course, saves=(4, last + 1)), tmp_path / "alone")
    ended = on_ranks(dataclasses.replace(course, end=None), 2, tmp_path / "ranks")
    assert_steps([one.lines for one in ended], expected, first=last + 1)
