"""Buffers that a forward pass writes to move once a micro-batch, as in the original."""

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import cases, stored
from nets import module_of
from torch import Tensor, nn
from training import trained

import revcompile
from revcompile.errors import CaptureError, InputError
from revcompile.runtime.reversible.replay import StatefulBuffers


class Averaged(nn.Module):
    """A layer, and buffers that its forward pass changes."""

    mean: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))


class InPlace(Averaged):
    """Reads the value of this very step, with its gradient."""

    def forward(self, x: Tensor) -> Tensor:
        old = self.mean.clone()
        self.mean.mul_(0.9).add_(x.detach().mean(0))
        self.count += 1
        return self.layer(x) * self.mean + old


class Assigned(Averaged):
    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        return y + self.mean


class OnlyInTraining(Averaged):
    """As a batch norm does."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(y.mean(0), 0.1)
            self.count.add_(1)
        return y - self.mean


class BehindData(Averaged):
    """No version counts these writes."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        self.mean.data.mul_(0.9).add_(0.1 * y.detach().mean(0))
        return y


class OwnNorm(Averaged):
    """Nor those of a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("variance", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        statistics = self.mean, self.get_buffer("variance")
        return nn.functional.batch_norm(self.layer(x), *statistics, training=self.training)


class OfItsChild(nn.Module):
    """Writes into buffers of another module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Averaged()

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner.layer(x)
        self.inner.mean[0] = y.detach().mean()
        self.inner.count = self.inner.count + 1
        return y - self.inner.mean


class Net(nn.Module):
    """Residual blocks around such modules."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(8, 8), nn.Linear(8, 3)
        self.layers = nn.ModuleList(kind() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        for layer in self.layers:
            h = h + torch.tanh(layer(h))
        return self.head(h)


MODELS = [InPlace, Assigned, OnlyInTraining, BehindData, OwnNorm, OfItsChild]


def made(kind: type[nn.Module]) -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(0)
    return Net(kind).double(), [torch.randn(5, 8, dtype=torch.float64) for _ in range(3)]


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
    assert max(map(len, net.rewired.body.chains())) == 4
    assert "layers.0 is a leaf module: the forward pass" in "".join(net.rewired.notes)
    wanted, got = (stepped(each, batches) for each in (stored(net), net))
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)
    assert any(got[name].any() for name, _ in net.named_buffers())


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("method", ["petra", "backprop"])
def test_stages_move_buffers_once_a_micro_batch(kind: type[nn.Module], method: str) -> None:
    model, batches = made(kind)
    net = revcompile.petrafy(model, 4, example_inputs=batches[0])
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


class WritesItself(Net):
    """The model's own forward pass writes: nothing is left to be a leaf module."""

    def __init__(self, how: str) -> None:
        super().__init__(lambda: nn.Linear(8, 8))  # type: ignore[arg-type]
        self.how, self.table = how, torch.zeros(8)
        self.register_buffer("mean", torch.zeros(8))
        self.scale = nn.Parameter(torch.full((8,), 3.0))

    def forward(self, x: Tensor) -> Tensor:
        match self.how:
            case "mean":
                self.mean.lerp_(x.mean(0), 0.1)
            case "assigned mean":
                self.mean = self.mean + x.mean(0)
            case "mean of a part":
                self.mean[2:].add_(x.mean())
            case "scale":
                self.scale.data.clamp_(max=1.0)
            case "table":
                self.table.add_(x.mean(0))
        return super().forward(x) * self.scale[:3]


@cases("how", "mean", "assigned mean", "mean of a part", "scale", "table", ids=str)
def test_a_model_whose_own_forward_pass_writes_is_refused(how: str) -> None:
    name = next(word for word in ("mean", "scale", "table") if word in how)
    with pytest.raises(CaptureError, match=rf"forward pass .*'{name}' \[.*test_buffer_writes"):
        revcompile.reversify(WritesItself(how), torch.randn(5, 8))


@cases(
    "holder, what",
    (lambda total: total, r"'layers\.0\.total'"),
    (lambda total: [total], "a tensor that is neither a parameter nor a buffer"),
    ids=["attribute", "list"],
)
def test_layers_that_sum_in_a_plain_tensor_are_refused(holder: Any, what: str) -> None:
    """It is no buffer, which would be restored before a branch runs again."""

    def counts(self: Any, x: Tensor) -> Tensor:
        total = self.total if isinstance(self.total, Tensor) else self.total[0]
        if self.training:
            total += x.detach().mean(0)
            return self.layer(x)
        return self.layer(x) - total

    model = Net(lambda: module_of(counts, layer=nn.Linear(8, 8), total=holder(torch.zeros(8))))
    for compiled in (revcompile.reversify, partial(revcompile.petrafy, num_stages=2)):
        with pytest.raises(InputError, match=rf"layers\.0: the forward pass writes into {what}"):
            compiled(model, example_inputs=torch.randn(5, 8))


@pytest.mark.parametrize("make", [dict, SimpleNamespace], ids=["dict", "object"])
def test_layers_that_replace_a_tensor_in_an_attribute_are_refused(make: Any) -> None:
    def centers(self: Any, x: Tensor) -> Tensor:
        held = self.state if isinstance(self.state, dict) else vars(self.state)
        y = self.layer(x) - held["mean"]
        held["mean"] = 0.9 * held["mean"] + 0.1 * y.detach().mean(0)
        return y

    model = Net(lambda: module_of(centers, layer=nn.Linear(8, 8), state=make(mean=torch.zeros(8))))
    with pytest.raises(InputError, match=r"layers\.0: the forward pass counts in .* 'state'"):
        revcompile.reversify(model, torch.randn(5, 8))


def test_writes_into_tensors_that_only_this_call_makes_do_not_stay() -> None:
    """Tracing sees them as constants."""

    def sums(self: Any, x: Tensor) -> Tensor:
        total = torch.zeros(8)
        total += x.mean(0)
        return self.layer(x) + total

    torch.manual_seed(0)
    model, x = Net(lambda: module_of(sums, layer=nn.Linear(8, 8))), torch.randn(5, 8)
    net = revcompile.reversify(model, x, policy="same_parameters")
    first = net(x)
    torch.testing.assert_close(net(x), first, rtol=0, atol=0)
    with pytest.raises(CaptureError, match=r"a tensor made without its input; .*new_zeros"):
        revcompile.reversify(module_of(sums, layer=nn.Linear(8, 8)), x)


def read_outside(kind: type[nn.Module]) -> nn.Module:
    """Reads a buffer of a leaf module that changes it."""
    return module_of(lambda self, x: self.inner(x) + self.inner.mean, inner=kind())


class Branches(InPlace):
    """Control flow on contents: its fake tensors are never written."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.isfinite().all() else x


@pytest.mark.parametrize("kind", [InPlace, Assigned, BehindData, OwnNorm, Branches])
def test_buffers_have_no_readers_outside_the_leaf_module_that_changes_them(kind: Any) -> None:
    x = torch.randn(5, 8)
    net = revcompile.reversify(Net(lambda: read_outside(kind)), x, policy="same_parameters")
    assert {f"layers.{index}" for index in range(4)} <= {
        str(node.target)
        for graph in net.rewired.graphs
        for node in graph.find_nodes(op="call_module")
    }
    with pytest.raises(CaptureError, match=r"add\w* reads inner\.mean, which inner changes"):
        revcompile.reversify(read_outside(kind), x)


@pytest.mark.parametrize("part", [slice(None), slice(2, 8)], ids=["same", "view"])
def test_leaf_modules_that_read_a_buffer_stay_with_the_one_that_changes_it(part: slice) -> None:
    writes, reads = InPlace(), module_of(lambda self, x: x * self.table.sum())
    reads.register_buffer("table", writes.mean if part == slice(None) else writes.mean[part])
    both = module_of(lambda self, x: self.reads(self.writes(x)), writes=writes, reads=reads)
    with pytest.raises(CaptureError, match="reads table, which writes changes"):
        revcompile.reversify(both, torch.randn(5, 8), leaf_modules=["reads"])


def test_assigning_data_twice_is_a_change_wherever_the_new_memory_lies() -> None:
    """The second assignment may reuse the address of what the first one has freed."""
    module = nn.Module()
    module.register_buffer("average", torch.ones(6))
    buffers = StatefulBuffers([(module, "average")])
    for _ in range(20):
        with buffers.recorded() as changed:
            for _ in range(2):
                module.average.data = 0.9 * module.average.data
        assert len(changed) == 1


def reads_before(self: Any, x: Tensor) -> Tensor:
    mean = self.norm.running_mean.clone()
    return self.norm(self.layer(x)) * (1 + mean)


def writes_before(self: Any, x: Tensor) -> Tensor:
    self.norm.running_mean.mul_(0.5)
    statistics = self.norm.running_mean, self.norm.running_var
    return nn.functional.batch_norm(self.layer(x), *statistics, training=self.training)


def moves_unseen(self: Any, x: Tensor) -> Tensor:
    norm = self.norm
    tensors = norm.weight, norm.bias, norm.running_mean, norm.running_var
    return torch.batch_norm(self.layer(x), *tensors, self.training, 0.1, 1e-5, False)


@pytest.mark.parametrize("forward", [reads_before, writes_before, moves_unseen])
def test_running_statistics_with_other_readers_stay_in_one_module(forward: Any) -> None:
    normed = module_of(forward, norm=nn.BatchNorm1d(6), layer=nn.Linear(6, 6))
    model, x = nn.Sequential(nn.Linear(6, 6), normed, nn.BatchNorm1d(6)), torch.randn(8, 6)
    net = revcompile.reversify(model, x, policy="same_parameters")
    for _ in range(2):
        torch.testing.assert_close(net(x), model(x))
    torch.testing.assert_close(*(dict(each.named_buffers()) for each in (net, model)))
    with pytest.raises(
        CaptureError, match=r"running statistics|which norm changes|writes into .norm.running_mean"
    ):
        revcompile.reversify(normed, x)


def test_only_statistics_of_a_leaf_module_with_a_batch_norm_have_no_other_readers() -> None:
    def decides(self: Any, x: Tensor) -> Tensor:  # a leaf module: its control flow reads contents
        return self.norm(x) * self.table if x.isfinite().all() else x

    def reads(self: Any, x: Tensor) -> Tensor:
        return self.inner(self.stem(x)) * self.inner.get_buffer(self.name)

    torch.manual_seed(0)
    inner = module_of(decides, norm=nn.BatchNorm1d(6))
    inner.register_buffer("table", torch.arange(6.0))
    model = module_of(reads, stem=nn.Linear(6, 6), inner=inner, name="table")
    x = torch.randn(8, 6)
    net = revcompile.reversify(model, x, policy="same_parameters")
    torch.testing.assert_close(net(x), model(x))
    model.name = "norm.running_mean"
    with pytest.raises(CaptureError, match=r"reads inner\.norm\.running_mean, which"):
        revcompile.reversify(model, x)
