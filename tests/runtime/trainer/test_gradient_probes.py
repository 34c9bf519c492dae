"""diagnostics: gradients compared by a probe, against the same gradients computed by hand."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

import revcompile
from revcompile.errors import InputError, NonFiniteError
from revcompile.runtime.stage.stage import Stage
from revcompile.runtime.trainer.core import Trainer
from revcompile.runtime.trainer.gradient_probes import GradientReport, Similarity
from revcompile.schedule import choose, window

EXACT: Final = 1e-10
STAGES: Final = 4
NO_DELAY: Final = ("backprop", "reversible_backprop", "gpipe", "1f1b")
DELAYED: Final = ("petra", "pipedream", "ddg", "features_replay", "delayed", "dsp")

Batch = tuple[Tensor, Tensor]
Weights = dict[str, Tensor]


class Block(nn.Module):
    def __init__(self, *extra: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), *extra, nn.Tanh(), nn.Linear(8, 6))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return x + y


class Net(nn.Module):
    def __init__(self, extra: Callable[[], Sequence[nn.Module]] = tuple) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(7, 6), nn.Linear(6, 5)
        self.blocks = nn.Sequential(*(Block(*extra()) for _ in range(6)))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.blocks(self.stem(x)))
        return y


class Tied(Net):
    """Two stages share a layer."""

    def __init__(self) -> None:
        super().__init__()
        first, last = self.blocks[0], self.blocks[5]
        assert isinstance(first, Block) and isinstance(last, Block)
        last.layers[0] = first.layers[0]


MODELS: Final[Mapping[str, Callable[[], nn.Module]]] = {
    "plain": Net,
    "norms": lambda: Net(lambda: [nn.BatchNorm1d(8)]),
    "dropout": lambda: Net(lambda: [nn.BatchNorm1d(8), nn.Dropout(0.3)]),
    "spectral": lambda: Net(lambda: [spectral_norm(nn.Linear(8, 8))]),
    "tied": Tied,
}


@functools.cache
def compiled(name: str) -> tuple[revcompile.StagedModel, dict[str, Tensor]]:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = MODELS[name]().double().train()
        example = torch.randn(4, 7, dtype=torch.float64)
        net = revcompile.petrafy(model, STAGES, example, check="off")
    return net, {key: value.clone() for key, value in net.model.state_dict().items()}


def fresh(name: str) -> revcompile.StagedModel:
    net, start = compiled(name)
    net.model.load_state_dict(start)
    return net


def batches(count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(5)
    return [
        (
            torch.randn(4, 7, generator=generator, dtype=torch.float64),
            torch.randint(0, 5, (4,), generator=generator),
        )
        for _ in range(count)
    ]


def sgd(lr: float) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.SGD(parameters, lr=lr)


def trainer_of(name: str, method: str, lr: float = 0.1, **settings: Any) -> Trainer:
    return fresh(name).trainer(sgd(lr), F.cross_entropy, method=method, **settings)


def watched(trainer: Trainer, fed: Sequence[Batch], watch: int) -> GradientReport:
    """The report on micro-batch `watch` of those fed, after all of them and a flush."""
    for number, (inputs, target) in enumerate(fed):
        if number == watch:
            probe = trainer.watch()
        trainer.step(inputs, target)
    trainer.flush()
    assert probe.complete and not trainer.probes
    return probe.report


def similarities(report: GradientReport) -> list[Similarity]:
    return [
        pair
        for one in report.stages
        for pair in (one.method_vs_delayed, one.method_vs_end_to_end, one.delayed_vs_end_to_end)
    ]


def assert_all_one(report: GradientReport) -> None:
    assert len(report.stages) == STAGES
    for pair in similarities(report):
        assert pair.cosine == pytest.approx(1, abs=EXACT)
        assert pair.norm_ratio == pytest.approx(1, abs=EXACT)
    for sigma in (report.sigma, *(one.sigma for one in report.stages)):
        assert sigma == pytest.approx(1, abs=EXACT)


# -- where all gradients agree --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dropout", "spectral", "tied"])
@pytest.mark.parametrize("method", DELAYED)
def test_without_learning_all_gradients_agree(name: str, method: str) -> None:
    """Dropout masks, statistics of batches and power iterations are those of the micro-batch."""
    report = watched(trainer_of(name, method, lr=0.0), batches(6), watch=2)
    assert_all_one(report)


@pytest.mark.parametrize("name", ["dropout", "tied"])
@pytest.mark.parametrize("method", NO_DELAY)
def test_without_delay_all_gradients_agree(name: str, method: str) -> None:
    report = watched(trainer_of(name, method, accumulate=2), batches(8), watch=5)
    assert_all_one(report)


@pytest.mark.parametrize("order", ["1f1b", "paper"])
def test_the_last_stage_has_no_delay(order: str) -> None:
    report = watched(trainer_of("norms", "petra", order=order), batches(16), watch=7)
    last = report.stages[-1]
    assert last.delay == 0
    for pair in (last.method_vs_delayed, last.method_vs_end_to_end, last.delayed_vs_end_to_end):
        assert pair.cosine == pytest.approx(1, abs=EXACT)


@pytest.mark.parametrize("method", ["delayed", "pipedream", "ddg"])
def test_with_stashed_parameters_the_gradient_is_the_delayed_one(method: str) -> None:
    trainer = trainer_of("dropout", method, clip_grad_norm=0.5)  # clipped later: it does not count
    report = watched(trainer, batches(16), watch=7)
    for one in report.stages:
        assert one.method_vs_delayed.cosine == pytest.approx(1, abs=EXACT)
        assert one.method_vs_delayed.norm_ratio == pytest.approx(1, abs=EXACT)
    assert report.stages[0].method_vs_end_to_end.cosine < 0.999


def test_later_stages_are_closer() -> None:
    trainer = trainer_of("norms", "petra", lr=0.05)
    probes = []
    for inputs, target in batches(18):
        probes.append(trainer.watch())
        trainer.step(inputs, target)
    trainer.flush()
    reports = [probe.report for probe in probes[6:]]

    def mean(stage: int, pair: str) -> float:
        cosines: list[float] = [getattr(r.stages[stage], pair).cosine for r in reports]
        return sum(cosines) / len(cosines)

    for pair in ("method_vs_delayed", "method_vs_end_to_end", "delayed_vs_end_to_end"):
        cosines = [mean(stage, pair) for stage in range(STAGES)]
        assert cosines == sorted(cosines), pair
        assert cosines[0] < 0.99


# -- against gradients by hand --------------------------------------------------------------------


class History:
    """An optimizer factory that writes down parameters and gradients before every update."""

    def __init__(self, lr: float) -> None:
        self.lr = lr
        self.weights: list[list[dict[int, Tensor]]] = []
        self.gradients: list[list[dict[int, Tensor]]] = []

    def __call__(self, parameters: Any) -> torch.optim.Optimizer:
        given = list(parameters)
        optimizer = torch.optim.SGD(given, lr=self.lr)
        weights: list[dict[int, Tensor]] = []
        gradients: list[dict[int, Tensor]] = []

        def write(*_: Any) -> None:
            weights.append({id(p): p.detach().clone() for p in given})
            gradients.append({id(p): p.grad.clone() for p in given})

        optimizer.register_step_pre_hook(write)
        self.weights.append(weights)
        self.gradients.append(gradients)
        return optimizer


def by_hand(module: nn.Module, weights: Mapping[str, Tensor], batch: Batch) -> Weights:
    """Autograd on the plain module."""
    leaves = {n: w.detach().clone().requires_grad_() for n, w in weights.items()}
    buffers = {n: b.clone() for n, b in module.named_buffers()}
    loss = F.cross_entropy(functional_call(module, {**leaves, **buffers}, batch[0]), batch[1])
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def flat(gradients: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    return torch.cat([gradients[name].flatten() for name in names])


def assert_similar(pair: Similarity, x: Tensor, y: Tensor) -> None:
    assert pair.cosine == pytest.approx(float(F.cosine_similarity(x, y, dim=0)), abs=EXACT)
    assert pair.norm_ratio == pytest.approx(float(x.norm() / y.norm()), abs=EXACT)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("order", ["1f1b", "paper"])
@pytest.mark.parametrize("watch", [0, 7, 11], ids=lambda m: f"m{m}")
def test_a_report_is_what_a_loop_by_hand_finds(order: str, accumulate: int, watch: int) -> None:
    """Filling, full, and drained by a flush: micro-batch 11 is among the last of 13."""
    fed, history, net = batches(13), History(0.1), fresh("norms")
    trainer = net.trainer(history, F.cross_entropy, method="petra", order=order,
                          accumulate=accumulate)  # fmt: skip
    report = watched(trainer, fed, watch)

    names = {id(p): n for n, p in net.model.named_parameters()}
    final = {id(p): p.detach().clone() for p in net.model.parameters()}
    assert all(len(versions) == len(history.weights[0]) for versions in history.weights)
    behind = [
        window(choose("petra", order=order), STAGES, j, accumulate) - 1 for j in range(STAGES)
    ]

    def at(tick: int) -> Weights:
        """All stages' parameters at the beginning of a tick."""
        found: Weights = {}
        for stage, versions in enumerate(history.weights):
            differentiated = min(max(tick - behind[stage], 0), len(fed))
            updates = differentiated // accumulate
            whole = differentiated == len(fed)
            version = final if whole else versions[updates]
            found |= {names[i]: version[i] for i in versions[0]}
        return found

    module = net.module().train()
    module.__dict__["reversible"] = False
    delayed = by_hand(module, at(watch), fed[watch])
    method_e2e = e2e_e2e = 0.0
    for j, one in enumerate(report.stages):
        mine = [names[i] for i in history.gradients[j][0]]
        x = flat(delayed, mine)
        y = flat(by_hand(module, at(watch + behind[j]), fed[watch]), mine)
        assert_similar(one.delayed_vs_end_to_end, x, y)
        if accumulate == 1:
            step = {names[i]: g for i, g in history.gradients[j][watch].items()}
            g = flat(step, mine)
            assert_similar(one.method_vs_delayed, g, x)
            assert_similar(one.method_vs_end_to_end, g, y)
            assert one.sigma == pytest.approx(float(y @ g / (y @ y)), abs=EXACT)
            method_e2e, e2e_e2e = method_e2e + float(y @ g), e2e_e2e + float(y @ y)
    if accumulate == 1:
        assert report.sigma == pytest.approx(method_e2e / e2e_e2e, abs=EXACT)


def test_a_flush_before_is_a_new_beginning() -> None:
    """The pipeline fills anew: the first stages stand still for a while."""
    fed = batches(12)
    trainer = trainer_of("plain", "petra")
    for inputs, target in fed[:5]:
        trainer.step(inputs, target)
    trainer.flush()
    weights = {n: w.clone() for n, w in trainer.model.state_dict().items()}
    found = watched(trainer, fed[5:], watch=1)
    again = trainer_of("plain", "petra")
    again.model.load_state_dict(weights)
    assert found.stages == watched(again, fed[5:], watch=1).stages
    assert found.stages[0].method_vs_end_to_end.cosine < 1 - 1e-6


# -- nothing changes ------------------------------------------------------------------------------


def everything(trainer: Trainer) -> dict[str, Tensor]:
    """Parameters, buffers, optimizers' states and the random state."""
    found = dict(trainer.model.state_dict())
    for executor in trainer.executors:
        found |= {f"replica {executor.index} {n}": p for n, p in executor.stage.parameters.items()}
        for name, state in executor.updater.state_dict()["state"].items():
            found |= {f"{name} {key}": torch.as_tensor(value) for key, value in state.items()}
    return {n: t.detach().clone() for n, t in found.items()} | {"random": torch.get_rng_state()}


def noisy(output: Tensor, target: Tensor) -> Tensor:
    """A loss that draws random numbers."""
    return F.cross_entropy(output + 0.1 * torch.randn_like(output), target)


def trained(name: str, method: str, watch: bool) -> tuple[list[float], list[dict[str, Tensor]]]:
    torch.manual_seed(0)
    adam = functools.partial(torch.optim.AdamW, lr=0.02)
    trainer = fresh(name).trainer(adam, noisy, method=method, accumulate=2, clip_grad_norm=1.0)
    losses, states, probes = [], [], []
    for inputs, target in batches(6):
        if watch:
            probes.append(trainer.watch())
        losses.append(trainer.step(inputs, target).loss)
        states.append(everything(trainer))
    trainer.flush()
    assert all(probe.complete for probe in probes)
    return losses, [*states, everything(trainer)]


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("dropout", "petra"),
        ("spectral", "petra"),
        ("tied", "petra"),
        ("dropout", "delayed"),
        ("dropout", "1f1b"),
        ("dropout", "dni"),
        ("spectral", "ddg"),
    ],
)
def test_training_is_the_same_to_the_bit_when_watched(name: str, method: str) -> None:
    losses, states = trained(name, method, watch=False)
    watched_losses, watched_states = trained(name, method, watch=True)
    assert watched_losses == losses
    for state, other in zip(states, watched_states, strict=True):
        assert state.keys() == other.keys()
        assert not [key for key in state if not torch.equal(state[key], other[key])]


def test_tensors_may_be_used_again() -> None:
    """Whoever fills the same target for every step does not disturb a probe."""
    fed = batches(6)
    expected = watched(trainer_of("plain", "petra"), fed, watch=1)
    trainer, reused = trainer_of("plain", "petra"), fed[0][1].clone()
    for number, (inputs, target) in enumerate(fed):
        if number == 1:
            probe = trainer.watch()
        trainer.step(inputs, reused.copy_(target))
    trainer.flush()
    assert probe.report == expected


# -- failures -------------------------------------------------------------------------------------


def test_a_report_is_there_when_all_stages_have_been_seen() -> None:
    trainer, fed = trainer_of("plain", "petra"), batches(8)
    probe = trainer.watch()
    with pytest.raises(InputError, match=r"micro-batch 0 .* stages \[0, 1, 2, 3\] yet"):
        _ = probe.report
    seen = []
    for inputs, target in fed:
        trainer.step(inputs, target)
        seen.append(probe.complete)
    # Stage 0 is three micro-batches behind.
    assert seen == [False] * 3 + [True] * 5
    assert probe.report.microbatch == 0


def test_a_step_that_is_taken_back_leaves_the_probe_waiting() -> None:
    fed = batches(6)
    expected = watched(trainer_of("norms", "petra"), fed, watch=2)
    trainer = trainer_of("norms", "petra")
    for number, (inputs, target) in enumerate(fed):
        if number == 2:
            probe = trainer.watch()
            with pytest.raises(InputError, match="loss"):
                trainer.step(2 * inputs, torch.zeros(9))
        trainer.step(inputs, target)
    trainer.flush()
    assert probe.report == expected


@contextmanager
def overflowing(stage: Stage) -> Iterator[None]:
    """The gradients a stage computes are not finite."""
    honest = stage._backward

    def infinite(*args: Any) -> Any:
        returned, of_inputs, of_parameters = honest(*args)
        return returned, [g * math.inf for g in of_inputs], of_parameters

    stage._backward = infinite
    try:
        yield
    finally:
        stage._backward = honest


def test_without_delay_a_micro_batch_that_is_left_out_has_no_report_either() -> None:
    trainer, fed = trainer_of("norms", "backprop"), batches(2)
    probe = trainer.watch()
    with overflowing(trainer.executors[1].stage), pytest.raises(NonFiniteError):
        trainer.step(*fed[0])
    trainer.step(*fed[1])
    assert probe.lost and not trainer.probes


def test_a_micro_batch_that_is_left_out_has_no_report() -> None:
    trainer, fed = trainer_of("plain", "petra"), batches(6)
    probe = trainer.watch()
    trainer.step(*fed[0])
    trainer.step(*fed[1])
    # Stage 1 differentiates micro-batch 0.
    with overflowing(trainer.executors[1].stage), pytest.raises(NonFiniteError):
        trainer.step(*fed[2])
    for inputs, target in fed[3:]:
        trainer.step(inputs, target)
    assert probe.lost and not probe.complete and not trainer.probes
    with pytest.raises(InputError, match="micro-batch 0 was left out"):
        _ = probe.report


def test_a_loaded_state_ends_all_watching() -> None:
    trainer, fed = trainer_of("plain", "petra"), batches(6)
    trainer.step(*fed[0])
    state = trainer.state_dict()
    probe = trainer.watch()
    trainer.step(*fed[1])
    trainer.load_state_dict(state)
    for inputs, target in fed[1:]:
        trainer.step(inputs, target)
    assert not probe.complete


# -- looking at it --------------------------------------------------------------------------------


def test_a_report_reads_as_a_table() -> None:
    report = watched(trainer_of("plain", "petra", order="paper"), batches(12), watch=5)
    lines = str(report).splitlines()
    assert lines[0].startswith("petra, micro-batch 5")
    assert [line.split()[:2] for line in lines[2:6]] == [["0", "6"], ["1", "4"], ["2", "2"],
                                                        ["3", "0"]]  # fmt: skip
    assert lines[2].split()[2] == f"{report.stages[0].method_vs_delayed.cosine:.4f}"
    assert lines[-1] == f"sigma over all stages: {report.sigma:.4f}"


def test_a_stage_without_trainable_parameters_has_no_numbers() -> None:
    net = fresh("plain")
    frozen = net.stages[1].generated.parameters
    for name in frozen:
        net.model.get_parameter(name).requires_grad_(False)
    try:
        trainer = net.trainer(sgd(0.1), F.cross_entropy)
        report = watched(trainer, batches(6), watch=1)
    finally:
        net.model.requires_grad_(True)
    assert math.isnan(report.stages[1].sigma)
    assert math.isnan(report.stages[1].method_vs_delayed.cosine)
    assert report.stages[0].sigma > 0 and math.isfinite(report.sigma)
