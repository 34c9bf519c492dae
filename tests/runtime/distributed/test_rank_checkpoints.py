"""A checkpoint means the same in one process and on ranks: this very moment, in flight or not.

Saving changes nothing in the training; a run goes on to the bit on any number of ranks with the
same stages. Other stages and methods need a drained checkpoint, and say so.
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed_worker import Run, batches, calls, fed, final, launch, trained, trainer_of
from helpers import refuses
from training import same

from revcompile.errors import InputError

Found = dict[str, Any]


def saving(run: Run, folder: Path) -> Found:
    """Train, and save after the fifth step; losses and weights at the end."""
    net, trainer = trainer_of(run)
    losses = []
    for number, batch in enumerate(data_of(run, trainer)):
        losses.append(fed(trainer, batch).loss)
        if number == 4:
            trainer.save(folder)
    trainer.flush()
    return {"losses": losses, "state": final(net, trainer)}


def resuming(run: Run, folder: Path) -> Found:
    """Go on after the fifth step, with something else in flight before that."""
    net, trainer = trainer_of(run, off=1.0)
    for batch in batches(run, seed=9)[:3]:
        fed(trainer, batch)
    trainer.load(folder)
    losses = [fed(trainer, batch).loss for batch in data_of(run, trainer)[5:]]
    trainer.flush()
    return {"losses": losses, "state": final(net, trainer)}


def data_of(run: Run, trainer: Any) -> list[Any]:
    return batches(run)[trainer.replica :: trainer.replicas]


pytestmark = pytest.mark.filterwarnings("ignore")
RUNS = {
    "petra": Run(steps=8),
    "stashed": Run(model="words", method="pipedream", accumulation_steps=2, steps=8),
    "tied": Run(model="words", in_flight_per_stage=2, accumulation_steps=3, steps=9, clip=0.1),
    "dni": Run(method="dni", steps=8),
}


def on_ranks(folder: Path, world: int, *steps: tuple[Any, Run, Path]) -> list[Any]:
    folder.mkdir()
    return launch(folder, world, calls, calls=[(call, given, {}) for call, *given in steps])


def test_saving_changes_nothing_and_a_run_goes_on_wherever_its_stages_are(tmp_path: Path) -> None:
    """One process and two ranks; each goes on from the other's checkpoint with the same bits."""
    steps = [(saving, run, tmp_path / f"ranks {name}") for name, run in RUNS.items()]
    saved = on_ranks(tmp_path / "first", 2, *steps)
    alone = {name: saving(run, tmp_path / f"alone {name}") for name, run in RUNS.items()}
    swapped = {
        name: dataclasses.replace(run, stage_to_rank=(1, 0, 1, 0)) for name, run in RUNS.items()
    }
    steps = [(resuming, run, tmp_path / f"alone {name}") for name, run in RUNS.items()]
    steps += [(resuming, swapped["tied"], tmp_path / "ranks tied")]
    resumed = on_ranks(tmp_path / "second", 2, *steps)
    for number, (name, run) in enumerate(RUNS.items()):
        expected = trained(run)  # nothing is saved
        for found in (alone[name], *(of_rank[number] for of_rank in saved)):
            assert same(found["state"], expected["state"]), name
        assert saved[1][number]["losses"] == expected["losses"]
        back = resuming(run, tmp_path / f"ranks {name}")
        assert back["losses"] == resumed[1][number]["losses"] == expected["losses"][5:], name
        for found in (back, *(of_rank[number] for of_rank in resumed)):
            assert same(found["state"], expected["state"]), name
    for of_rank in resumed:
        assert same(of_rank[-1]["state"], alone["tied"]["state"])


def test_copies_of_the_pipeline_go_on_with_their_own_micro_batches(tmp_path: Path) -> None:
    run, folder = Run(stages=2, steps=14), tmp_path / "copies"
    (expected,), *_ = saved = on_ranks(tmp_path / "first", 4, (saving, run, folder))
    again = on_ranks(tmp_path / "second", 4, (resuming, run, folder))
    for (before,), (after,) in zip(saved, again, strict=True):
        assert (
            same(after["losses"], before["losses"][5:])
            or torch.tensor(after["losses"]).isnan().all()
        )
        assert same(after["state"], before["state"])
    assert expected["state"].keys() == again[0][0]["state"].keys()
    refuses(InputError, "2 copies of the pipeline", resuming, run, folder)
