"""DelayAwareMuon and ErrorFeedback: without delay torch's own; with delay weights moved ahead."""

import copy
import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import cases, refuses
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import revcompile
from revcompile.errors import InputError
from revcompile.optim import DelayAwareMuon, DelayAwareSGD, ErrorFeedback, muon_groups


def updated(make: Callable[[Any], Optimizer], delay: float = 0.0, count: int = 3) -> list[Tensor]:
    """Parameters after some updates with the same gradients."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(size)) for size in ((6, 4), (4, 6), (4, 6), (5,))]
    optimizer = make(params)
    if hasattr(optimizer, "delay"):
        optimizer.delay = delay
    for _ in range(count):
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer.step()
    return [p.detach() for p in params]


def test_without_delay_vectors_are_adamws() -> None:
    settings: dict[str, Any] = {"betas": (0.9, 0.99), "weight_decay": 0.1}
    ours = updated(lambda p: DelayAwareMuon(p, adamw_lr=0.01, **settings))
    torchs = updated(lambda p: torch.optim.AdamW(p, lr=0.01, **settings))
    torch.testing.assert_close(ours[3], torchs[3])


def test_without_delay_matrices_are_muons() -> None:
    ours = updated(lambda p: DelayAwareMuon(p, lr=0.02, weight_decay=0.1))
    torchs = updated(lambda p: torch.optim.Muon(p[:3], lr=0.02, weight_decay=0.1))
    torch.testing.assert_close(ours[:3], torchs[:3])


def test_a_convolution_is_the_matrix_of_its_output_channels() -> None:
    """In every memory format, and after its state was loaded."""
    weight = nn.Parameter(torch.randn(6, 2, 3, 3).to(memory_format=torch.channels_last))
    matrix = nn.Parameter(weight.detach().reshape(6, -1))
    ours, torchs = DelayAwareMuon([weight]), torch.optim.Muon([matrix], 0.01, weight_decay=0.0)
    for _ in range(3):
        weight.grad = torch.randn_like(weight)
        matrix.grad = weight.grad.reshape(6, -1)
        ours.step(), torchs.step()
        ours.load_state_dict(copy.deepcopy(ours.state_dict()))
    torch.testing.assert_close(weight.reshape(6, -1), matrix)


@cases(
    "make",
    lambda p: DelayAwareMuon(p, weight_decay=0.1, max_drift=None),
    lambda p: ErrorFeedback(torch.optim.AdamW(p, lr=0.01)),
    lambda p: ErrorFeedback(torch.optim.SGD(p, lr=0.1)),
    ids=["muon", "adamw", "sgd"],
)
@pytest.mark.parametrize("delay", [1.0, 2.5])
def test_feedback_moves_weights_ahead(make: Callable[[Any], Optimizer], delay: float) -> None:
    """w = y - t u, with y the weights without feedback (updates must not depend on w)."""

    def without_decay(params: Any) -> Optimizer:
        optimizer = make(params)
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.0
        return optimizer

    plain = [updated(without_decay, count=count) for count in (2, 3)]
    ahead = updated(without_decay, delay)
    for y_before, y, w in zip(*plain, ahead, strict=True):
        torch.testing.assert_close(w, y - delay * (y_before - y))


LATE: dict[str, Callable[[Any], Any]] = {
    "muon": DelayAwareMuon,
    "sgd": lambda p: DelayAwareSGD(p, lr=0.1),
    "error feedback": lambda p: ErrorFeedback(torch.optim.AdamW(p)),
    "error feedback, sgd": lambda p: ErrorFeedback(DelayAwareSGD(p, lr=0.1)),
}


def step(optimizer: Optimizer, seed: int) -> list[Tensor]:
    """The parameters after one more update."""
    torch.manual_seed(seed)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for p in params:
        p.grad = torch.randn(p.shape).to(p)
    optimizer.step()
    return params


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LATE)
def test_training_goes_on_from_a_state_dict(name: str, dtype: torch.dtype) -> None:
    """To the bit, though torch converts a state to the precision of parameters."""
    model = nn.Linear(3, 4).to(dtype)
    optimizer = LATE[name](model.parameters())
    optimizer.delay = 2.0
    step(optimizer, 1)
    resumed = LATE[name](copy.deepcopy(model).parameters())
    resumed.delay = 2.0
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for seed in (2, 3):
        pairs = zip(step(optimizer, seed), step(resumed, seed), strict=True)
        assert all(torch.equal(p, q) for p, q in pairs)


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 11)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, tokens: Tensor) -> Any:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)


def test_embeddings_and_the_output_layer_are_adamws() -> None:
    model = Tower()
    model.token = nn.Parameter(torch.zeros(1, 3, 8))
    model.table = nn.Parameter(torch.zeros(3, 8))
    model.no_weight_decay = lambda: {"table"}  # type: ignore[assignment]
    model.get_classifier = lambda task: model.blocks[task]  # a method of another meaning
    named = list(model.named_parameters())
    names = {id(p): name for name, p in named}
    matrices, rest = muon_groups(model)(named)
    assert {names[id(p)] for p in matrices["params"]} == {f"blocks.{i}.weight" for i in range(4)}
    assert "embed.weight" in {names[id(p)] for p in rest["params"]}
    matrices, _ = muon_groups(model, adamw=["blocks.0"])(named)
    assert {names[id(p)] for p in matrices["params"]} == {f"blocks.{i}.weight" for i in (1, 2, 3)}
    with pytest.raises(ValueError, match="muon_groups: expected the model, got 3"):
        muon_groups(3)  # type: ignore[arg-type]
    refuses(ValueError, "the model has no 'block'", muon_groups, model, adamw=["block"])
    refuses(ValueError, "expected a list of paths", muon_groups, model, adamw="head")


@pytest.mark.parametrize(("size", "distance"), [(3.0, 0.6), (0.0, 0.02), (100.0, None)])
def test_a_matrix_does_not_drift_away_during_a_delay(size: float, distance: float | None) -> None:
    """By 20 % of its norm in two updates, if gradients are two late; at zero it counts as 0.2."""
    weight = nn.Parameter(size * torch.eye(6, 4))
    optimizer = DelayAwareMuon([weight], lr=1.0, feedback=0.0, max_drift=0.2)
    optimizer.delay = 2.0
    before = weight.detach().clone()
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    moved = before - weight.detach()
    twin = nn.Parameter(torch.zeros(6, 4))
    twin.grad = weight.grad
    torch.optim.Muon([twin], lr=1.0).step()
    update = -twin.detach()
    expected = update if distance is None else update * distance / update.norm()
    torch.testing.assert_close(moved, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(12, 4), (4, 12)], ids=["nn.Linear", "Conv1D"])
def test_three_matrices_in_one_are_updated_one_by_one(shape: tuple[int, int]) -> None:
    side = shape.index(12)
    whole = nn.Parameter(torch.randn(shape))
    parts = [nn.Parameter(part.clone()) for part in whole.detach().chunk(3, side)]
    optimizers = [
        DelayAwareMuon([{"params": [whole], "use_muon": True, "chunks": 3}]),
        DelayAwareMuon(parts),
    ]
    for _ in range(3):
        whole.grad = torch.randn(shape)
        for part, grad in zip(parts, whole.grad.chunk(3, side), strict=True):
            part.grad = grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(whole, torch.cat(parts, side))


@pytest.mark.parametrize("shape", [(10, 4), (12, 4, 1)])
def test_what_cannot_be_divided_is_refused(shape: tuple[int, ...]) -> None:
    group = {"params": [nn.Parameter(torch.ones(shape))], "use_muon": True, "chunks": 3}
    refuses(ValueError, "chunks=3: expected matrices whose longer side", DelayAwareMuon, [group])
    with pytest.raises(ValueError, match="chunks=0: expected a whole number, at least 1"):
        DelayAwareMuon([group | {"chunks": 0}])


class Conv1D(nn.Module):
    """A linear layer whose weight is transposed, as those of GPT-2."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(inputs, outputs))


def fused_of(model: nn.Module) -> set[str]:
    """Names of the matrices that are updated as three."""
    named = list(model.named_parameters())
    names = {id(p): name for name, p in named}
    groups = muon_groups(model)(named)
    return {names[id(p)] for group in groups for p in group["params"] if "chunks" in group}


def attention(layer: nn.Module, **attributes: Any) -> nn.Module:
    module = nn.ModuleDict({"qkv": layer})
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def test_fused_projections_are_found() -> None:
    model = nn.ModuleDict(
        {
            "qkv": nn.Linear(4, 12),
            "attention": nn.MultiheadAttention(4, 2),
            "c_attn": Conv1D(12, 4),
            "mlp": nn.Linear(4, 12),
            "grouped": attention(nn.Linear(4, 8)),
            "grouped_wide": attention(nn.Linear(4, 12), num_key_value_groups=4),
            "narrow": attention(nn.Linear(12, 4)),
            "by_head": attention(nn.Linear(4, 12), head_first=True),
            "adapted": attention(nn.ModuleDict({"down": nn.Linear(12, 4), "up": nn.Linear(4, 12)})),
        }
    )
    assert fused_of(model) == {"qkv.weight", "attention.in_proj_weight", "c_attn.weight"}


def test_vectors_and_tied_weights_are_adamws() -> None:
    model = Tower()
    model.scale = nn.Parameter(torch.ones(8, 1, 1))
    model.table = nn.Linear(8, 8)
    model.no_weight_decay = lambda: {"table"}  # type: ignore[assignment]
    model.head.weight = model.embed.weight
    named = list(model.named_parameters(remove_duplicate=False))
    names = {id(p): name for name, p in named if name != "embed.weight"}
    # a stage that has the output layer alone
    matrices, rest = muon_groups(model)([(n, p) for n, p in named if n != "embed.weight"])
    assert {names[id(p)] for p in matrices["params"]} == {f"blocks.{i}.weight" for i in range(4)}
    assert {"head.weight", "scale", "table.weight"} < {names[id(p)] for p in rest["params"]}
    with pytest.raises(ValueError, match=r"the model has no 'module\.scale'"):
        muon_groups(model)([(f"module.{name}", p) for name, p in named])


def test_factors_of_low_rank_are_adamws() -> None:
    """Adapters start at zero, and classifiers of few classes are output layers."""
    model = nn.Sequential(nn.Linear(32, 3), nn.Linear(3, 32), nn.Linear(32, 4), nn.Conv1d(4, 99, 1))
    matrices, _ = muon_groups(model)(list(model.named_parameters()))
    assert [tuple(p.shape) for p in matrices["params"]] == [(4, 32), (99, 4, 1)]


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (1, 5), (5, 1), (1, 1), (4, 3, 2, 2)])
def test_matrices_of_any_shape(shape: tuple[int, ...]) -> None:
    """Without a gradient that is not zero they stay."""
    weight = nn.Parameter(torch.zeros(shape))
    optimizer = DelayAwareMuon([weight])
    optimizer.delay = 2.0
    weight.grad = torch.zeros(shape)
    optimizer.step()
    assert not weight.any()
    step(optimizer, 0)
    assert weight.all() and weight.isfinite().all()


@pytest.mark.parametrize("method", ["petra", "petra_stashed", "1f1b"])
def test_a_pipeline_trains_with_it(method: str) -> None:
    model = Tower()
    tokens = torch.randint(11, (4, 6))
    net = revcompile.petrafy(model, 4, tokens)
    trainer = net.trainer(
        lambda p: DelayAwareMuon(p, lr=0.02, adamw_lr=0.01),
        lambda output, target: F.cross_entropy(output.flatten(0, 1), target.flatten()),
        method=method,
        param_groups=muon_groups(model),
    )
    delays = [executor.updater.optimizer.delay for executor in trainer._executors]
    assert (delays[0] > 0) == (method != "1f1b") and delays[-1] == 0
    losses = [trainer.step(tokens, tokens) for _ in range(60)]
    seen = [metrics.loss for metrics in losses if metrics.loss is not None]
    assert seen[-1] < 0.2 * seen[0]


@cases(
    "settings, message",
    ({"weight_decay": -1.0}, "weight_decay=-1.0: expected a number"),
    ({"momentum": None}, "momentum=None: expected a number"),
    ({"betas": 0.9}, "betas=0.9: expected two numbers"),
    ({"lr": -1.0}, "lr=-1.0: expected a number of 0 or more"),
    ({"momentum": 1.0}, "momentum=1.0: expected a number from 0 to below 1"),
    ({"betas": (0.9, 1.5)}, r"betas\[1\]=1.5"),
    ({"lr": "0.1"}, "lr='0.1': expected a number of 0 or more"),
    ({"max_drift": -0.1}, "max_drift=-0.1: expected a number above 0, or None"),
    ({"max_drift": 0}, "max_drift=0: expected a number above 0, or None"),
    ({"max_drift": math.inf}, "max_drift=inf: expected a number above 0, or None"),
    ({"max_drift": "0.1"}, "max_drift='0.1': expected a number above 0, or None"),
    ({"ns_steps": 0}, "ns_steps=0: expected a whole number, at least 1"),
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], message: str) -> None:
    """Given to the optimizer, or to a group; of all optimizers that have them."""
    params = [nn.Parameter(torch.zeros(2, 2))]
    for kind in (DelayAwareMuon, DelayAwareSGD):
        if settings.keys() <= inspect.signature(kind).parameters.keys():
            for given, rest in ((params, settings), ([{"params": params, **settings}], {})):
                refuses(InputError, message, kind, given, **{"lr": 0.1} | rest)
