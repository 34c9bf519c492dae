"""What a tracer does not see by itself: captured right, or refused with the line that does it."""

from typing import Any

import pytest
import torch
from helpers import assert_exact, gradients, refuses
from nets import Chain, module_of
from torch import Tensor, nn
from training import rebuilt_errors

import revcompile
from revcompile.compiler.capture import capture
from revcompile.errors import CaptureError, InputError, InversionError, ModifiedError

X = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.tanh(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 3 * gradients[0]


class Block(nn.Module):
    """A residual block with an effect before it; subclasses say which."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(6, 6)
        self.register_buffer("ema", torch.zeros(6))
        self.child = nn.Linear(6, 6)
        self.child.n = 0  # type: ignore[assignment]

    def effect(self, h: Tensor) -> Tensor:
        return h

    def forward(self, h: Tensor) -> Tensor:
        h = self.effect(h)
        return h + torch.tanh(self.l(h))


# -- custom autograd functions --------------------------------------------------------------------


class Unchanged(Tripled):
    """Computes nothing in its forward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x


class WithSetup(Tripled):
    @staticmethod
    def forward(x: Tensor) -> Tensor:  # type: ignore[override]
        return x.tanh()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)


class CustomFunction(Block):
    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.function = function

    def effect(self, h: Tensor) -> Tensor:
        return self.function.apply(h)  # type: ignore[no-any-return, no-untyped-call]


@pytest.mark.parametrize("function", [Tripled, Unchanged, WithSetup])
def test_a_custom_function_stays_in_a_module_of_its_own(function: Any) -> None:
    captured = capture(nn.Sequential(CustomFunction(function)), X, check="full")
    assert captured.leaf_modules == ("0",)
    expected = f"custom autograd function {function.__name__} "
    with pytest.raises(CaptureError, match=expected) as caught:
        capture(CustomFunction(function), X)
    assert "submodule" in str(caught.value) and "test_unseen.py" in str(caught.value)


def test_a_custom_function_is_of_the_module_that_calls_it() -> None:
    """Not of the one that is given its result."""

    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.after = Block()

        def forward(self, x: Tensor) -> Tensor:
            return self.after(Tripled.apply(x))  # type: ignore[no-any-return, no-untyped-call]

    refuses(CaptureError, r"in \(top level\): the custom .* Calls\.forward\]", capture, Calls(), X)
    assert capture(nn.Sequential(Calls()), X).leaf_modules == ("0",)


def test_a_generator_of_the_models_own_is_refused() -> None:
    class Draws(Block):
        def effect(self, h: Tensor) -> Tensor:
            return h + torch.rand(h.shape, generator=self.generator)  # type: ignore[call-overload]

    block = Draws()
    block.generator = torch.Generator()
    with pytest.raises(CaptureError, match=r"in 0: .* leave out generator=.* Draws\.fo") as caught:
        capture(nn.Sequential(block), X)
    assert "leaf module" not in str(caught.value)


def test_a_custom_function_without_gradients_is_part_of_the_graph() -> None:
    class Model(CustomFunction):
        def effect(self, h: Tensor) -> Tensor:
            with torch.no_grad():
                return h + super().effect(h)

    assert capture(Model(Tripled), X, check="full").leaf_modules == ()


class ReadsParameters(Block):
    def effect(self, h: Tensor) -> Tensor:
        return h + sum(p.pow(2).sum() for p in self.parameters())


def test_parameters_read_all_at_once_are_refused_with_what_to_do() -> None:
    refuses(CaptureError, r"reads through self\.parameters\(\)", capture, ReadsParameters(), X)
    assert capture(nn.Sequential(ReadsParameters()), X, check="full").leaf_modules == ("0",)


# -- data of a buffer -----------------------------------------------------------------------------


class SetData(Block):
    def effect(self, h: Tensor) -> Tensor:
        self.ema.data = 0.9 * self.ema.data + h.mean(0).detach()
        return h * (1 + self.ema)


def test_data_that_is_assigned_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"assigns to \.data of a tensor") as caught:
        capture(SetData(), X)
    assert "test_unseen.py" in str(caught.value) and "copy_" in str(caught.value)


# -- buffers that are written later ---------------------------------------------------------------


class Late(nn.Module):
    """Starts to write into its buffer when all of its class are told to."""

    is_late = False

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.l = nn.Linear(6, 6)
        self.register_buffer("scale", torch.ones(6))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, h: Tensor) -> Tensor:
        self.calls += 1
        if self.is_late:
            new = self.scale * 1.5
            if self.how == "assigned":
                self.scale = new
            elif self.how == "data":
                self.scale.data = new
            else:
                self.scale.copy_(new)
        return torch.tanh(self.l(h * self.scale))


@pytest.mark.parametrize("how", ["assigned", "data", "written"])
def test_a_buffer_written_late_is_an_error_first(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Chain(Late(how), nn.Linear(6, 6), nn.Linear(6, 6))
    net = revcompile.reversify(model, X, leaf_modules=[Late])
    assert len(net.rewired.couplings) == 3
    assert_exact(net, X, limit=1e-5)
    monkeypatch.setattr(Late, "is_late", True)  # no attribute of the module: not a guard
    refuses(ModifiedError, r"Late.*'scale'", gradients, net, X)
    for _ in range(2):
        assert_exact(net, X, limit=1e-5)


class CountedNorm(nn.Module):
    """A layer kept whole, with a batch norm and a buffer that every call changes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(6), nn.Linear(6, 6)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return torch.tanh(self.linear(self.norm(x))) * (1 + 0.1 * self.count)


@pytest.mark.parametrize("method", ["petra", "petra_stashed", "backprop"])
def test_buffers_beside_a_batch_norm_move_once_a_micro_batch(method: str) -> None:
    """Stages call a layer with batch norms in a way of their own (`normalised`)."""
    model = Chain(*(CountedNorm() for _ in range(3)))
    staged = revcompile.petrafy(model, 2, X, leaf_modules=[CountedNorm], check="off")
    trainer = staged.trainer(
        lambda p: torch.optim.SGD(p, lr=0.0),
        nn.functional.mse_loss,
        method=method,
    )
    errors = rebuilt_errors(trainer)
    for _ in range(4):
        trainer.step(X, torch.zeros_like(X))
    trainer.flush()
    counts = [b.item() for n, b in trainer.model.named_buffers() if n.endswith("count")]
    assert counts == [4.0] * 3
    assert all(error < 1e-5 for of_stage in errors.values() for error in of_stage)


# -- Python ---------------------------------------------------------------------------------------


class CountsInChild(Block):
    def effect(self, h: Tensor) -> Tensor:
        self.child.n += 1  # type: ignore[operator, assignment]
        return self.child(h) if self.child.n % 2 else h


def test_counting_in_an_attribute_of_a_child_is_seen() -> None:
    refuses(CaptureError, "counts in the attribute", capture, CountsInChild(), X, check="off")
    captured = capture(nn.Sequential(CountsInChild(), Block()), X, check="off")
    assert captured.leaf_modules == ("0",)


def test_a_counter_in_a_branch_is_told_to_be_a_buffer() -> None:
    """The branch is a leaf module already."""

    def counts(self: Any, h: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(h) * self.calls

    block = Block()
    block.l = module_of(counts, linear=nn.Linear(6, 6), calls=0)
    with pytest.raises(InputError, match=r"^reversify: 0\.l: .* counts .*register_buffer"):
        revcompile.reversify(nn.Sequential(block, Block()), X)
    with pytest.raises(InversionError, match=r"it counts, .* leaf_modules=\['0'\]"):
        revcompile.reversify(nn.Sequential(block, Block()), X, leaf_modules=[type(block.l)])
