"""The parts of branches that treat every token by itself, in chunks."""

from __future__ import annotations

from operator import add
from typing import Any

import pytest
import torch
from helpers import worst
from torch import Tensor, fx, nn

import revcompile
from revcompile.runtime.reversible import row_chunks
from revcompile.runtime.reversible.row_chunks import in_chunks

WIDTH, HEADS, TOKENS = 16, 4, 11


class Norm(nn.Module):
    """As transformers writes it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, x: Tensor) -> Tensor:
        h = x.to(torch.float32)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * h.to(x.dtype)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.q_norm = Norm(WIDTH), Norm(WIDTH // HEADS)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=i > 1) for i in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        sizes = x.shape[:-1]
        q = self.q_norm(self.q(x).view(*sizes, -1, WIDTH // HEADS)).transpose(1, 2)
        k = self.k(x).view(*sizes, -1, WIDTH // HEADS).transpose(1, 2)
        v = self.v(x).view(*sizes, -1, WIDTH // HEADS).transpose(1, 2)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(*sizes, -1))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        mlp = nn.Linear(WIDTH, 3 * WIDTH), nn.SiLU(), nn.Linear(3 * WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList((Attention(), nn.Sequential(Norm(WIDTH), *mlp)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return x


def decoder(**options: Any) -> tuple[Any, Decoder, Tensor]:
    torch.manual_seed(0)
    model, x = Decoder(), torch.randn(2, TOKENS, WIDTH)
    settings = {"policy": "pretrained", "check": "off"} | options
    return revcompile.reversify(model, x, **settings).train(), model, x


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The tokens of every chunk that runs, three or less, and the number of results."""
    monkeypatch.setattr(row_chunks, "LARGE", 1)
    monkeypatch.setattr(row_chunks, "CHUNK", 2 * 3 * WIDTH)
    seen: list[tuple[int, int]] = []
    store = row_chunks._store

    def watched(values: Any, chunk: Any, b: Tensor, results: Any) -> None:
        seen.append((chunk[2], len(values)))
        store(values, chunk, b, results)

    monkeypatch.setattr(row_chunks, "_store", watched)
    return seen


def trained(net: Any, x: Tensor, autocast: bool) -> dict[str, Tensor]:
    torch.manual_seed(1)
    net.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = net(x)
    out.float().square().mean().backward()
    found = {n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None}
    return {"output": out.detach(), **found}


@pytest.mark.parametrize("policy", ["pretrained", "same_parameters"])
@pytest.mark.parametrize("autocast", [False, True])
def test_the_same_training_in_chunks(
    rows: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch, autocast: bool, policy: str
) -> None:
    net, _, x = decoder(policy=policy)
    if not autocast:
        net, x = net.bfloat16(), x.bfloat16()
    found = trained(net, x, autocast)
    parts = [3, 3, 3, 2]
    # Forward: attention, the MLP. Rebuild: the MLP, which is differentiated too, and attention.
    expected = [(n, results) for results in (3, 1, 1, 3) for n in parts]
    assert rows == expected
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert max(error for _, error in net.inversion_errors(x)) == 0.0
    monkeypatch.setattr(row_chunks, "LARGE", 2**25)
    rows.clear()
    assert worst(found, trained(net, x, autocast))[0] < 2e-2  # sums are rounded once, not in parts
    assert not rows


def test_exact_where_rounding_does_not_hide_an_error(
    rows: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_chunks, "LOW_PRECISION", (torch.float64,))
    net, _, x = decoder()
    net, x = net.double(), x.double()
    net.blocks[0].k.requires_grad_(False)
    net.blocks[0].q.weight = net.blocks[0].v.weight  # one parameter of two layers
    found = trained(net, x, False)
    assert len(rows) == 16
    monkeypatch.setattr(row_chunks, "LARGE", 2**25)
    assert worst(found, trained(net, x, False))[0] < 1e-12
    assert len(rows) == 16


@pytest.mark.gpu
def test_on_a_gpu(rows: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    net, _, x = decoder()
    net, x = net.bfloat16().cuda(), x.bfloat16().cuda()
    found = trained(net, x, False)
    assert len(rows) == 16
    assert max(error for _, error in net.inversion_errors(x)) == 0.0
    monkeypatch.setattr(row_chunks, "LARGE", 2**25)
    assert worst(found, trained(net, x, False))[0] < 2e-2
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        assert worst(found, trained(net, x, False))[0] < 2e-2


def test_only_in_training(rows: list[tuple[int, int]]) -> None:
    net, model, x = decoder()
    net, model, x = net.bfloat16(), model.bfloat16(), x.bfloat16()
    assert torch.equal(net.eval()(x), model.eval()(x))
    net.train()(x.float().bfloat16().requires_grad_()).sum()
    rows.clear()
    net.reversible = False
    trained(net, x, False)
    assert not rows


def test_hooks_are_called_once_for_all_tokens(rows: list[tuple[int, int]]) -> None:
    net, _, x = decoder()
    net, x = net.bfloat16(), x.bfloat16()
    shapes = []
    net.blocks[1][1].register_forward_hook(lambda *given: shapes.append(given[2].shape))
    trained(net, x, False)
    assert shapes == [torch.Size([2, TOKENS, 3 * WIDTH])]
    assert {results for _, results in rows} == {3}  # attention only


class Mixing(nn.Module):
    """Row-wise up to a sum of values that have different dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = Norm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(self.norm(x))
        sizes = y.shape[:-1]
        return (y.view(sizes[0], sizes[1], 1, WIDTH) + y).sum(1)


def test_values_of_other_dimensions_are_not_taken_for_rows() -> None:
    model = Mixing()
    graph, whole = in_chunks(fx.symbolic_trace(model).graph, model)
    assert graph is not None and whole is None
    x = torch.randn(TOKENS, TOKENS, WIDTH)
    assert torch.equal(fx.GraphModule(model, graph)(x), model(x))
    assert len(graph.find_nodes(op="call_function", target=add)) == 1
