"""Only tensors and plain values travel between segments and stages, and each has its gradient."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import assert_exact
from nets import module_of
from torch import Tensor, nn

import revcompile
from revcompile.ir.types import TensorType, types_in
from tests.recorded import with_gradients

WIDTH, BLOCKS = 8, 3


class Conditioned(nn.Module):
    """Residual blocks, each of which reads one item of what `condition` makes of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.ada = nn.Linear(WIDTH, BLOCKS * WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 2)

    def condition(self, x: Tensor) -> Any:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for layer, gate in zip(self.layers, self.condition(x), strict=True):
            h = h + gate * torch.tanh(layer(h))
        return self.head(h)


class Chunk(Conditioned):
    def condition(self, x: Tensor) -> Any:
        return self.ada(x).chunk(BLOCKS, -1)


def hidden(pack: Callable[[tuple[Tensor, ...]], Any]) -> nn.Module:
    """A module whose inside is not traced: what it returns is one value of the graph."""
    ada = nn.Linear(WIDTH, BLOCKS * WIDTH)
    return module_of(lambda self, x: self.pack(self.ada(x).chunk(BLOCKS, -1)), ada=ada, pack=pack)


@dataclasses.dataclass
class Record:
    first: Tensor
    rest: dict[str, Tensor]
    count: int = 3


class DataclassOfAModule(Conditioned):
    def __init__(self) -> None:
        super().__init__()
        self.ada = hidden(lambda c: Record(c[0], {"a": c[1], "b": c[2]}))

    def condition(self, x: Tensor) -> Any:
        found = self.ada(x)
        return found.first * found.count, found.rest["a"], found.rest["b"]


class ChangedList(Conditioned):
    """A list that a module has returned is changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.ada = hidden(list)

    def condition(self, x: Tensor) -> Any:
        found = self.ada(x)
        found.append(x)
        return found[1:]


def made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return kind().double()


def example(rows: int = 3) -> Tensor:
    torch.manual_seed(5)
    return torch.randn(rows, WIDTH, dtype=torch.float64)


def assert_staged_equals_autograd(
    net: revcompile.StagedModel, x: Tensor, loss: Callable[[Any, Tensor], Tensor]
) -> None:
    """Every gradient at learning rate 0."""
    module: Any = net.to_module().train()
    module.reversible = False
    loss(module(x), torch.zeros(1)).backward()
    expected = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    for method in ("petra", "backprop", "1f1b"):
        _, (found,) = with_gradients(net, [(x, torch.zeros(1))], loss, method=method)
        found = {name: found[name] for name in expected}
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


def squares(output: Any, target: Tensor) -> Tensor:
    return (output.abs() ** 2).sum() + target.sum()


@pytest.mark.parametrize("kind", [DataclassOfAModule, ChangedList])
def test_items_of_structured_values_get_their_gradients(kind: type[nn.Module]) -> None:
    """`test_fuzz` has more of them."""
    leaves = {"leaf_modules": ["ada"] if kind is DataclassOfAModule else []}
    net: Any = revcompile.reversify(made(kind), example(), check="full", **leaves)
    assert len(net.rewired.couplings) == BLOCKS
    assert_exact(net, example(4))
    staged = revcompile.petrafy(made(kind), 4, example(), policy="same_parameters", **leaves)
    travelling = {n for part in staged._partition.parts for n in (*part.inputs, *part.outputs)}
    for name in travelling:
        kind_of = staged._partition.types.get(name)
        assert isinstance(kind_of, TensorType) or not types_in(kind_of), (name, kind_of)
    assert_staged_equals_autograd(staged, example(4), squares)


class RecordOutput(DataclassOfAModule):
    """A dataclass that nobody has registered with pytree, from inside a module kept whole."""

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x), self.ada(x)


def of_record(output: Any, target: Tensor) -> Tensor:
    head, record = output
    return (head**2).sum() + (record.first * record.rest["b"]).sum() + target.sum()


def test_structured_results_are_what_they_were_and_train() -> None:
    model = made(RecordOutput)
    net = revcompile.petrafy(model, 3, example(), check="full", leaf_modules=["ada"])
    expected, actual = model(example()), net.to_module()(example())
    assert [type(part) for part in expected] == [type(part) for part in actual]
    assert_staged_equals_autograd(net, example(), of_record)


# -- complex numbers ------------------------------------------------------------------------------


class Spectrum(nn.Module):
    """Later blocks read the spectrum of something computed before the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.kk = nn.Linear(WIDTH, WIDTH)
        self.filter = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex64))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 2)

    def spectra(self, x: Tensor) -> tuple[Tensor, Tensor]:
        k, h = torch.fft.rfft(self.kk(x)) * self.filter, x
        for layer in self.layers:
            h = h + torch.tanh(torch.fft.irfft(k * torch.fft.rfft(layer(h)), n=WIDTH))
        return h, k

    def forward(self, x: Tensor) -> Any:
        return self.head(self.spectra(x)[0])


class ComplexOutput(Spectrum):
    def forward(self, x: Tensor) -> Tensor:
        h, k = self.spectra(x)
        return torch.complex(h[:, :2], self.head(h)) * k[:, :2]


def spectrum(kind: type[nn.Module] = Spectrum) -> nn.Module:
    model: Any = made(kind)
    model.filter = nn.Parameter(model.filter.detach().to(torch.complex128))
    return model  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [Spectrum, ComplexOutput], ids=lambda kind: kind.__name__)
def test_complex_values_have_gradients_across_stages(kind: type[nn.Module]) -> None:
    net = revcompile.petrafy(spectrum(kind), 4, example(), check="full")
    crossing = [net._partition.types.get(n) for part in net._partition.parts for n in part.inputs]
    assert any(isinstance(t, TensorType) and t.dtype.is_complex for t in crossing)
    assert_staged_equals_autograd(net, example(4), squares)
