"""Run the pieces of a model one after the other, each with an autograd graph of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from revcompile.ir import coupling_ops
from revcompile.ir.python_code import compile_graph
from revcompile.ir.types import Coupling, Opaque, Segment


@dataclass(frozen=True)
class PieceCall:
    """A piece with the values that it runs on.

    `inputs` is what the piece's graph takes; `stream` is a coupling's other stream, to which the
    branch's result is added.
    """

    code: Callable[..., Any]
    inputs: tuple[Any, ...]
    stream: Tensor | None

    def run(self) -> tuple[Any, ...]:
        """The results of the piece's graph."""
        result = self.code(*self.inputs)
        return tuple(result) if isinstance(result, tuple | list) else (result,)

    def outputs(self, results: tuple[Any, ...]) -> tuple[Any, ...]:
        """The piece's outputs. A coupling is added without a grid."""
        if self.stream is None:
            return results
        return (self.inputs[0], self.stream + results[0], *results[1:])


def run_pieces(
    pieces: Sequence[Segment],
    values: Mapping[str, Any],
    root: nn.Module,
    run: Callable[[Segment, PieceCall], tuple[Any, ...]],
) -> None:
    """Call `run` for every piece in order, on the outputs of the pieces before it.

    Args:
        pieces: All pieces of the model.
        values: The model's inputs by name.
        root: The module that the pieces' graphs read.
        run: Runs one piece and returns its outputs.
    """
    live = dict(values)
    made: set[str] = set()
    for piece in pieces:
        outputs = run(piece, _call(piece, live, made, root))
        # The grid that a coupling opens is not needed here.
        names = piece.results if isinstance(piece, Coupling) else piece.outputs
        live.update(zip(names, map(coupling_ops.detached, outputs), strict=True))
        made.update(names)


def _call(segment: Segment, live: Mapping[str, Any], made: set[str], root: nn.Module) -> PieceCall:
    def value(name: str) -> Any:  # the model's own inputs need no gradient
        return (coupling_ops.leaf if name in made else coupling_ops.detached)(live[name])

    def code(graph: fx.Graph) -> Callable[..., Any]:
        function = compile_graph(graph, "cost")
        return lambda *inputs: function(root, *inputs)

    if isinstance(segment, Opaque):
        return PieceCall(code(segment.graph), tuple(map(value, segment.inputs)), None)
    a, b = (live[name] for name in segment.streams_in)
    if segment.rearrange is not None:
        sizes = [live[name] for name in segment.rearrange.sides]
        rearrange = code(segment.rearrange.forward)
        with torch.no_grad():
            a, b = rearrange(a, *sizes)[0], rearrange(b, *sizes)[0]
    inputs = coupling_ops.leaf(b), *map(value, segment.sides)
    return PieceCall(code(segment.branch), inputs, a)


def submodules_only(root: nn.Module) -> nn.Module:
    """A plain module with the submodules and tensors of `root`, but not its code."""
    plain = nn.Module()
    plain._modules = dict(root._modules)
    plain._parameters = dict(root._parameters)
    plain._buffers = dict(root._buffers)
    vars(plain).update({n: value for n, value in vars(root).items() if isinstance(value, Tensor)})
    plain.training = root.training
    return plain
