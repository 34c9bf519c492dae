"""Lengths stay free in stages where every size can be had from the inputs."""

from collections.abc import Callable

import pytest
import torch
from helpers import cases
from torch import Tensor, nn
from torch.nn import functional as F

import revcompile
from tests.recorded import with_gradients
from tests.support.comparing import loss, staged_error

WIDTH = 8


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.mlp = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))


class Flattened(Mixed):
    """Blocks on tokens in a row, put back into their samples by a shape read inside the chain."""

    def forward(self, x: Tensor) -> Tensor:
        for mix, mlp in zip(self.mix, self.mlp, strict=True):
            x = x + torch.tanh(mix(x)).cumsum(1)
            shape = x.shape
            tokens = x.reshape(-1, x.size(-1))
            x = (tokens + torch.tanh(mlp(tokens))).view(shape)
        return x


def _train(model: nn.Module, *sizes: tuple[int, int]) -> None:
    batches = [torch.randn(*size, WIDTH, dtype=torch.float64) for size in sizes]
    assert staged_error(revcompile.petrafy(model, 3, batches[0], check="off"), batches) < 1e-10


def _same_with_stored_activations(net: revcompile.StagedModel, batches: list[Tensor]) -> None:
    """PETRA beside a method that differentiates the graph of forward, with the same masks."""
    data = [(x, torch.tensor([0.1 * index])) for index, x in enumerate(batches, 1)]
    want, have = (
        with_gradients(net, data, loss, method=method)[1] for method in ("backprop", "petra")
    )
    torch.testing.assert_close(have, want, rtol=0, atol=1e-12)


def test_a_view_by_the_shape_of_another_value() -> None:
    model = Flattened().double()
    net = revcompile.reversify(model, torch.randn(2, 6, WIDTH, dtype=torch.float64))
    assert len(net.rewired.couplings) == 6
    assert len(net.rewired.guards.train.sizes) == 1
    _train(model, (2, 6), (3, 9))


class Reused(Mixed):
    """Sizes that are read inside a branch and used in the next one."""

    def forward(self, x: Tensor) -> Tensor:
        for mix, mlp in zip(self.mix, self.mlp, strict=True):
            mixed = torch.tanh(mix(x))
            first, second, width = mixed.shape
            x = x + mixed
            rows = torch.tanh(mlp(x).reshape(first * second, width))
            x = x + rows.reshape(first, second, width)
        return x


class SequenceFirst(Reused):
    """Of a fixed length, so that the batch is the second dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(6, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.positions)


class EvenBatch(Reused):
    """An odd batch takes another path, so that a capture is for one size."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.shape[0] % 2 else 2 * x)


@cases("kind, sizes", (SequenceFirst, [(6, 4), (6, 3)]), (EvenBatch, [(4, 6), (4, 6)]))
def test_a_size_the_next_block_reads(kind: type[nn.Module], sizes: list[tuple[int, int]]) -> None:
    _train(kind().double(), *sizes)


class Positions(nn.Module):
    """As T5: the first branch makes a bias and a scale for all, of its own size, type, device."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.table = nn.Linear(WIDTH, WIDTH), nn.Embedding(16, 2)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.keys = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.drop = nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        x, bias = self.start(x), None
        for norm, layer in zip(self.norms, self.keys, strict=True):
            normed = norm(x)
            batch, length = normed.shape[:-1]
            keys = layer(normed).view(batch, length, -1, 2).transpose(1, 2)
            if bias is None:
                bias = self.drop(self.table(torch.arange(keys.shape[-2], device=keys.device)))
                scale = torch.arange(length, device=keys.device, dtype=keys.dtype)[:, None]
            mixed = self.drop(torch.tanh(keys + bias) * scale.to(keys.dtype))
            x = x + mixed.transpose(1, 2).reshape(batch, length, -1)
        return x


def test_a_size_type_and_device_of_one_branch_that_all_read() -> None:
    batches = [torch.randn(*size, WIDTH, dtype=torch.float64) for size in ((2, 6), (3, 9))]
    net = revcompile.petrafy(Positions().double(), 3, batches[0], check="full")
    assert len(net._partition.rewired.couplings) == 3
    _same_with_stored_activations(net, batches)


class Dropped(Mixed):
    """Hand-written stochastic depth, on tensors made without a device, before a shape is read."""

    def __init__(self, draw: Callable[[int], Tensor]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        for mix, mlp in zip(self.mix, self.mlp, strict=True):
            x = x + torch.tanh(mix(x)).cumsum(1) * self.draw(x.shape[0])
            batch, length, width = x.shape
            tokens = torch.tanh(mlp(x.reshape(batch * length, width)))
            x = x + tokens.reshape(batch, length, width)
        return x


@cases(
    "draw",
    lambda batch: torch.bernoulli(torch.full((batch, 1, 1), 0.5)),
    lambda batch: torch.empty(batch, 1, 1, device="cpu").bernoulli_(0.5),
    lambda batch: F.dropout(torch.ones(batch, 1, 1), 0.5),
    ids=["bernoulli", "bernoulli_", "dropout"],
)
def test_a_size_behind_random_numbers_is_free(draw: Callable[[int], Tensor]) -> None:
    batches = [torch.randn(size, 6, WIDTH, dtype=torch.float64) for size in (4, 4, 3)]
    net = revcompile.petrafy(Dropped(draw).double(), 3, batches[0], check="off")
    assert len(net._partition.rewired.couplings) == 6
    _same_with_stored_activations(net, batches)


class Table(nn.Module):
    """Positions in a plain attribute; it grows if `grows`, and remembers for how many."""

    def __init__(self, length: int, grows: bool) -> None:
        super().__init__()
        self.table, self.length, self.grows = torch.randn(length, 6), length, grows

    def forward(self, x: Tensor) -> Tensor:
        if self.grows and x.shape[1] > self.length:
            self.length = x.shape[1]
            self.table = torch.arange(self.length)[:, None] / self.length
        return x + self.table[: x.shape[1]]


@pytest.mark.parametrize("length", [5, 8])
def test_a_table_in_a_plain_attribute_is_sliced(length: int) -> None:
    model = Table(length, grows=False)
    net = revcompile.reversify(model, torch.randn(2, 5, 6))
    for size in (5, 3, 1):
        x = torch.randn(2, size, 6)
        assert torch.equal(net(x), model(x))


@pytest.mark.parametrize("length", [0, 5, 8])
def test_a_table_that_grows_depends_on_earlier_calls(length: int) -> None:
    model = nn.Sequential(nn.Linear(6, 6), Table(length, grows=True), nn.Linear(6, 6))
    net = revcompile.reversify(model, torch.randn(2, 5, 6))
    for size in (5, 3, 9, 5, 12, 2, 6):
        x = torch.randn(2, size, 6)
        torch.testing.assert_close(net(x), model(x))


class Padding(nn.Module):
    """Leaves in an attribute how much it has added, for the model to cut off."""

    def forward(self, x: Tensor) -> Tensor:
        self.added = int(-x.shape[1] % 4)
        return F.pad(x, (0, 0, 0, self.added))


class Padded(Mixed):
    def __init__(self) -> None:
        super().__init__()
        self.padding = Padding()

    def forward(self, x: Tensor) -> Tensor:
        y = self.padding(x)
        for mix in self.mix:
            y = y + torch.tanh(mix(y))
        return y[:, : y.shape[1] - self.padding.added]


def test_a_size_that_one_module_leaves_for_another_is_that_of_this_call() -> None:
    model = Padded()
    net = revcompile.reversify(model, torch.randn(2, 6, WIDTH), policy="pretrained").eval()
    for length in (6, 6, 9, 5):
        x = torch.randn(3, length, WIDTH)
        torch.testing.assert_close(net(x), model.eval()(x), rtol=1e-4, atol=1e-5)
