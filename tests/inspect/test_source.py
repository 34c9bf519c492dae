"""Printed stage programs: what is printed is what runs, to the bit."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import revcompile
from revcompile.ir import coupling_ops, ops
from revcompile.ir.program import StageProgram
from revcompile.ir.python_code import compile_graph
from revcompile.schedule import METHODS, Keep, choose


@pytest.fixture(autouse=True)
def _untouched() -> Iterator[None]:
    """Programs switch autograd and statistics and leave them as they end."""
    enabled = torch.is_grad_enabled()
    with torch.random.fork_rng(devices=[]):
        yield
    ops.statistics_frozen.set(False)
    torch.set_grad_enabled(enabled)


class Averaged(nn.Module):
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.4))
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        self.mean.mul_(0.9).add_(y.detach().mean(0))
        return y


class Gated(nn.Module):
    """Sides, extras, dropout, batch norms, a stream that a later layer reads, a buffer written."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.gate = nn.Linear(5, 6), nn.Linear(6, 6)
        self.norms = nn.ModuleDict({"0": nn.BatchNorm1d(6), "1": nn.BatchNorm1d(6)})
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.4)) for _ in "1234")
        self.blocks[1] = Averaged()
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.norms["1"](self.stem(x))
        gate = torch.sigmoid(self.gate(x))
        x = x + torch.tanh(self.blocks[0](x))
        inner = self.blocks[1](x) * gate
        x = x + torch.tanh(inner) * mask
        early = x
        x = x + torch.tanh(self.norms["0"](self.blocks[2](x)))
        x = x + torch.tanh(self.blocks[3](x) + inner)
        return self.head(torch.cat([x, early], 1))


def gated() -> revcompile.StagedModel:
    torch.manual_seed(0)
    inputs = torch.randn(4, 5), torch.rand(4, 1)
    return revcompile.petrafy(Gated(), 4, inputs, check="off", policy="same_parameters")


def tensors(value: Any) -> list[Any]:
    """Everything in nested tuples, in order."""
    if isinstance(value, tuple | list):
        return [inner for one in value for inner in tensors(one)]
    return [value]


def assert_equal(printed: Any, run: Any) -> None:
    for one, other in zip(tensors(printed), tensors(run), strict=True):
        if isinstance(other, Tensor):
            assert isinstance(one, Tensor) and one.dtype == other.dtype
            assert torch.equal(one, other)
        else:
            assert one == other


class Running:
    """A program's flat graphs, and its printed text executed, on a model of their own."""

    def __init__(self, program: StageProgram, text: str, root: nn.Module) -> None:
        self.program = program
        self.twins = (root, copy.deepcopy(root))
        self.printed: dict[str, Any] = {}
        exec(compile(text, "<printed>", "exec"), self.printed)
        self.draws = any(unit.random for unit in program.units)

    def both(self, name: str, graph: fx.Graph, given: Any) -> tuple[Any, Any]:
        flat = self.call(compile_graph(graph, name), self.twins[0], given[0], key=True)
        text = self.call(self.printed[name], self.twins[1], given[1], key=self.draws)
        for one, other in zip(*(twin.state_dict().items() for twin in self.twins), strict=True):
            assert torch.equal(one[1], other[1]), one[0]
        return flat, text

    def call(self, function: Callable[..., Any], root: nn.Module, given: Any, key: bool) -> Any:
        coupling_ops.recording(False)
        try:
            return function(root, *([1234] if key else []), *given)
        finally:
            coupling_ops.recording(True)

    def check(self, inputs: list[Any]) -> list[Any]:
        """Run a stage both ways; returns its outputs."""
        program = self.program
        (outputs, kept), printed = self.both("forward", program.forward, (inputs, inputs))
        assert_equal(printed, (outputs, kept))
        values = dict(zip((port.name for port in program.outputs), outputs, strict=True))
        back = [values[name] for name in program.needs_back]
        given = [*kept, *back], [*back, *printed[1]]
        generator = torch.Generator().manual_seed(1)
        gradients = [
            torch.randn(values[name].shape, generator=generator).to(values[name].dtype)
            for name in program.outputs_with_grad
        ]
        flat, text = self.both(
            "backward", program.backward, tuple([*args, *gradients] for args in given)
        )
        assert_equal(text[:2], flat[:2])
        named = zip(program.parameters, flat[2], strict=True)
        expected = {name: gradient for name, gradient in named if gradient is not None}
        assert set(text[2]) == set(expected)
        assert_equal([text[2][name] for name in expected], list(expected.values()))
        assert not program.parameters or expected
        return list(outputs)


def check(net: revcompile.StagedModel, inputs: list[Any], method: str) -> None:
    """Run all stages both ways, one after the other."""
    net.method = choose(method)
    root = copy.deepcopy(net._partition.rewired.root).train()
    values: list[Any] = inputs
    compiled = net.stages
    for stage in compiled:
        names = [port.name for port in stage.generated.inputs]
        given = dict(zip(names, values, strict=True))
        running = Running(stage.generated, stage.code, root)
        values = running.check([given[name] for name in names])


KEEPS = {method.keep: name for name, method in reversed(METHODS.items())}
"""A method for each thing that stages can keep."""


@pytest.mark.parametrize("keep", KEEPS)
def test_printed_code_is_what_runs(keep: Keep) -> None:
    check(gated(), [torch.randn(3, 5), torch.rand(3, 1)], KEEPS[keep])
