"""What a stage holds: its inputs, its graphs, and the paper's table (see `test_stage_memory`)."""

from __future__ import annotations

import pytest
from training import Plain, fresh

from revcompile.schedule import choose
from tests.support.accounting import ROWS, revnet50, table3

BATCH = 3


def test_the_first_stage_keeps_what_it_is_fed() -> None:
    assert fresh(Plain, 4).memory(BATCH)[0].buffers == 4 * BATCH * 5 * 8  # four in flight, float64


@pytest.mark.parametrize(
    ("name", "accumulation_steps", "in_flight"),
    [("ddg", 1, 3), ("1f1b", 1, 1), ("1f1b", 2, 2), ("1f1b", 8, 3)],
)
def test_graphs_that_are_in_flight(name: str, accumulation_steps: int, in_flight: int) -> None:
    net, buffers = fresh(Plain, 4), []
    for method in ("backprop", name):
        net.method = choose(method)
        buffers.append(net.memory(BATCH, accumulation_steps=accumulation_steps)[1].buffers)
    assert buffers[1] == in_flight * buffers[0] > 0


def test_the_table_of_the_paper() -> None:
    rewired = revnet50()
    assert len(rewired.body.segments) == 18
    totals = [row.total / 1e9 for row in table3(rewired)]
    assert totals == pytest.approx([row.expected for row in ROWS], abs=0.1)
    assert [row.expected for row in ROWS] == [44.5, 43.6, 21.2, 20.3, 11.2, 6.6]
