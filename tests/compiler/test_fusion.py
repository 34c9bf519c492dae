"""Compiled regions that end with a residual add: values, rebuilt to the bit, and gradients."""

from contextvars import ContextVar
from typing import Any

import pytest
import timm
import torch
from helpers import cases
from nets import module_of
from torch import fx, nn
from torch.utils import _pytree as pytree

import revcompile
from revcompile.compiler.lower.fusion import Fusion
from revcompile.compiler.lower.fusion_regions import folded_conv2d
from revcompile.ir import coupling_ops, ops
from revcompile.ir.python_code import compile_graph
from revcompile.staged import StagedModel

KEY = 7


def _net() -> StagedModel:
    torch.manual_seed(0)
    model = timm.create_model("resnet34", num_classes=10, channels=(8, 16, 16, 16)).train()
    model.conv1, model.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
    return revcompile.petrafy(model, 6, torch.randn(4, 3, 16, 16), check="off")


def _calls(graph: fx.Graph) -> list[str]:
    return [node.name for node in graph.nodes if node.name.startswith("compiled")]


def _same(function: Any) -> Any:
    return function


def test_sums_become_a_part_of_their_branch() -> None:
    net = _net()
    program = net._programs(net.method)[4]
    forward, backward = Fusion(_same).fuse(program.forward, program.backward, net.model)
    assert _calls(forward) == _calls(backward) == ["compiled_0_and_sum"]
    targets = {node.target for graph in (forward, backward) for node in graph.nodes}
    assert not targets & {coupling_ops.plus, coupling_ops.minus}


def test_a_layer_that_is_called_by_keyword_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "statistics_frozen", ContextVar("frozen", default=True))
    x = torch.randn(4, 8)
    forward = lambda self, x: x + self.f(input=x).relu()  # noqa: E731
    model = nn.Sequential(*(module_of(forward, f=nn.Linear(8, 8)) for _ in range(2)))
    net = revcompile.petrafy(model, 1, x, check="off")
    (program,) = net._programs(net.method)
    fused, _ = Fusion(_same).fuse(program.forward, program.backward, net.model)
    with torch.no_grad():  # programs switch autograd
        graphs = fused, program.forward
        have, want = (compile_graph(graph, "stage")(net.model, KEY, x) for graph in graphs)
    torch.testing.assert_close(have[0], want[0])


@pytest.mark.parametrize("frozen", ["all", "one"])
def test_frozen_norms_stay_frozen(frozen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They normalize by running statistics, which do not move."""
    monkeypatch.setattr(ops, "statistics_frozen", ContextVar("frozen", default=True))
    net = _net()
    program = net._programs(net.method)[4]
    norms = [m for name, m in net.model.named_modules() if isinstance(m, nn.BatchNorm2d)]
    for norm in norms if frozen == "all" else norms[::2]:
        norm.eval()
        nn.init.uniform_(norm.running_mean, -0.5, 0.5)
    plain = program.forward, program.backward
    fused = Fusion(_same).fuse(*plain, net.model)
    torch.manual_seed(1)
    a, b, *seeds = (torch.randn(4, 16, 2, 2) for _ in range(4))
    before = {name: value.clone() for name, value in net.model.state_dict().items()}
    found, states = [], []
    for graphs in (plain, fused):
        net.model.load_state_dict(before)
        forward, backward = (compile_graph(graph, "stage") for graph in graphs)
        with torch.no_grad():  # programs switch autograd
            outputs, _ = forward(net.model, KEY, a, b, None)
            results = outputs, *backward(net.model, KEY, None, *outputs, *seeds)
        found.append([value for value in pytree.tree_leaves(results) if value is not None])
        states.append({name: value.clone() for name, value in net.model.state_dict().items()})
    torch.testing.assert_close(*found)
    assert all(torch.equal(states[1][name], value) for name, value in states[0].items())
    moved = [name for name, value in before.items() if not torch.equal(states[1][name], value)]
    assert bool(moved) == (frozen == "one")


@cases("kernel, step, padding, size", (7, 2, 3, 12), (3, 2, 1, 8), (4, 4, 0, 8), (5, 3, 1, 9))
def test_few_channels_are_folded(kernel: int, step: int, padding: int, size: int) -> None:
    x = torch.randn(2, 3, size, 2 * size if size % 2 == 0 else size, dtype=torch.float64)
    conv = nn.Conv2d(3, 5, kernel, step, padding).double()
    found = folded_conv2d(x, conv.weight, conv.bias, step, padding)
    torch.testing.assert_close(found, conv(x))
    seed = torch.randn_like(found)
    gradients = [torch.autograd.grad(y, conv.weight, seed)[0] for y in (found, conv(x))]
    torch.testing.assert_close(*gradients)
