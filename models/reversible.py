"""Blocks on two streams that can be run backwards: one coupling, and two in a row.

They are ordinary modules, trained by ordinary autograd; `inverse` shows that nothing needed to be
stored. In training mode batch norms see the same batch both ways, so that `inverse` is exact then
too, but each call moves their running statistics.
"""

from __future__ import annotations

from torch import Tensor, nn

__all__ = ["Coupling", "Pair", "RevBlock"]

Pair = tuple[Tensor, Tensor]


class Coupling(nn.Module):
    """`(a, b) -> (b, a + F(b))`, PETRA Fig. 2; an activation after the sum joins F."""

    def __init__(self, branch: nn.Module, activation: nn.Module | None = None) -> None:
        super().__init__()
        self.branch = branch
        self.activation = activation or nn.Identity()

    def forward(self, a: Tensor, b: Tensor) -> Pair:
        """The next pair of streams."""
        return b, a + self.activation(self.branch(b))

    def inverse(self, b: Tensor, y: Tensor) -> Pair:
        """The pair of streams that `forward` was given."""
        return y - self.activation(self.branch(b)), b


class RevBlock(nn.Module):
    """`y1 = x1 + F(x2)`, `y2 = x2 + G(y1)`, RevNet Eq. 6: two couplings in a row."""

    def __init__(self, f: nn.Module, g: nn.Module) -> None:
        super().__init__()
        self.f, self.g = f, g

    def forward(self, x1: Tensor, x2: Tensor) -> Pair:
        """The next pair of streams."""
        y1 = x1 + self.f(x2)
        y2 = x2 + self.g(y1)
        return y1, y2

    def inverse(self, y1: Tensor, y2: Tensor) -> Pair:
        """The pair of streams that `forward` was given: RevNet Eq. 7."""
        x2 = y2 - self.g(y1)
        x1 = y1 - self.f(x2)
        return x1, x2
