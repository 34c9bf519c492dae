"""The accounting of stages against what training really holds. Bytes are counted, not timed."""

import functools
from collections.abc import Iterable

import pytest
import timm
import torch
from helpers import cases, refuses
from torch import nn
from torch.nn.functional import cross_entropy
from training import momentum

import revcompile
from revcompile import TrainerOptions
from revcompile.errors import InputError
from revcompile.runtime.stage.slots import StaticBuffers
from revcompile.schedule import window
from revcompile.staged import StagedModel
from tests.support.stage_memory import BAR, Measured, Setting, images, measure

CPU = torch.device("cpu")
BATCH = 24
SIZE = 32
METHODS = {
    "petra": Setting(BATCH, "petra"),
    "petra, paper": Setting(BATCH, "petra", 2),
    "dsp": Setting(BATCH, "dsp"),
    "delayed": Setting(BATCH, "delayed"),
}


def resnet() -> nn.Module:
    """ResNet-18 of an eighth of its width."""
    model: nn.Module = timm.create_model("resnet18", num_classes=10, channels=(8, 16, 32, 64))
    return model


def vit() -> nn.Module:
    return timm.models.VisionTransformer(
        img_size=SIZE, patch_size=4, embed_dim=32, depth=4, num_heads=2, num_classes=10
    )


def vgg() -> nn.Module:
    """No shortcut: every stage keeps its input."""
    layers: list[nn.Module] = []
    for inside, outside in ((3, 16), (16, 16), (16, 32), (32, 32)):
        layers += [nn.Conv2d(inside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


MODELS = {"resnet": (resnet, 5), "vit": (vit, 3), "vgg": (vgg, 3)}


@functools.cache
def staged(name: str) -> StagedModel:
    torch.manual_seed(0)
    make, stages = MODELS[name]
    x = torch.randn(2, 3, SIZE, SIZE)
    return revcompile.petrafy(make(), stages, x, check="off", microbatch_size=BATCH)


@functools.cache
def measured(name: str, method: str) -> Measured:
    return measure(staged(name), METHODS[method], images(BATCH, SIZE, CPU))


each = pytest.mark.parametrize("name", MODELS)
every = pytest.mark.parametrize("method", METHODS)


@each
@every
def test_stages_hold_what_is_accounted(name: str, method: str) -> None:
    """To the byte: parameters, gradients, optimizer state and micro-batches in flight."""
    *rows, last = measured(name, method).rows
    for row in (*rows, last):
        for kind in ("parameters", "gradients", "optimizer"):
            assert getattr(row.held, kind) == getattr(row.accounted, kind) > 0, (kind, row)
    for row in rows:
        assert row.held.buffers == row.accounted.buffers
        used = row.accounted.messages - row.arriving
        assert 0 < row.accounted.waiting + used <= row.held.messages
        labels = BATCH * torch.int64.itemsize  # travel with the stream, and are not accounted
        assert row.held.messages <= row.accounted.waiting + row.accounted.messages + labels
    # The last stage may hold graphs as well, which are accounted as work.
    assert 0 <= last.held.buffers - last.accounted.buffers <= last.accounted.working


@each
def test_a_stage_holds_the_versions_in_flight(name: str) -> None:
    """And perhaps a copy of the newest, which is what the parameters still are."""
    for row in measured(name, "delayed").rows:
        assert 0 <= row.held.stashed - row.accounted.stashed <= row.accounted.parameters
    assert measured(name, "delayed").rows[0].accounted.stashed > 0
    assert all(row.held.stashed == 0 for row in measured(name, "petra").rows)


@each
@every
def test_the_peak_follows_the_accounting(name: str, method: str) -> None:
    found = measured(name, method)
    assert found.ratio == pytest.approx(1, abs=BAR), found


@functools.cache
def partly_frozen(stages: int, when: str) -> StagedModel:
    """The first two blocks have nothing to train."""
    torch.manual_seed(0)
    model = vit()
    frozen = {
        n for n, _ in model.named_parameters() if not n.startswith(("blocks.2", "blocks.3", "head"))
    }
    frozen |= {"blocks.3.attn.qkv.bias"}  # and not the rest of its block

    def freeze(module: nn.Module) -> None:
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name not in frozen)

    if when == "before it is cut":
        freeze(model)
    x = torch.randn(2, 3, SIZE, SIZE)
    net = revcompile.petrafy(model, stages, x, check="off", microbatch_size=BATCH)
    freeze(net.model)
    return net


@pytest.mark.parametrize("method", ["petra", "dsp", "delayed", "pipedream"])
@cases("stages, when", (4, "before it is cut"), (4, "afterwards"), (3, "afterwards"))
def test_frozen_parameters_take_no_more_memory(method: str, stages: int, when: str) -> None:
    """Below the first block that has something to train nothing is kept or sent back.

    That block begins a stage, or is in the middle of one of three.
    """
    net = partly_frozen(stages, when)
    found = measure(net, Setting(BATCH, method), images(BATCH, SIZE, CPU))
    for row in found.rows:
        for kind in ("parameters", "gradients", "stashed", "optimizer"):
            assert getattr(row.held, kind) == getattr(row.accounted, kind), (kind, row)
    for row in found.rows[:-1]:
        assert row.held.buffers == row.accounted.buffers
    assert found.rows[0].accounted.messages == found.rows[0].held.buffers == 0
    assert found.rows[0].held.stashed == 0
    trained = [row.accounted.gradients > 0 for row in found.rows]
    assert trained == [False, True, True] if stages == 3 else [False, False, True, True], trained
    assert found.ratio == pytest.approx(1, abs=BAR), found
    gradients = [stage.memory.gradients for stage in net.facts()]
    assert gradients == [row.accounted.gradients for row in found.rows]


# -- limits ---------------------------------------------------------------------------------------


def test_a_limit_counts_the_batches_that_the_first_stage_keeps() -> None:
    """Two of them, of 96,000 bytes each; all else the stage holds are 145,584."""
    model = nn.Sequential(nn.Linear(1000, 4), nn.ReLU(), nn.Linear(4, 4))
    cut = functools.partial(revcompile.petrafy, model, 2, torch.randn(2, 1000), check="off")
    assert cut(memory_budget=337_584, microbatch_size=BATCH).num_stages == 2
    refuses(InputError, "does not fit 2 devices", cut, memory_budget=337_583, microbatch_size=BATCH)


# -- inputs that wait in fewer bits ----------------------------------------------------------------


@pytest.mark.parametrize("name", ["resnet", "vit", "vgg"])
def test_the_peak_with_inputs_in_fewer_bits(name: str) -> None:
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
    facts = net.facts(net.workload(kept_input_dtype=buffers))
    for index, memory in enumerate(stage.memory for stage in facts[:-1]):
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
    ways = [net.workload(kept_input_dtype=kind) for kind in (None, torch.bfloat16)]
    plain, half = (net.facts(workload)[0].memory.buffers for workload in ways)
    batch = BATCH * 3 * SIZE * SIZE * 4
    assert [plain, half] == [3 * batch, 2 * batch]
    summary = net.summary(ways[1])
    assert "petra, inputs in 16 bits, micro-batches" in " ".join(summary.split())
