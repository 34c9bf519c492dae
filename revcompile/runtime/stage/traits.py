"""What a stage's program tells of its stage, before anything has run."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from revcompile.ir.module_tree import TreeReads
from revcompile.ir.program import StageProgram
from revcompile.schedule import Keep, Order, Weights

__all__ = ["candidates", "moves_early", "outlives_updates", "statistics_of"]


def outlives_updates(program: StageProgram) -> bool:
    """Are parameters updated while graphs that use them are kept?"""
    method, is_last = program.method, program.index == program.stages - 1
    keeps = any(unit.keep is Keep.GRAPH for unit in program.units)
    delayed = method.order is Order.CONTINUOUS and method.weights is Weights.LATEST
    return keeps and delayed and not is_last


def moves_early(program: StageProgram) -> bool:
    """Do running statistics move in forward, or in a backward pass that may be taken back?"""
    is_last = program.index == program.stages - 1
    records = any(unit.keep is Keep.GRAPH for unit in program.units)
    return is_last or records or program.method.order is Order.LOCKED


def statistics_of(program: StageProgram, root: nn.Module) -> list[tuple[nn.Module, str]]:
    """Running statistics of the stage's batch norms."""
    owners = TreeReads(program.forward, root).owners
    norms = (module for module in owners if isinstance(module, _BatchNorm))
    return [(norm, name) for norm in norms for name in norm._buffers]


def candidates(program: StageProgram, root: nn.Module) -> list[tuple[nn.Module, str]]:
    """Buffers the stage might write into, other than batch norms' statistics."""
    buffers = TreeReads(program.forward, root).buffers
    return [(module, name) for module, name in buffers if not isinstance(module, _BatchNorm)]
