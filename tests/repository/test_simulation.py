"""Simulated delay is the pipeline's."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import revcompile
from benchmarks.learning.gpt import GPT, SIZES, next_character_loss
from benchmarks.learning.results import gather
from benchmarks.learning.simulation import (
    TABLES,
    LateUpdates,
    Simulated,
    micro_batches_late,
    run,
)
from benchmarks.learning.text import load, split_parameters
from revcompile.optim import DelayAwareMuon


@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_simulated_delay_is_that_of_a_pipeline_with_stashed_weights(accumulate: int) -> None:
    torch.manual_seed(0)
    model = GPT(9, SIZES["tiny"]).double()
    tokens = torch.randint(9, (4 * accumulate, 4, 16))
    batches = list(zip(tokens, tokens.roll(1, -1), strict=True))

    def make(groups: Any) -> DelayAwareMuon:
        return DelayAwareMuon(groups, lr=0.02, weight_decay=0.01)

    net = revcompile.petrafy(copy.deepcopy(model), 4, tokens[0], check="off")
    trainer = net.trainer(
        make,
        next_character_loss,
        method="petra_stashed",
        accumulate=accumulate,
        param_groups=split_parameters(model),
        lr_schedule=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: 1 / (1 + n)),
    )
    settings = Simulated(accumulate=accumulate, stages=4)
    late = micro_batches_late(model, settings, 16)
    assert set(late.values()) == {0, 1, 2, 3}
    simulated = LateUpdates(
        revcompile.petrafy(copy.deepcopy(model), 4, tokens[0], check="off").module(),
        next_character_loss,
        late,
        accumulate,
        make,
        split_parameters(model),
    )
    for x, y in batches:
        trainer.step(x, y)
    trainer.flush()
    for n in range(4):
        simulated.step(batches[n * accumulate : (n + 1) * accumulate], 1 / (1 + n))
    for name, p in net.model.named_parameters():
        torch.testing.assert_close(p, simulated.weights[name], rtol=1e-6, atol=1e-7)


def test_a_simulation_writes_what_it_has_found(tmp_path: Path) -> None:
    file = tmp_path / "input.txt"
    file.write_text("to be or not to be, that is the question. " * 300)
    row = Simulated(stages=3, updates=24, until=4, size="tiny", fresh="tokens|blocks.0.")
    run(row, load(file), tmp_path / "row", math.inf)
    assert [line["update"] for line in gather(tmp_path)[row.name]["log"]] == [1, 2, 3, 4]
    for table in TABLES.values():
        names = [simulated.name for simulated in table(Simulated())]
        assert len(set(names)) == len(names)
