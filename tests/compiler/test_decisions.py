"""Branches that decide by comparing keep their input: a rebuilt one flips exact ties."""

from collections.abc import Callable
from typing import Any

import torch
from helpers import assert_exact, cases
from nets import Chain, module_of
from torch import Tensor, nn
from torch.nn import functional as F

import revcompile
from revcompile.compiler.capture import capture
from revcompile.compiler.find import find


class Router(nn.Module):
    """Two of four experts for each row; the router starts as zeros, as usual: all logits tie.

    It decides where no graph can follow: it is kept as one call.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4, bias=False)
        nn.init.zeros_(self.gate.weight)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2, dim=-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == index)
            out = out.index_add(0, rows, expert(x[rows]) * weights[rows, place, None])
        return out


def test_routers_full_of_ties_train_as_with_stored_activations() -> None:
    x = torch.randn(6, 8)
    mixes = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)]
    chain = Chain(*(branch for mix in mixes for branch in (mix, Router())))
    model = nn.Sequential(nn.Linear(8, 8), chain, nn.Linear(8, 3))
    net = revcompile.reversify(model, x, policy="same_parameters")
    reasons = [r.reason for r in net.rewired.refusals]
    assert sum("decides by" in reason for reason in reasons) == 3, reasons
    assert len(net.rewired.couplings) == 3
    assert_exact(net, x, limit=1e-4)


def branch(function: Callable[..., Any]) -> str | None:
    """Why `x + function(layer(x))` is refused, if it is."""
    forward = lambda self, x, mask: x + function(self.norm(self.layer(x)), mask)  # noqa: E731
    model = module_of(forward, layer=nn.Linear(8, 8), norm=nn.BatchNorm1d(8))
    found = find(capture(model, (torch.randn(3, 8), torch.ones(3, 8))))
    return next((r.reason for r in found.refusals), None)


@cases(
    "name, function",
    ("argsort", lambda y, m: y.gather(1, y.argsort(-1))),
    ("sort", lambda y, m: y * y.sort(-1).indices),
    ("max", lambda y, m: y * y.max(-1, keepdim=True)[1]),
    ("argmax", lambda y, m: F.one_hot(y.argmax(-1), 8) * y),
    ("gt", lambda y, m: torch.where(y > 0.5, y, 2 * y)),
    ("round", lambda y, m: y.round()),
    ("sign", lambda y, m: torch.sign(y) * m),
    ("long", lambda y, m: y.long() * y),
    ("hardshrink", lambda y, m: F.hardshrink(y)),
    ("div", lambda y, m: torch.div(y, 2.0, rounding_mode="floor")),
)
def test_what_jumps_is_refused(name: str, function: Callable[..., Any]) -> None:
    assert f"the branch decides by {name}" in (branch(function) or "accepted")


@cases(
    "function",
    lambda y, m: y.relu().clamp(max=2.0),
    lambda y, m: y.masked_fill(m == 0, 0.0),
    lambda y, m: y - y.max(-1, keepdim=True).values,
    lambda y, m: y.sort(-1)[0] + y.topk(8, -1).values.abs(),
    lambda y, m: F.max_pool1d(y.unsqueeze(1), 3, 1, 1).squeeze(1),
    lambda y, m: y * torch.ones_like(y, dtype=torch.long) + F.dropout(y, 0.5),
    lambda y, m: y.masked_fill(y.isnan(), 0.0),
)
def test_what_is_continuous_is_accepted(function: Callable[..., Any]) -> None:
    assert branch(function) is None
