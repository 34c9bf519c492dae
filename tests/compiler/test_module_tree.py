"""What graphs read of the module tree, and decisions by type, schema or tag instead of by name."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from revcompile.ir.module_tree import copy_module
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


# -- copies ---------------------------------------------------------------------------------------


class OwnCopy(nn.Identity):
    """A module that says itself what a copy of it is."""

    copies = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnCopy:
        memo[id(self)] = made = OwnCopy()
        made.copies = self.copies + 1
        return made


class OwnState(nn.Linear):
    """A module that leaves something behind."""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "cache": None}


@pytest.mark.parametrize("copied", [copy_module, copy.deepcopy])
def test_a_copy_is_the_deep_copy(copied: Callable[[nn.Module], Any]) -> None:
    """What is found twice, in containers and by other names, is one thing in the copy, too."""
    shared = nn.Linear(2, 2)
    net: Any = nn.Sequential(
        shared, nn.Sequential(shared, OwnCopy()), OwnState(2, 2), nn.LSTM(2, 2)
    )
    net.others, net.members = [shared, net], net._modules
    net[2].cache, net[2].table, net[1].alias = [1], {"a": [shared.weight]}, net[2].weight
    made = copied(net)
    assert made.others[0] is made[0] is made[1][0] is not shared and made.others[1] is made
    assert made.members is made._modules is not net._modules
    assert made[1][1].copies == 1 and made[2].cache is None
    assert made[2].table["a"][0] is made[0].weight and made[1].alias is made[2].weight
    assert made[3]._flat_weights[0] is made[3].weight_ih_l0 is not net[3].weight_ih_l0
    pairs = list(zip(made.modules(), net.modules(), strict=True))
    assert all(
        type(a) is type(b) and vars(a).keys() ^ vars(b).keys() <= {"copies"} for a, b in pairs
    )
    states = made.state_dict(), net.state_dict()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
