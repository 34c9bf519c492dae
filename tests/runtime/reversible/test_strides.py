"""Branches read rebuilt streams with the strides of forward: dropout draws in memory order."""

from typing import Any

import pytest
import torch
from helpers import FORMS, assert_exact, cases
from nets import Dropped
from torch import Tensor

import revcompile
from revcompile.kernels.layout import usual, usual_strides, with_strides

LAST = torch.channels_last


def images(count: int) -> Tensor:
    return torch.randn(count, 3, 5, 5, dtype=torch.float64)


LAYOUTS = (
    images(4),
    images(4).to(memory_format=LAST),
    images(1),
    images(4).to(memory_format=LAST)[:1],
    images(8)[::2].transpose(2, 3),
)


@cases("policy, convs", ("paper", 4), ("same_parameters", 2), ("pretrained", 0), ("pretrained", 4))
def test_dropout_is_replayed_in_every_layout(policy: Any, convs: int) -> None:
    net = revcompile.reversify(Dropped(convs).double(), images(4), policy=policy).train()
    for x in LAYOUTS:
        assert_exact(net, x)


@pytest.mark.parametrize("policy", ["paper", "pretrained"])
def test_saved_tensors_may_come_back_with_other_strides(policy: Any) -> None:
    net = revcompile.reversify(Dropped(0).double(), images(4), policy=policy).train()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.contiguous(), lambda t: t):
        assert_exact(net, images(4))


@pytest.mark.parametrize("form", FORMS)
def test_usual_strides_are_those_of_a_sum(form: str) -> None:
    x = FORMS[form]
    assert usual_strides(x) == (x + x).stride()
    assert torch.equal(usual(x), x)


def test_sizes_of_one_get_the_strides_of_their_memory_format() -> None:
    x = torch.randn(2, 3, 1, 1).as_strided((2, 3, 1, 1), (3, 1, 7, 9))
    assert usual(x).stride() == (3, 1, 1, 1) and usual(x).data_ptr() == x.data_ptr()
    one = torch.randn(1, 4, 5, 5).to(memory_format=LAST)
    chunk = torch.randn(1, 8, 5, 5).to(memory_format=LAST).chunk(2, 1)[0]
    assert usual_strides(chunk) == one.stride() == usual_strides(one.view_as(one))


def test_strides_are_given_under_autograd() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    y = with_strides(x, (1, 3))
    assert y.stride() == (1, 3) and torch.equal(x, y)
    (y * 2).sum().backward()
    assert torch.equal(x.grad, torch.full((3, 4), 2.0))
