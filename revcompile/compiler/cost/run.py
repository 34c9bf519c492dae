"""Running the pieces of a model one after the other, each with a graph of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from revcompile.errors import InputError
from revcompile.ir.program import Piece
from revcompile.ir.types import Coupling, Opaque, Rewired, TensorType

__all__ = ["Code", "Given", "Ran", "bare", "example_batch", "walk"]

Code = Callable[..., Any]
"""A graph made executable: `(*inputs) -> outputs`."""


@dataclass(frozen=True)
class Given:
    """What a piece is run on: all that a backward pass of it needs to know.

    `inputs` is what the piece's graph takes; a coupling's second stream is `stream`, to which
    the branch's result is added.
    """

    code: Code
    inputs: tuple[Any, ...]
    stream: Tensor | None

    def forward(self) -> Ran:
        """Run the piece. Sums of a coupling are plain: no grid."""
        found = self.code(*self.inputs)
        if self.stream is None:
            return Ran(tuple(found), tuple(found))
        made = tuple(found) if isinstance(found, (tuple, list)) else (found,)
        return Ran(made, (self.inputs[0], self.stream + made[0], *made[1:]))


@dataclass(frozen=True)
class Ran:
    """What a run gave: the results of the graph, and the piece's outputs made of them."""

    results: tuple[Any, ...]
    outputs: tuple[Any, ...]


def walk(
    pieces: Sequence[Piece],
    values: Mapping[str, Any],
    code_of: Callable[[fx.Graph], Code],
    visit: Callable[[Piece, Given], Ran],
) -> None:
    """Visit every piece in order, on the values that the pieces before it gave."""
    live = dict(values)
    made: set[str] = set()
    for piece in pieces:
        ran = visit(piece, _given(piece.segment, live, made, code_of))
        # A piece that opens a grid has it as its last output; nobody needs it here.
        names = piece.segment.outputs
        live.update(zip(names, map(_cut_off, ran.outputs), strict=True))
        made.update(names)


def _given(
    segment: Coupling | Opaque,
    live: Mapping[str, Any],
    made: set[str],
    code_of: Callable[[fx.Graph], Code],
) -> Given:
    if isinstance(segment, Opaque):
        inputs = [_leaf(live[name], name in made) for name in segment.inputs]
        return Given(code_of(segment.graph), tuple(inputs), None)
    a, b = (live[name] for name in segment.streams_in)
    if segment.rearrange is not None:
        sizes = [live[name] for name in segment.rearrange.sides]
        rearrange = code_of(segment.rearrange.forward)
        with torch.no_grad():
            a, b = rearrange(a, *sizes)[0], rearrange(b, *sizes)[0]
    sides = (_leaf(live[name], name in made) for name in segment.sides)
    return Given(code_of(segment.branch), (_leaf(b, True), *sides), a)


def _leaf(value: Any, graded: bool) -> Any:
    """A value as the beginning of a graph. The model's own inputs need no gradient."""
    if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
        return value.detach().requires_grad_(graded)
    return value


def _cut_off(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def bare(root: nn.Module) -> nn.Module:
    """The tree of modules alone: `root` itself may be a module with code of its own."""
    plain = nn.Module()
    plain._modules = dict(root._modules)
    plain._parameters = dict(root._parameters)
    plain._buffers = dict(root._buffers)
    plain.training = root.training
    return plain


def example_batch(rewired: Rewired, types: Mapping[str, Any]) -> int:
    """The batch size of the example the model was captured with."""
    for name in rewired.signature.placeholders:
        if isinstance(types[name], TensorType):
            return int(types[name].batch)
    raise InputError(f"cost: {rewired.name} takes no tensor, so it has no batch to speak of")
