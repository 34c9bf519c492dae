"""A live stage trains the parameters and modules it was built with, and says so if others come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from torch import Tensor, nn

from revcompile.errors import InputError
from revcompile.ir.ops import attribute
from revcompile.ir.program import StageProgram
from revcompile.runtime.reversible.bindings import Bindings

__all__ = ["Unchanged", "parameters_of"]

_CHANGED: Final = "layers were replaced or wrapped since; call petrafy on the changed model"


def parameters_of(program: StageProgram, root: nn.Module) -> dict[str, Tensor]:
    """The stage's parameters as they are now, by name."""
    found: dict[str, Tensor] = {}
    for name in program.parameters:
        try:
            found[name] = attribute(root, name)
        except AttributeError as error:
            raise InputError(
                f"trainer, stage {program.index}: {name}, which the stage was compiled for, is not "
                f"there any more ({_CHANGED})"
            ) from error
    return found


class Unchanged:
    """What a stage's program found in the module tree when the stage was built.

    The optimizer holds these very parameters, stashes and casts were made of them, and gradients
    are looked for under their names: nothing else may take their places. Of the parameters named
    in `replicas` the stage reads copies of its own, whatever is in the modules.
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
        found = self._bindings.parameters()
        self._wanted = [p is not None and p.requires_grad for p in found]
        copied = {id(parameters[name]) for name in replicas}
        self._is_copied = [id(p) in copied for p in found]
        self._found = [None if id(p) in copied else p for p in found]  # others are let go
        known = {id(p) for p in parameters.values()}
        for parameter, label in zip(found, self._bindings.labels, strict=True):
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
        now = self._bindings.parameters()
        for place, parameter in enumerate(now):
            if self._is_copied[place]:
                continue
            if parameter is not self._found[place]:
                return (
                    f"{self._bindings.labels[place]} was replaced after the trainer was built; "
                    "build a new trainer (or copy the values into the parameter that is there)"
                )
            if parameter is not None and parameter.requires_grad != self._wanted[place]:
                return (
                    f"requires_grad of {self._bindings.labels[place]} was changed after the "
                    "trainer was built; build a new trainer"
                )
        return None

    def check(self) -> None:
        """Stop if anything has changed."""
        problem = self.problem()
        if problem is not None:
            raise InputError(f"trainer.step, {self._where}: {problem}")
