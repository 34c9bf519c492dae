"""In-place operations on aliases, inputs and streams change no output and no gradient."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import refuses
from nets import module_of
from torch import Tensor, nn

import revcompile
from revcompile.compiler.capture import capture
from revcompile.compiler.capture.check import run_graph
from revcompile.errors import CaptureError

Forward = Callable[["Net", Tensor], Tensor]


class Net(nn.Module):
    """Two layers, and some in-place ones, for a forward pass given from outside."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.relu, self.same, self.idle = nn.ReLU(inplace=True), nn.Identity(), nn.Dropout(0.0)
        self._forward = (forward,)

    def forward(self, x: Tensor) -> Tensor:
        return self._forward[0](self, x)


def relu_after_identity(net: Net, x: Tensor) -> Tensor:
    """The issue's case: the shortcut reads what the activation has overwritten."""
    return x + net.a(net.relu(net.same(x)))


def chunk_written_without_gradient(net: Net, x: Tensor) -> Tensor:
    y = torch.ones_like(x)
    first, _ = y.chunk(2, -1)
    first.mul_(3.0)
    second = y.split(4, -1)[1]
    second += 1.0
    return net.a(x * y)


def detached_in_place(net: Net, x: Tensor) -> Tensor:
    y = net.b(x)
    y.detach_()
    return net.a(y) + x


def part_written_after_cat(net: Net, x: Tensor) -> Tensor:
    y = net.b(x)
    whole = torch.cat([y, net.a(x)], 1)
    y.mul_(3.0)
    return whole[:, :8] + net.a(y)


def base_of_an_expanded_tensor(net: Net, x: Tensor) -> Tensor:
    y = net.b(x)[:, :1]
    wide = y.expand(-1, 8)
    y.mul_(2.0)
    return net.a(x) * wide


def add_on_the_stream(net: Net, x: Tensor) -> Tensor:
    h = net.a(x)
    skip = h
    h += net.b(h.tanh())
    return h * skip


def index_methods(net: Net, x: Tensor) -> Tensor:
    y = net.b(x)
    index = torch.tensor([0, 2], device=x.device)
    y.index_add_(1, index, x[:, :2]).index_fill_(1, index[:1], 2.0)
    y.masked_fill_(x > 1.0, 0.5)
    y.scatter_(1, torch.zeros_like(x[:, :1], dtype=torch.long), x[:, 1:2])
    return net.a(y)


def comparisons_keep_the_type(net: Net, x: Tensor) -> Tensor:
    flags = x.detach() * 1
    flags.gt_(0.0).logical_not_()
    return net.a(x) * flags


def out_argument(net: Net, x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    torch.add(torch.ones_like(x), 2.0, out=y)
    return net.a(x) + y


def write_into_the_input(net: Net, x: Tensor) -> Tensor:
    x[:, 0] = 0.0
    x.clamp_(-1.0, 1.0)
    return net.a(x)


def detached_write(net: Net, x: Tensor) -> Tensor:
    y = net.b(x)
    y.data.mul_(2.0)
    y.detach()[:, 0].zero_()
    return y * 3.0


def reshaped_in_place(net: Net, x: Tensor) -> Tensor:
    y = net.b(x)
    again = net.same(y)
    y.unsqueeze_(1)
    again.mul_(2.0)
    return net.a(again).squeeze(1) + y.sum(1)


def result_nobody_names(net: Net, x: Tensor) -> Tensor:
    """DropPath."""
    mask = x.new_empty(x.shape[0], 1).bernoulli_(0.5)
    mask.div_(0.5)
    return net.a(x) * mask + torch.empty(8, dtype=x.dtype).normal_()


def add_of_another_type(net: Net, x: Tensor) -> Tensor:
    y = net.b(x).float()
    y += x
    return net.a(y.to(x.dtype))


def add_to_an_alias_of_eval_mode(net: Net, x: Tensor) -> Tensor:
    """Dropout returns its input itself in eval mode."""
    y = net.b(x)
    kept = net.idle(y)
    kept += 1
    return y + kept


FORWARDS = [
    value
    for value in list(globals().values())
    if callable(value) and getattr(value, "__annotations__", {}).get("net") is Net
]


SEEN_IN_VIEWS = (
    *(chunk_written_without_gradient, base_of_an_expanded_tensor, detached_write),
    *(reshaped_in_place, out_argument),
)
"""Write to memory that is read afterwards as another view, or change a tensor as a whole."""


@pytest.mark.parametrize("forward", [f for f in FORWARDS if f not in SEEN_IN_VIEWS])
def test_captured_is_the_original(forward: Forward) -> None:
    net = Net(forward).double()
    x = torch.randn(3, 8, dtype=torch.float64)
    captured = capture(net, x, check="full")
    given = x.clone()
    run_graph(captured.graph, captured.root, [given])
    assert torch.equal(given, x)
    said = [n for n in captured.notes if n.startswith("the model writes to its input x; the capt")]
    assert bool(said) == (forward in (relu_after_identity, write_into_the_input))


@pytest.mark.parametrize("forward", SEEN_IN_VIEWS)
def test_a_write_that_is_more_than_new_contents_makes_its_module_a_leaf(forward: Forward) -> None:
    net, x = nn.Sequential(nn.Linear(8, 8), Net(forward)).double(), torch.randn(3, 8).double()
    captured = capture(net, x, check="full")
    assert captured.leaf_modules == ("1",)
    advice = "(read afterwards; write out of place|assign its result instead).*test_in_place"
    refuses(CaptureError, advice, capture, net[1], x)


def test_check_sees_a_layer_that_writes_where_others_read() -> None:
    """What the old check missed: it let the layer write, and rewiring did not."""
    captured = capture(Net(relu_after_identity), torch.randn(3, 8))
    assert not captured.root.relu.inplace
    captured.root.relu.inplace = True
    with pytest.raises(RuntimeError, match="relu writes to its input"):
        run_graph(captured.graph, captured.root, [torch.randn(3, 8)])


class Hidden(nn.Module):
    """Resists tracing, and writes into its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2.0) if x.sum() > 100 else x.mul_(0.5)


def around() -> nn.Module:
    forward = lambda self, x: (y := self.layer(x)) + self.hidden(y)  # noqa: E731
    return module_of(forward, hidden=Hidden(), layer=nn.Linear(8, 8))


def test_what_cannot_be_rewritten_becomes_a_leaf_module_with_its_aliases() -> None:
    model = nn.Sequential(nn.Linear(8, 8), around(), nn.Linear(8, 8))
    captured = capture(model, torch.randn(3, 8), check="full")
    assert captured.leaf_modules == ("1", "1.hidden")
    assert "1 is a leaf module: 1.hidden writes to _1_layer" in "".join(captured.notes)


def test_a_write_to_what_only_the_writer_reads_makes_the_module_around_it_a_leaf() -> None:
    inner = nn.Sequential(nn.Linear(8, 8), Hidden())
    captured = capture(nn.Sequential(nn.Linear(8, 8), inner), torch.randn(3, 8), check="full")
    assert captured.leaf_modules == ("1", "1.1")
    with pytest.raises(CaptureError, match=r"1 writes to its input; write out of place"):
        capture(inner, torch.randn(3, 8))


def test_what_cannot_be_rewritten_anywhere_is_refused_with_path_and_line() -> None:
    with pytest.raises(CaptureError, match=r"hidden writes to layer, .*test_in_place.py:\d+"):
        capture(around(), torch.randn(3, 8))


def test_stages_are_not_cut_before_a_layer_that_overwrites_its_input() -> None:
    def forward(self: Any, x: Tensor, c: Tensor) -> Tensor:
        h = self.stem(x)
        c = self.side(c)
        return self.layer(self.act(h)) + c

    ends = {"stem": nn.Linear(7, 6), "side": nn.Linear(4, 6), "layer": nn.Linear(6, 6)}
    model = module_of(forward, **ends, act=nn.Hardtanh(inplace=True))
    net = revcompile.petrafy(model, 2, (torch.randn(3, 7), torch.randn(3, 4)))
    trainer = net.trainer(lambda p: torch.optim.SGD(p, lr=0.1), lambda y, _: y.square().mean())
    trainer.step((torch.randn(3, 7), torch.randn(3, 4)), None)
    trainer.flush()


def test_layers_inside_a_leaf_module_work_in_place_on_its_own_memory() -> None:
    def forward(self: Any, h: Tensor) -> Tensor:
        u = self.layer(h)
        return h + self.act(u.view(u.shape)) + u  # written through a view, then read

    block = module_of(forward, layer=nn.Linear(6, 6), act=nn.Hardtanh(-0.1, 0.1, inplace=True))
    model = nn.Sequential(nn.Linear(6, 6), block, block)
    captured = capture(model, torch.randn(3, 6))
    assert captured.leaf_modules == ("1",)
    x = torch.randn(5, 6)
    (output,) = run_graph(captured.graph, captured.root, [x])
    assert torch.equal(output, model(x))


class _InPlaceBlock(nn.Module):
    """Its shortcut is what the activation has written."""

    def __init__(self) -> None:
        super().__init__()
        self.act, self.layer = nn.ReLU(inplace=True), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(self.act(x))


class _Sized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Linear(3, 6), nn.ModuleList(_InPlaceBlock() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x / (3 if len(x) > 5 else 2)


def test_another_case_is_captured_with_the_writes_of_the_original() -> None:
    """Layers whose `inplace` capture has switched off are traced as the model has them."""
    torch.manual_seed(0)
    model, small, large = _Sized().double(), torch.randn(3, 3).double(), torch.randn(7, 3).double()
    nets = [
        revcompile.reversify(model, x, policy="same_parameters", check="off")
        for x in (small, large)
    ]
    assert torch.equal(*(net(large) for net in nets))
