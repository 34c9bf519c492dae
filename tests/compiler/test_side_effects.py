"""functionalize: in-place operations become pure; buffers are stored by nodes of their own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from tracing import Function, lines, outputs, traced

from revcompile.compiler.capture.functional import NotFunctional, forbid_inplace, functionalize
from revcompile.compiler.capture.memory import is_effect
from revcompile.ir.types import TYPE

X = torch.randn(2, 6)


def pure(model: nn.Module | Callable[..., Any], *args: Any) -> fx.Graph:
    """The functional graph of a model; checked: it computes what the model computes."""
    args = args or (X,)
    module = model if isinstance(model, nn.Module) else Function(model)
    module = copy.deepcopy(module)
    graph = functionalize(traced(module, *args).graph, module)
    forbid_inplace(graph, module)
    before = copy.deepcopy(args)
    torch.manual_seed(3)
    (actual,) = outputs(graph, *args, root=copy.deepcopy(module))
    torch.testing.assert_close(args, before, rtol=0, atol=0)
    torch.manual_seed(3)
    torch.testing.assert_close(actual, copy.deepcopy(module)(*before), rtol=0, atol=0)
    return graph


def effects(graph: fx.Graph) -> list[str]:
    return [node.name for node in graph.nodes if is_effect(node)]


def add_one(x: Tensor) -> Tensor:
    y = x * 2
    y += 1
    return y


def overwrite(x: Tensor) -> Tensor:
    y = x * 2
    y[:, 0] = 7.0
    return y.tanh()


def copy_into(x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y.copy_(x[:, :1])
    return y


def activate(x: Tensor) -> Tensor:
    y = x * 2
    F.relu(y, inplace=True)
    return y + torch.sigmoid_(x * 3)


def mask_both(x: Tensor) -> Tensor:
    mask = x > 0
    mask |= x < -1
    mask &= x < 2
    return x.masked_fill(mask, 0.0)


def reshape_in_place(x: Tensor) -> Tensor:
    y = x * 2
    y.unsqueeze_(0)
    return y.tanh()


def noise(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], 1).uniform_() + torch.empty(6).normal_()


def fair_coin(x: Tensor) -> Tensor:
    return x * torch.full_like(x, 0.9).bernoulli_()


@pytest.mark.parametrize(
    ("forward", "expected"),
    [
        (add_one, ["mul = mul(x, 2)", "add = add(mul, 1)"]),
        (
            overwrite,
            [
                "mul = mul(x, 2)",
                "with_item = with_item(mul, (slice(None, None, None), 0), 7.0)",
                "tanh = tanh(with_item)",
            ],
        ),
        (
            copy_into,
            [
                "zeros_like = zeros_like(x)",
                "getitem = getitem(x, (slice(None, None, None), slice(None, 1, None)))",
                "with_item = with_item(zeros_like, Ellipsis, getitem)",
            ],
        ),
        (
            activate,
            [
                "mul = mul(x, 2)",
                "relu = relu(mul)",
                "mul_1 = mul(x, 3)",
                "sigmoid = sigmoid(mul_1)",
                "add = add(relu, sigmoid)",
            ],
        ),
        (
            reshape_in_place,
            ["mul = mul(x, 2)", "unsqueeze = unsqueeze(mul, 0)", "tanh = tanh(unsqueeze)"],
        ),
    ],
)
def test_in_place_becomes_out_of_place(forward: Callable[..., Any], expected: list[str]) -> None:
    assert lines(pure(forward)) == expected


@pytest.mark.parametrize("forward", [mask_both, noise, fair_coin])
def test_no_effect_is_left(forward: Callable[..., Any]) -> None:
    assert effects(pure(forward)) == []


def test_result_nobody_names_is_not_dead() -> None:
    """DropPath: deleting `div_` made efficientnet_b0 wrong by 0.29."""

    def drop_path(x: Tensor) -> Tensor:
        mask = x.new_empty(x.shape[0], 1).bernoulli_(0.5)
        mask.div_(0.5)
        return x * mask

    assert lines(pure(drop_path))[-2:] == ["div = div(bernoulli, 0.5)", "mul = mul(x, div)"]


def test_sizes_read_before_are_no_alias() -> None:
    def forward(x: Tensor) -> Tensor:
        y = x * 2
        n = y.shape[0]
        y += 1
        return y.view(n, -1)

    assert effects(pure(forward)) == []


def test_views_taken_after_are_no_alias() -> None:
    def forward(x: Tensor) -> Tensor:
        y = x * 2
        y += 1
        return y.flatten().tanh() + y.view(-1)

    assert effects(pure(forward)) == []


def test_view_read_after_a_write_is_refused() -> None:
    def forward(x: Tensor) -> Tensor:
        y = x * 2
        first = y[:, 0]
        y += 1
        return first + y.sum()

    with pytest.raises(NotFunctional, match="writes to getitem, which is read afterwards"):
        pure(forward)


def test_writing_into_a_view_whose_base_is_read_is_refused() -> None:
    def forward(x: Tensor) -> Tensor:
        y = x * 2
        y[:, 2:4].mul_(3)
        return y

    with pytest.raises(NotFunctional, match="writes to mul, which is read afterwards"):
        pure(forward)


def test_a_part_is_assigned_once() -> None:
    def forward(x: Tensor) -> Tensor:
        y = x * 2
        y[:, 2:4] *= 3
        return y

    part = "(slice(None, None, None), slice(2, 4, None))"
    assert lines(pure(forward)) == [
        "mul = mul(x, 2)",
        f"getitem = getitem(mul, {part})",
        "mul_1 = mul(getitem, 3)",
        f"with_item = with_item(mul, {part}, mul_1)",
    ]


def test_alias_made_by_a_layer_in_eval_mode_is_seen() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            kept = self.drop(y)
            kept += 1
            return y + kept

    assert lines(pure(Model().eval()))[-1] == "add_1 = add(add, add)"
    assert lines(pure(Model().train()))[-1] == "add_1 = add(mul, add)"


def test_a_buffer_is_stored_by_a_node_of_its_own() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(6))

        def forward(self, x: Tensor) -> Tensor:
            self.seen += x.detach().mean(0)
            return x - self.seen

    graph = pure(Model())
    assert effects(graph) == ["store_buffer"]
    assert lines(graph)[-2] == "store_buffer = store_buffer(seen, add)"


def test_writing_into_state_that_a_leaf_hands_out_is_refused() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.zeros(6))

        def forward(self) -> Tensor:
            return self.table

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.leaf = Table()

        def forward(self, x: Tensor) -> Tensor:
            return x - self.leaf().add_(1)

    model = Model()
    graph = traced(model, X, leaf_paths=["leaf"]).graph
    with pytest.raises(NotFunctional, match="add_ writes to state that leaf returns"):
        functionalize(graph, model)


def test_input_of_an_in_place_layer_is_read_as_its_output() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.relu = nn.Linear(6, 6), nn.ReLU(inplace=True)

        def forward(self, x: Tensor) -> Tensor:
            y = self.stem(x)
            return y.clone() if self.relu(y) is None else y + 1

    graph = pure(Model())
    assert lines(graph) == ["stem = stem(x)", "relu = relu(stem)", "add = add(relu, 1)"]
    assert effects(graph) == []


def test_leaf_that_writes_into_its_input_is_given_a_copy() -> None:
    class Writes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.add_(1) if x.sum() > 100 else x.mul_(2)

    graph = pure(nn.Sequential(nn.Linear(6, 6), Writes()))
    assert lines(graph) == ["_0 = 0(input_1)", "clone = clone(_0)", "_1 = 1(clone)"]


def test_type_stays_what_it_was() -> None:
    def forward(x: Tensor) -> Tensor:
        y = x.bfloat16()
        y += x
        return y

    graph = pure(forward)
    assert lines(graph)[-1] == "type_as = type_as(add, bfloat16)"
    assert all(n.meta[TYPE].dtype is torch.bfloat16 for n in list(graph.nodes)[-2:-1])


def test_input_graph_is_not_changed() -> None:
    raw = traced(add_one, X).graph
    before = lines(raw)
    functionalize(raw, nn.Module())
    assert lines(raw) == before
