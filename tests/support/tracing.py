"""Trace a function or a module as the tests of single passes need it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from revcompile.compiler.capture.capture import trace
from revcompile.compiler.capture.example import make_example
from revcompile.compiler.capture.fake_values import fake_copy
from revcompile.compiler.capture.tracer import Tracer


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any, *more: Any) -> Any:
        return self.function(x, *more)


def traced(model: nn.Module | Callable[..., Any], *args: Any, **options: Any) -> Tracer:
    """The raw trace of a model in the mode it is in."""
    if not isinstance(model, nn.Module):
        model = Function(model)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    return trace(fake_copy(model, mode), model, make_example(model, args), mode, **options)


def lines(graph: fx.Graph) -> list[str]:
    """The calls of a graph in short: `relu = relu(x)`."""

    def call(node: fx.Node) -> str:
        name = getattr(node.target, "__name__", str(node.target))
        keywords = (f"{k}={v}" for k, v in node.kwargs.items())
        return f"{node.name} = {name}({', '.join([*map(str, node.args), *keywords])})"

    return [call(n) for n in graph.nodes if n.op not in ("placeholder", "output")]


def outputs(graph: fx.Graph, *inputs: torch.Tensor, root: nn.Module | None = None) -> Any:
    """What a graph computes."""
    return fx.Interpreter(root or nn.Module(), graph=graph).run(*inputs)
