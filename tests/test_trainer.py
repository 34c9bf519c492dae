"""The trainer as its users meet it: checkpoints, evaluation, bad input, any model and loss."""

from __future__ import annotations

import copy
import functools
import io
import re
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from helpers import worst
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.utils import _pytree as pytree

import revcompile
from revcompile.errors import InputError, NonFiniteError
from revcompile.runtime.trainer import Trainer

SAVED_IN_FLIGHT: Final = (
    ("petra", "half"),
    ("petra", "paper"),
    ("features_replay", None),
    ("dsp", None),
    ("pipedream", None),
    ("delayed", None),
    ("dni", None),
    ("backprop", None),
    ("reversible_backprop", None),
)
METHODS: Final = ("petra", "pipedream", "ddg", "backprop", "reversible_backprop", "gpipe", "1f1b")

Batch = tuple[Any, Any]


# -- models ---------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(torch.tanh(self.up(self.norm(x)))))


class Net(nn.Module):
    """Dropout, batch norms, couplings, opaque ends, and a layer that two distant blocks share."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first = nn.Linear(5, 6), nn.BatchNorm1d(6)
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.blocks[3].up = self.blocks[0].up
        self.last, self.head = nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.last(self.blocks(self.first(self.stem(x)))))


class Plain(nn.Module):
    """Couplings only in the middle; nothing random, no buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(5, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


def seeded(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float64) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make().to(dtype).train()


@functools.cache
def compiled(
    make: Callable[[], nn.Module], stages: int, dtype: torch.dtype = torch.float64
) -> revcompile.StagedModel:
    example = torch.zeros(4, 5, dtype=dtype)
    return revcompile.petrafy(seeded(make, dtype), stages, example, check="off")


def fresh(
    make: Callable[[], nn.Module] = Net, stages: int = 4, dtype: torch.dtype = torch.float64
) -> revcompile.StagedModel:
    """A staged model of its own: compiled once, copied for every test."""
    made = compiled(make, stages, dtype)
    return type(made)(copy.deepcopy(made.model), made.partition, made.method)


def batches(count: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> list[Batch]:
    """Micro-batches of four; every fifth has three samples."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [3 if index % 5 == 4 else 4 for index in range(count)]
    return [
        (
            torch.randn(size, 5, generator=generator, dtype=torch.float64).to(dtype),
            torch.randint(0, 3, (size,), generator=generator),
        )
        for size in sizes
    ]


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-2)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def plain_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


SCHEDULES: Final[dict[str, Callable[[Any], lr_scheduler.LRScheduler]]] = {
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=40),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 20),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda update: 1 / (1 + update)),
    "milestones": lambda o: lr_scheduler.MultiStepLR(o, [3, 5], 0.5),
    "warm-up": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 3), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
}


def trainer_of(
    net: revcompile.StagedModel,
    optimizer: Any = momentum,
    loss: Any = F.cross_entropy,
    **settings: Any,
) -> Trainer:
    return net.trainer(optimizer, loss, **settings)


def feed(trainer: Trainer, data: list[Batch]) -> list[float]:
    return [trainer.step(*batch).loss for batch in data]


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    loaded: dict[str, Any] = torch.load(buffer, weights_only=True)
    return loaded


def same(a: Any, b: Any) -> bool:
    """Equal to the bit, structure and all."""
    leaves, spec = pytree.tree_flatten(a)
    others, other_spec = pytree.tree_flatten(b)
    return spec == other_spec and all(map(_same_leaf, leaves, others))


def _same_leaf(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
    return bool(a == b)


def weights(net: revcompile.StagedModel) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in net.model.state_dict().items()}


# -- checkpoints ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "order", "schedule", "optimizer", "accumulate"),
    [
        *((*method, "one cycle", momentum, 1) for method in SAVED_IN_FLIGHT),
        *((*method, "cosine", adam, 3) for method in SAVED_IN_FLIGHT),
        ("petra", "half", "lambda", adam, 1),
        ("petra", "half", "milestones", momentum, 2),
        ("petra", "paper", "warm-up", momentum, 2),
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one(
    method: str, order: str | None, schedule: str, optimizer: Any, accumulate: int
) -> None:
    settings = {
        "method": method,
        "order": order,
        "accumulate": accumulate,
        "lr_schedule": SCHEDULES[schedule],
    }
    data = batches(13)
    whole = fresh()
    trainer = trainer_of(whole, optimizer, **settings)
    losses = feed(trainer, data[:8])
    state = through_a_file(trainer.state_dict())
    losses += feed(trainer, data[8:])
    trainer.flush()

    resumed = fresh()
    again = trainer_of(resumed, optimizer, **settings)
    feed(again, batches(2, seed=9))  # something else is in flight, and is forgotten
    again.load_state_dict(state)
    assert same(again.state_dict(), state)
    assert feed(again, data[8:]) == losses[8:]
    again.flush()
    assert same(weights(resumed), weights(whole))
    assert same(again.state_dict(), trainer.state_dict())


@pytest.mark.parametrize("method", ["ddg", "gpipe", "1f1b"])
def test_methods_that_keep_graphs_are_saved_after_a_flush(method: str) -> None:
    whole, resumed = fresh(), fresh()
    trainer = trainer_of(whole, method=method, accumulate=3)
    feed(trainer, batches(4))
    before = weights(whole)
    with pytest.raises(InputError, match=re.escape("call trainer.flush() first")):
        trainer.state_dict()
    assert same(weights(whole), before)
    trainer.flush()
    state = through_a_file(trainer.state_dict())
    again = trainer_of(resumed, method=method, accumulate=3)
    again.load_state_dict(state)
    for one in (trainer, again):
        feed(one, batches(7, seed=2))
        one.flush()
    assert same(weights(resumed), weights(whole))


def test_a_saved_state_does_not_change_when_training_goes_on() -> None:
    trainer = trainer_of(fresh(), adam, lr_schedule=SCHEDULES["warm-up"])
    feed(trainer, batches(6))
    state = trainer.state_dict()
    before = copy.deepcopy(state)
    feed(trainer, batches(6, seed=2))
    trainer.load_state_dict(state)
    feed(trainer, batches(6, seed=3))
    assert same(state, before)


def test_a_resumed_run_draws_the_masks_of_the_saved_one() -> None:
    whole, resumed = fresh(), fresh()
    trainer, again = trainer_of(whole, seed=3), trainer_of(resumed, seed=4)
    feed(trainer, batches(5))
    again.load_state_dict(trainer.state_dict())
    assert feed(trainer, batches(4, seed=2)) == feed(again, batches(4, seed=2))
    assert again.state_dict()["seed"] == 3


def test_clipping_goes_on_after_going_back() -> None:
    """Norms that other stages had announced for an update must not survive a load."""
    settings = {"method": "backprop", "clip_grad_norm": 0.1}
    net = fresh()
    trainer = trainer_of(net, **settings)
    feed(trainer, batches(3))
    state = trainer.state_dict()
    feed(trainer, batches(1, seed=2))
    trainer.load_state_dict(state)
    feed(trainer, batches(1, seed=3))
    straight = fresh()
    other = trainer_of(straight, **settings)
    feed(other, [*batches(3), *batches(1, seed=3)])
    assert same(weights(net), weights(straight))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stages", [1, 3, 6])
def test_a_flushed_state_moves_to_other_stages(stages: int, schedule: str) -> None:
    """Locked methods do not depend on the cuts, so the run goes on as if nothing had moved."""

    def groups(named: list[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
        decayed = [p for n, p in named if n.endswith("weight")]
        others = [p for n, p in named if not n.endswith("weight")]
        found = [{"params": decayed}, {"params": others, "weight_decay": 0.0, "lr": 0.02}]
        return [group for group in found if group["params"]]

    settings = {
        "method": "backprop",
        "accumulate": 2,
        "lr_schedule": SCHEDULES[schedule],
        "param_groups": groups,
    }
    whole, moved = fresh(Plain, 4), fresh(Plain, stages)
    trainer = trainer_of(whole, adam, **settings)
    feed(trainer, batches(5))
    trainer.flush()
    again = trainer_of(moved, adam, **settings)
    feed(again, batches(1, seed=3))
    again.load_state_dict(through_a_file(trainer.state_dict()))
    assert again.schedule.updates == (3,) * stages
    for one in (trainer, again):
        feed(one, batches(6, seed=2))
    assert again.metrics is not None and trainer.metrics is not None
    assert again.metrics.microbatch == trainer.metrics.microbatch == 10
    assert again.metrics.updates == (6,) * stages
    assert again.metrics.lr == trainer.metrics.lr
    assert worst(weights(whole), weights(moved))[0] < 1e-12


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        ({"method": "petra"}, 2),
        ({"method": "backprop", "accumulate": 3}, 2),  # gradients that are not applied yet
        ({"method": "dni"}, 1),  # a synthesiser that has not learned from it yet
        ({"method": "backprop"}, 1),  # tied weights on their way
    ],
)
def test_a_state_with_something_unfinished_stays_with_its_stages(
    settings: dict[str, Any], count: int
) -> None:
    trainer = trainer_of(fresh(Net, 4), **settings)
    feed(trainer, batches(count))
    net = fresh(Net, 2)
    other = trainer_of(net, **settings)
    before = other.state_dict()
    with pytest.raises(InputError, match=re.escape("call flush() before state_dict()")):
        other.load_state_dict(trainer.state_dict())
    assert same(other.state_dict(), before)
    trainer.flush()
    other.load_state_dict(trainer.state_dict())
    assert same(weights(net), trainer.state_dict()["model"])


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    trainer = trainer_of(fresh())
    feed(trainer, batches(3))
    state = trainer.state_dict()
    wrong_shape = {**state, "model": {**state["model"], "head.bias": torch.zeros(9)}}
    missing = {**state, "model": {k: v for k, v in state["model"].items() if k != "head.bias"}}
    with_adam = trainer_of(fresh(), adam).state_dict()
    for bad, said in [
        ({"weights": 1}, r"what trainer.state_dict\(\) returns .*got None"),
        (state["model"], "got None"),
        (wrong_shape, r"head.bias has shape \(9,\) in it, \(3,\) here"),
        (missing, "lacks head.bias"),
        (with_adam, "stage 0 has torch.optim.sgd.SGD, but .* has no 'dampening'"),
    ]:
        with pytest.raises(InputError, match=said):
            trainer.load_state_dict(bad)
        assert same(trainer.state_dict(), state)
    feed(trainer, batches(3, seed=2))


# -- evaluation -----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_evaluation_does_not_disturb_training(method: str) -> None:
    looked_at, left_alone = fresh(), fresh()
    a, b = (trainer_of(net, method=method, accumulate=2) for net in (looked_at, left_alone))
    torch.manual_seed(5)
    expected = [torch.rand(1), feed(b, batches(7)), b.flush(), torch.rand(1)]
    torch.manual_seed(5)
    found: list[Any] = [torch.rand(1), []]
    for index, batch in enumerate(batches(7)):
        found[1] += feed(a, [batch])
        if index % 2:
            a.evaluate(batches(3, seed=index))
    found += [a.flush(), torch.rand(1)]
    assert same(found, expected)
    assert same(weights(looked_at), weights(left_alone))


def test_evaluation_is_the_module_in_eval_mode_averaged_over_samples() -> None:
    net = fresh()
    trainer = trainer_of(net)
    feed(trainer, batches(6))
    frozen = net.model.get_submodule("last")
    frozen.eval()
    modes = [module.training for module in net.model.modules()]
    data = batches(5, seed=2)

    def accuracy(output: Tensor, target: Tensor) -> Tensor:
        return (output.argmax(1) == target).double().mean()

    found = trainer.evaluate(iter(data), {"accuracy": accuracy})
    x, y = (torch.cat(part) for part in zip(*data, strict=True))
    output = net.module().eval()(x).detach()
    assert found.samples == 19
    assert found.loss == pytest.approx(float(F.cross_entropy(output, y)), rel=1e-12)
    assert found.metrics == {"accuracy": pytest.approx(float(accuracy(output, y)))}
    assert [module.training for module in net.model.modules()] == modes


def test_evaluation_says_what_is_wrong_and_restores_the_mode() -> None:
    net = fresh()
    trainer = trainer_of(net)
    before = trainer.state_dict()
    x, _ = batches(1)[0]
    for loader, said in [
        ([], "the loader is empty"),
        ([x], r"expected batches of \(inputs, target\), got float64\[4, 5\]"),
        ([(x, torch.zeros(2, 2))], r"loss, evaluation, batch 0: .*\n.*output: float64\[4, 3\]"),
    ]:
        with pytest.raises(InputError, match=said):
            trainer.evaluate(loader)
        assert net.model.training
        assert same(trainer.state_dict(), before)


class WithAuxiliary(nn.Module):
    """Two outputs in training, one in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.aux = Plain(), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Any:
        out = self.body(x)
        return (out, self.aux(x)) if self.training else out


def test_a_model_with_another_structure_in_eval_mode() -> None:
    def loss(output: Any, target: Tensor) -> Tensor:
        outputs = output if isinstance(output, tuple) else (output,)
        return torch.stack([F.cross_entropy(o, target) for o in outputs]).sum()

    net = fresh(WithAuxiliary, 3)
    trainer = trainer_of(net, loss=loss, method="1f1b")
    feed(trainer, batches(3))
    assert isinstance(trainer.step(*batches(1)[0]).output, tuple)
    found = trainer.evaluate(batches(2))
    model = net.module().eval()
    each = [(loss(model(x), y).item(), len(y)) for x, y in batches(2)]
    assert found.loss == pytest.approx(sum(value * n for value, n in each) / 8)


def test_metrics_of_a_step() -> None:
    trainer = trainer_of(fresh(), accumulate=2, measure_every=3)
    found = [trainer.step(*batch) for batch in batches(6)]
    assert [m.microbatch for m in found] == list(range(6))
    assert [m.samples for m in found] == [4, 4, 4, 4, 3, 4]
    assert found[-1].delays == (2, 1, 1, 0)
    assert found[-1].updates == (1, 2, 2, 3)
    assert found[-1].lr == 0.05
    assert found[-1].throughput > 0
    assert found[-1].output.shape == (4, 3)
    assert trainer.metrics is found[-1]
    # micro-batch 0 is at stage 3 in step 0, at stage 2 in step 1, at stage 1 in step 2
    assert [sorted(m.reconstruction) for m in found] == [[3], [2], [1], [3], [2], [1]]


def test_samples_are_counted_where_the_batch_is() -> None:
    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = Plain()

        def forward(self, scale: Tensor, x: Tensor) -> Tensor:
            return self.body(x.unflatten(0, (-1, 2)).mean(1) * scale)

    def inputs(samples: int) -> tuple[Tensor, Tensor]:
        return torch.ones((), dtype=torch.float64), torch.zeros(samples, 5, dtype=torch.float64)

    net = revcompile.petrafy(seeded(Pairs), 2, inputs(4), check="off")
    trainer = trainer_of(net)
    batch = inputs(6), torch.zeros(3, dtype=torch.long)
    assert trainer.step(*batch).samples == 6
    assert trainer.evaluate([batch]).samples == 6


# -- bad input ------------------------------------------------------------------------------------

BAD_STEPS: Final[dict[str, tuple[Callable[[Any, Any], Batch], str]]] = {
    "a target that does not fit": (
        lambda x, y: (x, y[:2]),
        r"loss, micro-batch 4: it raised .*\n  output: float64\[4, 3\]\n  target: int64\[2\]",
    ),
    "a wrong shape": (
        lambda x, y: (x[:, :4], y),
        r"the model failed on this micro-batch: .*\n  captured with: x: float64\[B, 5\]\n"
        r"  got:           x: float64\[4, 4\]",
    ),
    "a wrong type": (lambda x, y: (x.float(), y), "captured with: x: float64"),
    "no tensor": (lambda x, y: ("x", y), "expected a tensor for x, got 'x'"),
    "too many inputs": (lambda x, y: ((x, x), y), "too many positional arguments"),
    "another keyword": (lambda x, y: ({"z": x}, y), "missing a required argument: 'x'"),
    "not a number in the data": (
        lambda x, y: (x.clone().fill_(float("nan")), y),
        "stage 3, micro-batch 4: the loss is nan",
    ),
    "infinity in the data": (
        lambda x, y: (x.clone().fill_(float("inf")), y),
        "stage 3, micro-batch 4: the loss is nan",
    ),
}


@pytest.mark.parametrize("method", [*METHODS, "dni"])
def test_a_bad_step_leaves_no_trace(method: str) -> None:
    settings = {"method": method, "accumulate": 2, "lr_schedule": SCHEDULES["cosine"]}
    spoiled, clean = fresh(), fresh()
    a, b = (trainer_of(net, **settings) for net in (spoiled, clean))
    feed(a, batches(4))
    in_flight = method in ("ddg", "gpipe", "1f1b") and bool(a.schedule.outstanding[0])
    before = weights(spoiled), None if in_flight else a.state_dict()
    for bad, said in BAD_STEPS.values():
        with pytest.raises((InputError, NonFiniteError), match=said):
            a.step(*bad(*batches(1, seed=3)[0]))
        assert same((weights(spoiled), None if in_flight else a.state_dict()), before)
    feed(b, batches(4))
    assert feed(a, batches(6, seed=2)) == feed(b, batches(6, seed=2))
    a.flush(), b.flush()
    assert same(weights(spoiled), weights(clean))


class Root(nn.Module):
    """Its value is fine at zero, its gradient is not."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale).square().sum(1, keepdim=True).sqrt() + x


class RootFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.root, self.body = Root(5), Net()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.root(x))


class RootLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.root = Plain(), Root(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.root(self.body(x) * x.mean(1, keepdim=True))


@pytest.mark.parametrize("method", ["petra", "pipedream", "backprop", "dni"])
def test_a_gradient_that_is_not_finite_is_taken_back_at_the_last_stage(method: str) -> None:
    spoiled, clean = fresh(RootLast), fresh(RootLast)
    a, b = (trainer_of(net, method=method, accumulate=2) for net in (spoiled, clean))
    feed(a, batches(3))
    before = a.state_dict()
    x, y = batches(1, seed=3)[0]
    with pytest.raises(NonFiniteError, match=r"stage 3, micro-batch 3: .* parameter \w") as raised:
        a.step(torch.zeros_like(x), y)
    assert (raised.value.stage, raised.value.microbatch) == (3, 3)
    assert "Nothing was changed" in str(raised.value)
    assert same(a.state_dict(), before)
    feed(b, batches(3))
    assert feed(a, batches(4, seed=2)) == feed(b, batches(4, seed=2))
    assert same(a.state_dict(), b.state_dict())


@pytest.mark.parametrize("method", ["backprop", "reversible_backprop"])
def test_locked_methods_take_back_a_gradient_of_any_stage(method: str) -> None:
    spoiled, clean = fresh(RootFirst), fresh(RootFirst)
    a, b = (trainer_of(net, method=method, accumulate=2) for net in (spoiled, clean))
    feed(a, batches(3))
    before = a.state_dict()
    x, y = batches(1, seed=3)[0]
    with pytest.raises(NonFiniteError, match=r"stage 0, micro-batch 3: .* parameter root\.scale"):
        a.step(torch.zeros_like(x), y)
    assert same(a.state_dict(), before)
    feed(b, batches(3))
    assert feed(a, batches(4, seed=2)) == feed(b, batches(4, seed=2))
    assert same(a.state_dict(), b.state_dict())


@pytest.mark.parametrize("method", ["petra", "pipedream", "ddg", "1f1b"])
def test_a_gradient_that_is_not_finite_on_its_way_back_is_left_out(method: str) -> None:
    """Later stages have used it already; the stage that meets it, and those before, do not."""
    net = fresh(RootFirst)
    trainer = trainer_of(net, method=method)
    x, y = batches(1, seed=3)[0]
    errors = []
    for inputs, target in [*batches(4), (torch.zeros_like(x), y), *batches(6, seed=2)]:
        root = net.model.get_parameter("root.scale").clone()
        try:
            trainer.step(inputs, target)
        except NonFiniteError as error:
            errors.append(error)
            assert torch.equal(net.model.get_parameter("root.scale"), root)
    (error,) = errors
    assert (error.stage, error.microbatch) == (0, 4)
    assert "parameter root.scale" in str(error)
    trainer.flush()
    assert all(t.isfinite().all() for t in weights(net).values())
    trainer.state_dict()


def test_a_step_that_the_user_interrupts_leaves_no_trace() -> None:
    def loss(output: Tensor, target: Any) -> Tensor:
        if target is None:
            raise KeyboardInterrupt
        return F.cross_entropy(output, target)

    trainer = trainer_of(fresh(), loss=loss)
    feed(trainer, batches(5))
    before = trainer.state_dict()
    with pytest.raises(KeyboardInterrupt):
        trainer.step(batches(1)[0][0], None)
    assert same(trainer.state_dict(), before)


def test_bad_arguments() -> None:
    net = fresh()
    parameters = list(net.model.parameters())
    for arguments, said in [
        ({"optimizer": lambda p: None}, "stage 0: expected a torch.optim.Optimizer .* got None"),
        ({"optimizer": momentum(parameters)}, "expected a function from a list of parameters"),
        ({"optimizer": "sgd"}, "expected a function .* got builtins.str"),
        ({"optimizer": lambda p: momentum(parameters)}, "it holds parameters of other places"),
        ({"optimizer": lambda p: momentum(p[:1])}, "it lacks stem.bias"),
        ({"optimizer": torch.optim.LBFGS}, "stage 0: .*LBFGS computes the loss several times"),
        ({"loss": 3}, r"expected a function of \(output, target\), got int"),
        ({"loss": nn.Linear(3, 1)}, "parameters of its own"),
        ({"accumulate": 0}, "accumulate=0"),
        ({"clip_grad_norm": 0.0}, "use a positive norm"),
        ({"autocast": torch.float16}, "float16 needs loss scaling"),
        ({"method": "petre"}, "did you mean 'petra'"),
        ({"method": "backprop", "order": "paper"}, "has a fixed order"),
        ({"order": "third"}, 'use "half" or "paper"'),
        ({"lr_schedule": lambda o: 0.1}, "stage 0: expected .* torch.optim.lr_scheduler"),
        ({"lr_schedule": lr_scheduler.ReduceLROnPlateau}, "needs a metric at every step"),
        ({"param_groups": lambda named: []}, "stage 0: .* empty parameter list; .* param_groups= "),
        (
            {"param_groups": lambda named: [{"params": [p for _, p in named[1:]]}]},
            "it lacks stem.weight.* return every parameter once",
        ),
    ]:
        with pytest.raises(InputError, match=said):
            trainer_of(net, **arguments)
    for loss, said in [
        (lambda o, t: o, r"expected a scalar tensor, got float64\[4, 3\]"),
        (lambda o, t: 1.0, "expected a scalar tensor, got 1.0"),
        (lambda o, t: o.sum().detach(), "does not depend on the model's output"),
    ]:
        with pytest.raises(InputError, match=said):
            trainer_of(net, loss=loss).step(*batches(1)[0])
    with pytest.raises(InputError, match=r"num_stages=40, but Net has .* use num_stages <= "):
        revcompile.petrafy(Net(), 40, torch.zeros(4, 5), check="off")
    with pytest.raises(InputError, match=r"does not fit 2 devices of 0\.00 GiB"):
        revcompile.petrafy(Net(), 2, torch.zeros(4, 5), check="off", memory_limit=1000)


def test_an_input_written_to_while_in_flight_is_noticed() -> None:
    trainer = trainer_of(fresh())
    x, y = batches(1)[0]
    trainer.step(x, y)
    with pytest.raises(InputError, match="stage 0: x of micro-batch 0 was written to"):
        for _ in range(4):
            x.normal_()
            trainer.step(x, y)
    with pytest.raises(RuntimeError, match=re.escape("load its last state_dict")):
        trainer.step(*batches(1)[0])


# -- optimizers -----------------------------------------------------------------------------------


def plain_loop(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: list[Batch],
    *,
    loss: Any = F.cross_entropy,
    accumulate: int = 1,
    clip: float | None = None,
    schedule: lr_scheduler.LRScheduler | None = None,
) -> dict[str, Tensor]:
    """What everybody writes, and what methods without a delay must equal."""
    for index, (inputs, target) in enumerate(data, 1):
        args = inputs if isinstance(inputs, tuple) else (inputs,)
        (loss(model(*args), target) / accumulate).backward()
        if index % accumulate == 0:
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            if schedule is not None:
                schedule.step()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


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
    model = net.module()
    mine = optimizer(groups(list(model.named_parameters())))
    clipped = {"clip": 0.05, "accumulate": 2, "schedule": SCHEDULES["one cycle"](mine)}
    expected = plain_loop(model, mine, batches(8), **clipped)
    trainer = trainer_of(
        net,
        optimizer,
        method=method,
        accumulate=2,
        clip_grad_norm=0.05,
        param_groups=groups,
        lr_schedule=SCHEDULES["one cycle"],
    )
    feed(trainer, batches(8))
    assert worst(expected, weights(net))[0] < 1e-10
    assert trainer.metrics is not None
    assert trainer.metrics.lr == pytest.approx(mine.param_groups[0]["lr"])


def test_petra_clips_the_norm_of_each_stage() -> None:
    seen: list[Tensor] = []

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        made = torch.optim.SGD(parameters, lr=0.0)
        own = list(parameters)
        made.register_step_pre_hook(
            lambda *_: seen.append(torch.stack([p.grad.norm() for p in own]).norm())
        )
        return made

    trainer = trainer_of(fresh(Plain), optimizer, clip_grad_norm=1e-3)
    feed(trainer, batches(6))
    trainer.flush()
    assert len(seen) == 4 * 6
    assert all(float(norm) == pytest.approx(1e-3, rel=1e-2) for norm in seen)


class Sums(nn.Module):
    """Autograd gives `p` and `q` one gradient, and with one sample the input the same."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(5, 6), nn.Linear(6, 3)
        self.p, self.q = nn.Parameter(torch.ones(1, 6)), nn.Parameter(torch.ones(1, 6))
        self.r = nn.Parameter(torch.ones(1, 6))

    def forward(self, x: Tensor) -> Tensor:
        x = (self.stem(x) + (self.p + self.q)) + self.r
        return self.head(x) + self.r.sum()


@pytest.mark.parametrize("method", ["backprop", "1f1b"])
@pytest.mark.parametrize("stages", [1, 2])
def test_gradients_that_share_memory(method: str, stages: int) -> None:
    data = [(x[:1], y[:1]) for x, y in batches(6)]
    net = fresh(Sums, stages)
    model = net.module()
    settings = {"accumulate": 3, "clip": 0.5}
    expected = plain_loop(model, momentum(model.parameters()), data, **settings)
    feed(trainer_of(net, method=method, accumulate=3, clip_grad_norm=0.5), data)
    assert worst(expected, weights(net))[0] < 1e-12


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


def words_batch(index: int, size: int = 3) -> Batch:
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


@pytest.mark.parametrize("method", METHODS)
def test_pytrees_in_and_out(method: str) -> None:
    """With a standing optimizer every method's gradient is autograd's."""
    inputs, _ = words_batch(0)
    args, kwargs = (inputs["words"],), {"mask": inputs["mask"]}
    net = revcompile.petrafy(seeded(Words), 4, args, kwargs, check="off")
    model = net.module()
    data = [words_batch(index, size=2 + index % 2) for index in range(7)]
    losses = [words_loss(model(**inputs), target) for inputs, target in data]
    torch.stack(losses).mean().backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    trainer = trainer_of(net, plain_sgd, words_loss, method=method, accumulate=7)
    before = {name: p.detach().clone() for name, p in net.model.named_parameters()}
    assert feed(trainer, data) == pytest.approx([loss.item() for loss in losses])
    trainer.flush()
    after = dict(net.model.named_parameters())
    found = {name: (before[name] - after[name].detach()) / 0.1 for name in before}
    assert worst(expected, found)[0] < 1e-10
    assert trainer.metrics is not None
    assert list(trainer.metrics.output) == ["main", "aux"]
    assert trainer.evaluate(data).samples == sum(len(t["labels"]) for _, t in data)


class Arranged(nn.Module):
    """An auxiliary head before a chain that goes on in another arrangement."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.aux = nn.Conv2d(3, 6, 3, padding=1), nn.Linear(6, 3)
        self.convs = nn.ModuleList(nn.Conv2d(6, 6, 1) for _ in range(2))
        self.mlps = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.stem(x)
        aux = self.aux(x.mean((2, 3)))
        for conv in self.convs:
            x = x + torch.tanh(conv(x))
        x = x.flatten(2).transpose(1, 2)
        for mlp in self.mlps:
            x = x + torch.tanh(mlp(x))
        return self.head(x.mean(1)), aux


@pytest.mark.parametrize("method", ["petra", "backprop", "dsp"])
def test_an_output_that_the_loss_does_not_read(method: str) -> None:
    """No gradient comes back for it, and its layers stay as they are."""
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    net = revcompile.petrafy(seeded(Arranged), 3, x, check="off")
    before = weights(net)
    trainer = trainer_of(
        net, plain_sgd, lambda output, target: F.cross_entropy(output[1], target), method=method
    )
    feed(trainer, [(x, torch.tensor([0, 1]))] * 4)
    trainer.flush()
    changed = {
        name for name, tensor in weights(net).items() if not torch.equal(tensor, before[name])
    }
    assert changed == {"stem.weight", "stem.bias", "aux.weight", "aux.bias"}


# -- precision ------------------------------------------------------------------------------------


def gradient_of(net: revcompile.StagedModel, data: list[Batch], **settings: Any) -> Any:
    """The mean gradient over the data, from one update with a learning rate of 1."""
    before = {name: p.detach().clone() for name, p in net.model.named_parameters()}

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1.0)

    trainer = trainer_of(net, optimizer, accumulate=len(data), **settings)
    found = [trainer.step(*batch) for batch in data]
    trainer.flush()
    after = dict(net.model.named_parameters())
    gradients = {name: (before[name] - after[name].detach()).float() for name in before}
    return gradients, [error for metrics in found for error in metrics.reconstruction.values()]


class Deep(nn.Module):
    """Enough layer norms and blocks that a last bit would grow."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(5, 16), nn.Linear(16, 3)
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU()) for _ in range(8))
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def test_autocast_reconstructs_exactly_with_standing_weights() -> None:
    data = batches(6, dtype=torch.float32)
    settings: dict[str, Any] = {"autocast": torch.bfloat16}
    expected, _ = gradient_of(fresh(Deep, 4, torch.float32), data, method="backprop", **settings)
    found, errors = gradient_of(fresh(Deep, 4, torch.float32), data, measure_every=1, **settings)
    precise, _ = gradient_of(fresh(Deep, 4, torch.float32), data, method="backprop")
    noise = worst(precise, expected)[0]
    assert noise > 1e-3  # autocast was on
    assert worst(expected, found)[0] < noise
    assert errors and max(errors) == 0.0


def test_reconstruction_errors_are_measured_while_weights_move() -> None:
    net = fresh(Deep, 4, torch.float32)
    trainer = trainer_of(net, autocast=torch.bfloat16, measure_every=2)
    found = [trainer.step(*batch).reconstruction for batch in batches(10, dtype=torch.float32)]
    seen = {stage: error for errors in found for stage, error in errors.items()}
    assert sorted(seen) == [1, 2, 3]
    assert seen[3] == 0.0  # no delay at the last stage
    assert all(0.0 < seen[stage] < 0.2 for stage in (1, 2))


def test_a_weight_read_with_and_without_a_graph_under_autocast() -> None:
    """The head of the last stage is recorded, a block of it is not; they share a weight."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.layer = nn.Linear(5, 5), nn.Linear(5, 5)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            x = x + torch.tanh(self.layer(x))
            return torch.tanh(x) @ self.layer.weight[:, :3]

    net = revcompile.petrafy(seeded(Shared, torch.float32), 1, torch.zeros(4, 5), check="off")
    data = batches(1, dtype=torch.float32)
    found, _ = gradient_of(net, data, autocast=torch.bfloat16)
    net = revcompile.petrafy(seeded(Shared, torch.float32), 1, torch.zeros(4, 5), check="off")
    expected, _ = gradient_of(net, data, method="backprop")
    assert worst(expected, found)[0] < 0.05


def test_a_model_in_bfloat16() -> None:
    data = batches(6, dtype=torch.bfloat16)
    found, errors = gradient_of(fresh(Deep, 4, torch.bfloat16), data, measure_every=1)
    expected, _ = gradient_of(fresh(Deep, 4, torch.bfloat16), data, method="backprop")
    precise = batches(6, dtype=torch.float32)
    reference, _ = gradient_of(fresh(Deep, 4, torch.float32), precise, method="backprop")
    assert max(errors) == 0.0
    assert worst(reference, found)[0] < 2 * worst(reference, expected)[0] + 0.02


# -- tied weights ---------------------------------------------------------------------------------


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)


def next_word(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def sentences(count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(2)
    found = [torch.randint(0, 11, (3, 6), generator=generator) for _ in range(count)]
    return [(words[:, :-1], words[:, 1:]) for words in found]


def language(stages: int) -> revcompile.StagedModel:
    # "pretrained": both streams start as one, and the head keeps its shape and its tie
    example = torch.zeros(3, 5, dtype=torch.long)
    model = seeded(Language)
    return revcompile.petrafy(model, stages, example, check="off", policy="pretrained")


@pytest.mark.parametrize("method", ["backprop", "1f1b", "gpipe", "reversible_backprop"])
def test_tied_ends_train_as_in_a_plain_loop(method: str) -> None:
    net = language(4)
    assert [(tie.owner, tie.holder) for tie in net.partition.ties] == [(0, 3)]
    model = net.module()
    expected = plain_loop(
        model, adam(model.parameters()), sentences(6), loss=next_word, accumulate=2
    )
    feed(trainer_of(net, adam, next_word, method=method, accumulate=2), sentences(6))
    assert worst(expected, weights(net))[0] < 1e-10


@pytest.mark.parametrize("method", ["petra", "pipedream"])
def test_tied_copies_are_equal_after_a_flush(method: str) -> None:
    net = language(4)
    trainer = trainer_of(net, momentum, next_word, method=method)
    feed(trainer, sentences(7))
    trainer.flush()
    owner, holder = (trainer.actors[index].stage.parameters["embed.weight"] for index in (0, 3))
    assert owner is not holder
    assert torch.equal(owner, holder)
    module = net.module()
    assert module.get_parameter("head.weight") is module.get_parameter("embed.weight")
    assert module.get_parameter("embed.weight") is not owner
    assert torch.equal(module.get_parameter("embed.weight"), owner)


def test_ends_in_one_stage_are_not_tied() -> None:
    assert not language(1).partition.ties
    assert language(2).partition.ties


# -- models of every kind -------------------------------------------------------------------------


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


class Chain(nn.Module):
    """Nothing but blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def spectral() -> nn.Module:
    model = Plain()
    nn.utils.parametrizations.spectral_norm(model.layers[1])
    nn.utils.parametrizations.spectral_norm(model.head)
    return model


class Bare(Chain):
    """Stages without a single parameter at both ends."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(super().forward(torch.tanh(x)))


@pytest.mark.parametrize("method", ["petra", "pipedream", "ddg"])
@pytest.mark.parametrize(
    ("make", "stages"),
    [(vgg, 3), (Frozen, 4), (Chain, 3), (spectral, 4), (Bare, 6), (Plain, 1), (Net, 6)],
    ids=["vgg", "frozen", "chain", "spectral norm", "bare", "one stage", "net"],
)
def test_any_model_trains_and_learns(
    make: Callable[[], nn.Module], stages: int, method: str
) -> None:
    net = fresh(make, stages)
    before = weights(net)
    trainer = trainer_of(net, lambda p: torch.optim.SGD(p, lr=0.02), method=method)
    x, y = batches(1)[0]
    losses = feed(trainer, [(x, y)] * 15)
    trainer.flush()
    assert sum(losses[-5:]) < sum(losses[:5])
    changed = {name for name, t in weights(net).items() if not torch.equal(t, before[name])}
    trained = {name for name, p in net.model.named_parameters() if p.requires_grad}
    assert changed & dict(net.model.named_parameters()).keys() <= trained
    assert {name for name in trained if name.endswith("weight")} <= changed


@pytest.mark.parametrize("method", ["backprop", "reversible_backprop", "1f1b"])
@pytest.mark.parametrize("make", [vgg, Frozen, Chain, spectral, Bare])
def test_any_model_equals_a_plain_loop(make: Callable[[], nn.Module], method: str) -> None:
    """Buffers included: running statistics and power iterations move once a micro-batch."""
    net = fresh(make, 3)
    model = net.module()
    trained = [p for p in model.parameters() if p.requires_grad]
    expected = plain_loop(model, momentum(trained), batches(5))
    feed(trainer_of(net, method=method), batches(5))
    assert worst(expected, weights(net))[0] < 1e-9


def test_nothing_reaches_the_users_model() -> None:
    model = seeded(Net)
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


def test_training_leaves_the_global_random_state_alone() -> None:
    torch.manual_seed(3)
    trainer = trainer_of(fresh())
    feed(trainer, batches(3))
    found = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(found, torch.rand(1))


def test_the_module_is_a_copy_of_the_current_weights() -> None:
    net = fresh()
    trainer = trainer_of(net)
    feed(trainer, batches(3))
    module = net.module()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    assert same(before, weights(net))
    feed(trainer, batches(3, seed=2))
    assert same(dict(module.state_dict()), before)
    with pytest.raises(AttributeError, match=re.escape("net.module() is the plain module")):
        net.state_dict  # noqa: B018
