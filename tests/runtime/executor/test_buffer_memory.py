"""The accounting of inputs that wait in fewer bits."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch.nn.functional import cross_entropy
from training import momentum

from revcompile import TrainerOptions
from revcompile.runtime.stage.slots import StaticBuffers
from revcompile.schedule import window
from tests.plan.test_stage_memory import BATCH, CPU, SIZE, staged
from tests.support.stage_memory import BAR, Setting, images, measure


@pytest.mark.parametrize("name", ["resnet", "vit", "vgg"])
def test_the_peak_follows_the_accounting(name: str) -> None:
    net, buffers = staged(name), torch.bfloat16
    found = measure(net, Setting(BATCH, buffers=buffers), images(BATCH, SIZE, CPU))
    assert found.ratio == pytest.approx(1, abs=BAR), found
    for index, row in enumerate(found.rows[:-1]):
        assert name != "vgg" or row.ratio == pytest.approx(1, abs=0.01)
        # All in flight wait between two actions; one is in float32 during a backward pass.
        count = window(net.method, net.num_stages, index)
        one, four = row.held.buffers / count, 4 // buffers.itemsize
        assert row.accounted.buffers == pytest.approx((count - 1 + four) * one, rel=5e-3)


@pytest.mark.parametrize("buffers", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["resnet", "vgg"])
def test_captured_steps_keep_what_is_accounted(name: str, buffers: torch.dtype | None) -> None:
    """To the byte, but for a flag in every message."""
    net, make = staged(name), images(BATCH, SIZE, CPU)
    trainer = net.trainer(
        momentum, cross_entropy, backend="static", options=TrainerOptions(kept_input_dtype=buffers)
    )
    for _ in range(2 * net.num_stages + 2):
        trainer.step(*make())
    assert trainer._runner.is_active
    each, waiting = 4 if buffers is None else buffers.itemsize, 0
    for index, memory in enumerate(net.memory(BATCH, kept_input_dtype=buffers)[:-1]):
        ring, count = (
            trainer._executors[index].stage.ring,
            window(net.method, net.num_stages, index),
        )
        slots = [ring.slot(n) for n in range(ring.count)] if ring is not None else []
        kept = bytes_in(slots)
        assert memory.buffers == kept // count * (count - 1 + 4 // each)
        waiting += memory.waiting + 4
    messages = (slot.buffers for each in trainer._transport.slots.values() for slot in each.slots)
    assert bytes_in(messages) == waiting


def bytes_in(buffers: Iterable[StaticBuffers]) -> int:
    return sum(t.numel() * t.element_size() for each in buffers for t in each.tensors)


def test_the_summary_is_of_the_buffers_it_is_asked_for() -> None:
    net = staged("vgg")
    ways = (None, torch.bfloat16)
    plain, half = (net.facts(BATCH, kept_input_dtype=buffers)[0].memory.buffers for buffers in ways)
    batch = BATCH * 3 * SIZE * SIZE * 4
    assert [plain, half] == [3 * batch, 2 * batch]
    summary = net.summary(BATCH, kept_input_dtype=torch.bfloat16)
    assert "petra, inputs in bfloat16, micro-batches" in " ".join(summary.split())
