"""Run the pieces of a model one after the other, each with an autograd graph of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from revcompile.errors import InputError
from revcompile.ir import coupling_ops
from revcompile.ir.types import Coupling, Opaque, Rewired, Segment, TensorType

Code = Callable[..., Any]
"""A graph made executable: `(*inputs) -> outputs`."""


@dataclass(frozen=True)
class PieceCall:
    """A piece with the values it is to be run on.

    `inputs` is what the piece's graph takes; `stream` is a coupling's other stream, to which the
    branch's result is added.
    """

    code: Code
    inputs: tuple[Any, ...]
    stream: Tensor | None

    def forward(self) -> PieceResult:
        """Run the piece. Sums of a coupling are plain: no grid."""
        result = self.code(*self.inputs)
        if self.stream is None:
            return PieceResult(tuple(result), tuple(result))
        results = tuple(result) if isinstance(result, (tuple, list)) else (result,)
        outputs = (self.inputs[0], self.stream + results[0], *results[1:])
        return PieceResult(results, outputs)


@dataclass(frozen=True)
class PieceResult:
    """The results of a piece's graph, and the piece's outputs made of them."""

    results: tuple[Any, ...]
    outputs: tuple[Any, ...]


def run_pieces(
    pieces: Sequence[Segment],
    values: Mapping[str, Any],
    code_of: Callable[[fx.Graph], Code],
    run: Callable[[Segment, PieceCall], PieceResult],
) -> None:
    """Call `run` for every piece in order, on the outputs of the pieces before it.

    Args:
        pieces: All pieces of the model.
        values: The model's inputs by name.
        code_of: Makes a piece's graph executable.
        run: Runs one piece and returns its result.
    """
    live = dict(values)
    made: set[str] = set()
    for piece in pieces:
        result = run(piece, _call(piece, live, made, code_of))
        # The grid that a coupling opens is not needed here.
        names = piece.results if isinstance(piece, Coupling) else piece.outputs
        live.update(zip(names, map(coupling_ops.detached, result.outputs), strict=True))
        made.update(names)


def _call(
    segment: Coupling | Opaque,
    live: Mapping[str, Any],
    made: set[str],
    code_of: Callable[[fx.Graph], Code],
) -> PieceCall:
    def value(name: str) -> Any:  # the model's own inputs need no gradient
        return (coupling_ops.leaf if name in made else coupling_ops.detached)(live[name])

    if isinstance(segment, Opaque):
        inputs = [value(name) for name in segment.inputs]
        return PieceCall(code_of(segment.graph), tuple(inputs), None)
    a, b = (live[name] for name in segment.streams_in)
    if segment.rearrange is not None:
        sizes = [live[name] for name in segment.rearrange.sides]
        rearrange = code_of(segment.rearrange.forward)
        with torch.no_grad():
            a, b = rearrange(a, *sizes)[0], rearrange(b, *sizes)[0]
    sides = (value(name) for name in segment.sides)
    return PieceCall(code_of(segment.branch), (coupling_ops.leaf(b), *sides), a)


def submodules_only(root: nn.Module) -> nn.Module:
    """A plain module with the submodules, parameters and buffers of `root`, but not its code."""
    plain = nn.Module()
    plain._modules = dict(root._modules)
    plain._parameters = dict(root._parameters)
    plain._buffers = dict(root._buffers)
    plain.training = root.training
    return plain


def example_batch_size(rewired: Rewired, types: Mapping[str, Any]) -> int:
    """The batch size of the example the model was captured with."""
    for name in rewired.signature.placeholders:
        if isinstance(types[name], TensorType):
            return int(types[name].batch)
    raise InputError(f"cost: {rewired.name} takes no tensor, so it has no batch size")
