"""The tracer: sizes steer, batches stay free, what a graph cannot hold is noticed."""

from __future__ import annotations

import builtins
import math
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from tracing import lines, traced

from revcompile.compiler.capture import capture
from revcompile.compiler.capture.example import make_example
from revcompile.compiler.capture.fake_values import fake_copy
from revcompile.compiler.capture.fx_frontend import trace
from revcompile.compiler.capture.trace_errors import Untraceable
from revcompile.ir.types import PATH, SOURCE, TYPE, VALUE


def graph_lines(function: Callable[..., Any], *args: Any) -> list[str]:
    return lines(traced(function, *args).graph)


X = torch.randn(2, 6)


# -- sizes ---------------------------------------------------------------------------------------


def test_sizes_steer_python() -> None:
    def forward(x: Tensor) -> Tensor:
        for _ in range(x.shape[1] // 3):
            x = x.tanh() if x.ndim == 2 and len(x.shape) == 2 else x.relu()
        return x

    assert graph_lines(forward, X) == ["tanh = tanh(x)", "tanh_1 = tanh(tanh)"]


def test_batch_size_stays_in_the_graph() -> None:
    assert graph_lines(lambda x: x.view(x.shape[0] * 2, -1), X) == [
        "getattr_1 = getattr(x, shape)",
        "getitem = getitem(getattr_1, 0)",
        "mul = mul(getitem, 2)",
        "view = view(x, mul, -1)",
    ]
    graph = traced(lambda x: x.view(x.shape[0] * 2, -1), X).graph
    facts = {n.name: (str(n.meta[TYPE]), n.meta[VALUE]) for n in graph.nodes}
    assert facts["mul"] == ("None", (4, 6))
    assert facts["view"] == ("float32[2B, 3]", None)


@pytest.mark.parametrize(
    ("forward", "size"),
    [
        (lambda x: x.new_zeros(math.ceil(x.shape[0] / 2)), (1, 2)),
        (lambda x: x.new_zeros(math.floor(x.shape[0] / 2)), (1, 1)),
        (lambda x: x.new_zeros(round(x.shape[0] * 1.6)), (3, 5)),
        (lambda x: x.new_zeros(-(-x.shape[0] // 4)), (1, 1)),
        (lambda x: x.new_zeros(math.prod([x.shape[0], 2])), (4, 6)),
        (lambda x: torch.zeros(x.shape[0], device=x.device), (2, 3)),
        (lambda x: torch.full((x.size(0),), 1.0), (2, 3)),
        (lambda x: torch.tensor([x.shape[0], 1]), (2, 2)),
    ],
)
def test_arithmetic_of_the_batch_size(forward: Callable[..., Any], size: tuple[int, int]) -> None:
    result = list(traced(forward, X).graph.nodes)[-2].meta[TYPE]
    assert (result.at(2), result.at(3)) == ((size[0],), (size[1],))


@pytest.mark.parametrize(
    ("forward", "words"),
    [
        (lambda x: x if x.shape[0] > 2 else -x, "control flow depends on the batch size"),
        (lambda x: [row for row in x], "control flow depends on the batch size (2 or 3)"),  # noqa: C416
        (lambda x: x * int(x.shape[0]), "control flow depends on the batch size (2 or 3)"),
        (lambda x: x if x.max() > 0 else -x, "control flow depends on the contents of a tensor"),
        (lambda x: x * x.max().item(), "control flow depends on the contents of a tensor"),
        (lambda x: x[x > 0], "a shape depends on the contents of a tensor (aten.nonzero.default)"),
        (lambda x: x if torch.rand(()) > 0 else -x, "control flow depends on random numbers"),
        (lambda x: torch.add(x, x, out=torch.empty(2, 6)), ""),
    ],
)
def test_what_does_not_trace_says_why(forward: Callable[..., Any], words: str) -> None:
    with pytest.raises(Untraceable) as error:
        traced(forward, X)
    assert error.value.path == ""
    assert error.value.cause.startswith(words)
    assert "test_tracer.py" in error.value.source


def test_a_size_that_must_not_be_zero_stays_free() -> None:
    found = traced(lambda x: x.view(x.shape[0] or 1, 6) if x.shape[0] else x, X)
    guards = found.guards.sizes[0].guards
    assert {(guard.expression, guard.value) for guard in guards} == {("x.shape[0] != 0", True)}
    assert list(found.graph.nodes)[-2].meta[TYPE].at(5) == (5, 6)


def test_control_flow_on_a_mask_of_sizes_alone() -> None:
    def forward(x: Tensor) -> Tensor:
        padding = torch.zeros(x.shape[0], 6, dtype=torch.bool, device=x.device)
        return x.masked_fill(padding, 0.0) if padding.any() else x.tanh()

    assert graph_lines(forward, X) == ["tanh = tanh(x)"]


def test_control_flow_on_a_mask_written_to_is_not_folded() -> None:
    def forward(x: Tensor) -> Tensor:
        padding = torch.zeros(x.shape[0], 6, dtype=torch.bool, device=x.device)
        padding[:, 0] = True
        return x.masked_fill(padding, 0.0) if padding.any() else x.tanh()

    with pytest.raises(Untraceable, match="control flow depends on the contents of a tensor"):
        traced(forward, X)


def test_types_and_devices_stay_in_the_graph() -> None:
    assert graph_lines(lambda x, y: x.to(y.dtype).to(y.device), X, X) == [
        "getattr_1 = getattr(more_0, dtype)",
        "to = to(x, getattr_1)",
        "getattr_2 = getattr(more_0, device)",
        "to_1 = to(to, getattr_2)",
    ]


def test_type_limits_are_read_once_for_a_type() -> None:
    least = torch.finfo(torch.float32).min
    found = traced(lambda x: x.to(x.dtype).clamp(min=torch.finfo(x.dtype).min), X)
    to, clamp = lines(found.graph)
    assert to.endswith("to(x, torch.float32)") and clamp.endswith(f"min={least})")
    assert [(g.expression, g.value) for g in found.guards.sizes[0].guards] == [
        ("x.dtype", torch.float32)
    ]


def test_isinstance_believes_what_a_proxy_stands_for() -> None:
    seen = []

    def forward(x: Tensor) -> Tensor:
        seen.append((isinstance(x, Tensor), isinstance(x, nn.Parameter), isinstance(x, int)))
        seen.append((isinstance(x.shape[0], int), isinstance(x.shape, tuple)))
        return x * 2

    traced(forward, X)
    assert seen == [(True, False, False), (True, True)]


def test_absent_attributes_are_absent() -> None:
    assert graph_lines(lambda x: x.tanh() if hasattr(x, "magic") else x.relu(), X) == [
        "relu = relu(x)"
    ]


# -- state and constants -------------------------------------------------------------------------


def test_equal_constants_share_a_name_across_modes() -> None:
    class Constants(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            shift = torch.ones(6) if self.training else torch.ones(6) * 2
            return x * torch.arange(6.0) + shift

    constants: dict[str, Tensor] = {}
    model = Constants()
    train = traced(model, X, constants=constants)
    evaluation = traced(model.eval(), X, constants=constants)
    assert list(constants) == [f"revcompile_constant_{i}" for i in range(3)]
    assert train.constants.keys() & evaluation.constants.keys() == {"revcompile_constant_0"}


def test_caches_are_forgotten() -> None:
    class Caches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.ones(6))
            self.cache: dict[str, Tensor] = {}
            self.last: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if "bias" not in self.cache:
                self.cache["bias"] = self.bias * 2
            self.last = x
            return x + self.cache["bias"]

    model, mode = Caches(), FakeTensorMode(allow_non_fake_inputs=True)
    fake, example = fake_copy(model, mode), make_example(model, X)
    for _ in range(2):
        graph = trace(fake, model, example, mode).graph
        assert lines(graph) == ["bias = bias()", "mul = mul(bias, 2)", "add = add(x, mul)"]
        assert fake.cache == {} and fake.last is None


def test_no_grad_becomes_detach() -> None:
    def forward(x: Tensor) -> Tensor:
        with torch.no_grad():
            centre = x.mean(0).tanh()
        return x - centre

    assert graph_lines(forward, X) == [
        "mean = mean(x, 0)",
        "tanh = tanh(mean)",
        "detach = detach(tanh)",
        "sub = sub(x, detach)",
    ]


def test_writing_under_no_grad_into_a_value_with_gradients() -> None:
    def forward(x: Tensor) -> Tensor:
        y = x.tanh()
        with torch.no_grad():
            y.mul_(2)
        return y

    with pytest.raises(Untraceable, match="an in-place operation under no_grad on a value made"):
        traced(forward, X)


# -- modules -------------------------------------------------------------------------------------


class Stubborn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.after = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).relu()
        return self.after(y) if y.sum() > 0 else y


def test_an_untraceable_module_leaves_no_nodes() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stubborn, self.head = Stubborn(), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.stubborn(x)) @ self.stubborn.linear.weight

    found = traced(Model(), X)
    assert [line.split(" = ")[1] for line in lines(found.graph)] == [
        "stubborn(x)",
        "head(stubborn)",
        "stubborn.linear.weight()",
        "matmul(head, stubborn_linear_weight)",
    ]
    assert found.untraceable == {"stubborn": "control flow depends on the contents of a tensor"}


def test_the_innermost_module_that_can_be_a_leaf_becomes_one() -> None:
    class Region(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(6, 6))

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.inner(x)

    found = traced(nn.Sequential(Region()), X)
    assert list(found.untraceable) == ["0"]


def test_an_attempt_that_the_model_catches_leaves_nothing_behind() -> None:
    def forward(x: Tensor) -> Tensor:
        y = x.tanh()
        try:
            return y.add_(torch.ones(7))
        except RuntimeError:
            return y.relu()

    assert graph_lines(forward, X) == ["tanh = tanh(x)", "relu = relu(tanh)"]


def test_a_layer_that_fails_is_named_with_the_line_that_calls_it() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Sequential(nn.Linear(5, 5))

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x)

    with pytest.raises(Untraceable) as error:
        traced(Model(), X)
    assert error.value.path == "head.0"
    assert error.value.cause.startswith("RuntimeError: ")
    assert error.value.source.endswith("return self.head(x)")


def test_nodes_know_where_they_come_from() -> None:
    found = traced(nn.Sequential(nn.Sequential(nn.Linear(6, 6)), nn.Flatten()), X)
    paths = {n.name: n.meta[PATH] for n in found.graph.nodes}
    assert paths["_0_0"] == "0.0"

    node = list(traced(lambda x: x.tanh(), X).graph.nodes)[1]
    assert node.meta[SOURCE].rpartition(":")[0] == __file__


def test_tuple_of_a_leaf_is_taken_apart() -> None:
    found = traced(nn.Sequential(nn.LSTM(6, 4)), X)
    assert lines(found.graph)[1:] == [
        "getitem = getitem(_0, 0)",
        "getitem_1 = getitem(_0, 1)",
        "getitem_2 = getitem(getitem_1, 0)",
        "getitem_3 = getitem(getitem_1, 1)",
    ]
    assert found.out_spec.num_leaves == 3


# -- other threads -------------------------------------------------------------------------------


OWNERS = (
    *(builtins, math, torch, torch.Tensor, torch._C.TensorBase, F, nn, nn.Module),
    *(torch.autograd.Function, torch.autocast, torch.utils.checkpoint, torch.nn.modules.module),
)


def attributes() -> dict[tuple[str, str], Any]:
    return {(str(owner), name): value for owner in OWNERS for name, value in vars(owner).items()}


def replaced(before: dict[tuple[str, str], Any]) -> list[tuple[str, str]]:
    now = attributes()
    logged = ("__getattribute__", "__setattr__")
    return [key for key, v in before.items() if now.get(key) is not v and key[1] not in logged]


class Helper(nn.Module):
    """What another thread uses while a model is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(6, 6), 2.0

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale


def test_other_threads_see_nothing_of_a_trace() -> None:
    helper, found = Helper(), list[Any]()
    before, result = attributes(), helper(X).detach()

    def look() -> None:
        found.append(replaced(before) == [])
        kinds = {type(make(3)) for make in (torch.randn, torch.empty, torch.arange, torch.ones)}
        found.append(kinds == {Tensor} and type(torch.tensor([1, 2])) is Tensor)
        found.append(type(helper.layer.weight) is nn.Parameter and helper.scale == 2.0)
        found.append(torch.equal(helper(X), result) and isinstance(helper, nn.Module))
        found.append(type(math.sqrt(4.0)) is float and torch.is_grad_enabled())
        random.random(), np.random.rand()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x) + torch.zeros(x.shape[0], 6)
            other.submit(look).result()
            return y * math.sqrt(x.shape[1])

    with ThreadPoolExecutor(1) as other:
        captured = capture(Model(), X, check="fast")
    assert captured.leaf_modules == () and len(found) > 10 and all(found)
