"""What stages keep under a budget of memory: the plan, and whether training fits it.

Bytes are counted, not timed; work is in the unit of the costs.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Final

import pytest
import torch
import training
from helpers import cases, refuses
from torch import nn
from training import settings_of

import revcompile
import tests.plan.test_stage_memory as models
from revcompile.compiler.cost import Workload
from revcompile.errors import InputError, NonFiniteError, RevcompileWarning
from revcompile.ir.program import Partition
from revcompile.plan import budget
from revcompile.plan.budget import Choice, MemoryPlan, _Device, choices, plan_memory, state_copies
from revcompile.runtime.trainer.trainer import Trainer
from revcompile.schedule import Keep, choose
from revcompile.staged import StagedModel
from tests.compiler.test_partition import HEAVY_HEAD, Chain, weighed
from tests.support.measuring import LiveStorages
from tests.support.stage_memory import Bytes, CpuMeter, Watch, images

N, I, G = Keep.NOTHING, Keep.INPUT, Keep.GRAPH  # noqa: E741
PETRA: Final = Workload(choose("petra"), microbatch_size=8)
CPU: Final = torch.device("cpu")
LAYOUTS: Final = {"one device": (0, 0, 0, 0, 0), "two": (0, 0, 1, 1, 1), "one each": None}


def cut() -> Partition:
    """Five stages of a ResNet."""
    return models.staged("resnet")._partition


def every_plan(
    partition: Partition, workload: Workload, stage_to_rank: Sequence[int]
) -> Iterator[tuple[tuple[Choice, ...], list[int]]]:
    """All ways to choose, and what each device then holds."""
    for chosen in itertools.product(*choices(partition, workload)):
        yield chosen, devices(chosen, workload, stage_to_rank)


def devices(
    chosen: Sequence[Choice], workload: Workload, stage_to_rank: Sequence[int]
) -> list[int]:
    """What each device holds."""
    ranks = sorted(set(stage_to_rank))
    held = [[c.memory for c in chosen if stage_to_rank[c.stage] == rank] for rank in ranks]
    return [_Device([], workload, len(ranks) == 1).peak(memory) for memory in held]


def least(workload: Workload, stage_to_rank: Sequence[int]) -> int:
    return min(max(held) for _, held in every_plan(cut(), workload, stage_to_rank))


def limits(workload: Workload, stage_to_rank: Sequence[int]) -> list[int]:
    """From the least that will do to more than enough."""
    small = least(workload, stage_to_rank)
    large = max(max(held) for _, held in every_plan(cut(), workload, stage_to_rank))
    return [small + (large - small) * step // 12 for step in range(14)]


# -- the plan -------------------------------------------------------------------------------------


@pytest.mark.parametrize("workload", [PETRA, dataclasses.replace(PETRA, accumulation_steps=3)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_plans_are_the_best_of_one_stage_and_good_of_several(
    layout: str, workload: Workload
) -> None:
    stage_to_rank = LAYOUTS[layout] or tuple(range(5))
    plans = [(chosen, max(held)) for chosen, held in every_plan(cut(), workload, stage_to_rank)]
    works = []
    for limit in limits(workload, stage_to_rank):
        found = plan_memory(cut(), limit, workload, LAYOUTS[layout])
        best = min(sum(c.work for c in chosen) for chosen, held in plans if held <= limit)
        assert found.work <= best * (1 + 1e-12 if layout == "one each" else 1.25)
        assert max(found.peaks) <= limit
        works.append(found.work)
    assert works == sorted(works, reverse=True) and works[-1] < works[0]


def test_a_budget_is_used_to_the_byte() -> None:
    stage_to_rank = (0,) * 5
    small = least(PETRA, stage_to_rank)
    assert plan_memory(cut(), small, PETRA, stage_to_rank).peaks == (small,)
    with pytest.raises(InputError, match=rf"device 0 needs .* \({small} bytes\) for its 5 stages"):
        plan_memory(cut(), small - 1, PETRA, stage_to_rank)


def test_a_budget_too_small_names_the_stage_and_what_to_do() -> None:
    with pytest.raises(InputError) as raised:
        plan_memory(cut(), 1000, PETRA)
    said = str(raised.value)
    for part in ("memory_budget=1000", "8 samples", "Stage 0 needs the most", "microbatch_size="):
        assert part in said


@pytest.mark.parametrize("memory", [0, -1, True, 1.5, "2 parsecs", "GiB"])
def test_a_budget_is_a_number_of_bytes(memory: Any) -> None:
    refuses(InputError, "memory_budget=", models.staged("vgg").facts, memory_budget=memory)
    refuses(InputError, "memory_budget=", trainer_of, models.staged("vgg"), memory_budget=memory)


# -- one meaning of keep and of memory_budget ------------------------------------------------------


def test_stages_keep_what_keep_says() -> None:
    net = revcompile.petrafy(Chain(), 3, torch.randn(2, 5), keep=["nothing", "input", "graph"])
    assert [stage.keep for stage in net.facts()] == [N, I, G]
    trainer = trainer_of(net)
    held = [{unit.keep for unit in program.units} for program in trainer._programs]
    assert held == [{I, N}, {I}, {G}] and trainer.memory_plan is None
    refuses(
        InputError,
        "petrafy was given keep=.* 'petra_stashed' keep 'nothing'",
        trainer_of,
        net,
        weights="stashed",
    )
    plan = trainer_of(net, memory_budget="1GiB").memory_plan
    assert plan.keeps == (N, I, G)
    refuses(InputError, "device 0 needs", trainer_of, net, memory_budget=1000)


def test_a_net_cut_for_a_method_that_keeps_graphs_trains_by_it() -> None:
    net = revcompile.petrafy(Chain(), 3, torch.randn(2, 5), keep="graph")
    assert trainer_of(net, method="1f1b").method.name == "1f1b"


def test_trainers_do_not_use_more_than_the_net_was_cut_for() -> None:
    x = torch.randn(2, 5)
    net = revcompile.petrafy(Chain(), 2, x, memory_budget="1GiB", optimizer_copies=0)
    assert {stage.keep for stage in net.facts()} == {G} and "at most 1.0 GiB" in str(net)
    assert trainer_of(net).memory_plan.keeps == (G, G)
    refuses(InputError, "memory_budget=1000: .* device 0", trainer_of, net, memory_budget=1000)
    refuses(InputError, "device 0", trainer_of, net, memory_budget=1000, method="1f1b")
    assert trainer_of(net, method="1f1b").memory_plan.keeps == (G, G)
    refuses(
        InputError,
        "does not report its memory",
        revcompile.petrafy,
        Chain(),
        2,
        x,
        memory_budget="auto",
    )


# -- what a device reports -------------------------------------------------------------------------


def test_auto_leaves_a_fifth_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "_report", lambda *_: ("gpu", 10_000_000))
    trainer = training.trainer_of(training.fresh(training.Plain), memory_budget="auto")
    assert trainer.memory_plan.memory_budget == 8_000_000
    assert "4 stages, graphs of stages [0, 1, 2] kept, petra" in repr(trainer)


def test_ranks_plan_with_the_least_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two share the first GPU."""
    reports = [("a", 1000), ("a", 900), ("b", 500)]
    monkeypatch.setattr(budget, "world_size", lambda: 3)
    monkeypatch.setattr(budget, "join", lambda *_: CPU)
    monkeypatch.setattr(budget, "new_group", lambda *_: None)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda _: None)
    monkeypatch.setattr(budget, "gather_plain", lambda *_: reports)
    assert budget.free_memory(nn.Linear(1, 1), None, 1.0) == 0.8 * 450
    reports.append(None)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="does not report its memory"):
        budget.free_memory(nn.Linear(1, 1), None, 1.0)


# -- what people see ------------------------------------------------------------------------------


def test_a_plan_of_uneven_devices_says_how_to_even_them() -> None:
    x = torch.randn(2, 5)
    plans = {
        keep: plan_memory(weighed(Chain(), 2, x, HEAVY_HEAD, keep=[keep] * 2), 2**30, PETRA)
        for keep in (N, G)
    }
    assert {keep: round(plan.balance, 2) for keep, plan in plans.items()} == {N: 1.17, G: 1.0}
    assert "1.17x the mean work; petrafy(..., keep='graph')" in str(plans[N])
    assert "petrafy" not in str(plans[G])


def test_a_micro_batch_larger_than_planned_is_said() -> None:
    net = training.fresh(training.Plain)
    net.microbatch_size = 3
    trainer = training.trainer_of(net, memory_budget="1GiB")
    assert isinstance(trainer.memory_plan, MemoryPlan)
    small, large = ((x[:size], y[:size]) for size in (3, 4) for x, y in training.batches(1))
    trainer.step(*small)
    with pytest.warns(UserWarning, match="micro-batches of 3 samples, but one has 4"):
        trainer.step(*large)
    refuses(RevcompileWarning, "one has 4", trainer.step, *large)  # the tests make it an error
    losses = trainer._loss_head.totals.clone()
    bad = torch.full_like(large[0], torch.nan), large[1]
    refuses(NonFiniteError, "micro-batch 3", trainer.step, *bad)
    assert trainer.step(*small).microbatch == 4 and losses[1] == 3


@cases(
    "make, copies",
    (lambda p: torch.optim.SGD(p, lr=0.1), 0.0),
    (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 1.0),
    (lambda p: torch.optim.Adam(p, amsgrad=True), 3.0),
    (torch.optim.Adafactor, 5 / 40),  # rows and columns of the weight; the whole bias,
)
def test_an_optimizer_is_asked_what_it_keeps(make: Any, copies: float) -> None:
    layers = dict(nn.Linear(7, 5).named_parameters())
    assert state_copies(layers, make, None) == copies


# -- training under it ----------------------------------------------------------------------------

BATCH: Final = models.BATCH
NO_MORE: Final = 1.05


def trainer_of(net: StagedModel, **settings: Any) -> Trainer:
    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1e-4, momentum=0.9)

    return net.trainer(sgd, nn.functional.cross_entropy, **settings_of(**settings))


@functools.cache
def watched(name: str, share: float) -> tuple[MemoryPlan, Watch, int]:
    """Train with a budget between the least and the most: the plan, and what was really held."""
    net = models.staged(name)
    workload = dataclasses.replace(PETRA, microbatch_size=BATCH)
    stage_to_rank = (0,) * net.num_stages
    ends = [max(held) for _, held in every_plan(net._partition, workload, stage_to_rank)]
    limit = min(ends) + round(share * (max(ends) - min(ends)))
    batch = images(BATCH, models.SIZE, CPU)
    own = Bytes().of(net.model.state_dict())
    with LiveStorages() as storages:
        trainer = trainer_of(net, memory_budget=limit)
        watch = Watch(trainer, CpuMeter(storages))
        for _ in range(net.num_stages + 1):
            trainer.step(*batch())
        watch.start()
        for _ in range(2):
            trainer.step(*batch())
        watch.stop()
    assert isinstance(trainer.memory_plan, MemoryPlan)
    return trainer.memory_plan, watch, own


@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("name", models.MODELS)
def test_training_holds_no_more_than_was_predicted(name: str, share: float) -> None:
    plan, watch, own = watched(name, share)
    assert watch.peak + own <= NO_MORE * plan.memory(0) <= NO_MORE * plan.memory_budget
    for choice, peak in zip(plan.chosen, watch.peaks, strict=True):
        assert peak <= NO_MORE * choice.memory.total, choice


@pytest.mark.parametrize("name", models.MODELS)
def test_graphs_hold_what_they_have_saved_and_where_they_begin_and_end(name: str) -> None:
    plan, watch, _ = watched(name, 1.0)
    for choice, held in zip(plan.chosen[:-1], watch.held, strict=False):
        assert choice.keep is G
        predicted = choice.memory.buffers + choice.memory.ends
        assert 0.75 * predicted <= held.buffers <= 1.01 * predicted, choice
