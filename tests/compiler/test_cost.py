"""Costs of pieces: counted over fake tensors, measured, or given by the user."""

import functools
from typing import Any

import pytest
import timm
import torch
from nets import Residual, module_of
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import revcompile
from revcompile.compiler.cost import piece_costs, segment_costs
from revcompile.compiler.cost.analytic import FLOPS_PER_BYTE
from revcompile.compiler.cost.source import CostSource
from revcompile.errors import InputError
from revcompile.ir.types import Cost, Rewired

WORD = 4  # bytes of a float32


class Small(nn.Module):
    """A linear stem, two residual blocks, a head."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Linear(3, width)
        self.f, self.g = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.f(x).tanh()
        x = x + self.norm(self.g(x))
        y: Tensor = self.head(x)
        return y


def rewired_of(model: nn.Module, *example: Tensor, **options: Any) -> Rewired:
    return revcompile.reversify(model, example or None, check="off", **options).rewired


def small(batch: int = 5) -> tuple[Rewired, dict[str, Cost]]:
    rewired = rewired_of(Small(), torch.randn(batch, 3), policy="same_parameters")
    names = [segment.name for segment in rewired.body.segments]
    return rewired, dict(zip(names, segment_costs(rewired), strict=True))


def test_flops_parameters_and_bytes_of_a_small_model_by_hand() -> None:
    _, found = small(batch=5)
    assert list(found) == ["stem", "f", "g", "head"]
    assert found["f"].flops == 2 * 5 * 8 * 8
    assert [cost.parameters for cost in found.values()] == [3 * 8 + 8, 8 * 8 + 8, 8 * 8 + 16, 18]
    assert all(cost.weights == cost.trained == WORD * cost.parameters for cost in found.values())
    # what f's backward pass needs: its input, and the result of tanh
    assert found["f"].saved == WORD * 5 * (8 + 8)
    # g: its input, the norm's input, and the norm's mean and deviation
    assert found["g"].saved == WORD * (5 * (8 + 8) + 2 * 8)
    assert {cost.batch for cost in found.values()} == {5}


def test_work_is_flops_and_bytes_moved() -> None:
    _, found = small(batch=5)
    # linear: reads and writes 5 x 8; tanh: the same; the coupling's sum: reads two, writes one
    moved = WORD * 5 * 8 * (2 + 2 + 3)
    assert found["f"].forward == found["f"].flops + FLOPS_PER_BYTE * moved
    assert found["f"].backward == 3 * found["f"].forward


def test_a_frozen_parameter_is_held_but_not_trained() -> None:
    model = Small()
    model.f.weight.requires_grad_(False)
    rewired = rewired_of(model, torch.randn(5, 3), policy="same_parameters")
    found = segment_costs(rewired)[1]
    assert (found.weights, found.trained) == (WORD * (64 + 8), WORD * 8)


def test_a_tied_parameter_counts_once() -> None:
    model = Small()
    model.g.weight = model.f.weight
    found = segment_costs(rewired_of(model, torch.randn(5, 3), policy="same_parameters"))
    assert [cost.parameters for cost in found] == [32, 72, 16, 18]


@functools.cache
def on_meta(name: str) -> revcompile.ReversibleModule:
    options: dict[str, Any] = {"vit_tiny_patch16_224": {"depth": 4}}.get(name, {})
    with torch.device("meta"):
        return revcompile.reversify(timm.create_model(name, **options), check="off")


@pytest.mark.parametrize("name", ["resnet18", "vit_tiny_patch16_224", "convnext_atto"])
def test_flops_are_those_torch_counts(name: str) -> None:
    net = on_meta(name)
    x = torch.empty(2, 3, 224, 224, device="meta")
    kernel = torch.nn.attention.SDPBackend.MATH  # its products have formulas on every device
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(kernel):
        net(x)
    assert sum(cost.flops for cost in segment_costs(net.rewired)) == counter.get_total_flops()


# -- other sources of cost -------------------------------------------------------------------------


def test_what_looks_at_numbers_is_counted_on_real_ones() -> None:
    looking = module_of(
        lambda self, x: self.layer(x if x.sum() > 0 else 2 * x), layer=nn.Linear(6, 6)
    )
    model = nn.Sequential(nn.Linear(3, 6), nn.Dropout(), looking, nn.Linear(6, 2))
    x = torch.randn(4, 3)
    before = torch.random.get_rng_state()
    net = revcompile.petrafy(model, 2, x, check="off", leaf_modules=["2"])
    assert sum(cost.flops for part in net._partition.parts for cost in part.costs) == 4 * 2 * 66
    assert torch.equal(before, torch.random.get_rng_state())


class ReplacesItsTable(nn.Module):
    """Chooses by its data, and frees a buffer while it runs if it `replaces` that."""

    def __init__(self, replaces: bool) -> None:
        super().__init__()
        self.layer, self.replaces = nn.Linear(8, 8), replaces
        self.register_buffer("table", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        if self.replaces:
            self.table = torch.ones(8)
        else:
            torch.ones(8)
        y: Tensor = self.layer(x)
        return y.relu() if y.sum() > 0 else y.tanh()


def test_tensors_count_at_the_address_of_a_freed_buffer() -> None:
    def work(replaces: bool) -> list[float]:
        torch.manual_seed(0)
        rewired = rewired_of(Residual(ReplacesItsTable(replaces)), torch.ones(4, 8))
        return [cost.forward for cost in segment_costs(rewired)]

    assert work(True) == work(False)


def test_measuring_needs_a_real_device() -> None:
    with torch.device("meta"):
        rewired = rewired_of(Small(), torch.randn(2, 3))
    with pytest.raises(InputError, match="meta device"):
        piece_costs(rewired, [rewired.body.segments], rewired.body.types, CostSource.MEASURED)


def test_a_forward_that_differentiates_has_costs() -> None:
    """torch.func allows no hooks on saved tensors; what is written counts as saved."""

    def slope(self: Any, x: Tensor) -> Tensor:
        return torch.func.grad(lambda y: self.up(y).tanh().sum())(x)  # type: ignore[no-any-return]

    layers = {"slope": module_of(slope, up=nn.Linear(6, 6)), "head": nn.Linear(6, 6)}
    model = module_of(lambda self, x: self.head(x + self.slope(x)), **layers).double()
    x = torch.randn(4, 6, dtype=torch.float64)
    net = revcompile.reversify(model, x, policy="same_parameters", leaf_modules=["slope"])
    costs = segment_costs(net.rewired)
    assert sum(cost.flops for cost in costs) > 2 * 4 * 6 * 6 and max(c.saved for c in costs) > 0
    assert torch.autograd.gradcheck(net.train(), x.requires_grad_())
