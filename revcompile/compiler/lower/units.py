"""The units of a stage: what is differentiated at once, and whether it draws random numbers."""

from __future__ import annotations

import itertools

from torch import nn

from revcompile.compiler.partition.cuts import parameter_names
from revcompile.ir.program import Part, Partition, Unit
from revcompile.ir.random_numbers import random_reads
from revcompile.ir.types import Coupling, Segment
from revcompile.schedule import Keep


def units_of(partition: Partition, part: Part, keep: Keep) -> tuple[Unit, ...]:
    """A stage's units.

    Under `Keep.NOTHING` every coupling is a unit, and so is each run of opaque pieces, which keeps
    its input (at the last stage, where backward follows forward at once, its graph):

        stem | block | block | transition, pooling | block
        INPUT  NOTHING NOTHING        INPUT          NOTHING

    Otherwise the whole stage is one unit.
    """
    if keep is not Keep.NOTHING:
        return (_unit(partition, part.pieces, keep),)
    is_last = part.index == len(partition.parts) - 1
    opaque = Keep.GRAPH if is_last else Keep.INPUT
    units: list[Unit] = []
    for reversible, run in itertools.groupby(part.pieces, lambda piece: piece.reversible):
        if reversible:
            units += [_unit(partition, (piece,), Keep.NOTHING) for piece in run]
        else:
            units.append(_unit(partition, tuple(run), opaque))
    return tuple(units)


def _unit(partition: Partition, pieces: tuple[Segment, ...], keep: Keep) -> Unit:
    root = partition.rewired.root
    names = {id(p): name for name, p in root.named_parameters()}
    graphs = [piece.graph for piece in pieces]
    parameters = dict.fromkeys(n for g in graphs for n in parameter_names(g, root, names))
    random = tuple(piece.name for piece in pieces if _draws(piece, root))
    is_frozen = not any(partition.requires_grad(name) for p in pieces for name in p.outputs)
    return Unit(pieces, keep, tuple(parameters), random, is_frozen)


def _draws(piece: Segment, root: nn.Module) -> bool:
    """May a piece draw random numbers: in its graph, or the signs of an averaged coupling?"""
    if isinstance(piece, Coupling) and piece.averaged:
        return True
    return random_reads(piece.graph, root).may_ever_draw
