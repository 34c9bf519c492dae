"""What a chain costs the host: operations of a block besides those of its branch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import revcompile
from revcompile.runtime.reversible.block import BlockWeights


class Twice(nn.Module):
    """A block whose first layer is called twice, and whose other weights are converted together."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.both, self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.down.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        return x + self.down(torch.relu(self.up(self.both(torch.relu(self.both(x))))))


def test_weights_are_converted_together_to_the_same_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net = revcompile.reversify(Twice(), torch.randn(2, 8), check="off").train()
    x, found, counts = torch.randn(4, 8), [], []
    converted = BlockWeights.converted

    def counted(weights: BlockWeights, *given: Any) -> dict[int, Tensor]:
        counts.append(len(copies := converted(weights, *given)))
        return copies

    for function in (counted, lambda *_: {}):
        monkeypatch.setattr(BlockWeights, "converted", function)
        net.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = net(x).square().sum()
        loss.backward()
        found.append({name: p.grad for name, p in net.named_parameters()})
    assert counts == [4, 4], "of forward and of the rebuild"
    together, by_autocast = found
    assert together["down.weight"] is None
    assert all(g.dtype == torch.float32 for g in together.values() if g is not None)
    for name, gradient in by_autocast.items():
        assert gradient is together[name] or torch.equal(gradient, together[name]), name
    assert type(net.up.weight) is nn.Parameter, "the layers have their own weights again"
