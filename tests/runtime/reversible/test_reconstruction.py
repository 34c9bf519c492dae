"""Every call of a chain compares what it rebuilds with what it was given."""

import copy
import itertools

import pytest
import torch
from helpers import cases, refuses, stored
from nets import Chain
from torch import nn

import revcompile
from revcompile.errors import InversionError, RevcompileWarning
from revcompile.runtime.reversible import reconstruction
from revcompile.runtime.reversible.module import Reversible
from revcompile.runtime.reversible.reconstruction import ReconstructionCheck, samples_of

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def reversible_stack(device: str = "cpu") -> Reversible:
    torch.manual_seed(0)
    stack = Chain(*(nn.Linear(16, 16) for _ in range(4)))
    net = revcompile.reversify(stack.to(device), torch.randn(2, 16, device=device))
    assert isinstance(net, Reversible)
    return net


def train(net: nn.Module, device: str = "cpu") -> None:
    net(torch.randn(8, 16, device=device)).sum().backward()


def blow_up(net: Reversible) -> None:
    """Weights with which the branch outgrows the stream by more digits than float32 has."""
    with torch.no_grad():
        net.get_parameter("blocks.3.weight").fill_(1e9)


@pytest.mark.parametrize("calls", [1, 7])
def test_whichever_call_it_is_a_wrong_reconstruction_stops_the_training(calls: int) -> None:
    net = reversible_stack()
    for _ in range(calls):
        train(net)
    blow_up(net)
    refuses(InversionError, r"blocks\.3 reconstruct.*precision.*\.data", train, net)


def test_a_branch_that_computes_something_else_again_is_a_cause_that_is_named() -> None:
    net, factors = reversible_stack(), itertools.count(1)
    hooked = net.get_submodule("blocks.2")
    hooked.register_forward_hook(lambda layer, given, out: out * next(factors))
    refuses(InversionError, "a forward hook of it returns other values in each call", train, net)


def test_without_a_tolerance_nothing_is_compared() -> None:
    net = copy.deepcopy(reversible_stack())  # compiled anew, with the tolerance it has then
    net.tolerance = None
    blow_up(net)
    train(net)


def test_blocks_that_are_not_trained_are_not_needed_for_the_check() -> None:
    """Autograd never comes back to the chain's first block if that, and its input, is frozen."""
    net = reversible_stack()
    for index in (0, 1):
        for name in ("weight", "bias"):
            net.get_parameter(f"blocks.{index}.{name}").requires_grad_(False)
    train(net)
    blow_up(net)
    with pytest.raises(InversionError):
        train(net)


def test_values_that_are_not_finite_are_left_to_the_loss() -> None:
    """`GradScaler` skips such a step; with stored activations nothing is raised either."""
    net = reversible_stack()
    for model in (net, stored(net)):
        train(model)
        model.zero_grad()
        model(torch.full((8, 16), float("nan"))).sum().backward()
        weights = [p for name, p in model.named_parameters() if name.endswith("weight")]
        assert all(w.grad is not None and not w.grad.isfinite().any() for w in weights)


def test_consecutive_failures() -> None:
    right, wrong = torch.ones(4, 4), torch.zeros(4, 4)
    check = ReconstructionCheck("chain", "auto", 50, failures_allowed=1)
    for rebuilt in (wrong, right, wrong, right, right, wrong):
        check.finish(check.start({"": right}), {"": rebuilt})
    with pytest.raises(InversionError):
        check.finish(check.start({"": right}), {"": wrong})


def test_errors_that_training_bears_are_warned_of_once() -> None:
    right = torch.ones(4, 4)
    check = ReconstructionCheck("chain", "auto", 50)
    with pytest.warns(RevcompileWarning, match="gradients are no more precise"):
        check.finish(check.start({"": right}), {"": right + 5e-3})
    check.finish(check.start({"": right}), {"": right + 5e-3})
    with pytest.raises(InversionError):
        check.finish(check.start({"": right}), {"": right + 5e-2})
    for tolerance, values in (("auto", right.double()), (1e-3, right)):
        strict = ReconstructionCheck("chain", tolerance, 50)
        with pytest.raises(InversionError):
            strict.finish(strict.start({"": values}), {"": values + 5e-3})


@cases("shape", (), (1,), (1000,), (0, 3), (64, 3, 224, 224), (2, 5, 7), (3, 4096), (1, 1, 300, 1))
def test_samples_are_few_and_everywhere(shape: tuple[int, ...]) -> None:
    stream = torch.zeros(shape)
    count = samples_of(stream).numel()
    assert min(stream.numel(), 32) <= count <= 256
    assert samples_of(stream).untyped_storage()._cdata == stream.untyped_storage()._cdata


def test_an_asynchronous_device_stops_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconstruction, "_is_asynchronous", lambda device: True)
    right, wrong = torch.ones(4, 4), torch.zeros(4, 4)
    check = ReconstructionCheck("chain", "auto", 50)
    check.finish(check.start({"": right}), {"": right})
    check.finish(check.start({"": right}), {"": wrong})
    refuses(InversionError, "in an earlier step", check.start, {"": right})
    check.finish(check.start({"": right}), {"": right})  # reported once
    infinite = torch.full((4, 4), float("inf"))
    check.finish(check.start({"": right}), {"": infinite})
    check.finish(check.start({"": right}), {"": right})


@on_gpu
def test_on_a_gpu_nobody_waits_and_the_next_step_says_so() -> None:
    net = reversible_stack("cuda")
    train(net, "cuda")
    blow_up(net)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        train(net, "cuda")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    refuses(InversionError, "in an earlier step", train, net, "cuda")
