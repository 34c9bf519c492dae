"""Cross entropy in chunks: the numbers of torch's, and one operation of a captured model."""

from typing import Any

import pytest
import torch
from helpers import assert_exact
from nets import PreNorm, module_of
from torch import Tensor, nn
from torch.nn import functional as F

import revcompile
from revcompile.errors import InputError
from revcompile.losses import linear_cross_entropy

CLASSES, WIDTH = 11, 8


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("has_bias", [True, False])
def test_it_equals_torch(reduction: Any, has_bias: bool) -> None:
    shapes = ((3, 5, WIDTH), (CLASSES, WIDTH), (CLASSES,))
    hidden, weight, bias = (torch.randn(s).double().requires_grad_() for s in shapes)
    target = torch.randint(CLASSES, (3, 5))
    target[0, :3] = -100
    given = [hidden, weight, bias] if has_bias else [hidden, weight]
    own = bias if has_bias else None
    loss = linear_cross_entropy(hidden, weight, target, own, reduction=reduction, rows=4)
    logits = F.linear(hidden, weight, own).flatten(0, 1)
    want = F.cross_entropy(logits, target.flatten(), reduction=reduction)
    assert torch.allclose(loss, want)
    found, wanted = (torch.autograd.grad(3 * each, given) for each in (loss, want))
    assert all(map(torch.allclose, found, wanted))
    with torch.no_grad():
        assert torch.allclose(linear_cross_entropy(hidden, weight, target, own), loss) == (
            reduction == "mean"
        )


def test_sums_over_chunks_are_float32() -> None:
    hidden, weight = torch.randn(4096, 16), 0.3 * torch.randn(50, 16)
    target = torch.randint(50, (4096,))
    weight.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, target, rows=8)
    want = F.cross_entropy(F.linear(hidden, weight), target)
    assert loss.dtype == torch.float32 and abs(loss - want) < 2e-3
    found, wanted = (torch.autograd.grad(each, weight)[0] for each in (loss, want))
    assert (found - wanted).abs().max() < 1e-2 * wanted.abs().max()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_scaled_loss_in_float16_has_its_gradients(reduction: Any) -> None:
    """The usual scale is infinite in float16; classes that nearly never occur are not zero."""
    hidden, weight = torch.randn(64, 16), 0.05 * torch.randn(500, 16)
    target, scale = torch.randint(500, (64,)), 2.0**16
    bias = torch.zeros(500)
    bias[100:] = -16.0  # probabilities of 1e-9
    for tensor in (hidden, weight):
        tensor.requires_grad_()

    def gradients(loss: Tensor) -> list[Tensor]:
        return [g / scale for g in torch.autograd.grad(scale * loss, (hidden, weight))]

    target %= 100
    with torch.autocast("cpu", torch.float16):
        found = gradients(
            linear_cross_entropy(hidden, weight, target, bias, reduction=reduction, rows=8)
        )
    wanted = gradients(F.cross_entropy(F.linear(hidden, weight, bias), target, reduction=reduction))
    for own, torchs in zip(found, wanted, strict=True):
        assert (own - torchs).abs().max() < 2e-3 * torchs.abs().max()
    rare = found[1][100:].norm() / wanted[1][100:].norm()
    assert abs(rare - 1) < 0.02, rare


def test_if_no_row_counts_the_gradient_is_zero() -> None:
    hidden, weight = torch.randn(3, WIDTH, requires_grad=True), torch.randn(CLASSES, WIDTH)
    loss = linear_cross_entropy(hidden, weight, torch.full((3,), -100))
    (gradient,) = torch.autograd.grad(loss, hidden)
    assert loss.isnan() and not gradient.any()


@pytest.mark.parametrize("wrong", [{"rows": 0}, {"rows": 2.5}, {"target": torch.rand(3)}])
def test_wrong_arguments_are_named(wrong: dict[str, Any]) -> None:
    given = {"target": torch.zeros(3, dtype=torch.long)} | wrong
    with pytest.raises(InputError, match=f"linear_cross_entropy: {next(iter(wrong))}"):
        linear_cross_entropy(torch.randn(3, WIDTH), torch.randn(CLASSES, WIDTH), **given)


def test_in_chains_and_in_the_last_stage() -> None:
    def forward(self: Any, x: Tensor, target: Tensor) -> Tensor:
        return linear_cross_entropy(self.body(x), self.head.weight, target, self.head.bias, rows=4)

    body, head = PreNorm(WIDTH, 4, dropout=0.0), nn.Linear(WIDTH, CLASSES)
    body.head = nn.Identity()  # type: ignore[assignment]
    x, target = torch.randn(3, 5, WIDTH).double(), torch.randint(CLASSES, (3, 5))
    model = module_of(forward, body=body, head=head).double()
    net = revcompile.reversify(model, (x, target), policy="pretrained").eval()
    assert torch.equal(net(x, target), model(x, target))
    other = x.repeat(2, 1, 1), target.repeat(2, 1)
    assert torch.equal(net(*other), model(*other))
    assert_exact(net.train(), x, target)
    staged = revcompile.petrafy(model, 2, (x, target), policy="pretrained", check="off")
    trainer = staged.trainer(lambda p: torch.optim.SGD(p, lr=0.1), None)
    for batch in ((x, target), ((x, target), None), {"x": x, "target": target}):
        assert trainer.evaluate([batch]).loss == model(x, target).item()
    with pytest.raises(InputError, match="a target was given, which nothing would read"):
        trainer.step((x, target), target)
    trainer.step((x, target))
    trainer.flush()
