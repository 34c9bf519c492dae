"""Captured calls without a GPU: what a graph would do is recorded, operation by operation."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import revcompile
from revcompile.errors import InputError
from revcompile.runtime.reversible.captured_calls import CapturedCalls, CudaGraphs


class Tape(TorchDispatchMode):
    """Operations in order, with the memory that they read and write."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self):
        for func, args, kwargs, out in self.calls:
            new = func(*args, **kwargs)
            for old, value in zip(pytree.tree_leaves(out), pytree.tree_leaves(new), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != value.data_ptr():
                    old.copy_(value)


class Taped(CudaGraphs):
    """Records instead of capturing; as a capture, it leaves buffers as they were."""

    def __init__(self, net=None):
        super().__init__()
        self.net, self.count, self.replays = net, 0, 0

    def why_not(self, tensors):
        return None

    def is_busy(self):
        return False

    def capture(self, function):
        before = [buffer.clone() for buffer in self.net.buffers()]
        with Tape() as tape:
            function()
        with torch.no_grad():
            for buffer, value in zip(self.net.buffers(), before, strict=True):
                buffer.copy_(value)
        self.count += 1

        def replay():
            self.replays += 1
            with torch.no_grad():
                tape.replay()

        return replay


class Block(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(width), nn.Linear(width, width)

    def forward(self, x):
        return x + self.linear(self.norm(x)).tanh()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.blocks = nn.Linear(3, 4), nn.Sequential(Block(), Block(), Block())
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)))


@pytest.fixture
def nets():
    """A model run as it is, and the same with captured calls."""
    torch.manual_seed(0)
    eager = revcompile.reversify(Net().double(), torch.randn(4, 3).double(), check="off")
    captured = copy.deepcopy(eager)
    graphs = Taped(captured)
    captured.__dict__["_captured_calls"] = CapturedCalls(graphs)
    return eager, captured, graphs


def data(seed, batch=4):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 3, generator=generator, dtype=torch.float64)


def loss_of(net, x):
    return net(x).square().sum()


def assert_same(eager, captured):
    for a, b in zip(eager.parameters(), captured.parameters(), strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=0)
        torch.testing.assert_close(b.grad, a.grad, rtol=0, atol=0)
    for a, b in zip(eager.buffers(), captured.buffers(), strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=0)


def test_training_is_the_same_bit_for_bit(nets):
    *both, graphs = nets
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in both]
    for step in range(6):
        losses = []
        for net, optimizer in zip(both, optimizers, strict=True):
            optimizer.zero_grad()
            for part in range(2):  # gradients of two micro-batches
                losses.append(loss_of(net, data(2 * step + part)))
                losses[-1].backward()
            optimizer.step()
        assert losses[:2] == losses[2:]
        assert_same(*both)
    assert graphs.count == 2 and graphs.replays == 2 * 10


def warmed_up(nets, calls=3):
    for call in range(calls):
        for net in nets[:2]:
            net.zero_grad()
            loss_of(net, data(call)).backward()
    assert nets[2].count == 2


def test_results_and_gradients_are_not_overwritten(nets):
    warmed_up(nets)
    _, net, _ = nets
    x = data(7).requires_grad_()
    y = net(x)
    y.sum().backward()
    kept = [y, x.grad, *(p.grad for p in net.parameters())]
    before = [value.clone() for value in kept]
    net.zero_grad()
    loss_of(net, data(8)).backward()
    assert all(map(torch.equal, kept, before))


def test_a_call_between_forward_and_backward_is_run_as_it_is(nets):
    warmed_up(nets)
    for net in nets[:2]:
        net.zero_grad()
        losses = [loss_of(net, data(seed)) for seed in (5, 6)]
        losses[0].backward()
        losses[1].backward()
    assert_same(*nets[:2])


def test_a_graph_that_is_dropped_does_not_wait_for_its_backward_pass(nets):
    warmed_up(nets)
    replays = nets[2].replays
    loss_of(nets[1], data(5))
    loss_of(nets[1], data(6)).backward()
    assert nets[2].replays == replays + 3


@pytest.mark.parametrize(
    "change",
    [
        lambda net: setattr(net.blocks[1].norm, "momentum", 0.5),
        lambda net: net.blocks[1].norm.eval(),
        lambda net: net.head.weight.requires_grad_(False),
        lambda net: setattr(net.stem.weight, "data", net.stem.weight.detach() * 2),
        lambda net: setattr(net.head, "bias", nn.Parameter(torch.ones(2).double())),
    ],
    ids=["setting", "mode", "frozen", "data", "replaced"],
)
def test_what_has_changed_is_captured_anew(nets, change):
    warmed_up(nets)
    for net in nets[:2]:
        change(net)
    for call in range(4):
        for net in nets[:2]:
            net.zero_grad()
            loss_of(net, data(call)).backward()
        assert_same(*nets[:2])
    assert nets[2].count == 4


def test_other_shapes_and_modes_are_calls_of_their_own(nets):
    warmed_up(nets)
    for batch in (6, 6, 6, 4, 6):
        for net in nets[:2]:
            net.zero_grad()
            loss_of(net, data(batch, batch)).backward()
        assert_same(*nets[:2])
    assert nets[2].count == 4
    replays = nets[2].replays
    with torch.no_grad():
        nets[1](data(1))
    nets[1].eval()(data(1))
    assert nets[2].replays == replays


def test_hooks_see_every_call(nets):
    warmed_up(nets)
    _, net, graphs = nets
    seen = []
    handle = net.blocks[0].linear.register_forward_hook(lambda *_: seen.append(1))
    loss_of(net, data(1)).backward()
    assert seen and graphs.replays == 2
    handle.remove()


def test_gradient_hooks_run_once_a_step(nets):
    _, net, _ = nets
    seen = []
    net.head.weight.register_hook(lambda gradient: seen.append(gradient.shape))
    for call in range(5):
        net.zero_grad()
        loss_of(net, data(call)).backward()
    assert len(seen) == 5


def test_weights_written_to_before_backward_are_refused(nets):
    warmed_up(nets)
    loss = loss_of(nets[1], data(1))
    with torch.no_grad():
        nets[1].head.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_second_backward_pass_after_another_call_is_refused(nets):
    warmed_up(nets)
    loss = loss_of(nets[1], data(1))
    loss.backward(retain_graph=True)
    loss_of(nets[1], data(2)).backward()
    with pytest.raises(InputError, match="second backward pass"):
        loss.backward()


def test_reconstructions_are_still_checked(nets):
    _, net, graphs = nets
    net.check_every = 5
    for call in range(10):
        loss_of(net, data(call)).backward()
    assert graphs.replays == 2 * (10 - 2 - 2)


def test_a_failed_capture_warns_once_and_goes_on(nets):
    eager, net, graphs = nets

    def fail(function):
        raise RuntimeError("operation not permitted")

    graphs.capture = fail
    with pytest.warns(revcompile.errors.RevcompileWarning, match="not permitted") as seen:
        for call in range(3):
            loss_of(net, data(call)).backward()
    assert [warning.filename for warning in seen] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss_of(net, data(4)).backward()
    for call in (0, 1, 2, 4):
        loss_of(eager, data(call)).backward()
    assert_same(eager, net)


def test_a_model_that_is_not_on_a_gpu_warns_once():
    """When it is trained: until then it may be moved there."""
    x = torch.randn(4, 3)
    net = revcompile.reversify(Net(), x, check="off", backend="cudagraphs")
    net.eval()(x)
    with torch.no_grad():
        net.train()(x)
    with pytest.warns(revcompile.errors.RevcompileWarning) as seen:
        net(x)
        net(x)
    (warning,) = seen
    assert str(warning.message) == (
        "backend='cudagraphs': the model's calls are run as they are, because the model is not on "
        "a CUDA device; move it there. Pass backend='eager' to silence this warning"
    )
    assert warning.filename == __file__


def test_copies_have_no_graphs():
    net = revcompile.reversify(Net(), torch.randn(4, 3), check="off", backend="cudagraphs")
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert other._captured_calls is not None
        assert other._captured_calls is not net._captured_calls
    with pytest.raises(InputError, match="backend"):
        revcompile.reversify(Net(), torch.randn(4, 3), backend="cudagraph")
