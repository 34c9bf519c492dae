"""A block rebuilt while the next one is differentiated: same bits, another order of work."""

import copy
import weakref
from typing import Any

import pytest
import timm
import torch
from helpers import gradients
from nets import Chain
from torch import Tensor, nn

import revcompile
from revcompile.runtime.reversible.overlap import Overlap
from tests.support.measuring import step_memory
from tests.support.stacks import KINDS, Sizes, batch_of
from tests.test_reversible import FAMILIES

DEPTH = 6


class _Watched(torch.autograd.Function):
    """The identity that says when it is computed with a graph, and when differentiated."""

    log: list[str]
    graphs: weakref.WeakSet[Any]

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.name = name
        ctx.save_for_backward(x)
        if x.requires_grad:
            _Watched.log.append(f"rebuild {name}")
            _Watched.graphs.add(ctx)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        _Watched.log.append(f"differentiate {ctx.name}")
        assert len(_Watched.graphs) <= 2, "a third block's graph is alive"
        return grads[0], None


class _Layer(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Watched.apply(torch.tanh(self.linear(x)), self.name)
        return out


@pytest.fixture(autouse=True)
def empty_log() -> None:
    _Watched.log, _Watched.graphs = [], weakref.WeakSet()


def _net(overlap: str, model: nn.Module | None = None, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = model or Chain(*(_Layer(str(index)) for index in range(DEPTH)))
    x = options.pop("x", torch.randn(4, 8))
    net = revcompile.reversify(model, x, check="off", overlap=overlap, **options).train()
    _Watched.log.clear()
    _Watched.graphs.clear()
    return net


def test_the_block_before_is_rebuilt_first() -> None:
    _net("on")(torch.randn(4, 8).requires_grad_()).sum().backward()
    expected = [f"rebuild {DEPTH - 1}"]
    for index in reversed(range(1, DEPTH)):
        expected += [f"rebuild {index - 1}", f"differentiate {index}"]
    assert _Watched.log == [*expected, "differentiate 0"]


@pytest.mark.parametrize("overlap", ["off", "auto"])
def test_otherwise_and_by_default_on_a_cpu_one_after_the_other(overlap: str) -> None:
    _net(overlap)(torch.randn(4, 8).requires_grad_()).sum().backward()
    expected = [f"{what} {i}" for i in reversed(range(DEPTH)) for what in _STEPS]
    assert _Watched.log == expected


_STEPS = ("rebuild", "differentiate")


def test_no_block_is_rebuilt_that_nobody_differentiates() -> None:
    net = _net("on")
    for name, parameter in net.named_parameters():
        parameter.requires_grad_("blocks.4" in name)
    net(torch.randn(4, 8)).sum().backward()
    assert _Watched.log == ["rebuild 5", "rebuild 4", "differentiate 5", "differentiate 4"]


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "conv"])
def test_same_gradients_buffers_and_random_state_to_the_bit(name: str, autocast: bool) -> None:
    options, size = FAMILIES.get(name, ({}, 16))
    model = timm.create_model(name, **options) if options else KINDS["conv"](2, 8)
    x = torch.randn(3, 3, size, size)
    net = _net("on", model, x=x)
    found = []
    for overlap in (Overlap.ON, Overlap.OFF):
        twin = copy.deepcopy(net)
        twin.overlap = overlap
        with torch.autocast("cpu", torch.bfloat16, autocast):
            found.append(gradients(twin, x) | {"random state": torch.get_rng_state()})
    assert found[0].keys() == found[1].keys()
    for key, value in found[0].items():
        assert torch.equal(value, found[1][key]), key


def test_a_second_backward_pass_over_a_kept_graph() -> None:
    net = _net("on")
    loss = (net(torch.randn(4, 8)) ** 2).sum()
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in net.parameters()]
    loss.backward()
    assert all(torch.equal(p.grad, 2 * g) for p, g in zip(net.parameters(), once, strict=True))


def test_a_backward_pass_after_one_that_ended_inside_the_chain() -> None:
    net = _net("on")
    loss = (net(torch.randn(4, 8)) ** 2).sum()
    weight = net.get_parameter("blocks.3.linear.weight")
    (alone,) = torch.autograd.grad(loss, weight, retain_graph=True)
    loss.backward()
    assert torch.equal(weight.grad, alone)


@pytest.mark.parametrize(("overlap", "dtype"), [("on", "fp32"), ("off", "bf16")])
def test_memory_does_not_grow_with_depth(overlap: str, dtype: str) -> None:
    """Nor do weights that autocast has cast pile up."""
    peaks = []
    for depth in (3, 9):
        model = KINDS["transformer"](depth, SIZES.width)
        x, y = batch_of("transformer", SIZES, torch.device("cpu"))
        peaks.append(step_memory(_net(overlap, model, x=x), x, y, x.device, dtype).peak)
    assert peaks[1] == pytest.approx(peaks[0], rel=0.001)


SIZES = Sizes(depth=0, width=32, side=16, batch=2)
