"""Two CUDA streams in backward: the same gradients, in order, captured too. `pytest -m gpu`."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from helpers import ON_GPU, stored, worst
from torch import Tensor, nn
from torch.nn import functional as F

import revcompile
from revcompile.runtime.reversible.overlap import Overlap
from tests.support.measuring import capture_step
from tests.support.stacks import KINDS, Sizes, batch_of

pytestmark = ON_GPU

SIZES = Sizes(depth=8, width=128, side=64, batch=16)


def _stack(kind: str, choice: str, depth: int = 8, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = KINDS[kind](depth, SIZES.width).cuda()
    x, _ = batch_of(kind, SIZES, torch.device("cuda"))
    net = revcompile.reversify(model, x[:2], check="off", overlap=choice, **options)
    return net.train()


def _step(net: nn.Module, x: Tensor, y: Tensor) -> None:
    with torch.autocast("cuda", torch.bfloat16):
        loss = F.cross_entropy(net(x), y)
    loss.backward()


@pytest.mark.parametrize("kind", ["transformer", "conv"])
def test_memory_of_two_streams_is_never_mixed_up(kind: str) -> None:
    """Many steps, gradients given back and taken again, other work in between: no bit changes."""
    torch.backends.cudnn.deterministic = True
    device = torch.device("cuda")
    nets = {c: _stack(kind, c, depth=12) for c in ("on", "off")}
    for index in range(12):
        x, y = batch_of(kind, SIZES, device)
        x.requires_grad_()
        for net in nets.values():
            net.zero_grad(set_to_none=index % 3 != 0)
            x.grad = None
            _step(net, x, y)
            waste = [torch.full((1 + 17 * index, 999), torch.nan, device=device) for _ in range(8)]
            del waste
        pairs = zip(nets["on"].parameters(), nets["off"].parameters(), strict=True)
        assert all(bool((a.grad == b.grad).all()) for a, b in pairs), index  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = False


def test_hooks_find_gradients_in_order_on_the_callers_stream() -> None:
    """An update as soon as a gradient is there, on a stream of the caller's own."""
    found = []
    for choice in ("on", "off"):
        net = _stack("transformer", choice)
        for parameter in net.parameters():
            parameter.register_post_accumulate_grad_hook(_updated)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(5):
                x = torch.ones(16, 64, 16, device="cuda")
                _step(net, x, torch.zeros(16, device="cuda").long())
        torch.cuda.current_stream().wait_stream(stream)
        found.append([p.detach().clone() for p in net.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def _updated(parameter: Tensor) -> None:
    assert parameter.grad is not None
    with torch.no_grad():
        parameter.sub_(parameter.grad, alpha=0.01)
    parameter.grad = None


def _captured(net: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    def step() -> None:
        net.zero_grad()
        _step(net, x, y)

    return capture_step(step, net)


@pytest.mark.parametrize("choice", ["on", "off"])
def test_a_step_recorded_by_the_user(choice: str) -> None:
    net = _stack("transformer", choice)
    eager = copy.deepcopy(net)
    eager.overlap = Overlap.OFF
    x, y = batch_of("transformer", SIZES, torch.device("cuda"))
    replay = _captured(net, x, y)
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        replay()
        eager.zero_grad()
        _step(eager, x, y)
        pairs = zip(net.parameters(), eager.parameters(), strict=True)
        assert all(torch.equal(a.grad, b.grad) for a, b in pairs)


def _recorded_bytes(choice: str, depth: int) -> int:
    """What recording a step of this depth takes, without gradients."""
    sizes = Sizes(depth, width=128, side=196, batch=512)
    net = _stack("transformer", choice, depth)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    replay = _captured(net, *batch_of("transformer", sizes, torch.device("cuda")))
    weights = sum(p.numel() * p.element_size() for p in net.parameters())
    found = torch.cuda.max_memory_allocated() - before - weights
    del replay
    return found


@pytest.mark.parametrize("choice", ["on", "off"])
def test_a_recorded_step_does_not_grow_with_depth(choice: str) -> None:
    # A stream of every block would be 300 MB more. Workspaces of cuBLAS are 70 MB more or less:
    # there is one for each stream and thread that it has seen.
    _recorded_bytes(choice, 6)
    assert _recorded_bytes(choice, 12) < 1.1 * _recorded_bytes(choice, 6)


def _vit(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, depth=4, num_classes=5, **options
    ).cuda()


def test_stochastic_depth_is_repeated_in_a_recording() -> None:
    x, y = torch.randn(8, 3, 32, 32, device="cuda"), torch.zeros(8, device="cuda").long()
    net = revcompile.reversify(_vit(drop_path_rate=0.5), x, check="off", overlap="on").train()
    nets = net, stored(net)
    replays = [_captured(module, x, y) for module in nets]
    norms = []
    for _ in range(4):
        for replay in replays:
            torch.manual_seed(len(norms))
            replay()
        found = [{n: p.grad for n, p in m.named_parameters()} for m in nets]
        assert worst(*found)[0] < 1e-2
        norms.append(float(net.get_parameter("blocks.3.mlp.fc1.weight").grad.norm()))
    assert len(set(norms)) == 4, "every replay draws its own masks"


def test_backward_inside_autocast() -> None:
    net = _stack("transformer", "off")
    x, y = batch_of("transformer", SIZES, torch.device("cuda"))
    _step(net, x, y)
    want = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    with torch.autocast("cuda", torch.bfloat16):
        F.cross_entropy(net(x), y).backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(want, net.parameters(), strict=True))


def test_dropout_cannot_be_repeated_in_a_recording() -> None:
    x = torch.randn(4, 3, 32, 32, device="cuda")
    net = revcompile.reversify(_vit(proj_drop_rate=0.3), x, check="off").train()
    generator = torch.cuda.default_generators[0]
    before, stream = generator.graphsafe_get_state(), torch.cuda.current_stream()
    generator.graphsafe_set_state(before.clone_state())  # a recording that fails keeps both
    with pytest.raises(revcompile.RevcompileError, match="native_dropout, whose random numbers"):
        _captured(net, x, torch.zeros(4, device="cuda").long())
    generator.graphsafe_set_state(before)
    torch.cuda.set_stream(stream)
