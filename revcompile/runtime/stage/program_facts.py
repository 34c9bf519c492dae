"""What a stage's program reads of the module tree that it may change: statistics, buffers."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from revcompile.ir.module_tree import TreeReads, repeated_layers
from revcompile.ir.program import StageProgram
from revcompile.ir.types import Coupling
from revcompile.kernels.repeatable import Repeated
from revcompile.schedule import Order


def statistics_move_early(program: StageProgram) -> bool:
    """Do running statistics move in forward, or in a backward pass that follows it at once?"""
    return program.is_last or program.keeps_graphs or program.method.order is Order.LOCKED


def statistics_of(program: StageProgram, root: nn.Module) -> list[tuple[nn.Module, str]]:
    # A functional batch norm updates all statistics of its layer, read by the program or not.
    owners = TreeReads(program.forward, root).owners
    norms = [module for module in owners if isinstance(module, _BatchNorm)]
    return [(norm, name) for norm in norms for name in norm._buffers]


def stateful_candidates(program: StageProgram, root: nn.Module) -> list[tuple[nn.Module, str]]:
    """Buffers the stage might write into, other than batch norms' statistics."""
    buffers = TreeReads(program.forward, root).buffers
    return [(module, name) for module, name in buffers if not isinstance(module, _BatchNorm)]


def repeated_in(program: StageProgram, root: nn.Module) -> Repeated:
    """Layers of averaged couplings, which have to give the same bits twice."""
    pieces = (piece for unit in program.units for piece in unit.pieces)
    averaged = [p for p in pieces if isinstance(p, Coupling) and p.averaged]
    found = [repeated_layers(coupling.branch, root) for coupling in averaged]
    return Repeated(*map(any, zip(*found, strict=True)))
