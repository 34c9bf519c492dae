"""One coupling `(a, b) -> (b, a + F(b))` as something to run, forward and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from revcompile.kernels.exact_sum import add, subtract
from revcompile.runtime.reversible.bindings import Bindings
from revcompile.runtime.reversible.replay import ReplayContext
from revcompile.runtime.reversible.sharding import Unit

__all__ = ["Block", "couple", "rearranged", "run_branch", "uncouple"]


@dataclass(frozen=True)
class Block:
    """An executable coupling.

    `branch(root, b, *sides)` is F. `sides` are the positions of the block's side values among
    the chain's. With `has_extras` it returns `(F(b), *extras)`: values read outside the block,
    which end a chain. `rearrange(root, stream, *sizes) -> (stream, shapes)` and
    `unlink(root, stream, shapes)` rearrange a stream, where needed. `bindings` is what F finds in
    the module tree. `casts_on_read` if all that F does with `b` is to give it to a layer
    that autocast casts it for.
    """

    name: str
    branch: Callable[..., Any]
    sides: tuple[int, ...] = ()
    has_extras: bool = False
    rearrange: Callable[..., tuple[Tensor, Any]] | None = None
    unlink: Callable[..., Tensor] | None = None
    rearrange_sides: tuple[int, ...] = ()
    bindings: Bindings = field(default_factory=Bindings)
    replay_context: ReplayContext = field(default_factory=ReplayContext)
    casts_on_read: bool = False
    units: tuple[Unit, ...] = ()
    """FSDP2 units that its layers belong to."""


def couple(
    root: nn.Module,
    block: Block,
    a: Tensor,
    b: Tensor,
    sides: Sequence[Any],
    cast: torch.dtype | None = None,
    grid: Tensor | None = None,
) -> tuple[Tensor, Tensor, Any, tuple[Tensor, ...]]:
    """`(a, b) -> (b, a + F(b))`, after the block's rearrange.

    Also returns the shapes to unlink, and the block's extras.
    """
    a, b, shapes = rearranged(root, block, a, b, sides)
    addend, extras = run_branch(root, block, b, [sides[i] for i in block.sides], cast)
    return b, add(a, addend, grid), shapes, extras


def rearranged(
    root: nn.Module, block: Block, a: Tensor, b: Tensor, sides: Sequence[Any]
) -> tuple[Tensor, Tensor, Any]:
    """The streams after the block's rearrange, and the shapes to unlink."""
    if block.rearrange is None:
        return a, b, ()
    sizes = [sides[i] for i in block.rearrange_sides]
    a, shapes = block.rearrange(root, a, *sizes)
    return a, block.rearrange(root, b, *sizes)[0], shapes


def run_branch(
    root: nn.Module, block: Block, b: Tensor, used: Sequence[Any], cast: torch.dtype | None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """F(b) and the extras. Streams wider than the model's own type are cast on the way in."""
    found = block.branch(root, b if cast is None else b.to(cast), *used)
    return (found[0], tuple(found[1:])) if block.has_extras else (found, ())


def uncouple(
    root: nn.Module,
    block: Block,
    b: Tensor,
    y: Tensor,
    sides: Sequence[Any],
    shapes: Any,
    cast: torch.dtype | None = None,
    grid: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`(b, y) -> (y - F(b), b)`, then back through the block's rearrange."""
    addend, _ = run_branch(root, block, b, [sides[i] for i in block.sides], cast)
    a = subtract(y, addend, grid)
    if block.unlink is not None:
        a, b = block.unlink(root, a, shapes), block.unlink(root, b, shapes)
    return a, b
