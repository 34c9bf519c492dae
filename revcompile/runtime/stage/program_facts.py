"""What a stage's program says about the module tree: its buffers, parameters, and their changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from revcompile.errors import InputError
from revcompile.ir.module_tree import TreeReads
from revcompile.ir.ops import attribute
from revcompile.ir.program import StageProgram
from revcompile.runtime.reversible.bindings import Bindings
from revcompile.schedule import Keep, Order, Weights

__all__ = [
    "ModuleGuard",
    "outlives_updates",
    "parameters_of",
    "stateful_candidates",
    "statistics_move_early",
    "statistics_of",
]


def outlives_updates(program: StageProgram) -> bool:
    """Are parameters updated between a forward pass that keeps a graph and its backward pass?"""
    method, is_last = program.method, program.index == program.stages - 1
    keeps = any(unit.keep is Keep.GRAPH for unit in program.units)
    delayed = method.order is Order.CONTINUOUS and method.weights is Weights.LATEST
    return keeps and delayed and not is_last


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


# -- changes of the module tree -------------------------------------------------------------------


_CHANGED: Final = "layers were replaced or wrapped since; call petrafy on the changed model"


def parameters_of(program: StageProgram, root: nn.Module) -> dict[str, Tensor]:
    """The stage's present parameters by name."""
    parameters: dict[str, Tensor] = {}
    for name in program.parameters:
        try:
            parameters[name] = attribute(root, name)
        except AttributeError as error:
            raise InputError(
                f"trainer, stage {program.index}: {name}, which the stage was compiled for, is not "
                f"there any more ({_CHANGED})"
            ) from error
    return parameters


class ModuleGuard:
    """Refuses to train if modules or parameters were replaced since the stage was built.

    The optimizer holds these very parameters, and stashed and cast weights are copies of them, so
    nothing else may take their place. Of the parameters named in `replicas` the stage has copies of
    its own, whatever is in the modules.
    """

    def __init__(
        self,
        program: StageProgram,
        root: nn.Module,
        parameters: Mapping[str, Tensor],
        replicas: Sequence[str],
    ) -> None:
        self._where = f"stage {program.index}"
        self._bindings = Bindings(program.forward, root)
        present = self._bindings.parameters()
        self._requires_grad = [p is not None and p.requires_grad for p in present]
        replicated = {id(parameters[name]) for name in replicas}
        self._is_replica = [id(p) in replicated for p in present]
        self._parameters = [None if id(p) in replicated else p for p in present]
        known = {id(p) for p in parameters.values()}
        for parameter, label in zip(present, self._bindings.labels, strict=True):
            if parameter is not None and id(parameter) not in known:
                raise InputError(
                    f"trainer, {self._where}: {label} is not among the parameters that the stage "
                    f"was compiled for ({_CHANGED})"
                )

    def problem(self) -> str | None:
        """What has changed and what to do, or None."""
        changed = self._bindings.change(with_hooks=False)
        if changed is not None:
            return (
                f"{changed} was replaced, wrapped or reparametrized after the trainer was built, "
                "and would not be trained; make the change before petrafy"
            )
        for index, parameter in enumerate(self._bindings.parameters()):
            label = self._bindings.labels[index]
            if self._is_replica[index]:
                continue
            if parameter is not self._parameters[index]:
                return (
                    f"{label} was replaced after the trainer was built; build a new trainer (or "
                    "copy the values into the original parameter)"
                )
            if parameter is not None and parameter.requires_grad != self._requires_grad[index]:
                return (
                    f"requires_grad of {label} was changed after the trainer was built; build a "
                    "new trainer"
                )
        return None

    def check(self) -> None:
        """Raise if anything has changed."""
        problem = self.problem()
        if problem is not None:
            raise InputError(f"trainer.step, {self._where}: {problem}")
