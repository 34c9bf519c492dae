"""Side effects of a forward pass that a graph does not have: never lost silently."""

import warnings
from typing import Any

import pytest
import torch
from helpers import refuses
from torch import Tensor, nn

import revcompile
from revcompile.errors import InputError, RevcompileWarning

STORES = "forward stores a value with gradients"
pytestmark = pytest.mark.filterwarnings(f"ignore:.*{STORES}:revcompile.RevcompileWarning")
X = torch.randn(3, 8)
TAKEN = "a gradient flows into a tensor that a forward hook or an attribute took out"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(8, 8)
        self.aux: Any = 0.0
        self.losses: dict[str, Any] = {"z": 0.0}
        self.scale = {"s": 1.0}

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.f(x).tanh() * self.scale["s"]
        self.aux = h.pow(2).mean()
        self.losses["z"] = h.mean()
        return x + h


class Caching(nn.Module):
    """Fills a cache in eval mode, and empties it in `train()`."""

    def __init__(self, is_dict: bool) -> None:
        super().__init__()
        self.f, self.bias = nn.Linear(8, 8), nn.Parameter(torch.randn(8))
        self.is_dict, self.entries, self.entry = is_dict, dict[str, Tensor](), None

    def train(self, mode: bool = True) -> "Caching":
        self.entries, self.entry = {} if self.entries else self.entries, None
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        bias: Any = self.bias
        if not self.training and self.is_dict:
            if "bias" not in self.entries:
                self.entries["bias"] = self.bias * 1
            bias = self.entries["bias"]
        elif not self.training:
            self.entry = bias = self.bias * 1 if self.entry is None else self.entry
        return x + (self.f(x) + bias).tanh()


def _net() -> Any:
    return revcompile.reversify(nn.Sequential(Block(), Block(), Block()), X)


def test_a_tensor_that_the_graph_does_not_leave_in_an_attribute_is_not_there() -> None:
    staged = revcompile.petrafy(nn.Sequential(Block(), Block(), Block()), 2, X)
    for net in (_net(), staged.to_module()):
        net(X)
        block = net.get_submodule("1")
        assert not hasattr(block, "aux") and not hasattr(block, "losses")
        assert "set by the original's forward pass, not by this one: 0.aux" in net.summary()


@pytest.mark.parametrize("is_dict", [True, False])
@pytest.mark.parametrize("is_filled", [True, False])
def test_a_cache_of_eval_mode_is_computed_in_every_call(is_dict: bool, is_filled: bool) -> None:
    model = nn.Sequential(Caching(is_dict), Caching(is_dict)).train(not is_filled)
    with torch.no_grad():
        model(X)
    net = revcompile.reversify(model, X, policy="pretrained")
    for _ in range(2):
        torch.testing.assert_close(net.eval()(X), net.to_original().eval()(X))
        with torch.no_grad():
            for parameter in net.train().parameters():
                parameter.add_(1)
    staged = revcompile.petrafy(model, 2, X)
    trainer = staged.trainer(lambda p: torch.optim.SGD(p, lr=0.1), nn.functional.mse_loss)
    trainer.step(X, X)
    expected = nn.functional.mse_loss(staged.to_module().eval()(X), X)
    assert trainer.evaluate([(X, X)]).loss == pytest.approx(expected.item())


def test_a_gradient_into_what_a_hook_took_from_a_chain_is_an_error() -> None:
    net, seen = _net(), list[Tensor]()
    net.get_submodule("1").f.register_forward_hook(lambda m, i, o: seen.append(o))
    out = net(X)
    out.sum().backward()  # looking on is free
    refuses(InputError, TAKEN, (net(X).sum() + seen[-1].pow(2).sum()).backward)
    seen.clear()
    net.reversible = False
    (net(X).sum() + seen[-1].pow(2).sum()).backward()


class Observed(nn.LayerNorm):
    """A layer of torch with one thing more, which is not traced."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.aux, self.seen = y.pow(4).mean(), y.detach()
        return y


def test_a_gradient_into_what_a_layer_keeps_for_a_loss_is_an_error() -> None:
    blocks = [Block() for _ in range(3)]
    layers = [Observed(8) for _ in blocks]
    for block, layer in zip(blocks, layers, strict=True):
        block.f = nn.Sequential(layer, block.f)
    net = revcompile.reversify(nn.Sequential(*blocks), X)
    layer = net.get_submodule("1.f.0")
    for _ in range(2):
        (net(X).sum() + layer.seen.sum()).backward()
    refuses(InputError, TAKEN, (net(X).sum() + layer.aux).backward)
    net.reversible = False
    (net(X).sum() + layer.aux).backward()
    net.requires_grad_(False)  # what needs no gradient may be part of a loss
    weight = torch.ones((), requires_grad=True)
    (weight * (net(X).sum() + layer.aux)).backward()


class Summing(nn.Module):
    """Adds up what its blocks leave in their attributes."""

    def __init__(self, is_dict: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.is_dict = is_dict

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        total: Any = 0
        for block in self.blocks:
            x = block(x)
            total = total + (block.losses["z"] if self.is_dict else block.aux)
        return x, total + sum(block.aux for block in self.blocks)


@pytest.mark.parametrize("is_dict", [True, False])
@pytest.mark.parametrize("is_inside", [True, False])
def test_a_model_may_read_what_its_blocks_have_stored(is_dict: bool, is_inside: bool) -> None:
    model: Any = nn.Sequential(Summing(is_dict)) if is_inside else Summing(is_dict)
    net = revcompile.reversify(model, X, policy="pretrained", check="full").eval()
    assert net.rewired.couplings
    for each in (model.eval(), net):
        out, total = each(X)
        (out.sum() + total).backward()
    for before, now in zip(model.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(now.grad, before.grad, rtol=1e-4, atol=1e-5)


class Storing(nn.Module):
    """Stores a value in an attribute that has a default on the class."""

    aux: Any = 0.0

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.f, self.kind = nn.Linear(8, 8), kind
        self.info: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.f(x).tanh()
        if self.kind == "attribute":
            self.aux = h.pow(2).mean()
        elif self.kind == "list":
            self.aux = [h.mean()]
        elif self.kind == "dict":
            self.info["aux"] = h.mean()
        elif self.kind == "detached":
            self.aux = h.detach().mean()
        elif self.kind == "of the input":
            self.aux = x.mean()
        return x + h


@pytest.mark.parametrize("kind", ["attribute", "list", "dict"])
def test_what_a_loss_outside_may_read_is_warned_of(kind: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Storing(kind), Storing(kind))
    name = "info" if kind == "dict" else "aux"
    expected = rf"{STORES} in 1\.{name} and 1 more.* return it .*leaf_modules=\['1'\]"
    with pytest.warns(RevcompileWarning, match=f"^reversify: {expected}"):
        revcompile.reversify(model, X)
    with pytest.warns(RevcompileWarning, match=f"^petrafy: {expected}"):
        revcompile.petrafy(model, 2, X)


@pytest.mark.parametrize("kind", ["detached", "of the input", "leaf", "frozen", "read"])
def test_what_no_loss_outside_can_read_is_not_warned_of(kind: str) -> None:
    class Reading(nn.Sequential):
        def forward(self, x: Tensor) -> Any:
            x = super().forward(x)
            return (x, sum(each.aux for each in self)) if kind == "read" else x

    stored = kind if kind in ("detached", "of the input") else "attribute"
    others = [Storing(stored)] if stored == "attribute" else []  # their input has gradients
    model = Reading(Storing(stored), *others).requires_grad_(kind != "frozen")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        revcompile.reversify(model, X, leaf_modules=[Storing] if kind == "leaf" else ())
    assert not [each for each in caught if STORES in str(each.message)]
