"""Random operations are known by their tag, not by their name."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.nn import functional as F

from revcompile.ir.random_numbers import draws_random
from revcompile.ir.types import TYPE, TensorType


def function_node(function: Any, *rest: Any, **kwargs: Any) -> fx.Node:
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(function, (x, *rest), kwargs)
    node.meta[TYPE] = TensorType((2,), (1,), torch.float32, 2)
    return node


def method_node(name: str) -> fx.Node:
    graph = fx.Graph()
    node = graph.call_method(name, (graph.placeholder("x"),))
    node.meta[TYPE] = TensorType((2,), (1,), torch.float32, 2)
    return node


def dropout_of_my_own(x: Tensor) -> Tensor:
    return x


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (function_node(F.dropout), True),
        (function_node(F.dropout2d), True),
        (function_node(torch.ops.aten.rrelu.default), True),
        (function_node(torch.binomial, 0.5), True),
        (method_node("log_normal_"), True),
        (function_node(dropout_of_my_own), True),
        (function_node(F.scaled_dot_product_attention, 1, 1), False),
        (function_node(F.scaled_dot_product_attention, 1, 1, dropout_p=0.1), True),
        (function_node(F.poisson_nll_loss, 1), False),
        (function_node(operator.and_, 1), False),
        (function_node(torch.Tensor.size, 0), False),
        (method_node("relu"), False),
    ],
)
def test_random_operations_are_known_by_their_tag(node: fx.Node, expected: bool) -> None:
    assert draws_random(node) is expected
