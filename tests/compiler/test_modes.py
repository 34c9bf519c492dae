"""merge_modes: one graph for train and eval where their structures agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tracing import lines, outputs, traced

from revcompile.compiler.capture.modes import first_difference, merge_modes

X = torch.randn(2, 6)


class Switch(nn.Module):
    """A function of the input and the mode."""

    def __init__(self, function: Callable[[Tensor, bool], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x, self.training)


def both(function: Callable[[Tensor, bool], Any]) -> tuple[Any, Any]:
    model, constants = Switch(function), dict[str, Tensor]()
    train = traced(model.train(), X, constants=constants).graph
    return train, traced(model.eval(), X, constants=constants).graph


def corner(x: Tensor, rows: int, columns: int) -> Tensor:
    return x[:rows, :columns]


def test_equal_graphs_stay_as_they_are() -> None:
    train, evaluation = both(lambda x, training: x.tanh() + 1)
    merged = merge_modes(train, evaluation)
    assert merged is not None and merged is not train
    assert lines(merged) == ["tanh = tanh(x)", "add = add(tanh, 1)"]


@pytest.mark.parametrize(
    "function",
    [
        lambda x, training: F.dropout(x, 0.5, training),
        lambda x, training: x * (2.0 if training else 3.0),
        lambda x, training: x[:, : 4 if training else 2],
        lambda x, training: x.sum((0, 1) if training else (0, -1)),
        lambda x, training: torch.clamp(x, max=1.0 if training else None, min=0.0),
        lambda x, training: x * (1 if training else True),
    ],
)
def test_constants_are_chosen_by_the_mode(function: Callable[[Tensor, bool], Any]) -> None:
    merged = merge_modes(*both(function))
    assert merged is not None
    assert sum("select(" in line for line in lines(merged)) == 1
    for training in (True, False):
        root = nn.Module().train(training)
        torch.manual_seed(0)
        (actual,) = outputs(merged, X, root=root)
        torch.manual_seed(0)
        torch.testing.assert_close(actual, function(X, training))


def test_choice_is_written_as_select() -> None:
    merged = merge_modes(*both(lambda x, training: x * (2.0 if training else 3.0)))
    assert merged is not None
    assert lines(merged) == [
        "training = training()",
        "select = select(training, 2.0, 3.0)",
        "mul = mul(x, select)",
    ]


def test_order_of_keywords_makes_no_difference() -> None:
    train, evaluation = both(
        lambda x, training: x.clamp(min=0.0, max=1.0) if training else x.clamp(max=3.0, min=2.0)
    )
    merged = merge_modes(train, evaluation)
    assert merged is not None
    (actual,) = outputs(merged, X, root=nn.Module().eval())
    torch.testing.assert_close(actual, X.clamp(min=2.0, max=3.0))


@pytest.mark.parametrize(
    "function",
    [
        lambda x, training: x.tanh() if training else x,
        lambda x, training: x.tanh() if training else x.relu(),
        lambda x, training: (x, x.tanh()) if training else (x.tanh(), x),
        lambda x, training: x.tanh() - x.relu() if training else -(x.relu() - x.tanh()),
        lambda x, training: x.add(x) if training else x.add(1),
        lambda x, training: x + (torch.ones(6) if training else torch.zeros(6)),
        lambda x, training: corner(x, *(x.shape if training else reversed(tuple(x.shape)))),
    ],
)
def test_different_structures_are_not_merged(function: Callable[[Tensor, bool], Any]) -> None:
    train, evaluation = both(function)
    assert merge_modes(train, evaluation) is None
    assert len(first_difference(train, evaluation)) == 2


def test_what_was_only_looked_at_makes_no_difference() -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(6)), nn.Parameter(torch.ones(6))

        def forward(self, x: Tensor) -> Tensor:
            if not self.training:
                _ = self.b.device, self.a.dtype, x.shape
            return x * self.a + self.b

    model = Looks()
    train, evaluation = traced(model.train(), X).graph, traced(model.eval(), X).graph
    assert merge_modes(train, evaluation) is not None
