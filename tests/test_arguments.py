"""Wrong arguments are refused in the user's words; nothing reversible is told with its reasons."""

from __future__ import annotations

import collections
import warnings
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import revcompile
from revcompile.errors import InputError, RevcompileWarning


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x + self.f(x).tanh()


X = torch.randn(3, 4)
LOADER: DataLoader[Any] = DataLoader(TensorDataset(X))


@pytest.mark.parametrize(
    ("inputs", "told"),
    [
        ({"x": X}, r"a dict of x, which Block.forward takes as keyword arguments; .* example_kwar"),
        (collections.UserDict(x=X, mask=X), "a UserDict of x, mask, which Block.forward takes"),
        ((2, 4), r"\(2, 4\) is a shape; pass a tensor: torch.randn\(2, 4\)"),
        (X.numpy(), "example_inputs: a numpy array; pass a tensor, torch.from_numpy"),
        ((X, X.numpy()), r"example_inputs\[1\]: a numpy array"),
        (LOADER, r"a DataLoader; pass the inputs of one batch: x, y = next\(iter\(loader\)\)"),
        ((x for x in [X]), "a generator; pass the inputs of one batch"),
    ],
)
def test_example_inputs_of_a_wrong_kind(inputs: Any, told: str) -> None:
    with pytest.raises(InputError, match=told):
        revcompile.reversify(Block(), inputs)


def test_a_dict_that_is_an_argument_is_taken() -> None:
    class FromDict(Block):
        def forward(self, batch: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
            return super().forward(batch["x"])

    net = revcompile.reversify(FromDict(), {"x": X})
    assert net({"x": X}).shape == X.shape


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (Block, r"got the class Block; pass a model of it, Block\(\.\.\.\)"),
        ("resnet18", r"got 'resnet18'; create it first: timm.create_model\('resnet18'\)"),
        (X, "expected a torch.nn.Module, got Tensor"),
    ],
)
def test_what_is_no_model(model: Any, told: str) -> None:
    with pytest.raises(InputError, match=f"reversify: .*{told}"):
        revcompile.reversify(model, X)
    with pytest.raises(InputError, match=f"petrafy: .*{told}"):
        revcompile.petrafy(model, 2, X)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"num_stages": 0}, "petrafy: num_stages=0; expected a whole number, at least 1"),
        ({"num_stages": X}, r"num_stages=Tensor; .*: petrafy\(model, num_stages, example_inputs\)"),
        ({"num_stages": 2.0}, "num_stages=2.0; expected a whole number"),
        ({"num_stages": True}, "num_stages=True; expected a whole number"),
        ({"num_stages": 40}, r"num_stages=40, but Block has \d+ pieces .* use num_stages <= \d+"),
        ({"cost": "mesured"}, r"cost: expected .* got 'mesured'; did you mean 'measured'\?"),
        ({"keep": "graphs"}, r"keep='graphs'; use one of: .*; did you mean 'graph'\?"),
        ({"policy": "papers"}, "policy: expected 'paper', 'pretrained' or a revcompile.Policy"),
        ({"policy": ["paper"]}, r"policy: expected .* got \['paper'\]"),
        ({"check": "slow"}, "check: expected one of 'full', 'fast', 'off', got 'slow'"),
        ({"memory_budget": 0}, 'memory_budget=0; give bytes above 0, or a size like "2GiB"'),
        ({"batch_size": 0}, "batch_size=0; expected a whole number"),
        ({"example_kwargs": X}, "example_kwargs: expected a dict of keyword arguments, got Tensor"),
    ],
)
def test_options_of_petrafy(options: dict[str, Any], told: str) -> None:
    given: dict[str, Any] = {"num_stages": 1, "example_inputs": X} | options
    with pytest.raises(InputError, match=told):
        revcompile.petrafy(Block(), **given)


def test_numbers_of_numpy_are_numbers() -> None:
    assert revcompile.petrafy(Block(), numpy.int64(1), X).num_stages == 1  # type: ignore[arg-type]


# -- nothing reversible ---------------------------------------------------------------------------


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x + self.inner.f(x)


MLP = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
CASES = [
    (MLP, "nothing in Sequential became reversible, .* x \\+ F\\(x\\)"),
    (Scaled(), r"nothing in Scaled became .*Why: \(top level\): the shortcut is scaled by 0.5"),
]


@pytest.mark.parametrize(("model", "told"), CASES)
def test_one_warning_says_that_nothing_is_reversible_and_why(model: nn.Module, told: str) -> None:
    for caller, make in (
        ("reversify", lambda: revcompile.reversify(model, X)),
        ("petrafy", lambda: revcompile.petrafy(model, 1, X)),
    ):
        with pytest.warns(RevcompileWarning, match=f"{caller}: {told}") as seen:
            make()
        assert len(seen) == 1 and seen[0].filename == __file__


def test_something_reversible_gives_no_warning() -> None:
    with warnings.catch_warnings(action="error"):
        revcompile.reversify(Block(), X)
