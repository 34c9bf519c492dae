"""The tracer: sizes steer, batches stay free, what a graph cannot hold is noticed."""

import builtins
import math
import operator
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from helpers import cases, refuses
from nets import module_of
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from revcompile.compiler.capture import capture
from revcompile.compiler.capture.capture import trace
from revcompile.compiler.capture.example import make_example
from revcompile.compiler.capture.fake_values import fake_copy
from revcompile.compiler.capture.trace_errors import Untraceable
from revcompile.compiler.capture.tracer import Tracer
from revcompile.ir.random_numbers import draws_random
from revcompile.ir.types import TYPE, TensorType


def traced(model: nn.Module | Callable[..., Any], *args: Any, **options: Any) -> Tracer:
    """The raw trace of a model in the mode it is in."""
    if not isinstance(model, nn.Module):
        model = module_of(lambda self, x, *more: self.function(x, *more), function=model)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    return trace(fake_copy(model, mode), model, make_example(model, args), mode, **options)


def lines(graph: fx.Graph) -> list[str]:
    """The calls of a graph in short: `relu = relu(x)`."""

    def call(node: fx.Node) -> str:
        name = getattr(node.target, "__name__", str(node.target))
        keywords = (f"{k}={v}" for k, v in node.kwargs.items())
        return f"{node.name} = {name}({', '.join([*map(str, node.args), *keywords])})"

    return [call(n) for n in graph.nodes if n.op not in ("placeholder", "output")]


X = torch.randn(2, 6)


# -- sizes ---------------------------------------------------------------------------------------


@cases(
    "forward, size",
    (lambda x: x.new_zeros(math.ceil(x.shape[0] / 2)), (1, 2)),
    (lambda x: x.new_zeros(math.floor(x.shape[0] / 2)), (1, 1)),
    (lambda x: x.new_zeros(round(x.shape[0] * 1.6)), (3, 5)),
    (lambda x: x.new_zeros(-(-x.shape[0] // 4)), (1, 1)),
    (lambda x: x.new_zeros(math.prod([x.shape[0], 2])), (4, 6)),
    (lambda x: x.new_zeros(sum(divmod(x.shape[0], 2))), (1, 2)),
    (lambda x: x.new_zeros(round(np.sqrt(x.shape[0]) * 4)), (6, 7)),
    (lambda x: torch.zeros(x.shape[0], device=x.device), (2, 3)),
    (lambda x: torch.full((x.size(0),), 1.0), (2, 3)),
    (lambda x: torch.tensor([x.shape[0], 1]), (2, 2)),
)
def test_arithmetic_of_the_batch_size(forward: Callable[..., Any], size: tuple[int, int]) -> None:
    result = list(traced(forward, X).graph.nodes)[-2].meta[TYPE]
    assert (result.at(2), result.at(3)) == ((size[0],), (size[1],))


@pytest.mark.parametrize("number", [1 / np.sqrt(4), np.float32(0.5), np.int64(3)])
def test_numbers_of_numpy_are_plain_in_graphs(number: Any) -> None:
    (product,) = traced(lambda x: x * number, X).graph.find_nodes(
        op="call_function", target=operator.mul
    )
    assert product.args[1] == number and type(product.args[1]) in (float, int)


@cases(
    "forward, words",
    (lambda x: x if x.shape[0] > 2 else -x, "control flow depends on the batch size"),
    (lambda x: [row for row in x], "control flow depends on the batch size (2 or 3)"),  # noqa: C416
    (lambda x: x * int(x.shape[0]), "control flow depends on the batch size (2 or 3)"),
    (lambda x: x if x.max() > 0 else -x, "control flow depends on the contents of a tensor"),
    (lambda x: x * x.max().item(), "control flow depends on the contents of a tensor"),
    (lambda x: x[x > 0], "a shape depends on the contents of a tensor (aten.nonzero.default)"),
    (lambda x: x if torch.rand(()) > 0 else -x, "control flow depends on random numbers"),
    (lambda x: torch.add(x, x, out=torch.empty(2, 6)), ""),
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

    assert lines(traced(forward, X).graph) == ["tanh = tanh(x)"]


def test_control_flow_on_a_mask_written_to_is_not_folded() -> None:
    def forward(x: Tensor) -> Tensor:
        padding = torch.zeros(x.shape[0], 6, dtype=torch.bool, device=x.device)
        padding[:, 0] = True
        return x.masked_fill(padding, 0.0) if padding.any() else x.tanh()

    refuses(Untraceable, "control flow depends on the contents of a tensor", traced, forward, X)


def test_type_limits_are_read_once_for_a_type() -> None:
    least = torch.finfo(torch.float32).min
    found = traced(lambda x: x.to(x.dtype).clamp(min=torch.finfo(x.dtype).min), X)
    to, clamp = lines(found.graph)
    assert to.endswith("to(x, torch.float32)") and clamp.endswith(f"min={least})")
    assert [(g.expression, g.value) for g in found.guards.sizes[0].guards] == [
        ("x.dtype", torch.float32)
    ]


# -- state and constants -------------------------------------------------------------------------


def test_writing_under_no_grad_into_a_value_with_gradients() -> None:
    def forward(x: Tensor) -> Tensor:
        y = x.tanh()
        with torch.no_grad():
            y.mul_(2)
        return y

    refuses(Untraceable, "an in-place operation under no_grad on a value made", traced, forward, X)


# -- modules -------------------------------------------------------------------------------------


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


def test_other_threads_see_nothing_of_a_trace() -> None:
    helper = module_of(lambda self, x: self.layer(x) * self.scale, layer=nn.Linear(6, 6), scale=2.0)
    found, traces = list[Any](), list[Any]()
    before, result = attributes(), helper(X).detach()

    def look() -> None:
        found.append(replaced(before) == [])
        kinds = {type(make(3)) for make in (torch.randn, torch.empty, torch.arange, torch.ones)}
        found.append(kinds == {Tensor} and type(torch.tensor([1, 2])) is Tensor)
        found.append(type(helper.layer.weight) is nn.Parameter and helper.scale == 2.0)
        found.append(torch.equal(helper(X), result) and isinstance(helper, nn.Module))
        found.append(type(math.sqrt(4.0)) is float and torch.is_grad_enabled())
        if len(traces) < 2:
            random.random(), np.random.rand()

    def forward(self: Any, x: Tensor) -> Tensor:
        traces.append(x)
        y = self.layer(x) + torch.zeros(x.shape[0], 6)
        other.submit(look).result()
        return y * math.sqrt(x.shape[1])

    with ThreadPoolExecutor(1) as other:
        captured = capture(module_of(forward, layer=nn.Linear(6, 6)), X, check="fast")
    assert captured.leaf_modules == () and len(found) > 10 and all(found)


def test_torchvision_is_no_part_of_torch() -> None:
    """Text of a size in an assertion of a model is no decision, whatever becomes of the result."""
    torchvision = pytest.importorskip("torchvision")
    model = torchvision.models.VisionTransformer(32, 8, 1, 2, 16, 32, num_classes=3)
    captured = capture(model, torch.randn(2, 3, 32, 32))
    assert not [path for path in captured.leaf_modules if path.endswith("encoder")]


# -- random operations are known by their tag, not by their name -----------------------------------


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


@cases(
    "node, expected",
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
)
def test_random_operations_are_known_by_their_tag(node: fx.Node, expected: bool) -> None:
    assert draws_random(node) is expected
