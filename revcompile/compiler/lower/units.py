"""What a stage differentiates at once, and what that depends on besides its inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd

from revcompile.compiler.dataflow import draws_random
from revcompile.compiler.partition.cuts import parameter_names
from revcompile.ir.program import Part, Partition, Piece, Unit
from revcompile.schedule import Keep

__all__ = ["Group", "groups"]

_DETERMINISTIC: Final = (
    _BatchNorm,
    _ConvNd,
    nn.AdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d,
    nn.AdaptiveAvgPool3d,
    nn.AvgPool2d,
    nn.Embedding,
    nn.Flatten,
    nn.GELU,
    nn.GroupNorm,
    nn.Hardsigmoid,
    nn.Hardswish,
    nn.Identity,
    nn.LayerNorm,
    nn.LeakyReLU,
    nn.Linear,
    nn.MaxPool2d,
    nn.PReLU,
    nn.ReLU,
    nn.ReLU6,
    nn.Sigmoid,
    nn.SiLU,
    nn.Softmax,
    nn.Tanh,
)
"""Layers known to draw nothing. Of all others it is assumed that they do."""


@dataclass(frozen=True)
class Group:
    """Pieces that are differentiated at once: a unit in the making."""

    pieces: tuple[Piece, ...]
    keep: Keep
    parameters: tuple[str, ...]
    random: frozenset[str]
    """Pieces that may draw random numbers."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """Live values read from outside."""
        made = set(self.outputs)
        read = dict.fromkeys(name for piece in self.pieces for name in piece.inputs)
        return tuple(name for name in read if name not in made)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Live values made."""
        return tuple(dict.fromkeys(name for piece in self.pieces for name in piece.outputs))

    def unit(self) -> Unit:
        """What is told of it afterwards."""
        names = tuple(piece.name for piece in self.pieces)
        label = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"
        reversible = all(piece.reversible for piece in self.pieces)
        return Unit(label, names, reversible, self.keep, bool(self.random), self.inputs)


def groups(partition: Partition, part: Part, keep: Keep) -> tuple[Group, ...]:
    """A stage's units for what it is to keep.

    If nothing is to be kept, couplings stand alone and opaque pieces in a row are one unit that
    keeps its input; at the last stage, where backward follows forward at once, its graph.
    Otherwise the stage is one unit.
    """
    if keep is not Keep.NOTHING:
        return (_group(partition, part.pieces, keep),)
    is_last = part.index == len(partition.parts) - 1
    opaque = Keep.GRAPH if is_last else Keep.INPUT
    found: list[Group] = []
    run: list[Piece] = []
    for piece in part.pieces:
        if not piece.reversible:
            run.append(piece)
            continue
        if run:
            found.append(_group(partition, tuple(run), opaque))
        run = []
        found.append(_group(partition, (piece,), Keep.NOTHING))
    if run:
        found.append(_group(partition, tuple(run), opaque))
    return tuple(found)


def _group(partition: Partition, pieces: tuple[Piece, ...], keep: Keep) -> Group:
    root = partition.rewired.root
    names = {id(p): name for name, p in root.named_parameters()}
    graphs = [piece.segment.graph for piece in pieces]
    parameters = dict.fromkeys(n for g in graphs for n in parameter_names(g, root, names))
    random = frozenset(piece.name for piece in pieces if _draws(piece.segment.graph, root))
    return Group(pieces, keep, tuple(parameters), random)


def _draws(graph: fx.Graph, root: nn.Module) -> bool:
    """Might the graph draw random numbers? Yes, unless everything in it is known not to."""
    for node in graph.nodes:
        if node.op == "call_module":
            for module in root.get_submodule(str(node.target)).modules():
                idle = isinstance(module, _DropoutNd) and module.p == 0
                if type(module) is nn.Dropout and idle:
                    continue
                if not isinstance(module, _DETERMINISTIC):
                    return True
        elif draws_random(node):
            return True
    return False
