"""What a chain costs the host: operations of a block besides those of its branch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from nets import Chain
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import revcompile
from revcompile.runtime.reversible.block import BlockWeights


def stack(depth: int) -> nn.Module:
    return Chain(*(nn.Linear(8, 8) for _ in range(depth)))


class Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        return func(*args, **(kwargs or {}))


def operations(net: nn.Module) -> tuple[int, int]:
    """Of a forward pass and of its backward pass."""
    with Count() as forward:
        loss = net(torch.ones(2, 8)).sum()
    with Count() as backward:
        loss.backward()
    return forward.operations, backward.operations


def of_a_block(is_reversible: bool) -> tuple[int, int]:
    """By the difference that one block more makes: the check of a chain costs the same for all."""
    found = []
    for depth in (3, 4):
        net = revcompile.reversify(stack(depth), torch.randn(2, 8), check="off").train()
        net.reversible = is_reversible
        operations(net)
        net.zero_grad()
        found.append(operations(net))
    return found[1][0] - found[0][0], found[1][1] - found[0][1]


def test_operations_of_a_block() -> None:
    stored, ours = of_a_block(False), of_a_block(True)
    assert ours[0] <= stored[0] + 4, "the stream that passes through; comparing the random state"
    assert ours[1] <= stored[0] + stored[1] + 1, "the branch again, with another input"


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
