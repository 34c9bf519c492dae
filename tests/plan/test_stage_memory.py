"""The accounting of stages against what training really holds. Bytes are counted, not timed."""

import functools

import pytest
import timm
import torch
from torch import nn

import revcompile
from revcompile.errors import InputError
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
    return revcompile.petrafy(make(), stages, torch.randn(2, 3, SIZE, SIZE), check="off")


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
        assert row.held.messages <= row.accounted.waiting + row.accounted.messages
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
    net = revcompile.petrafy(model, stages, torch.randn(2, 3, SIZE, SIZE), check="off")
    freeze(net.model)
    return net


@pytest.mark.parametrize("method", ["petra", "dsp", "delayed", "pipedream"])
@pytest.mark.parametrize(
    ("stages", "when"), [(4, "before it is cut"), (4, "afterwards"), (3, "afterwards")]
)
def test_frozen_parameters_have_no_gradients_nor_copies_nor_optimizer_state(
    method: str, stages: int, when: str
) -> None:
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
    gradients = [stage.gradients for stage in net.memory(BATCH)]
    assert gradients == [row.accounted.gradients for row in found.rows]


# -- limits ---------------------------------------------------------------------------------------


def cuts(net: StagedModel) -> list[int]:
    """How many pieces each stage has."""
    return [len(part.pieces) for part in net._partition.parts]


def test_a_limit_counts_the_batches_that_the_first_stage_keeps() -> None:
    """Two of them, of 96,000 bytes each; all else the stage holds are 145,584."""
    model = nn.Sequential(nn.Linear(1000, 4), nn.ReLU(), nn.Linear(4, 4))
    cut = functools.partial(revcompile.petrafy, model, 2, torch.randn(2, 1000), check="off")
    assert cut(memory_budget=337_584, microbatch_size=BATCH).num_stages == 2
    with pytest.raises(InputError, match="does not fit 2 devices"):
        cut(memory_budget=337_583, microbatch_size=BATCH)
