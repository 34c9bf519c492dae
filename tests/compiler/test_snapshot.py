"""One snapshot behind every question whether a model has changed."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nets import module_of
from torch import Tensor, nn

from revcompile.ir.snapshot import Kind, TreeSnapshot, below


class Masked(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("mask", torch.ones(4))
        self.scales, self.offset = [1.0, 2.0], torch.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.mask


def net_of() -> Any:
    layers = {"first": Masked(), "drop": nn.Dropout(0.1), "last": nn.Linear(4, 4, bias=False)}
    return module_of(lambda self, x: self.last(self.drop(self.first(x))), **layers)


def put(path: str, value: Any) -> Callable[[Any], None]:
    *owner, name = path.split(".")
    return lambda net: setattr(functools.reduce(getattr, owner, net), name, value)


CHANGES: dict[str, tuple[Kind, Callable[[Any], Any], str]] = {
    "module": (
        Kind.MODULE, put("drop", nn.Identity()), "drop was a Dropout and is an Identity now",
    ),
    "module of the same class": (
        Kind.MODULE, put("last", nn.Linear(4, 4)),
        "last was replaced by another Linear, which has its own weights",
    ),
    "new module": (
        Kind.MEMBERS, lambda net: net.last.add_module("x", nn.Identity()),
        "last was given other members",
    ),
    "class": (Kind.CLASS, put("last.__class__", Masked), "last was a Linear and is a Masked now"),
    "forward": (Kind.FORWARD, put("forward", print), "the model was given another forward"),
    "members": (
        Kind.MEMBERS, lambda net: net.drop.register_buffer("x", None),
        "drop was given other members",
    ),
    "parameter": (
        Kind.PARAMETER, put("last.weight", nn.Parameter(torch.ones(4, 4))),
        "last.weight was replaced",
    ),
    "parameter in place of none": (
        Kind.PARAMETER, put("last.bias", nn.Parameter(torch.ones(4))), "last.bias was replaced",
    ),
    "buffer": (Kind.BUFFER, put("first.mask", torch.ones(4)), "first.mask was replaced"),
    "tensor": (Kind.BUFFER, put("first.offset", torch.zeros(1)), "first.offset was replaced"),
    "memory": (
        Kind.MEMORY, put("last.weight.data", torch.ones(4, 4)), "last.weight lies in other memory",
    ),
    "requires_grad": (
        Kind.REQUIRES_GRAD, lambda net: net.last.requires_grad_(False),
        "requires_grad of last.weight was changed",
    ),
    "requires_grad of another buffer": (
        Kind.REQUIRES_GRAD, put("first.mask", torch.ones(4, requires_grad=True)),
        "requires_grad of first.mask was changed",
    ),
    "requires_grad in a list": (
        Kind.REQUIRES_GRAD,
        lambda net: net.first.scales.append(torch.ones(1, requires_grad=True)),
        "requires_grad of first.scales[2] was changed",
    ),
    "a computed tensor": (
        Kind.DIFFERENTIABLE, lambda net: put("first.offset", net.last.weight * 2)(net),
        "requires_grad of first.offset was changed",
    ),
    "setting": (Kind.SETTING, put("drop.p", 0.3), "drop.p was 0.1 and is 0.3 now"),
    "new setting": (Kind.SETTING, put("drop.rate", 0.3), "drop.rate was absent and is 0.3 now"),
    "setting in place": (
        Kind.SETTING, lambda net: net.first.scales.append(3.0),
        "first.scales was [1.0, 2.0] and is [1.0, 2.0, 3.0] now",
    ),
    "mode": (Kind.SETTING, lambda net: net.drop.eval(), "drop.training was True and is False now"),
    "hook": (
        Kind.HOOK, lambda net: net.last.register_forward_hook(lambda *_: None),
        "a hook of last was registered or removed",
    ),
    "gradient hook": (
        Kind.GRADIENT_HOOK, lambda net: net.last.weight.register_hook(lambda grad: grad),
        "a hook of last.weight was registered or removed",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_named_once_and_by_its_kind(name: str) -> None:
    kind, change, said = CHANGES[name]
    net = net_of()
    snapshots = {each: TreeSnapshot(below(net), (each,)) for each in Kind}
    assert [s.first_change() for s in snapshots.values()] == [None] * len(Kind)
    change(net)
    found = snapshots[kind].first_change()
    assert found is not None and found.kind is kind and str(found) == said
    snapshots[kind].take()
    assert snapshots[kind].first_change() is None


def test_equal_values_are_no_change() -> None:
    net = net_of()
    snapshot = TreeSnapshot(below(net), (Kind.SETTING,))
    net.drop.p, net.first.scales = float("0.1"), [1.0, float("2")]
    net.first.more = torch.ones(1)  # a tensor, no setting
    assert snapshot.first_change() is None
    net.drop.p = float("nan")
    assert snapshot.first_change() is not None


@pytest.mark.parametrize("kind", [Kind.MODULE, Kind.MEMBERS])
def test_a_change_after_one_that_was_undone(kind: Kind) -> None:
    """`del` of a list makes another dict of its modules."""
    layers = nn.ModuleList([nn.Linear(2, 2)])
    snapshot = TreeSnapshot(below(layers), (kind,))
    layers.append(nn.Identity())
    del layers[-1]
    assert snapshot.first_change() is None
    layers.append(nn.Identity())
    layers[0] = nn.Linear(2, 2)
    assert snapshot.first_change() is not None


def test_a_member_of_a_list_that_was_empty() -> None:
    layers = nn.ModuleList()
    snapshot = TreeSnapshot(below(layers), (Kind.MEMBERS,))
    layers.append(nn.Identity())
    del layers[-1]
    assert snapshot.first_change() is None
    layers.append(nn.Identity())
    assert snapshot.first_change() is not None


@pytest.mark.parametrize("name", ["module", "parameter", "setting", "hook", "new module"])
def test_copies_look_at_copies(name: str) -> None:
    kind, change, _ = CHANGES[name]
    net = net_of()
    kinds = Kind.MODULE, Kind.MEMBERS, Kind.PARAMETER, Kind.SETTING, Kind.HOOK
    copied, snapshot = copy.deepcopy((net, TreeSnapshot(below(net), kinds)))
    change(net)
    assert snapshot.first_change() is None
    _, unseen = copy.deepcopy((copied, snapshot))
    change(copied)
    found = snapshot.first_change()
    assert found is not None and found.kind is kind
    _, noticed = copy.deepcopy((copied, snapshot))
    assert noticed.first_change() is not None and unseen.first_change() is None
