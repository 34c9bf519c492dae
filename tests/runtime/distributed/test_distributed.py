"""Several ranks train what one process trains, to the bit; and end well when one of them does not.

Ranks are processes on this machine, over gloo. What they do is in `distributed_worker`.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from distributed_memory import absent, holdings
from distributed_worker import Run, batches, differences, fed, launch, launched, trained, trainer_of
from helpers import cases, refuses
from nets import SharedLayer
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

import revcompile
from revcompile.compiler.partition import assign_contiguous
from revcompile.errors import InputError, NonFiniteError
from revcompile.runtime.distributed.layout import Layout, check_ranks_agree, make_layout
from revcompile.runtime.distributed.rank_weights import SharedBuffers
from revcompile.schedule import METHODS

pytestmark = pytest.mark.filterwarnings("ignore")


@functools.cache
def alone(run: Run) -> dict[str, Any]:
    """The same training in one process."""
    return trained(dataclasses.replace(run, stage_to_rank=None))


def assert_equal_to_one_process(folder: Path, ranks: int, runs: Sequence[Run]) -> None:
    results = launch(folder, ranks, "train_all", runs=runs)
    for number, run in enumerate(runs):
        expected = alone(run)
        for rank, found in enumerate(results):
            odd = differences(expected["state"], found[number]["state"])
            assert not odd, f"{run}, rank {rank}: {odd[:3]}"
        last = ranks - 1 if run.stage_to_rank is None else run.stage_to_rank[-1]
        assert results[last][number]["losses"] == expected["losses"], run


# -- the same training ----------------------------------------------------------------------------


def test_two_ranks_train_as_one_process_with_every_method(tmp_path: Path) -> None:
    runs = [Run(method=method, accumulation_steps=2, steps=9) for method in METHODS]
    runs += [Run(stage_to_rank=(1, 0, 1, 0), steps=7)]  # stages may live on any rank
    runs += [Run(model="words", stage_to_rank=(1, 1, 0, 0), method="pipedream", steps=7)]
    assert_equal_to_one_process(tmp_path, 2, runs)


def test_four_ranks_train_as_one_process(tmp_path: Path) -> None:
    """Dropout, tied weights, clipping over all stages, the paper's order, an incomplete group.

    And two optimizers a stage, error feedback, predicted weights.
    """
    runs = [
        Run(model="vit"),
        Run(model="vit", method="1f1b", accumulation_steps=4, steps=10),
        Run(model="words", steps=9),
        Run(model="words", method="gpipe", accumulation_steps=2, steps=7),
        Run(method="backprop", clip=0.1, steps=5),
        Run(method="petra", in_flight_per_stage=2, clip=0.1, steps=9),
        Run(model="words", weights="predicted", clip=0.1, steps=9),
        Run(several=True, steps=7),
    ]
    assert_equal_to_one_process(tmp_path, 4, runs)


@pytest.mark.parametrize("stage_to_rank", [None, (0, 1, 1, 0)])
def test_copies_of_the_pipeline_train_with_the_mean_gradient(
    tmp_path: Path, stage_to_rank: Any
) -> None:
    """Two copies with half the data each are one pipeline that gathers two micro-batches."""
    run = Run(
        method="backprop", stages=4 if stage_to_rank else 2, steps=10, stage_to_rank=stage_to_rank
    )
    results = launch(tmp_path, 4, "copies", run=run)
    expected = alone(dataclasses.replace(run, accumulation_steps=2))["state"]
    trainable = {name for name, _ in trainer_of(Run())[0].model.named_parameters()}
    for found in results:
        for other in (results[0], expected):
            assert not [n for n in differences(other, found) if n in trainable]


@cases(
    "run",
    Run(steps=5),
    Run(model="words", stage_to_rank=(1, 1, 0, 0), steps=5),
    ids=["stages in a row", "tied weights"],
)
def test_a_rank_holds_only_the_weights_of_its_stages(tmp_path: Path, run: Run) -> None:
    """And all of them find each other again: for the whole model, and for another trainer."""
    results = launch(tmp_path, 2, holdings, run=run, other=(0, 1, 0, 1))
    net, _ = trainer_of(run)
    programs, tensors = net._programs(net.method), dict(net.model.named_parameters())
    stage_to_rank = run.stage_to_rank or assign_contiguous(net._partition, 2)
    for rank, found in enumerate(results):
        used = {n for p in programs if stage_to_rank[p.index] == rank for n in p.parameters}
        assert found["names"] == sorted(used)
        assert found["bytes"] == sum(4 * tensors[name].numel() for name in used)
        assert not differences(alone(run)["state"], found["state"])
    assert used != tensors.keys()


def test_only_the_first_rank_needs_to_have_the_weights(tmp_path: Path) -> None:
    run = Run(model="vit", steps=4)
    results = launch(tmp_path, 2, absent, run=run)
    for state, errors in results:
        assert not differences(alone(run)["state"], state)
        assert len(errors) == 2
        for error in errors:
            assert "no rank has the values of token" in error and "load weights" in error


def test_all_start_with_the_weights_of_rank_0_and_know_the_mean_loss(tmp_path: Path) -> None:
    results = launch(tmp_path, 2, "report")
    losses = trained(Run(steps=5))["losses"]
    assert results[1]["losses"] == losses and all(map(math.isnan, results[0]["losses"]))
    for found in results:
        assert found["mean"] == pytest.approx(sum(losses) / 5, rel=1e-12)
    assert [found["samples"] for found in results] == [2, 2]
    hook = "a hook of blocks.1 was registered or removed after petrafy"
    for in_flush, in_step in (found["refused"] for found in results):
        assert f"trainer.flush: {hook}" in in_flush and f"trainer.step: {hook}" in in_step


# -- micro-batches that cannot be used ------------------------------------------------------------

BAD: Final = [[3, "nan"], [5, "shape"], [6, "type"], [8, "target"]]


def test_a_lost_micro_batch_changes_nothing(tmp_path: Path) -> None:
    """With one micro-batch in the pipeline at a time, as if it had never been."""
    run = Run(method="backprop", steps=12)
    results = launch(tmp_path, 2, "lose", run=run, bad=BAD)
    net, trainer = trainer_of(run)
    lost = {number for number, _ in BAD}
    for number, batch in enumerate(batches(run)):
        if number not in lost:
            fed(trainer, batch)
    expected = net.to_module().state_dict()
    for found in results:
        assert not differences(expected, found["state"])
    raised = sorted(one for found in results for one in found["raised"])
    assert raised == [
        (3, NonFiniteError.__name__),
        (5, InputError.__name__),
        (6, InputError.__name__),
        (8, InputError.__name__),
    ]


# -- ranks that end -------------------------------------------------------------------------------


@cases(
    "doomed, how, said",
    (2, "killed", "rank 2 (stage 2) is gone"),
    (0, "killed", "rank 0 (stage 0) is gone"),
    (2, "killed between steps", "rank 2 (stage 2) is gone"),
    (1, "failed", "rank 1 (stage 1) stopped: ZeroDivisionError: some bug"),
    (3, "failed in net.module", "rank 3 (stage 3) stopped: ZeroDivisionError: some bug"),
)
def test_others_name_the_rank_that_ended(tmp_path: Path, doomed: int, how: str, said: str) -> None:
    results, codes = launched(
        tmp_path, 4, "end", doomed=doomed, how=how, method="petra", timeout=60, limit=50
    )
    others = [rank for rank in range(4) if rank != doomed]
    assert [codes[rank] for rank in others] == [0, 0, 0]
    for rank in others:
        assert said in results[rank]
        assert f"last completed micro-batch here (rank {rank} (stage {rank})): " in results[rank]


def test_a_rank_that_hangs_is_named_after_the_timeout(tmp_path: Path) -> None:
    results, codes = launched(
        tmp_path, 3, "end", doomed=1, hangs=1, how="stopped", method="1f1b", timeout=4, limit=60
    )
    assert (codes[0], codes[2]) == (0, 0)
    for rank in (0, 2):
        assert "no answer from rank 1 (stage 2) for 4 s" in results[rank]


# -- the start ------------------------------------------------------------------------------------


def test_ranks_that_differ_are_refused(tmp_path: Path) -> None:
    results = launch(tmp_path, 2, "differ")
    expected = [
        "stages: 2 on rank 0; 3 on rank 1",
        "model: ViT on rank 0; Words on rank 1",
        "accumulation_steps: 1 on rank 0; 2 on rank 1",
        "revcompile version: 1.0 on rank 0; 9.9 on rank 1",
        "parameter conv.weight: float32[8, 3, 3, 3] on rank 0; float64[8, 3, 3, 3] on rank 1",
        "stage_to_rank=(0, 1, 2, 3) needs 4 ranks",
        "replicas of stage 0 have different optimizers",
    ]
    for found in results:
        for said, text in zip(expected, found, strict=False):
            assert said in text
    assert results[1][-1] == trained(Run(steps=2))["losses"][0]


def test_a_trainer_that_one_rank_cannot_build_is_refused_by_all(tmp_path: Path) -> None:
    """No rank has freed weights, or changed what the trainer before has."""
    results = launch(tmp_path, 2, "refuse")
    assert "net.trainer, rank 1 (stages 2, 3): InputError: optimizer, stage 2" in results[0][0]
    assert results[1][0].startswith("optimizer, stage 2: expected a torch.optim.Optimizer")
    for _, is_same, state in results:
        assert is_same
        assert not differences(alone(Run(weights="predicted", steps=4))["state"], state)


def test_a_bad_gradient_that_a_flush_finds_is_raised_by_all(tmp_path: Path) -> None:
    results = launch(tmp_path, 2, "drain_bad")
    (raised, _, state), (elsewhere, losses, other) = results
    assert raised == elsewhere
    text, *where, note = raised
    assert text.startswith("stage 0, micro-batch 0: the gradient of parameter") and where == [0, 0]
    assert note == "The pipeline is drained; go on without another flush."
    assert all(map(math.isfinite, losses)) and not differences(state, other)


def test_the_difference_names_the_ranks() -> None:
    facts: list[dict[str, Any]] = [{"seed": 1}, {"seed": 2}, {"seed": 1, "more": "a"}]
    with pytest.raises(InputError, match="seed: 1 on ranks 0, 2; 2 on rank 1") as error:
        check_ranks_agree(facts)
    assert "more: nothing on ranks 0, 1; a on rank 2" in str(error.value)
    assert "cost=" not in str(error.value)
    with pytest.raises(InputError, match='use cost="analytic"'):
        check_ranks_agree([{"stage 0": "stem"}, {"stage 0": "stem, layer1"}])


@cases(
    "stages, world, stage_to_rank, said",
    (4, 6, None, "6 ranks for 4 stages.*start 4 ranks"),
    (4, 3, (0, 0, 1, 1), "needs 2 ranks .*but there are 3"),
    (3, 3, (0, 2, 2), "rank 1 has no stage"),
)
def test_a_layout_that_does_not_fit_is_refused(
    stages: int, world: int, stage_to_rank: tuple[int, ...] | None, said: str
) -> None:
    refuses(InputError, said, make_layout, stages, world, stage_to_rank, range)


def test_more_ranks_than_stages_are_copies_of_the_pipeline() -> None:
    layout = make_layout(2, 6, None, range)
    assert layout == Layout((0, 1), replicas=3)
    assert [layout.rank(1, replica) for replica in range(3)] == [1, 3, 5]
    assert [layout.stages(rank) for rank in range(6)] == [(0,), (1,)] * 3


@cases(
    "layer, buffer",
    (nn.BatchNorm1d(6), "layer.running_mean"),
    (spectral_norm(nn.Linear(6, 6)), "layer.parametrizations.weight.0._u"),
    ids=["batch norm", "spectral norm"],
)
def test_a_buffer_that_ranks_would_change_apart_is_refused(layer: nn.Module, buffer: str) -> None:
    net = revcompile.petrafy(SharedLayer(layer), 2, torch.randn(4, 6), check="off")
    trainer = net.trainer(lambda p: torch.optim.SGD(p, lr=0.1), F.cross_entropy)
    trainer.step(torch.randn(4, 6), torch.arange(4) % 3)
    flights = [f for e in trainer._executors for f in e.stage.in_flight.values()]
    for stage_to_rank in ((0, 0), (0, 1)):

        def check(layout: Layout = Layout(stage_to_rank)) -> None:  # noqa: B008
            buffers = SharedBuffers(net.model, trainer._programs, layout)
            for flight in flights:
                buffers.check_changed(flight.buffers)

        if stage_to_rank == (0, 0):
            check()
        else:
            refuses(InputError, f"{re.escape(buffer)} belongs .* 0 and 1 share", check)
