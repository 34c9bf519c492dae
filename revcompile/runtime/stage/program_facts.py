"""What a stage's program says about its state: graphs that outlive updates, statistics, buffers."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from revcompile.ir.module_tree import TreeReads, repeated_layers
from revcompile.ir.program import StageProgram
from revcompile.ir.types import Coupling
from revcompile.kernels.repeatable import Repeated
from revcompile.schedule import Keep, Order, Weights


def keeps_graphs_in_flight(program: StageProgram) -> bool:
    """Are there updates between a forward pass that keeps a graph and its backward pass?"""
    is_last = program.index == program.stages - 1
    keeps = any(unit.keep is Keep.GRAPH for unit in program.units)
    return keeps and program.method.order is Order.CONTINUOUS and not is_last


def outlives_updates(program: StageProgram) -> bool:
    """Do updates change parameters to which graphs in flight refer?"""
    return keeps_graphs_in_flight(program) and program.method.weights is Weights.LATEST


def statistics_move_early(program: StageProgram) -> bool:
    """Do running statistics move in forward, or in a backward pass that may be rolled back?"""
    is_last = program.index == program.stages - 1
    records = any(unit.keep is Keep.GRAPH for unit in program.units)
    return is_last or records or program.method.order is Order.LOCKED


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
    averaged = [p for p in pieces if isinstance(p, Coupling) and p.kept_bits > 0]
    found = [repeated_layers(coupling.branch, root) for coupling in averaged]
    return Repeated(*map(any, zip(*found, strict=True)))


def needed_in_flight(program: StageProgram) -> list[str]:
    """The values of a micro-batch in flight that a stage's backward pass needs.

    They depend on the memory budget: a state in flight fits only stages that need the same.
    """
    return [*program.kept, *program.needs_back]
