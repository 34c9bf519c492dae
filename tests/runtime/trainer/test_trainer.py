"""The trainer as its users meet it: any optimizer, any inputs and loss, any model."""

import copy
import gc
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import training
from helpers import refilling, worst
from nets import Chain
from torch import Tensor, nn
from torch.nn import functional as F
from training import Plain, batches, feed, fresh, plain_sgd, same, seeded, trainer_of, weights

import revcompile

# -- optimizers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["backprop", "reversible_backprop", "gpipe", "1f1b"])
def test_clipping_groups_and_schedules_are_those_of_a_plain_loop(method: str) -> None:
    def groups(named: list[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
        return [
            {"params": [p for n, p in named if not n.endswith("bias")]},
            {"params": [p for n, p in named if n.endswith("bias")], "weight_decay": 0.0},
        ]

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.3)

    net = fresh(Plain)
    model = net.to_module()
    mine = optimizer(groups(list(model.named_parameters())))
    clipped = {
        "clip": 0.05,
        "accumulation_steps": 2,
        "schedule": training.SCHEDULES["one cycle"](mine),
    }
    expected = training.plain_loop(model, mine, batches(8), **clipped)
    trainer = trainer_of(
        net,
        optimizer,
        method=method,
        accumulation_steps=2,
        clip_grad_norm=0.05,
        param_groups=groups,
        lr_schedule=training.SCHEDULES["one cycle"],
    )
    feed(trainer, batches(8))
    assert worst(expected, weights(net))[0] < 1e-10
    assert trainer.metrics is not None
    assert trainer.metrics.lr == pytest.approx(mine.param_groups[0]["lr"])


@pytest.mark.parametrize("method", ["petra", "backprop"])
def test_clipping_leaves_gradients_within_the_norm_alone(method: str) -> None:
    ends = []
    for clip in (None, 1e6):
        net = fresh(Plain)
        feed(trainer_of(net, method=method, clip_grad_norm=clip), batches(3))
        ends.append(weights(net))
    assert same(*ends)


# -- inputs and outputs of every form -------------------------------------------------------------


class Words(nn.Module):
    """Token ids and a mask that only the end reads; an auxiliary head after the first block."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.aux, self.head = nn.Linear(6, 2), nn.Linear(6, 3)

    def forward(self, words: Tensor, *, mask: Tensor) -> dict[str, Any]:
        x = self.embed(words)
        for index, block in enumerate(self.blocks):
            x = x + torch.tanh(block(x))
            if index == 0:
                aux = self.aux(x.mean(1))
        return {"main": (self.head((x * mask[..., None]).mean(1)), mask), "aux": [aux]}


def words_loss(output: dict[str, Any], target: dict[str, Any]) -> Tensor:
    logits, mask = output["main"]
    main = F.cross_entropy(logits, target["labels"]) * mask.mean()
    return main + F.mse_loss(output["aux"][0], target["aux"]["values"])


def words_batch(index: int, size: int = 3) -> training.Batch:
    generator = torch.Generator().manual_seed(index)
    inputs = {
        "words": torch.randint(0, 11, (size, 4), generator=generator),
        "mask": torch.rand(size, 4, generator=generator, dtype=torch.float64),
    }
    target = {
        "labels": torch.randint(0, 3, (size,), generator=generator),
        "aux": {"values": torch.rand(size, 2, generator=generator, dtype=torch.float64)},
    }
    return inputs, target


@pytest.mark.parametrize("method", training.METHODS)
def test_pytrees_in_and_out(method: str) -> None:
    """With a standing optimizer every method's gradient is autograd's."""
    inputs, _ = words_batch(0)
    args, kwargs = (inputs["words"],), {"mask": inputs["mask"]}
    net = revcompile.petrafy(seeded(Words), 4, args, kwargs, check="off")
    model = net.to_module()
    data = [words_batch(index, size=2 + index % 2) for index in range(7)]
    losses = [words_loss(model(**inputs), target) for inputs, target in data]
    torch.stack(losses).mean().backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    trainer = trainer_of(net, plain_sgd, words_loss, method=method, accumulation_steps=7)
    before = {name: p.detach().clone() for name, p in net.model.named_parameters()}
    assert feed(trainer, data) == pytest.approx([loss.item() for loss in losses])
    trainer.flush()
    after = dict(net.model.named_parameters())
    found = {name: (before[name] - after[name].detach()) / 0.1 for name in before}
    assert worst(expected, found)[0] < 1e-10
    assert trainer.metrics is not None
    assert list(trainer.metrics.output) == ["main", "aux"]
    assert trainer.evaluate(data).samples == sum(len(t["labels"]) for _, t in data)


@pytest.mark.parametrize(
    "settings", [*({"method": m} for m in training.METHODS), {"backend": "static"}]
)
def test_callers_may_write_to_batches_and_outputs(settings: dict[str, Any]) -> None:
    """Also by numpy, unseen by autograd. The mask is an input of the last stage and an output."""
    inputs, _ = words_batch(0)
    given = (inputs["words"],), {"mask": inputs["mask"]}
    net = revcompile.petrafy(seeded(Words), 4, *given, check="off")
    expected, settings = copy.deepcopy(net), {"accumulation_steps": 2, **settings}
    untouched, trainer = (
        trainer_of(each, plain_sgd, words_loss, **settings) for each in (expected, net)
    )
    for batch in map(words_batch, range(9)):
        untouched.step(*batch)
        output = refilling(trainer.step, *batch).output
        output["main"][1].detach().numpy()[:] = 7.0
    for each in (untouched, trainer):
        each.flush()
    assert same(weights(net), weights(expected))


# -- precision ------------------------------------------------------------------------------------


def gradient_of(net: revcompile.StagedModel, data: list[training.Batch], **settings: Any) -> Any:
    """The mean gradient over the data, from one update with a learning rate of 1."""
    before = {name: p.detach().clone() for name, p in net.model.named_parameters()}

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1.0)

    trainer = trainer_of(net, optimizer, accumulation_steps=len(data), **settings)
    errors = training.rebuilt_errors(trainer)
    training.drained(trainer, data)
    after = dict(net.model.named_parameters())
    gradients = {name: (before[name] - after[name].detach()).float() for name in before}
    return gradients, [error for of_stage in errors.values() for error in of_stage]


def deep() -> nn.Module:
    """Enough layer norms and blocks that a last bit would grow."""
    blocks = (nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU()) for _ in range(8))
    return nn.Sequential(nn.Linear(5, 16), Chain(*blocks), nn.Linear(16, 3))


def test_autocast_reconstructs_exactly_with_standing_weights() -> None:
    data = batches(6, dtype=torch.float32)
    settings: dict[str, Any] = {"autocast": torch.bfloat16}
    expected, _ = gradient_of(fresh(deep, 4, torch.float32), data, method="backprop", **settings)
    found, errors = gradient_of(fresh(deep, 4, torch.float32), data, **settings)
    precise, _ = gradient_of(fresh(deep, 4, torch.float32), data, method="backprop")
    noise = worst(precise, expected)[0]
    assert noise > 1e-3  # autocast was on
    assert worst(expected, found)[0] < noise
    assert errors and max(errors) == 0.0


def test_streams_are_rebuilt_nearly_while_weights_move() -> None:
    trainer = trainer_of(fresh(deep, 4, torch.float32), autocast="bf16")
    assert trainer._settings.autocast is torch.bfloat16
    errors = training.rebuilt_errors(trainer)
    feed(trainer, batches(10, dtype=torch.float32))
    assert {*errors[0], *errors[3]} == {0.0}  # nothing to rebuild; no delay at the last stage
    assert all(0.0 < errors[stage][-1] < 0.2 for stage in (1, 2))


def test_a_model_in_bfloat16() -> None:
    data = batches(6, dtype=torch.bfloat16)
    found, errors = gradient_of(fresh(deep, 4, torch.bfloat16), data)
    expected, _ = gradient_of(fresh(deep, 4, torch.bfloat16), data, method="backprop")
    precise = batches(6, dtype=torch.float32)
    reference, _ = gradient_of(fresh(deep, 4, torch.float32), precise, method="backprop")
    assert max(errors) == 0.0
    assert worst(reference, found)[0] < 2 * worst(reference, expected)[0] + 0.02


# -- models of every kind -------------------------------------------------------------------------


def test_sparse_gradients_are_gathered_dense() -> None:
    found = []
    for sparse in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(11, 6, sparse=sparse), nn.Linear(6, 11)).double()
        net = revcompile.petrafy(model, 2, torch.zeros(3, 5, dtype=torch.long), check="off")
        loss = lambda output, target: F.cross_entropy(output.flatten(0, 1), target)  # noqa: E731
        trainer = trainer_of(net, plain_sgd, loss, accumulation_steps=2, clip_grad_norm=0.1)
        words = torch.randint(11, (6, 3, 6))
        feed(trainer, [(each[:, :-1], each[:, 1:].flatten()) for each in words])
        found.append(weights(net))
    assert same(*found)


def vgg() -> nn.Module:
    layers = [nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(inplace=True)]
    for _ in range(3):
        layers += [nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.Linear(6, 3))


class Frozen(Plain):
    """A stem that does not learn, and a bias in the middle that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.stem.requires_grad_(False)
        self.layers[1].bias.requires_grad_(False)


def spectral() -> nn.Module:
    model = Plain()
    nn.utils.parametrizations.spectral_norm(model.layers[1])
    nn.utils.parametrizations.spectral_norm(model.head)
    return model


def bare() -> nn.Module:
    """Stages without a single parameter at both ends."""
    blocks = (nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(4))
    return nn.Sequential(nn.Tanh(), Chain(*blocks), nn.Softplus())


@pytest.mark.parametrize("method", ["backprop", "reversible_backprop", "1f1b"])
@pytest.mark.parametrize("make", [vgg, Frozen, spectral, bare])
def test_any_model_equals_a_plain_loop(make: Callable[[], nn.Module], method: str) -> None:
    """Buffers included: running statistics and power iterations move once a micro-batch."""
    net = fresh(make, 3)
    model = net.to_module()
    trained = [p for p in model.parameters() if p.requires_grad]
    expected = training.plain_loop(model, training.momentum(trained), batches(5))
    feed(trainer_of(net, method=method), batches(5))
    assert worst(expected, weights(net))[0] < 1e-9


def test_nothing_reaches_the_users_model() -> None:
    model = seeded(training.Net)
    model.last.eval()
    modes = [module.training for module in model.modules()]
    before = copy.deepcopy(model.state_dict())
    torch.manual_seed(3)
    net = revcompile.petrafy(model, 3, batches(1)[0][0], check="fast")
    drawn = torch.rand(1)
    feed(trainer_of(net), batches(4))
    torch.manual_seed(3)
    assert torch.equal(torch.rand(1), drawn)
    assert same(dict(model.state_dict()), dict(before))
    assert [module.training for module in model.modules()] == modes
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("is_whole", [True, False])
def test_only_layers_that_are_in_eval_mode_by_themselves_stay_in_it(is_whole: bool) -> None:
    layers = [nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Linear(5, 5), nn.BatchNorm1d(5)]
    model = nn.Sequential(*layers).double()
    (model if is_whole else model[1]).eval()
    x = batches(1)[0][0]
    trainer = trainer_of(net := revcompile.petrafy(model, 2, x), loss=F.mse_loss)
    feed(trainer, [(x, x)] * 2)
    trainer.evaluate([(x, x)])
    training.drained(trainer, [(x, x)] * 2)
    calls = [int(net.to_module().get_submodule(path).num_batches_tracked) for path in ("1", "3")]
    assert calls == ([4, 4] if is_whole else [0, 4])


def test_the_module_is_a_copy_of_the_current_weights() -> None:
    net = fresh()
    trainer = trainer_of(net)
    feed(trainer, batches(3))
    module = net.to_module()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    assert same(before, weights(net))
    feed(trainer, batches(3, seed=2))
    assert same(dict(module.state_dict()), before)
    with pytest.raises(AttributeError, match=re.escape("net.to_module() is the module")):
        net.state_dict  # noqa: B018


def test_a_trainer_that_nobody_has_any_more_lets_go_of_its_micro_batches() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, norm_first=True, batch_first=True)
    net = revcompile.petrafy(layer, 2, torch.randn(2, 5, 8), check="off")
    trainer = net.trainer(lambda p: torch.optim.SGD(p, lr=0.1), F.mse_loss)
    x = torch.randn(4, 5, 8)
    trainer.step(x, torch.zeros(4, 5, 8))
    held = weakref.ref(next(iter(trainer._executors[0].stage.in_flight.values())))
    gc.disable()
    try:
        del trainer
        assert held() is None
    finally:
        gc.enable()


def test_a_gradient_is_sent_before_that_of_parameters_is_added() -> None:
    """The stage before waits for it."""
    trainer = trainer_of(fresh(stages=3), accumulation_steps=8)
    last = trainer._executors[-1]
    send, seen = last._send, []
    last._send = lambda *message: (seen.append(dict(last.stage.gradients)), send(*message))
    feed(trainer, batches(1))
    assert seen == [{}] and last.stage.gradients
