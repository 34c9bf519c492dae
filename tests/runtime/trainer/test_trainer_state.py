"""Checkpoints and evaluation, which leave a training run as it was, and micro-batches left out."""

import copy
import math
import re
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import training
from helpers import cases, refuses, worst
from torch import Tensor, nn
from torch.nn import functional as F
from training import SCHEDULES, adam, batches, drained, feed, fresh, same, trainer_of, weights

import revcompile
from revcompile.errors import InputError, NonFiniteError, TrainerStoppedError
from revcompile.runtime.checkpoint.training import save_training

RESUMED: Final[dict[str, dict[str, Any]]] = {
    "petra": {"lr_schedule": SCHEDULES["one cycle"]},
    "petra, two in flight": {"in_flight_per_stage": 2, "lr_schedule": SCHEDULES["warm-up"]},
    "petra, adam": {"optimizer": adam, "accumulation_steps": 3, "lr_schedule": SCHEDULES["lambda"]},
    "petra_stashed": {"method": "petra_stashed", "lr_schedule": SCHEDULES["cosine"]},
    "features_replay": {"method": "features_replay", "optimizer": adam, "accumulation_steps": 3},
    "dsp": {"method": "dsp"},
    "pipedream": {"method": "pipedream", "optimizer": adam, "accumulation_steps": 3},
    "delayed": {"method": "delayed", "accumulation_steps": 2},
    "dni": {"method": "dni", "optimizer": adam},
    "backprop": {"method": "backprop", "accumulation_steps": 3},
    "reversible_backprop": {"method": "reversible_backprop", "optimizer": adam},
    "predicted weights": {"weights": "predicted", "accumulation_steps": 4},
    "predicted, accumulated": {"weights": "predicted", "accumulation_steps": 3},
    "several optimizers": {"optimizer": training.several, "lr_schedule": SCHEDULES["milestones"]},
    "inputs in bfloat16": {"dtype": torch.float32, "kept_input_dtype": torch.bfloat16},
    "autocast": {"dtype": torch.float32, "autocast": torch.bfloat16},
    "captured": {"backend": "static"},
    "captured, then not": {"backend": "static", "then": {"backend": "eager"}},
    "captured later": {"optimizer": adam, "then": {"backend": "static"}},
    "captured, stashed": {"backend": "static", "weights": "stashed"},
    "captured, predicted": {"backend": "static", "weights": "predicted"},
    "captured, bfloat16": {
        **{"backend": "static", "dtype": torch.float32},
        **{"kept_input_dtype": torch.bfloat16, "optimizer": training.several},
    },
}

# -- checkpoints ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_is_the_uninterrupted_one(name: str) -> None:
    """Masks, learning rates and norms too, whatever the trainer has been doing that loads it."""
    settings = {"clip_grad_norm": 0.1, **RESUMED[name]}
    dtype, then = settings.pop("dtype", torch.float64), settings.pop("then", {})
    is_captured = settings.get("backend") == "static"
    data = batches(13, dtype=dtype)
    if is_captured or then:
        data = [(x, y) for x, y in batches(25, dtype=dtype) if len(x) == 4]
    whole = fresh(dtype=dtype)
    trainer = trainer_of(whole, seed=3, **settings)
    at = len(data) - 5
    losses = feed(trainer, data[:at])
    assert trainer._runner.is_active == is_captured
    live = trainer.state_dict()
    state = training.through_a_file(live)
    losses += drained(trainer, data[at:])
    assert same(live, state)  # nor does it change when training goes on

    resumed = fresh(dtype=dtype)
    again = trainer_of(resumed, seed=4, **settings | then)
    feed(again, batches(2, seed=9, dtype=dtype))  # something else is in flight, and is forgotten
    again.load_state_dict(state)
    assert same(again.state_dict(), state)
    assert feed(again, data[at:]) == losses[at:]
    assert again._runner.is_active == ((settings | then).get("backend") == "static")
    again.flush()
    assert same(weights(resumed), weights(whole))
    assert same(again.state_dict(), trainer.state_dict())


def test_a_start_without_delay() -> None:
    """The state of "1f1b", flushed, goes on as "petra"; as does that of plain updates."""
    data = [batch for batch in batches(22) if len(batch[0]) == 4]
    found = []
    for method in ("1f1b", "backprop"):
        first, later = fresh(), fresh()
        start = trainer_of(first, adam, method=method)
        drained(start, data[:6])
        trainer = trainer_of(later, adam)
        trainer.load_state_dict(training.through_a_file(start.state_dict()))
        assert trainer.delays == (3, 2, 1, 0) and trainer.microbatches_seen == 6
        drained(trainer, data[6:])
        found.append(weights(later))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-10)


class SharedByAll(training.Plain):
    """A layer of every stage, also of those in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([self.layers[0]] * 4)


@pytest.mark.parametrize("choice", ["latest", "stashed", "predicted"])
def test_a_shared_weight_on_its_way_arrives_once(choice: str) -> None:
    """What a stage makes of a new value depends on the value before it, which is saved too."""
    data = batches(7)
    whole, resumed = fresh(SharedByAll), fresh(SharedByAll)
    settings = {"weights": choice, "accumulation_steps": 2}
    trainer, again = (trainer_of(net, **settings) for net in (whole, resumed))
    for batch in data:
        trainer.step(*batch)
        again.step(*batch)
        state = again.state_dict()
        again = trainer_of(resumed, **settings)
        again.load_state_dict(state)
    assert same(again.state_dict(), trainer.state_dict())
    trainer.flush()
    again.flush()
    assert same(weights(resumed), weights(whole))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stages", [1, 3, 6])
def test_a_flushed_state_moves_to_other_stages(stages: int, schedule: str) -> None:
    """Locked methods do not depend on the cuts, so the run goes on as if nothing had moved."""

    def groups(named: list[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
        biases = [p for n, p in named if n.endswith("bias")]
        others = [p for n, p in named if not n.endswith("bias")]
        return [{"params": biases, "weight_decay": 0.0, "lr": 0.02}, {"params": others}]

    settings = {
        "method": "backprop",
        "accumulation_steps": 2,
        "lr_schedule": SCHEDULES[schedule],
        "param_groups": groups,
    }
    whole, moved = fresh(training.Plain, 4), fresh(training.Plain, stages)
    trainer = trainer_of(whole, adam, **settings)
    drained(trainer, batches(5))
    again = trainer_of(moved, adam, **settings)
    feed(again, batches(1, seed=3))
    again.load_state_dict(training.through_a_file(trainer.state_dict()))
    assert again._schedule.updates == (3,) * stages
    for one in (trainer, again):
        feed(one, batches(6, seed=2))
    assert again.metrics is not None and trainer.metrics is not None
    assert again.metrics.microbatch == trainer.metrics.microbatch == 10
    assert again.metrics.updates == (6,) * stages
    assert again.metrics.lr == trainer.metrics.lr
    assert worst(weights(whole), weights(moved))[0] < 1e-12


def test_a_state_of_other_groups_is_refused() -> None:
    def groups(named: list[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
        stem = [p for n, p in named if n.startswith("stem")]
        others = [p for n, p in named if not n.startswith("stem")]
        found = [{"params": stem, "weight_decay": 0.1, "lr": 0.02}, {"params": others}]
        return [group for group in found if group["params"]]

    def made(stages: int, **settings: Any) -> Any:
        return trainer_of(fresh(training.Plain, stages), adam, method="backprop", **settings)

    saved = made(4, param_groups=groups).state_dict()
    made(1, param_groups=groups).load_state_dict(saved)
    said = r"stage 0 .* were saved with different lr; group parameters as they were"
    refuses(InputError, said, made(1).load_state_dict, saved)
    scheduled = {"param_groups": groups, "lr_schedule": SCHEDULES["cosine"]}
    saved = made(4, **scheduled).state_dict()
    said = r"stage 0 .* rates \[0\.02, .*\], but the state has a schedule for groups with \["
    refuses(InputError, said, made(1, **scheduled).load_state_dict, saved)


class Noted(nn.Linear):
    note = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"note": self.note}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.note = state["note"]


def test_what_modules_add_to_their_state_comes_back(tmp_path: Path) -> None:
    models = [nn.Sequential(nn.Linear(5, 6), nn.Tanh(), Noted(6, 3)).double() for _ in range(2)]
    nets = [revcompile.petrafy(m, 2, batches(1)[0][0], check="off") for m in models]
    one, other = (trainer_of(net) for net in nets)
    feed(one, batches(3))
    last = [net.model.get_submodule("2") for net in nets]
    last[0].note = 3  # type: ignore[assignment]
    other.load_state_dict(training.through_a_file(one.state_dict()))
    assert last[1].note == 3
    assert same(nets[0].model.state_dict(), nets[1].model.state_dict())
    one.save(tmp_path)
    for load in (other.load, nets[1].load_weights):
        last[1].note = 0  # type: ignore[assignment]
        load(tmp_path)
        assert last[1].note == 3


@cases(
    "settings, count",
    ({"method": "petra"}, 2),
    ({"method": "backprop", "accumulation_steps": 3}, 2),  # gradients that are not applied yet
    ({"method": "dni"}, 1),  # a gradient_predictor that has not learned from it yet
    ({"method": "backprop"}, 1),  # tied weights on their way,
)
def test_an_unfinished_state_stays_with_its_stages(settings: dict[str, Any], count: int) -> None:
    trainer = trainer_of(fresh(training.Net, 4), **settings)
    feed(trainer, batches(count))
    net = fresh(training.Net, 2)
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
    more = trainer.state_dict()
    for stage in more["stages"].values():
        for group in stage["groups"]:
            group["amsgrad"] = False
    for bad, said in [
        ({"weights": 1}, r"what trainer.state_dict\(\) returns .*got None"),
        (state["model"], "got None"),
        (wrong_shape, r"head.bias has shape \(9,\) in it, \(3,\) here"),
        (missing, "lacks head.bias"),
        (with_adam, "stage 0 has torch.optim.sgd.SGD, but .* has no 'dampening'"),
        (more, r"stage 0 has .*SGD, but .* \(it has 'amsgrad'\)"),
        ({**state, "policy": "pretrained"}, "policy='pretrained', but this net has 'paper'"),
    ]:
        refuses(InputError, said, trainer.load_state_dict, bad)
        assert same(trainer.state_dict(), state)
    feed(trainer, batches(3, seed=2))


# -- evaluation -----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", training.METHODS)
def test_evaluation_does_not_disturb_training(method: str) -> None:
    looked_at, left_alone = fresh(), fresh()
    a, b = (trainer_of(net, method=method, accumulation_steps=2) for net in (looked_at, left_alone))
    torch.manual_seed(5)
    expected = [torch.rand(1), feed(b, batches(7)), b.flush(), torch.rand(1)]
    torch.manual_seed(5)
    found: list[Any] = [torch.rand(1), []]
    for index, batch in enumerate(batches(7)):
        found[1] += feed(a, [batch])
        if index % 2:
            shuffled = torch.randperm  # as a loader would, from the global generator
            a.evaluate((x[shuffled(len(x))], y) for x, y in batches(3, seed=index))
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
    output = net.to_module().eval()(x).detach()
    assert found.samples == 19
    assert found.loss == pytest.approx(float(F.cross_entropy(output, y)), rel=1e-12)
    assert found.metrics == {"accuracy": pytest.approx(float(accuracy(output, y)))}
    assert [module.training for module in net.model.modules()] == modes


def test_evaluation_holds_one_output_at_a_time() -> None:
    outputs = []

    def loader() -> Any:
        for batch in batches(3):
            assert not any(each() is not None for each in outputs)
            yield batch

    def see(output: Tensor, target: Tensor) -> Tensor:
        outputs.append(weakref.ref(output))
        return torch.zeros(())

    trainer_of(fresh()).evaluate(loader(), {"seen": see})
    assert len(outputs) == 3


class WithAuxiliary(nn.Module):
    """Two outputs in training, one in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.aux = training.Plain(), nn.Linear(5, 3)

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
    model = net.to_module().eval()
    each = [(loss(model(x), y).item(), len(y)) for x, y in batches(2)]
    assert found.loss == pytest.approx(sum(value * n for value, n in each) / 8)


def test_an_output_that_the_loss_does_not_read() -> None:
    """No gradient comes back for it, and its layers stay as they are."""
    net = fresh(WithAuxiliary, 3)
    before = weights(net)
    trainer = trainer_of(net, loss=lambda output, target: F.cross_entropy(output[1], target))
    drained(trainer, batches(4))
    changed = {n for n, value in weights(net).items() if not torch.equal(value, before[n])}
    assert changed == {"aux.weight", "aux.bias"}


def test_metrics_of_a_step() -> None:
    trainer = trainer_of(fresh(), accumulation_steps=2)
    found = [trainer.step(*batch) for batch in batches(6)]
    assert [m.microbatch for m in found] == list(range(6))
    assert [m.samples for m in found] == [4, 4, 4, 4, 3, 4]
    assert found[-1].delays == (2, 1, 1, 0)
    assert found[-1].updates == (1, 2, 2, 3)
    assert found[-1].lr == 0.05
    assert found[-1].throughput > 0
    assert found[-1].output.shape == (4, 3)
    assert trainer.metrics is found[-1]


def test_tables_show_the_method_that_is_trained() -> None:
    net = fresh()
    assert trainer_of(net).delays == net.delays() == (3, 2, 1, 0)
    net.method = "1f1b"
    trainer = trainer_of(net)
    assert trainer.delays == net.delays() == (0, 0, 0, 0)
    assert trainer._schedule.method == net.method and "stages, 1f1b" in str(net)
    assert trainer_of(net, method="petra", in_flight_per_stage=2).delays == (6, 4, 2, 0)


def test_throughput_is_of_training_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step takes a second, the rest more."""
    now = [0.0]
    monkeypatch.setattr("revcompile.runtime.trainer.steps.perf_counter", lambda: now[0])

    def loss(output: Tensor, target: Tensor) -> Tensor:
        now[0] += 1.0
        return F.cross_entropy(output, target)

    def slow(data: Any) -> Any:
        for batch in data:
            now[0] += 100.0
            yield batch

    trainer, data = trainer_of(fresh(), loss=loss), batches(4)

    def slow_write(*given: Any, **options: Any) -> Path:
        now[0] += 100.0
        return save_training(*given, **options)

    monkeypatch.setattr("revcompile.runtime.trainer.trainer.save_training", slow_write)
    now[0] += 100.0  # compiling, loading data
    for batch in data:
        assert trainer.step(*batch).throughput == 4.0
        trainer.evaluate(slow(data))
        trainer.save(tmp_path)
    now[0] += 1.0  # the user's own code between two steps, e.g. a loader, counts
    trainer.step(*data[0])
    now[0] += 1.0
    assert trainer.step(*data[0]).throughput == 6 * 4 / 7
    trainer.flush()
    now[0] += 100.0
    assert trainer.step(*data[0]).throughput == 7 * 4 / 8


# -- bad input ------------------------------------------------------------------------------------

BAD_STEPS: Final[dict[str, tuple[Callable[[Any, Any], training.Batch], str]]] = {
    "a target that does not fit": (
        lambda x, y: (x, y[:2]),
        r"loss, micro-batch 4: it raised .*\n  output: float64\[4, 3\]\n  target: int64\[2\]",
    ),
    "a wrong shape": (
        lambda x, y: (x[:, :4], y),
        r"the model failed on micro-batch 5: .*\n  captured with: x: float64\[B, 5\]\n"
        r"  got:           x: float64\[4, 4\]",
    ),
    "a wrong type": (lambda x, y: (x.float(), y), "captured with: x: float64"),
    "no tensor": (lambda x, y: ("x", y), "expected a tensor for x, got 'x'"),
    "too many inputs": (lambda x, y: ((x, x), y), "too many positional arguments"),
    "another keyword": (lambda x, y: ({"z": x}, y), "missing a required argument: 'x'"),
}


@pytest.mark.parametrize("method", training.METHODS)
def test_a_bad_step_counts_and_is_left_out(method: str) -> None:
    """However it is bad, training goes on as if its data were not finite."""
    settings = {"method": method, "accumulation_steps": 2, "lr_schedule": SCHEDULES["cosine"]}
    a, b = (trainer_of(fresh(), **settings) for _ in range(2))
    for trainer in (a, b):
        feed(trainer, batches(4))
    x, y = batches(1, seed=3)[0]
    for number, (bad, said) in enumerate(BAD_STEPS.values(), 4):
        with pytest.raises(InputError, match=said) as raised:
            a.step(*bad(x, y))
        note = f"Micro-batch {number} counts, and all stages have left it out."
        assert raised.value.__notes__ == [note]
        with pytest.raises(NonFiniteError):
            b.step(x * torch.nan, y)
    assert feed(a, batches(6, seed=2)) == feed(b, batches(6, seed=2))
    a.flush(), b.flush()
    assert a.microbatches_seen == 4 + len(BAD_STEPS) + 6
    assert same(dict(a.named_parameters()), dict(b.named_parameters()))


def test_a_bad_step_of_stages_that_predict_gradients() -> None:
    """They do not wait for the loss."""
    net = fresh()
    trainer, (x, y) = trainer_of(net, method="dni"), batches(1, seed=3)[0]
    feed(trainer, batches(4))
    before = dict(trainer.named_parameters())["stem.weight"].clone()
    with pytest.raises(InputError) as raised:
        trainer.step(x, y[:2])
    assert not torch.equal(dict(trainer.named_parameters())["stem.weight"], before)
    (note,) = raised.value.__notes__
    assert note.startswith("Micro-batch 4 counts, and stages before the error have trained on it")
    losses = drained(trainer, batches(6, seed=2))
    assert all(map(math.isfinite, losses)) and set(trainer._schedule.updates) == {11}


@pytest.mark.parametrize("method", [*training.METHODS, "dni"])
def test_a_micro_batch_that_is_not_finite_counts_and_is_left_out(method: str) -> None:
    net = fresh()
    settings = {"accumulation_steps": 2, "lr_schedule": SCHEDULES["cosine"]}
    trainer = trainer_of(net, method=method, **settings)
    losses = feed(trainer, batches(4))
    x, y = batches(1, seed=3)[0]
    for index, number in enumerate((torch.nan, torch.inf), 4):
        with pytest.raises(NonFiniteError, match=f"micro-batch {index}: .* was left out"):
            trainer.step(torch.full_like(x, number), y)
    losses += drained(trainer, batches(6, seed=2))
    assert trainer.microbatches_seen == 12
    assert set(trainer._schedule.updates) == {6}
    for executor in trainer._executors:  # schedules go on with an update that is left out
        assert executor.updater.lr_schedule.last_epoch == 6
    assert trainer.pop_mean_loss() == pytest.approx(sum(losses) / 10)
    assert all(t.isfinite().all() for t in weights(net).values())


@pytest.mark.parametrize("method", ["backprop", "reversible_backprop", "petra"])
def test_a_bad_step_moves_no_statistics(method: str) -> None:
    net, (x, y) = fresh(), batches(1)[0]
    trainer = trainer_of(net, method=method)
    trainer.step(x, y)
    trainer.flush()
    before = {name: buffer.clone() for name, buffer in net.model.named_buffers()}
    with pytest.raises(InputError, match="check that the target fits"):
        trainer.step(x, y[:1])  # after the forward passes
    trainer.flush()
    assert same(dict(net.model.named_buffers()), before)


@pytest.mark.parametrize("accumulation_steps", [1, 2, 3])
def test_an_update_is_the_mean_over_what_is_not_left_out(accumulation_steps: int) -> None:
    data = [(x, y) for x, y in batches(12) if len(x) == 4][:6]
    net = fresh(training.Plain)
    model = copy.deepcopy(net.to_module())
    optimizer = training.momentum(model.parameters())
    for first in range(0, 6, accumulation_steps):
        good = [n for n in range(first, first + accumulation_steps) if n != 3]
        for n in good:
            (F.cross_entropy(model(data[n][0]), data[n][1]) / len(good)).backward()
        if good:
            optimizer.step()
        optimizer.zero_grad()
    trainer = trainer_of(net, method="backprop", accumulation_steps=accumulation_steps)
    for n, (x, y) in enumerate(data):
        with pytest.raises(NonFiniteError) if n == 3 else nullcontext():
            trainer.step(x * torch.inf if n == 3 else x, y)
    assert worst(dict(model.state_dict()), dict(net.to_module().state_dict()))[0] < 1e-12


class SteepFirst(training.Net):
    def __init__(self) -> None:
        super().__init__()
        self.stem = training.Steep(5, 6)


class SteepLast(training.Plain):
    def __init__(self) -> None:
        super().__init__()
        self.last = training.Steep(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(super().forward(x) * x.mean(1, keepdim=True))


@pytest.mark.parametrize("method", ["petra", "pipedream", "backprop"])
def test_a_bad_gradient_of_the_last_stage_is_as_a_bad_loss(method: str) -> None:
    x, y = batches(1, seed=3)[0]
    found = []
    for bad in (0.0, torch.nan):
        trainer = trainer_of(fresh(SteepLast), method=method, accumulation_steps=2)
        feed(trainer, batches(3))
        with pytest.raises(NonFiniteError, match=r"was left out of the update") as raised:
            trainer.step(torch.full_like(x, bad), y)
        assert (raised.value.stage, raised.value.microbatch) == (3, 3)
        assert ("parameter" in str(raised.value)) == (bad == 0.0)
        losses = feed(trainer, batches(4, seed=2))
        found.append((losses, trainer.state_dict()))
    assert same(*found)


@pytest.mark.parametrize("method", ["petra", "pipedream", "ddg", "1f1b", "backprop"])
def test_a_gradient_that_is_not_finite_on_its_way_back_is_left_out(method: str) -> None:
    """Later stages have used it already; the stage that meets it, and those before, do not."""
    net = fresh(SteepFirst)
    trainer = trainer_of(net, method=method)
    x, y = batches(1, seed=3)[0]
    errors = []
    for inputs, target in [*batches(4), (torch.zeros_like(x), y), *batches(6, seed=2)]:
        stem = net.model.get_parameter("stem.weight").clone()
        try:
            trainer.step(inputs, target)
        except NonFiniteError as error:
            errors.append(error)
            assert torch.equal(net.model.get_parameter("stem.weight"), stem)
    (error,) = errors
    assert (error.stage, error.microbatch) == (0, 4)
    assert "parameter stem.weight" in str(error)
    trainer.flush()
    assert all(t.isfinite().all() for t in weights(net).values())
    trainer.state_dict()


def test_all_that_a_call_finds_bad_is_named() -> None:
    trainer = trainer_of(fresh(SteepFirst))
    x, y = batches(1, seed=3)[0]
    feed(trainer, batches(4))
    for _ in range(3):  # none has come back to the first stage
        trainer.step(torch.zeros_like(x), y)
    with pytest.raises(NonFiniteError, match="stage 0, micro-batch 4") as raised:
        trainer.flush()
    *others, drained = raised.value.__notes__
    for microbatch, note in enumerate(others, 5):
        assert note.startswith(f"And stage 0, micro-batch {microbatch}: the gradient of parameter")
    assert len(others) == 2 and "drained" in drained
    feed(trainer, batches(4, seed=2))


def test_a_drained_save_writes_and_then_reports_the_bad_micro_batch(tmp_path: Path) -> None:
    saved, flushed, resumed = (trainer_of(fresh(SteepFirst)) for _ in range(3))
    x, y = batches(1, seed=3)[0]
    for trainer in (saved, flushed):
        feed(trainer, [*batches(4), (torch.zeros_like(x), y)])
    with pytest.raises(NonFiniteError, match="stage 0, micro-batch 4") as raised:
        saved.save(tmp_path, drain=True)
    assert raised.value.__notes__[-1].startswith(f"The checkpoint {tmp_path / 'step_00000005'} is")
    with pytest.raises(NonFiniteError):
        flushed.flush()
    resumed.load(tmp_path)
    for trainer in (saved, resumed):
        assert same(trainer.state_dict(), flushed.state_dict())


def test_a_step_that_the_user_interrupts_stops_the_trainer() -> None:
    """Until a state is loaded."""

    def loss(output: Tensor, target: Any) -> Tensor:
        if target is None:
            raise KeyboardInterrupt
        return F.cross_entropy(output, target)

    trainer = trainer_of(fresh(), loss=loss)
    feed(trainer, batches(5))
    before = trainer.state_dict()
    with pytest.raises(KeyboardInterrupt):
        trainer.step(batches(1)[0][0], None)
    with pytest.raises(TrainerStoppedError, match=r"in the middle of a call .*KeyboardInterrupt"):
        trainer.step(*batches(1)[0])
    trainer.load_state_dict(before)
    assert same(trainer.state_dict(), before)
    feed(trainer, batches(2))


def test_an_interrupt_just_before_a_step_does_not_stop_the_trainer_later() -> None:
    trainer = trainer_of(fresh())
    feed(trainer, batches(5))
    before = trainer.state_dict()
    entered = trainer._stop_on_error()
    entered.__enter__()  # The interrupt comes now. Its traceback refers to `entered`.
    trainer.load_state_dict(before)
    del entered
    feed(trainer, batches(2))
