"""The planner: steady states equal the dry run's, and forecasts move the way clusters do."""

from __future__ import annotations

import functools
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from nets import Residual
from torch import nn

import revcompile
from revcompile.compiler.cost import Workload
from revcompile.errors import InputError
from revcompile.ir.types import Rewired
from revcompile.plan.cluster import Cluster, Device, NetworkLink, TimeModel
from revcompile.plan.forecast import Forecast, better_stages, plan_cluster
from revcompile.plan.learning import cost_of_delay
from revcompile.schedule import (
    Costs,
    Op,
    actions,
    choose,
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
    work = [f + b + u / accumulation_steps for f, b, u in zip(*_work(costs), strict=True)]
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
def test_the_period_without_drains_is_the_dry_runs(
    stages: int, link: float, in_flight_per_stage: float
) -> None:
    costs = drawn(stages, link, update=0.3, seed=stages)
    method = choose("petra", in_flight_per_stage=in_flight_per_stage)
    assert period(method, costs) == pytest.approx(played(method, costs), rel=0.01)


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


def _work(costs: Costs) -> tuple[tuple[float, ...], ...]:
    return costs.forward, costs.backward, costs.update


# -- forecasts ------------------------------------------------------------------------------------


@functools.cache
def rewired() -> Rewired:
    branches = [(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)) for _ in range(8)]
    blocks = (Residual(nn.Sequential(*branch)) for branch in branches)
    model = nn.Sequential(nn.Linear(8, 64), *blocks, nn.Linear(64, 4))
    return revcompile.reversify(model, torch.randn(4, 8), check="off").rewired


SLOW_DEVICE = TimeModel.on(Device(flops=1e9, bandwidth=1e9))
FAST = NetworkLink(bandwidth=1e12)


PETRA = Workload(choose("petra"), microbatch_size=16)


def planned(devices: int, link: NetworkLink = FAST, **options: Any) -> dict[str, Forecast]:
    """By method; of those that never drain, what comes with an update every micro-batch."""
    _, found = plan_cluster(rewired(), Cluster(devices, link, SLOW_DEVICE), PETRA, **options)
    return {one.method: one for one in found}


def test_every_method_is_forecast_on_the_same_stages() -> None:
    found = planned(4, stages=4)
    assert set(found) == {"petra", "1f1b", "gpipe", "zero-bubble (bound)"}
    assert {(one.stages, one.replicas) for one in found.values()} == {(4, 1)}
    petra, drained, gpipe = (found[name] for name in ("petra", "1f1b", "gpipe"))
    assert (petra.delay, petra.in_flight_per_stage, petra.accumulation_steps) == (3, 1.0, 1)
    assert (drained.delay, drained.in_flight_per_stage, drained.accumulation_steps) == (0, None, 16)
    # PETRA computes forward twice, but has no bubbles; GPipe keeps every graph of a group.
    assert petra.efficiency > drained.efficiency
    assert petra.memory < drained.memory < gpipe.memory


def test_the_better_number_of_stages_is_found() -> None:
    cluster = Cluster(8, NetworkLink(bandwidth=1e6), SLOW_DEVICE)
    narrow = plan_cluster(rewired(), cluster, PETRA)[1][0]
    better = better_stages(rewired(), cluster, PETRA, narrow)
    assert better is not None and better.throughput > narrow.throughput
    assert (
        better.accumulation_steps * better.replicas == narrow.accumulation_steps * narrow.replicas
    )
    assert better_stages(rewired(), cluster, PETRA, better) is None


def test_what_delay_costs_is_that_of_the_results() -> None:
    """The delays up to which a sentence holds are those of the table in docs/results.md."""
    encoder = nn.TransformerEncoderLayer(8, 2, 16, norm_first=True, batch_first=True)
    attention = revcompile.reversify(encoder, torch.randn(2, 5, 8), check="off").rewired
    results = Path(__file__).parents[2].joinpath("docs/results.md").read_text()
    table = [
        ("convolutional nets | up to 9 updates | `DelayAwareSGD`", rewired(), 9, "nearly"),
        ("transformers | one update", attention, 1, "learn as by backprop"),
        ("transformers | 2 to 7 updates | `DelayAwareMuon`", attention, 7, "in more updates"),
    ]
    for row, model, most, says in table:
        assert row in results
        assert says in cost_of_delay(model, most)
        assert says not in cost_of_delay(model, most + 1)
    for model, delay in ((attention, 8), (rewired(), 10)):
        assert "use a larger accumulation_steps" in cost_of_delay(model, delay)
    assert cost_of_delay(attention, 0) == "no gradient is late"


def test_devices_beyond_the_stages_become_copies() -> None:
    single, copied = planned(5, stages=5)["petra"], planned(4096, stages=5)["petra"]
    assert (copied.stages, copied.replicas) == (5, 819)
    # Gradients are averaged over fast links: nearly as many times the throughput.
    assert 0.95 * 819 < copied.throughput / single.throughput <= 819


def test_without_a_number_of_stages_no_device_idles_and_stages_are_many() -> None:
    assert (planned(16)["petra"].stages, planned(16)["petra"].replicas) == (8, 2)
    assert (planned(7)["petra"].stages, planned(7)["petra"].replicas) == (7, 1)


def test_slow_links_cost_delay_and_not_throughput() -> None:
    near = planned(8, stages=8)["petra"]
    far = planned(8, NetworkLink(bandwidth=1e12, latency=0.01), stages=8)["petra"]
    assert far.in_flight_per_stage is not None and far.in_flight_per_stage > 1
    assert far.delay > near.delay == 7
    assert far.throughput == pytest.approx(near.throughput, rel=0.02)
    fixed = planned(
        8, NetworkLink(bandwidth=1e12, latency=0.01), stages=8, in_flight_per_stage=1.0
    )["petra"]
    assert fixed.delay == 7 and fixed.throughput < 0.5 * far.throughput
    assert fixed.bottleneck == "bubbles" and far.bottleneck.startswith("stage")


def test_with_a_memory_limit_the_fastest_cut_that_fits_is_taken() -> None:
    roomy = planned(8, memory_budget=10**9, accumulation_steps=1)["petra"]
    assert (roomy.stages, roomy.fits) == (1, True)
    tight = planned(8, memory_budget=roomy.memory // 2, accumulation_steps=1)["petra"]
    assert tight.stages > 1 and tight.fits and tight.memory <= roomy.memory // 2
    assert planned(8, memory_budget=1000)["petra"].fits is False


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": 4, "stages": 5}, "use 1 to 4"),
        ({"devices": 64, "stages": 60}, "num_stages=60"),
        ({"devices": 4, "methods": ["petar"]}, "did you mean 'petra'"),
    ],
)
def test_what_cannot_be_planned_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        planned(**options)
