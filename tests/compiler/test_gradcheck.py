"""Lost or wrong gradients are refused by name before anything trains."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import cases
from torch import Tensor, nn
from torch.nn import functional as F

import revcompile
from revcompile import gradcheck
from revcompile.errors import VerificationError
from revcompile.ir import coupling_ops
from revcompile.ir.program import Partition
from revcompile.runtime.reversible import coupling
from tests.compiler.test_values import Chunk, example, made, spectrum


class Noisy(nn.Module):
    """Dropout, batch norm, and an input that is read by all blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.norm, self.drop, self.key = nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        key, x = self.key(x).sigmoid(), self.stem(x)
        for layer in self.layers:
            x = x + self.drop(torch.tanh(layer(x))) * key
        return self.norm(x)


# -- numbers --------------------------------------------------------------------------------------


def test_a_gradient_that_stages_lose_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    known = Partition.requires_grad

    def real_numbers_alone(self: Partition, name: str) -> bool:
        return known(self, name) and not self.types[name].dtype.is_complex

    monkeypatch.setattr(Partition, "requires_grad", real_numbers_alone)
    with pytest.raises(VerificationError, match=r"(?s)petrafy: .*stages.*filter differs by"):
        revcompile.petrafy(spectrum(), 4, example())


def test_wrong_gradients_of_a_chain_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    right = coupling._differentiate

    def without_sides(node: Any, rebuilt: Any, *rest: Any) -> Any:
        grad_a, grad_b, *found = right(node, rebuilt, *rest)
        return grad_a, grad_b, *[None] * len(rebuilt.sides), *found[len(rebuilt.sides) :]

    monkeypatch.setattr(coupling, "_differentiate", without_sides)
    with pytest.raises(VerificationError, match=r"(?s)reversify: .*chains.*key.weight has no grad"):
        revcompile.reversify(Noisy(), torch.randn(5, 8))
    revcompile.reversify(Noisy(), torch.randn(5, 8), check="off")


def test_wrong_gradients_of_stages_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    right = coupling_ops.vjp

    def doubled(*args: Any) -> Any:
        return tuple(None if g is None else 2 * g for g in right(*args))

    monkeypatch.setattr(coupling_ops, "vjp", doubled)
    with pytest.raises(VerificationError, match=r"(?s)petrafy: .*stages \(backprop\).*differs by"):
        revcompile.petrafy(made(Chunk), 3, example())


class Pooling(nn.Module):
    """Max pooling by a function or by a layer, at the beginning of each branch."""

    def __init__(self, pool: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv1d(4, 4, 3, padding=1) for _ in range(3))
        self.pool = pool

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(self.pool(x))
        return x


@cases(
    "pool",
    nn.MaxPool1d(3, 1, 1),
    nn.Sequential(nn.MaxPool1d(3, 1, 1)),
    lambda x: F.max_pool1d(x, 3, 1, 1),
)
def test_ties_of_max_pooling_are_refused(pool: Callable[[Tensor], Tensor]) -> None:
    x = torch.randint(1, 3, (2, 4, 8)).float() / 3
    leaves = [nn.Sequential] if isinstance(pool, nn.Sequential) else []
    with pytest.raises(VerificationError, match=r"(?s)differs by .*exactly equal"):
        revcompile.reversify(Pooling(pool), x, leaf_modules=leaves)
    revcompile.reversify(Pooling(pool), x, leaf_modules=leaves, check="off")
    revcompile.reversify(Pooling(pool), torch.randn(2, 4, 8), leaf_modules=leaves)


def test_a_long_comparison_is_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    line = "gradients were not compared on the example, which would take longer than compiling"
    assert line not in revcompile.reversify(Noisy(), torch.randn(5, 8)).summary()
    monkeypatch.setattr(gradcheck, "_WORK_PER_NODE", 0.0)
    assert line in revcompile.reversify(Noisy(), torch.randn(5, 8)).summary().replace("\n", " ")
    net = revcompile.reversify(Noisy(), torch.randn(5, 8), check="full")
    assert not any("not compared" in note for note in net.rewired.notes)
