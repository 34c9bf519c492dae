"""A staged model that is changed after petrafy: stages follow the change, or name and refuse it."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from helpers import refuses
from torch import Tensor, nn
from training import Net, batches, drained, feed, fresh, plain_sgd, trained, trainer_of, weights

import revcompile
from revcompile.errors import InputError, RevcompileWarning, TrainerStoppedError
from revcompile.runtime.trainer.trainer import Trainer


def staged() -> revcompile.StagedModel:
    return fresh(Net, 2)


def test_a_change_before_there_is_a_trainer_is_refused() -> None:
    net = staged()
    net.model.register_forward_pre_hook(print)
    refuses(InputError, "the model was reg", trainer_of, net)


def decayed(trainer: Trainer, weight_decay: float) -> None:
    for executor in trainer._executors:
        executor.updater.optimizer.param_groups[0]["weight_decay"] = weight_decay


def test_steps_are_captured_again_16_steps_after_a_change() -> None:
    """Values of parameter groups may change in flight; if they do in every step, one is told."""
    found = []
    data = [batch for batch in batches(30) if len(batch[1]) == 4][:20]
    for backend in ("eager", "static"):
        net = staged()
        trainer = trainer_of(net, backend=backend)
        feed(trainer, data)
        decayed(trainer, 0.5)
        feed(trainer, data[:16])
        assert not trainer._runner.is_active
        feed(trainer, data)
        assert trainer._runner.is_active == (backend == "static")
        with (
            nullcontext()
            if backend == "eager"
            else pytest.warns(RevcompileWarning, match="change so often") as told
        ):
            for number, batch in enumerate(data):
                decayed(trainer, 0.01 * number)
                trainer.step(*batch)
        assert told is None or len(told) == 1
        trainer.flush()
        found.append(weights(net))
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)


class Counting(nn.Linear):
    """A layer that changes its own attributes, some of them only at times."""

    longest = 0

    def forward(self, x: Tensor) -> Tensor:
        self.longest = max(self.longest, len(x))
        self.last = super().forward(x)
        return self.last


def test_what_layers_change_themselves_is_no_change_of_settings() -> None:
    def made() -> Net:
        net = Net()
        net.blocks[1].up = Counting(6, 12)  # type: ignore[union-attr]
        return net

    net = fresh(made, 2)
    trainer, data = trainer_of(net), batches(6)
    feed(trainer, data)
    trainer.evaluate([(data[0][0].repeat(3, 1), data[0][1].repeat(3))])
    assert net.model.get_submodule("blocks.1.up").longest == 12
    feed(trainer, data)
    net.model.get_submodule("blocks.1.up").longest = 3
    refuses(InputError, r"blocks\.1\.up\.longest was 12 and is 3 now", trainer.flush)


# -- hooks on layers ------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:backend='static'")
@pytest.mark.parametrize("backend", ["eager", "static"])
@pytest.mark.parametrize(
    ("method", "runs"),
    [("petra", 2), ("pipedream", 1), ("ddg", 1)],
    ids=["petra", "pipedream", "ddg"],
)
def test_hooks_of_layers_run_whenever_the_layers_run(method: str, runs: int, backend: str) -> None:
    net = staged()
    trainer, data = trainer_of(net, method=method, backend=backend), batches(4)
    feed(trainer, data * 2)
    trainer.flush()
    seen: list[str] = []
    up = net.model.get_submodule("blocks.1.up")
    up.register_forward_hook(lambda *_: seen.append("forward"))
    feed(trainer, data)
    trainer.flush()
    assert seen == ["forward"] * 4 * runs
    up.register_full_backward_hook(lambda *_: seen.append("backward"))
    trainer.step(*data[0])
    trainer.flush()
    assert seen[4 * runs :] == [*["forward"] * runs, "backward"]


# -- other trainers, other weights ----------------------------------------------------------------


def test_a_new_trainer_takes_over() -> None:
    net = staged()
    first, data = trainer_of(net), batches(2)
    feed(first, data)
    second = trainer_of(net)
    state = first.state_dict()
    calls = (lambda: first.load_state_dict(state), lambda: first.evaluate(data))
    for use in (lambda: first.step(*data[0]), first.flush, *calls):
        refuses(TrainerStoppedError, r"net\.trainer.* called again", use)
    second.load_state_dict(state)
    second.flush()
    refuses(TrainerStoppedError, r"net\.trainer.* called again", first.state_dict)


def test_a_closed_trainer_cannot_be_used() -> None:
    net, data = staged(), batches(2)
    trainer = trainer_of(net)
    feed(trainer, data)
    trainer.close()
    trainer.close()
    for use in (lambda: trainer.step(*data[0]), trainer.flush, lambda: trainer.evaluate(data)):
        refuses(TrainerStoppedError, r"trainer\.close\(\) has ended", use)
    feed(trainer_of(net), data)


def test_weights_loaded_into_a_drained_pipeline_are_trained(tmp_path: Path) -> None:
    """Tied weights, of which a stage has copies, and stashed ones are the loaded ones, too."""
    net, twin = fresh(Net), fresh(Net)
    file, data = net.save_weights(tmp_path / "weights.safetensors"), batches(6)
    trainer = trainer_of(net, plain_sgd, method="pipedream")
    drained(trainer, data)
    net.load_weights(file)
    other = trainer_of(twin, plain_sgd, method="pipedream")
    other._schedule.injected = trainer.microbatches_seen  # dropout is drawn by number
    for each in (trainer, other):
        drained(each, data)
    found = [dict(each.named_parameters()) for each in (trainer, other)]
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_the_mean_loss_is_of_the_steps_since_the_last_call() -> None:
    trainer = trainer_of(staged())
    losses = feed(trainer, batches(3))
    assert trainer.pop_mean_loss() == pytest.approx(sum(losses) / 3)
    assert trainer.pop_mean_loss() != trainer.pop_mean_loss()  # nan
    losses = feed(trainer, batches(6))
    assert trainer.pop_mean_loss() == pytest.approx(sum(losses) / 6)


# -- names ----------------------------------------------------------------------------------------


class Named(nn.Module):
    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(6, 6) for name in names})
        self.norms = nn.ModuleDict({name: nn.BatchNorm1d(6) for name in names})
        self.scales = nn.ParameterDict({name: torch.ones(6) for name in names})

    def forward(self, x: Tensor) -> Tensor:
        for name, layer in self.layers.items():
            x = x + torch.tanh(self.norms[name](layer(x))) * self.scales[name]
        return x


def test_modules_may_have_any_name() -> None:
    names = ["in", "it's", 'a "b"', "back\\slash", "{x}", "None", "self"]
    net = revcompile.petrafy(Named(names), 2, torch.randn(4, 6), cost="measured")
    trained(net, [(torch.randn(4, 6), torch.zeros(4, 6))] * 3)
    for stage in net.stages:
        compile(stage.code, "code", "exec")
    for name in names:
        assert "placed" in str(net.explain(f"layers.{name}"))
