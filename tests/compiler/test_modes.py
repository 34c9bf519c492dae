"""One graph for train and eval mode where their structures agree, and two where they do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from revcompile.compiler.capture import capture

X = torch.randn(2, 6)


class Switch(nn.Module):
    """A function of the input and the mode."""

    def __init__(self, function: Callable[[Tensor, bool], Any]) -> None:
        super().__init__()
        self.function = (function,)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Any:
        if not self.training:
            _ = self.scale.device, x.shape  # what is only looked at makes no difference
        return self.function[0](x * self.scale, self.training)


ONE: list[Callable[[Tensor, bool], Any]] = [
    lambda x, training: x.tanh() + 1,
    lambda x, training: F.dropout(x, 0.5, training),
    lambda x, training: x * (2.0 if training else 3.0),
    lambda x, training: x[:, : 4 if training else 2],
    lambda x, training: x.sum((0, 1) if training else (0, -1)),
    lambda x, training: torch.clamp(x, max=1.0 if training else None, min=0.0),
    lambda x, training: x.clamp(min=0.0, max=1.0) if training else x.clamp(max=3.0, min=2.0),
]
TWO: list[Callable[[Tensor, bool], Any]] = [
    lambda x, training: x.tanh() if training else x,
    lambda x, training: x.tanh() if training else x.relu(),
    lambda x, training: (x, x.tanh()) if training else (x.tanh(), x),
    lambda x, training: x.tanh() - x.relu() if training else -(x.relu() - x.tanh()),
    lambda x, training: x.add(x) if training else x.add(1),
    lambda x, training: x + (torch.ones(6) if training else torch.zeros(6)),
]


@pytest.mark.parametrize(
    ("function", "count"), [*((one, 1) for one in ONE), *((two, 2) for two in TWO)]
)
def test_modes_have_one_graph_or_two(function: Callable[[Tensor, bool], Any], count: int) -> None:
    captured = capture(Switch(function), X, check="full")
    assert (captured.eval_graph is not None) == (count == 2)
