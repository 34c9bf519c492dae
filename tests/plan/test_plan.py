"""The planner: steady states equal the dry run's, and forecasts move the way clusters do."""

import dataclasses
import functools
import math
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import cases
from nets import Residual
from torch import nn
from torch.distributed.pipelining import ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble

from revcompile.compiler.capture import capture
from revcompile.compiler.capture.check import Check
from revcompile.compiler.find import find
from revcompile.compiler.partition import Pieces, one_stream
from revcompile.compiler.rewire import rewire
from revcompile.errors import InputError
from revcompile.ir.policy import Policy
from revcompile.plan.forecast import Cluster, Forecast, Planner, Training, best
from revcompile.schedule import (
    Costs,
    Op,
    actions,
    choose,
    drained_passes,
    dry_run,
    hiding_in_flight,
    period,
    window,
)

# -- steady states --------------------------------------------------------------------------------


def drawn(stages: int, link: float, update: float, seed: int) -> Costs:
    """Uneven stages and links."""
    generator = random.Random(seed)

    def times(count: int, most: float) -> tuple[float, ...]:
        return tuple(generator.uniform(0.2, 1) * most for _ in range(count))

    return Costs(
        times(stages, 1),
        times(stages, 3),
        times(stages, update),
        times(stages - 1, link),
        times(stages - 1, link),
    )


def played(
    method: Any, costs: Costs, accumulation_steps: int = 1, microbatches: int = 300
) -> float:
    """Time a micro-batch in the middle of a dry run, at the slowest stage."""
    stages = len(costs.forward)
    columns = costs.forward, costs.backward, costs.update
    work = [f + b + u / accumulation_steps for f, b, u in zip(*columns, strict=True)]
    slowest = work.index(max(work))
    ends = {
        span.action.index: span.end
        for span in dry_run(actions(method, stages, microbatches, accumulation_steps), costs)
        if span.stage == slowest and span.action.op is Op.BACKWARD
    }
    # Behind slow links micro-batches come in bursts of as many as are in flight.
    burst = math.lcm(accumulation_steps, window(choose(method), stages, 0, accumulation_steps))
    first = microbatches // 3 // accumulation_steps * accumulation_steps
    last = first + (microbatches // 2) // burst * burst
    return (ends[last] - ends[first]) / (last - first)


@pytest.mark.parametrize("link", [0.0, 0.5, 6.0])
@pytest.mark.parametrize("stages", [1, 2, 5])
@pytest.mark.parametrize("in_flight_per_stage", [1.0, 1.5, 3.0])
@pytest.mark.parametrize(("accumulation_steps", "nearly"), [(1, 0.01), (8, 0.05)])
def test_the_period_without_drains_is_the_dry_runs(
    stages: int, link: float, in_flight_per_stage: float, accumulation_steps: int, nearly: float
) -> None:
    costs = drawn(stages, link, update=0.3 * accumulation_steps, seed=stages)
    method = choose("petra", in_flight_per_stage=in_flight_per_stage)
    expected = played(method, costs, accumulation_steps)
    assert period(method, costs, accumulation_steps) == pytest.approx(expected, rel=nearly)


@pytest.mark.parametrize("link", [0.0, 2.0])
@pytest.mark.parametrize("method", ["gpipe", "1f1b", "backprop", "reversible_backprop"])
@pytest.mark.parametrize("accumulation_steps", [1, 3, 8])
def test_the_period_with_drains_is_exactly_the_dry_runs(
    method: str, accumulation_steps: int, link: float
) -> None:
    costs = drawn(4, link, update=0.3, seed=accumulation_steps)
    expected = played(method, costs, accumulation_steps)
    assert period(method, costs, accumulation_steps) == pytest.approx(expected, rel=1e-9)


def test_thousands_of_stages_take_no_time_at_all() -> None:
    """No dry run: 4096 stages would be 130 million actions."""
    costs = Costs.uniform(4096, forward=1, backward=3, link=3)
    # All the way and back: 4 a stage and 6 a border, shared by 4096 micro-batches.
    assert period("petra", costs) == pytest.approx((4 * 4096 + 6 * 4095) / 4096)
    # To the next stage and back takes 4 + 4 + 6: that must be shared by four, windows 3 apart.
    assert hiding_in_flight("petra", costs) == 3.0


@pytest.mark.parametrize("link", [1.0, 4.0, 40.0])
def test_the_chosen_alpha_is_the_least_that_hides_the_links(link: float) -> None:
    costs = Costs.uniform(6, forward=1, backward=3, link=link)
    in_flight_per_stage = hiding_in_flight("petra", costs)
    assert period(choose("petra", in_flight_per_stage=in_flight_per_stage), costs) <= 4 * 1.01
    if in_flight_per_stage > 1:
        assert (
            period(choose("petra", in_flight_per_stage=round(in_flight_per_stage - 0.05, 2)), costs)
            > 4 * 1.01
        )


@cases(
    "order, theirs, chunks",
    ("interleaved", ScheduleInterleaved1F1B, 2),
    ("zero-bubble", ScheduleInterleavedZeroBubble, 1),
)
def test_other_pipelines_are_in_the_order_of_torchs(order: str, theirs: Any, chunks: int) -> None:
    devices, microbatches = 4, 8
    own = SimpleNamespace(group_size=devices, group_rank=0, num_stages=chunks * devices)
    own.has_backward, own.device, own.submod = True, "cpu", nn.Identity()
    stages = [
        SimpleNamespace(**vars(own), stage_index=i * devices, is_first=not i, is_last=False)
        for i in range(chunks)
    ]
    listed = theirs(stages, microbatches).pipeline_order
    for device, passes in enumerate(drained_passes(order, chunks * devices, devices, microbatches)):
        done = [str(action) for action in listed[device] if action is not None]
        assert [f"{stage}{kind}{microbatch}" for kind, stage, microbatch in passes] == done


def test_bubbles_are_those_of_the_papers() -> None:
    """Per update: 1F1B loses (P-1)(F+B), v stages per device a v-th, ZB-H1 (P-1)(F+I-W)."""
    costs, halves = Costs.uniform(4, 1, 2), Costs.uniform(8, 0.5, 1)
    assert 8 * period("1f1b", costs, 8) == 8 * 3 + 3 * 3
    assert 8 * period("interleaved", halves, 8, devices=4) == 8 * 3 + 3 * 3 / 2
    assert 8 * period("zero-bubble", costs, 8) == 8 * 3 + 3 * 1


def test_messages_add_to_every_cycle_without_slack() -> None:
    """With one in flight per stage: once around the pipeline, shared by all in flight."""
    costs = Costs.uniform(8, forward=1, backward=2, link=0.5)
    assert period("petra", costs, 32) == 3 + 14 * 0.5 / 8
    assert period(choose("petra", in_flight_per_stage=2), costs, 32) == 3


@pytest.mark.parametrize("method", ["petra", "1f1b", "gpipe", "zero-bubble"])
def test_a_link_carries_one_message_at_a_time(method: str) -> None:
    costs = dataclasses.replace(Costs.uniform(3, 1, 2, link=9), latency=1.0)
    chosen = choose(method, in_flight_per_stage=9) if method == "petra" else method
    assert period(chosen, costs, 64) >= 8


# -- forecasts ------------------------------------------------------------------------------------


@functools.cache
def pieces() -> tuple[Pieces, Pieces]:
    """Of the original model and of the rewired one."""
    blocks = (Residual(nn.Sequential(nn.Linear(64, 64), nn.Tanh())) for _ in range(40))
    model = nn.Sequential(nn.Linear(8, 64), *blocks, nn.Linear(64, 4))
    captured = capture(model, torch.randn(4, 8), None, check=Check.OFF)
    found = find(captured)
    rewired = rewire(captured, found, Policy.SAME_PARAMETERS)
    return Pieces.of(one_stream(captured, found)), Pieces.of(rewired)


FAST = Cluster(8, link=1e12, latency=0.0, flops=1e9, memory_bandwidth=1e9, memory=10**9)
USUAL = Training(512, accumulation_steps=32, optimizer_copies=2, low_precision=False)


def planner(cluster: Cluster = FAST, stages: int = 8, **training: Any) -> Planner:
    return Planner(*pieces(), cluster, dataclasses.replace(USUAL, **training), stages)


@functools.cache
def rows(cluster: Cluster = FAST, stages: int = 8, **training: Any) -> dict[str, Forecast]:
    return {row.method: row for row in planner(cluster, stages, **training).rows()}


def test_baselines_are_the_original_model_cut_between_its_blocks() -> None:
    """One value crosses each cut, where the rewired model has two."""
    original, rewired = pieces()
    assert len(original.whole) == 42 and all(not piece.reversible for piece in original.whole)
    assert {len(piece.inputs) for piece in original.whole} == {1}
    assert sum(cost.parameters for cost in original.costs) == sum(
        parameter.numel() for parameter in original.rewired.root.parameters()
    )
    assert [len(piece.inputs) for piece in rewired.whole if piece.reversible][1:] == [3] * 39


def test_the_frontier_of_petra_is_that_of_the_design() -> None:
    """Of the ideal: 1F1B M / (M+S-1), all rebuilt 3/4, all kept 1; memory the other way round."""
    found = rows()
    ideal = found["data parallel"].throughput
    shares = {name: row.throughput / ideal for name, row in found.items()}
    assert shares["1f1b"] == pytest.approx(32 / 39, rel=0.05)
    assert shares["gpipe"] == pytest.approx(32 / 39, rel=0.05)
    assert shares["petra, all rebuilt"] == pytest.approx(3 / 4, rel=0.05)
    assert shares["petra on this device"] == pytest.approx(1, rel=0.05)
    assert shares["1f1b, recomputed"] == pytest.approx(32 / 39 * 3 / 4, rel=0.05)
    assert found["petra, all rebuilt"].memory < found["1f1b, recomputed"].memory
    assert found["1f1b, recomputed"].memory < found["1f1b"].memory / 2
    assert found["petra on this device"].memory < 1.3 * found["1f1b"].memory
    assert found["gpipe"].memory > 3 * found["1f1b"].memory
    assert found["1f1b"].throughput < found["zero-bubble"].throughput
    assert found["interleaved"].stages == 16
    assert found["petra in 1f1b's memory"].memory <= found["1f1b"].memory
    assert [row.delay for row in found.values()] == [0] * 6 + [1] * 3


def test_between_rebuilt_and_kept_more_memory_is_more_throughput() -> None:
    front = planner().frontier()
    assert [row.memory for row in front] == sorted(row.memory for row in front)
    assert [row.throughput for row in front] == sorted(row.throughput for row in front)
    kept = [row.keeps.count("graph") for row in front]
    assert (kept[0], kept[-1]) == (0, 8) and any(0 < some < 8 for some in kept)
    assert all(row.keeps == tuple(sorted(row.keeps, reverse=True)) for row in front)


def test_waits_for_links_are_not_bubbles() -> None:
    for found in (rows(), rows(dataclasses.replace(FAST, latency=0.05))):
        for row in found.values():
            assert row.busy + row.bubbles + row.links == pytest.approx(1)
    near, far = rows()["1f1b"], rows(dataclasses.replace(FAST, latency=0.05))["1f1b"]
    assert near.links == pytest.approx(0, abs=1e-4) and far.links > 0.2
    assert near.bubbles / near.busy == pytest.approx(far.bubbles / far.busy)


def test_latency_costs_petra_flight_and_not_throughput() -> None:
    near, far = (
        rows(dataclasses.replace(FAST, latency=latency))["petra, all rebuilt"]
        for latency in (0.0, 0.05)
    )
    assert near.in_flight_per_stage == 1.0 and (far.in_flight_per_stage or 0) > 1.5
    assert far.throughput == pytest.approx(near.throughput, rel=0.02)
    fixed = dataclasses.replace(
        planner(dataclasses.replace(FAST, latency=0.05)), in_flight_per_stage=1.0
    )
    assert fixed.petra[0].throughput < 0.8 * far.throughput


def test_precision_and_optimizer_count() -> None:
    """In bf16 a message and an activation take half; PETRA's two streams stay float32."""
    slow = dataclasses.replace(FAST, link=1e5)
    full, half = rows(slow), rows(slow, low_precision=True)
    for method, ratio in (("gpipe", 2), ("petra, all rebuilt", 1)):
        faster = half[method].throughput / full[method].throughput
        assert faster == pytest.approx(ratio, rel=0.1), method
    assert rows(low_precision=True)["gpipe"].memory < 0.6 * rows()["gpipe"].memory
    assert rows(optimizer_copies=1)["1f1b"].memory < rows()["1f1b"].memory


def test_data_parallel_has_the_samples_per_update_of_a_pipeline() -> None:
    """Four micro-batches on eight devices: each has half of one."""
    few, many = (rows(accumulation_steps=steps)["data parallel"] for steps in (4, 8))
    assert few.throughput < many.throughput and few.memory < many.memory


def test_replicas_are_averaged_over_links() -> None:
    many = dataclasses.replace(FAST, devices=16)
    assert rows(many)["1f1b"].replicas == 2 and rows(many)["data parallel"].replicas == 16
    assert rows(many)["1f1b"].throughput == pytest.approx(2 * rows()["1f1b"].throughput, rel=0.01)
    slow = rows(dataclasses.replace(many, link=1e4))["data parallel"]
    assert slow.links > 0.5 and slow.bubbles == pytest.approx(0)


def test_the_best_is_the_fastest_or_as_fast_and_less_late() -> None:
    found = rows()
    assert best(list(found.values())).method == "data parallel"
    late, early = found["petra on this device"], found["zero-bubble"]
    assert best([late, early]) is late
    assert best([late, dataclasses.replace(early, throughput=0.995 * late.throughput)]) is not late


def test_what_cannot_be_cut_is_left_out_or_refused() -> None:
    assert "interleaved" not in rows(stages=4, accumulation_steps=6)
    assert set(rows(stages=1)) == {"data parallel", "petra, all rebuilt", "petra on this device"}
    with pytest.raises(InputError, match="num_stages=60"):
        planner(dataclasses.replace(FAST, devices=64), stages=60).rows()
