"""Only tensors and plain values travel between segments and stages, and each has its gradient."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import gradients, worst
from torch import Tensor, nn

import revcompile
from revcompile.ir.types import TensorType, types_in
from tests.support.comparing import Recorder

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


class Maximum(Conditioned):
    def condition(self, x: Tensor) -> Any:
        largest = self.ada(x).unflatten(-1, (BLOCKS, WIDTH)).max(1)
        return largest.values, largest[0] + largest.indices, largest[0].sin()


class Hidden(nn.Module):
    """A module whose inside is not traced: what it returns is one value of the graph."""

    def __init__(self, pack: Callable[[tuple[Tensor, ...]], Any]) -> None:
        super().__init__()
        self.ada, self.pack = nn.Linear(WIDTH, BLOCKS * WIDTH), pack

    def forward(self, x: Tensor) -> Any:
        return self.pack(self.ada(x).chunk(BLOCKS, -1))


@dataclasses.dataclass
class Record:
    first: Tensor
    rest: dict[str, Tensor]
    count: int = 3


class DictOfAModule(Conditioned):
    def __init__(self) -> None:
        super().__init__()
        self.ada = Hidden(lambda c: {"gates": [c[0], {"inner": (c[1], c[2])}], "scale": 2.0})

    def condition(self, x: Tensor) -> Any:
        found = self.ada(x)
        gates = found["gates"]
        return gates[0] * found["scale"], gates[1]["inner"][0], gates[-1]["inner"][1]


class DataclassOfAModule(Conditioned):
    def __init__(self) -> None:
        super().__init__()
        self.ada = Hidden(lambda c: Record(c[0], {"a": c[1], "b": c[2]}))

    def condition(self, x: Tensor) -> Any:
        found = self.ada(x)
        return found.first * found.count, found.rest["a"], found.rest["b"]


class ReadWhole(Conditioned):
    """One reader far away reads the tuple as a whole."""

    def forward(self, x: Tensor) -> Tensor:
        h, gates = x, self.ada(x).chunk(BLOCKS, -1)
        for layer in self.layers:
            h = h + torch.tanh(layer(h)) * torch.stack(gates).mean(0) + torch.cat(gates[1:]).mean()
        return self.head(h)


class ChangedList(Conditioned):
    """A list that a module has returned is changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.ada = Hidden(list)

    def condition(self, x: Tensor) -> Any:
        found = self.ada(x)
        found.append(x)
        return found[1:]


class LastStates(Conditioned):
    """A recurrent layer returns a tuple in a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.ada = nn.LSTM(WIDTH, WIDTH, num_layers=BLOCKS, batch_first=True)

    def condition(self, x: Tensor) -> Any:
        _, (_, cells) = self.ada(x[:, None])
        return cells.unbind(0)


STRUCTURES = (
    *(Chunk, Maximum, DictOfAModule, DataclassOfAModule, ReadWhole, ChangedList, LastStates),
)


def made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return kind().double()


def example(rows: int = 3) -> Tensor:
    torch.manual_seed(5)
    return torch.randn(rows, WIDTH, dtype=torch.float64)


def leaves_of(kind: type[nn.Module]) -> list[str]:
    return ["ada"] if "OfAModule" in kind.__name__ else []


def staged_gradients(
    net: revcompile.StagedModel, method: str, x: Any, loss: Callable[[Any, Tensor], Tensor]
) -> dict[str, Tensor | None]:
    """Every parameter's gradient at learning rate 0."""
    trainer = net.trainer(Recorder, loss, method=method)
    trainer.step(x, torch.zeros(1))
    trainer.flush()
    found = {}
    for executor in trainer._executors:
        optimizer: Any = executor.updater.optimizer
        if executor.updater.parameters:
            found |= dict(zip(executor.updater.parameters, optimizer.seen[0], strict=True))
    return found


def stored_gradients(
    net: revcompile.StagedModel, x: Any, loss: Callable[[Any, Tensor], Tensor]
) -> dict[str, Tensor | None]:
    module: Any = net.to_module()
    module.reversible = False
    loss(module.train()(x), torch.zeros(1)).backward()
    return {name: p.grad for name, p in module.named_parameters()}


def assert_staged_equals_autograd(
    net: revcompile.StagedModel,
    x: Any,
    loss: Callable[[Any, Tensor], Tensor],
    methods: tuple[str, ...] = ("petra", "backprop", "1f1b"),
) -> None:
    expected = stored_gradients(net, x, loss)
    assert all(g is not None for g in expected.values())
    for method in methods:
        found = staged_gradients(net, method, x, loss)
        assert found.keys() == expected.keys()
        for name, want in expected.items():
            assert found[name] is not None, f"{method}: {name} has no gradient"
            torch.testing.assert_close(found[name], want, rtol=1e-9, atol=1e-11, msg=name)


def squares(output: Any, target: Tensor) -> Tensor:
    return (output.abs() ** 2).sum() + target.sum()


@pytest.mark.parametrize("kind", STRUCTURES, ids=lambda kind: kind.__name__)
def test_items_of_structured_values_get_their_gradients(kind: type[nn.Module]) -> None:
    model, x = made(kind), example()
    net = revcompile.reversify(model, x, check="full", leaf_modules=leaves_of(kind))
    # The first block of `Maximum` finds its gate by comparing its own input: that is not repeated.
    assert len(net.rewired.couplings) == BLOCKS - (kind is Maximum)
    actual = gradients(net, example(4))
    assert all(p.grad is not None for p in net.parameters())
    net.reversible = False
    error, where = worst(gradients(net, example(4)), actual)
    assert error < 1e-10, where


@pytest.mark.parametrize("kind", STRUCTURES, ids=lambda kind: kind.__name__)
def test_items_of_structured_values_get_their_gradients_in_stages(kind: type[nn.Module]) -> None:
    net = revcompile.petrafy(
        made(kind),
        4,
        example(),
        check="off",
        leaf_modules=leaves_of(kind),
        policy="same_parameters",
    )
    travelling = {name for part in net._partition.parts for name in (*part.inputs, *part.outputs)}
    for name in travelling:
        kind_of = net._partition.types.get(name)
        assert isinstance(kind_of, TensorType) or not types_in(kind_of), (name, kind_of)
    assert_staged_equals_autograd(net, example(4), squares, ("petra", "backprop"))


class RecordOutput(Conditioned):
    """A dataclass that nobody has registered with pytree, from inside a module kept whole."""

    def __init__(self) -> None:
        super().__init__()
        self.ada = Hidden(lambda c: Record(c[0], {"a": c[1], "b": c[2]}))

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x), self.ada(x)


def of_record(output: Any, target: Tensor) -> Tensor:
    head, record = output
    return (head**2).sum() + (record.first * record.rest["b"]).sum() + target.sum()


def test_structured_results_are_what_they_were_and_train() -> None:
    model, loss = made(RecordOutput), of_record
    net = revcompile.petrafy(model, 3, example(), check="full", leaf_modules=["ada"])
    expected, actual = model(example()), net.to_module()(example())
    assert [type(part) for part in expected] == [type(part) for part in actual]
    module: Any = net.to_module()
    module.reversible = False
    loss(module(example()), torch.zeros(1)).backward()
    for method in ("petra", "backprop"):
        found = staged_gradients(net, method, example(), loss)
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                torch.testing.assert_close(found[name], parameter.grad, rtol=1e-9, atol=1e-11)


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


def test_complex_values_have_gradients_in_a_chain() -> None:
    net: Any = revcompile.reversify(spectrum(), example(), check="full")
    actual = gradients(net, example(4))
    net.reversible = False
    expected = gradients(net, example(4))
    assert expected.keys() == actual.keys() and "grad filter" in actual
    for name, want in expected.items():
        torch.testing.assert_close(actual[name], want, rtol=1e-9, atol=1e-11, msg=name)


def test_a_complex_loss_is_refused_by_name() -> None:
    net = revcompile.petrafy(spectrum(ComplexOutput), 2, example(), check="off")
    trainer = net.trainer(Recorder, lambda output, target: output.sum(), method="backprop")
    with pytest.raises(revcompile.RevcompileError, match="expected a real number, got complex128"):
        trainer.step(example(), torch.zeros(1))
