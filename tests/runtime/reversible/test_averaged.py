"""policy="pretrained": the original function in eval mode, averaged couplings in training."""

import copy
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import timm
import torch
from helpers import assert_exact, gradients, gradients_in_flight, refuses, stored, worst
from nets import Chain as Blocks
from nets import LoRA, PreNorm
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import revcompile
from revcompile.errors import InputError, InversionError, RevcompileWarning
from revcompile.kernels.fixed_point import pack_bits, unpack_bits
from revcompile.runtime.reversible.block import Averaged
from revcompile.runtime.reversible.coupling import Chain

WIDTH = 16


def made(depth: int = 4, **options: Any) -> tuple[nn.Module, Any, Tensor]:
    torch.manual_seed(0)
    model, x = PreNorm(WIDTH, depth, **options), torch.randn(5, 3, WIDTH)
    return model, revcompile.reversify(model, x, policy="pretrained", check="off").train(), x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_eval_is_the_original_to_the_bit(dtype: torch.dtype) -> None:
    model, _, x = made()
    model, x = model.to(dtype).eval(), x.to(dtype)
    net = revcompile.reversify(model, x, policy="pretrained", check="off").eval()
    assert len(net.rewired.couplings) == 4
    assert torch.equal(net(x), model(x))
    assert not torch.equal(net.train()(x), model(x))


@pytest.mark.parametrize("how", ["float32", "float64", "autocast"])
def test_96_blocks_are_rebuilt_exactly(how: str) -> None:
    _, net, x = made()
    around: AbstractContextManager[Any] = nullcontext()
    if how == "float64":
        net, x = net.double(), x.double()
    if how == "autocast":
        around = torch.autocast("cpu", torch.bfloat16)
    (chain,) = (step.run for step in net._plan(net.rewired.body) if isinstance(step.run, Chain))
    blocks = tuple(copy.copy(block) for block in chain.blocks * 24)
    chain = Chain(blocks, chain.tolerance, chain.overlap)
    results = []
    with around:
        _, errors = chain.inspect(x, x, [])
        for run in (chain.plain, chain.reversible):
            torch.manual_seed(0)
            stream = x.clone().requires_grad_()
            net.zero_grad()
            out = run(stream, stream, [])[1]
            out.square().mean().backward()
            of_parameters = {n: p.grad for n, p in net.blocks.named_parameters()}
            results.append({"output": out.detach(), "input": stream.grad, **of_parameters})
    assert len(errors) == 96 and max(error for _, error in errors) == 0.0
    assert worst(*results)[0] < {"float64": 1e-10, "float32": 1e-5, "autocast": 2e-2}[how]
    assert torch.equal(results[0]["output"], results[1]["output"])


def test_the_mean_over_gamma_of_one_step_is_the_original() -> None:
    """`y` is linear in gamma: the mean of both signs is `b + F(b)`."""
    a, b, addend = torch.randn(3, 2, 5).double().unbind()
    signs = torch.tensor([[1.0, 1.0], [-1.0, -1.0]]).double()
    sums = Averaged(signs, (0, 0))
    both = [sums.add(index, a, b, addend)[0] for index in range(2)]
    assert torch.allclose((both[0] + both[1]) / 2, b + addend)
    assert torch.allclose(both[0], a / 2 + b / 2 + 1.5 * addend)


def test_four_bits_are_kept_for_each_element_and_block() -> None:
    difference = torch.arange(-50, 49).view(9, 11).int()
    packed = pack_bits(difference)
    assert packed.nbytes == 50  # of 99 elements
    assert torch.equal(unpack_bits(packed, difference.shape).int(), difference & 15)


def test_signs_and_dropout_are_replayed_with_several_calls_in_flight() -> None:
    net = made()[1].double()
    shapes = [(rows, 3, WIDTH) for rows in (5, 2, 7)]
    found = [gradients_in_flight(module, *shapes) for module in (net, stored(net))]
    assert worst(found[1], found[0])[0] < 1e-10


def convolutions() -> nn.Module:
    return Blocks(*(nn.Sequential(nn.Conv2d(3, 3, 1), nn.Tanh()) for _ in range(2)))


def test_convolutions_are_repeatable(monkeypatch: pytest.MonkeyPatch) -> None:
    """In forward and in the rebuild, chains and stages: flags of cuDNN, strides of 1 x 1 images."""
    flags, strides = [], []
    convolve = nn.Conv2d._conv_forward

    def watched(*args: Any) -> Tensor:
        flags.append((torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark))
        strides.append(args[1].stride())
        return convolve(*args)

    x = torch.randn(2, 3, 1, 1).as_strided((2, 3, 1, 1), (3, 1, 3, 3))  # channels last
    net = revcompile.reversify(convolutions(), x, policy="pretrained", check="off").train()
    stages = revcompile.petrafy(convolutions(), 1, x, policy="pretrained", check="off")
    monkeypatch.setattr(nn.Conv2d, "_conv_forward", watched)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    net(x).sum().backward()
    stages.trainer(lambda p: torch.optim.SGD(p, lr=0.1), lambda y, _: y.sum()).step(x, None)
    assert len(flags) == 8 and set(flags) == {(True, False)} and len(set(strides)) == 1
    assert torch.backends.cudnn.benchmark and not torch.backends.cudnn.deterministic


class Positions(nn.Module):
    """Attention whose mask is a parameter: without gradients it would take another kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(64, 192) for _ in range(6))
        self.bias = nn.ParameterList(torch.randn(2, 4, 4) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer, bias in zip(self.qkv, self.bias, strict=True):
            q, k, v = layer(x).unflatten(-1, (3, 2, 32)).permute(2, 0, 3, 1, 4).unbind()
            mask = bias[None] * 2
            y = nn.functional.scaled_dot_product_attention(query=q, key=k, value=v, attn_mask=mask)
            x = x + y.transpose(1, 2).flatten(2)
        return x


def test_attention_with_a_mask_of_parameters_is_repeatable() -> None:
    model, x = Positions(), torch.randn(8, 4, 64)
    net = revcompile.reversify(model, x, policy="pretrained", check="off").train()
    assert_exact(net, x, limit=1e-5)
    assert torch.equal(net.eval()(x), model.eval()(x))
    assert torch.backends.cuda.flash_sdp_enabled()


def test_a_block_alone_keeps_its_input_and_has_no_noise() -> None:
    model, net, x = made(1, dropout=0.0)
    assert torch.equal(net(x), model(x))
    assert worst(gradients(model, x), gradients(net, x))[0] < 1e-6
    assert len(net.rewired.couplings) == 1


def test_activations_behind_sums_and_projections_stay_opaque() -> None:
    model, x = timm.create_model("test_resnet", num_classes=3).eval(), torch.randn(2, 3, 32, 32)
    with pytest.warns(RevcompileWarning, match="an activation follows the sum"):
        net = revcompile.reversify(model, x, policy="pretrained")
    assert not net.rewired.couplings
    assert "an activation follows the sum" in net.rewired.body.segments[0].reason  # type: ignore[union-attr]
    assert "the shortcut is projected" in " ".join(net.summary().split())
    assert torch.equal(net.eval()(x), model(x))


def test_streams_that_outgrow_their_range_are_refused_and_never_silent() -> None:
    model, net, x = made(2, dropout=0.0)
    with torch.no_grad():
        net.blocks[1][1].weight.mul_(1e7)
    assert net(x).isnan().any()
    assert net.eval()(x).isfinite().all()
    model.load_state_dict(net.state_dict())
    refuses(InversionError, "2048 times", revcompile.reversify, model, x, policy="pretrained")


def test_the_original_comes_back_with_the_trained_weights() -> None:
    model, net, x = made()
    net(x).sum().backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    original = net.to_original()
    assert type(original) is PreNorm and original.training
    assert torch.equal(original.eval()(x), net.eval()(x))
    assert not torch.equal(original(x), model.eval()(x))
    assert original.stem.weight is not net.stem.weight
    other = revcompile.reversify(model, x, policy="same_parameters")
    refuses(InputError, "another function", other.to_original)
    net.stem.bias = None
    refuses(InputError, r"stem\.bias is not the same parameter", net.to_original)


# -- fine-tuning ----------------------------------------------------------------------------------


def _adapted(model: Any) -> Any:
    model.requires_grad_(False)
    for block in model.blocks[1:]:
        block[1] = LoRA(block[1])
    return model


def test_adapters_before_and_after() -> None:
    model, after, x = made(dropout=0.0)
    _adapted(after)
    before = revcompile.reversify(_adapted(model), x, policy="pretrained", check="off")
    assert torch.equal(before.eval()(x), model.eval()(x))
    assert torch.equal(after.eval()(x), model(x))
    found = [gradients(net.train(), x.requires_grad_()) for net in (before, after, stored(after))]
    assert len(found[0]) == 2 + 6  # the output, the input, and three pairs
    assert worst(found[0], found[1])[0] == 0.0
    assert worst(found[2], found[1])[0] < 1e-5
    assert isinstance(before.to_original().blocks[1][1], LoRA)
    refuses(InputError, "take adapters", after.to_original)


def test_nothing_is_rebuilt_below_the_first_trainable_block() -> None:
    _, net, x = made(6, dropout=0.0)
    net.stem.requires_grad_(False)
    net.blocks[:4].requires_grad_(False)
    matmul, flops = 2 * 15 * WIDTH * WIDTH, {}
    for net.reversible in (True, False):
        out = net(x)
        with FlopCounterMode(display=False) as counter:
            out.sum().backward()
        flops[net.reversible] = counter.get_total_flops()
        assert net.blocks[3][1].weight.grad is None and net.blocks[4][1].weight.grad is not None
    assert flops[True] == flops[False] + 2 * matmul  # blocks 4 and 5 run again
    net.reversible = True
    nodes: list[Any] = [net(x).grad_fn]
    for node in nodes:
        nodes += [n for n, _ in node.next_functions if n is not None and n not in nodes]
    kept = {node.index: node.lost for node in nodes if hasattr(node, "call")}
    assert kept == {4: 1, 5: 1}  # the other blocks' bits are nowhere
