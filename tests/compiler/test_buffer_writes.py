"""Buffers that a forward pass writes to move once a micro-batch, as in the original."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from helpers import stored
from nets import Chain
from torch import Tensor, nn
from training import trained

import revcompile
from revcompile.errors import CaptureError, InputError
from revcompile.runtime.reversible.replay import StatefulBuffers


class Net(nn.Module):
    """Residual blocks, and buffers of the model itself."""

    mean: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(8, 8), nn.Linear(8, 3)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))


class InPlaceBefore(Net):
    """Read by the head: the value of this very step, with its gradient."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        old = self.mean.clone()
        self.mean.mul_(0.9).add_(x.mean(0))
        self.count += 1
        for layer in self.layers:
            h = h + torch.tanh(layer(h))
        return self.head(h * self.mean + old)


class AssignedInTheLoop(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        for layer in self.layers:
            h = h + torch.tanh(layer(h))
            self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        return self.head(h) + self.mean[:3]


class InsideABranch(Net):
    """Only in training mode, as a batch norm does."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        for index, layer in enumerate(self.layers):
            y = layer(h)
            if index == 2:
                if self.training:
                    with torch.no_grad():
                        self.mean.lerp_(y.mean(0), 0.1)
                    self.count.add_(1)
                y = y - self.mean
            h = h + torch.tanh(y)
        return self.head(h)


class InEachBlock(Net):
    """Each branch is divided by a mean of its own, which it moves first."""

    def __init__(self) -> None:
        super().__init__()
        for index in range(len(self.layers)):
            self.register_buffer(f"square_{index}", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        for index, layer in enumerate(self.layers):
            y, square = layer(h), self.get_buffer(f"square_{index}")
            if self.training:
                with torch.no_grad():
                    square.lerp_(y.pow(2).mean(), 0.1)
            h = h + torch.tanh(y) * torch.rsqrt(square)
        return self.head(h)


MODELS = [InPlaceBefore, AssignedInTheLoop, InsideABranch, InEachBlock]


def made(kind: type[nn.Module]) -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(0)
    return kind().double(), [torch.randn(5, 8, dtype=torch.float64) for _ in range(3)]


def stepped(net: nn.Module, batches: Sequence[Tensor]) -> dict[str, Tensor]:
    """The summed gradients after some steps, and the buffers."""
    for x in batches:
        net(x).square().sum().backward()
    found = {f"gradient of {name}": p.grad for name, p in net.named_parameters()}
    with torch.no_grad():
        found["output in eval mode"] = net.eval()(batches[0])
    return found | {name: buffer.clone() for name, buffer in net.named_buffers()}


@pytest.mark.parametrize("kind", MODELS)
def test_reversible_steps_move_buffers_once(kind: type[nn.Module]) -> None:
    model, batches = made(kind)
    net = revcompile.reversify(model, batches[0], check="full", policy="same_parameters")
    assert len(net.rewired.couplings) == 4
    wanted, got = (stepped(each, batches) for each in (stored(net), net))
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)
    assert any(got[name].any() for name, _ in net.named_buffers())


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("method", ["petra", "backprop"])
def test_stages_move_buffers_once_a_micro_batch(kind: type[nn.Module], method: str) -> None:
    model, batches = made(kind)
    stages = 4 if kind is InEachBlock else 2
    net = revcompile.petrafy(model, stages, example_inputs=batches[0])
    reference = net.to_module().train()
    data = [(x, torch.zeros(5, 3).double()) for x in batches]
    trained(net, data, method=method, accumulation_steps=len(batches))
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for x in batches:
        (reference(x).square().mean() / len(batches)).backward()
    optimizer.step()
    trained_model = net.to_module()
    for named in ("named_parameters", "named_buffers"):
        got, wanted = (dict(getattr(m, named)()) for m in (trained_model, reference))
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)


class Centered(nn.Module):
    """Writes to its buffer in both modes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return x - self.mean


def test_layers_that_write_to_their_buffers_do_not_interrupt_a_chain() -> None:
    blocks = (nn.Sequential(nn.Linear(8, 8), Centered()) for _ in range(3))
    net = revcompile.reversify(Chain(*blocks), torch.randn(5, 8), check="full")
    assert max(map(len, net.rewired.body.chains())) == 3


def test_buffer_used_in_every_block_cannot_be_cut() -> None:
    model, batches = made(AssignedInTheLoop)
    with pytest.raises(InputError, match="writes into its buffer mean, which is used from"):
        revcompile.petrafy(model, 6, example_inputs=batches[0])


class Clamps(Net):
    """Keeps a weight small in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((8,), 3.0))

    def forward(self, x: Tensor) -> Tensor:
        self.scale.data.clamp_(max=1.0)
        h = self.stem(x)
        for layer in self.layers:
            h = h + torch.tanh(layer(h))
        return self.head(h * self.scale)


def test_parameters_written_by_the_forward_pass_are_refused() -> None:
    model, batches = made(Clamps)
    with pytest.raises(CaptureError, match=r"clamp_ writes to scale.*test_buffer_writes"):
        revcompile.reversify(model, batches[0])


def test_assigning_data_twice_is_a_change_wherever_the_new_memory_lies() -> None:
    """The second assignment may reuse the address of what the first one has freed."""
    module = nn.Module()
    module.register_buffer("average", torch.ones(6))
    buffers = StatefulBuffers([(module, "average")])
    for _ in range(20):
        snapshots, identities = buffers.snapshot(), buffers.identities()
        assert isinstance(identities[0][2], torch.UntypedStorage)  # held, so not reused
        for _ in range(2):
            module.average.data = 0.9 * module.average.data
        assert len(buffers.changed(snapshots, identities)) == 1


def test_a_mean_of_what_it_scales_is_no_shortcut() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.layer, self.head = (nn.Linear(6, 6) for _ in range(3))
            self.register_buffer("mean", torch.zeros(6))

        def forward(self, x: Tensor) -> Tensor:
            h = self.stem(x)
            h = h + torch.tanh(self.layer(h)) * (1 + self.mean)
            self.mean += h.mean(0).detach()
            return self.head(h)

    torch.manual_seed(0)
    x, model = torch.randn(4, 6), Scaled()
    net = revcompile.reversify(model, x, policy="same_parameters", check="off")
    assert [coupling.name for coupling in net.rewired.couplings if "mean" in coupling.name] == []
    net(x)
    assert not torch.equal(net.mean, model.mean)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(6), nn.Linear(6, 6)


class ReadsBefore(Normed):
    def forward(self, x: Tensor) -> Tensor:
        mean = self.norm.running_mean.clone()
        return self.norm(self.layer(x)) * (1 + mean)


class WritesBefore(Normed):
    def forward(self, x: Tensor) -> Tensor:
        norm = self.norm
        norm.running_mean.mul_(0.5)
        statistics = norm.running_mean, norm.running_var
        return nn.functional.batch_norm(self.layer(x), *statistics, training=self.training)


class MovesUnseen(Normed):
    def forward(self, x: Tensor) -> Tensor:
        norm = self.norm
        tensors = norm.weight, norm.bias, norm.running_mean, norm.running_var
        return torch.batch_norm(self.layer(x), *tensors, self.training, 0.1, 1e-5, False)


@pytest.mark.parametrize("kind", [ReadsBefore, WritesBefore, MovesUnseen])
def test_running_statistics_with_other_readers_stay_in_one_module(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 6), kind(), nn.BatchNorm1d(6)), torch.randn(8, 6)
    net = revcompile.reversify(model, x, policy="same_parameters")
    for _ in range(2):
        torch.testing.assert_close(net(x), model(x))
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(net.get_buffer(name), buffer)
    with pytest.raises(CaptureError, match=r"running statistics|which a batch norm moves"):
        revcompile.reversify(kind(), x)


class Decides(Normed):
    """A leaf module: its control flow reads contents."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(6.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) * self.table if x.isfinite().all() else x


def test_only_statistics_of_a_leaf_module_with_a_batch_norm_have_no_other_readers() -> None:
    class Reads(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name, self.stem, self.inner = name, nn.Linear(6, 6), Decides()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.stem(x)) * self.inner.get_buffer(self.name)

    torch.manual_seed(0)
    model, x = Reads("table"), torch.randn(8, 6)
    net = revcompile.reversify(model, x, policy="same_parameters")
    torch.testing.assert_close(net(x), model(x))
    with pytest.raises(CaptureError, match=r"reads inner\.norm\.running_mean, which"):
        revcompile.reversify(Reads("norm.running_mean"), x)
