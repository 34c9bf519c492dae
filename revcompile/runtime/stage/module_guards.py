"""Changes of modules and parameters that stages would not follow: each is refused by name.

    TreeGuard        the modules below a model, as they were when its stages were compiled
    ParameterGuard   the parameters of one stage, as they were when its optimizer was built

Hooks on layers that stages call are followed (see `Stage`); what else changes what a module
computes is refused, at `net.trainer` and at the next step, flush or evaluation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter, is_
from typing import Any, Final

from torch import Tensor, nn

from revcompile.errors import InputError
from revcompile.ir.module_tree import TreeReads
from revcompile.ir.ops import attribute
from revcompile.ir.program import StageProgram
from revcompile.ir.types import Rewired
from revcompile.runtime.reversible.bindings import Bindings
from revcompile.runtime.reversible.hooks import MODULE_HOOKS

__all__ = ["ParameterGuard", "TreeGuard", "parameters_of"]

_requires_grad: Final = attrgetter("requires_grad")
_gradient_hooks: Final = attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")


class TreeGuard:
    """The module tree of a model, and whether it is still the one that stages were compiled for."""

    def __init__(self, rewired: Rewired, root: nn.Module) -> None:
        self._root, self._bindings = root, Bindings(None, root)
        self._own = self._of_root()
        called = set(TreeReads(rewired.graphs, root).modules)
        uncalled = {m: path for path, m in root.named_modules() if m not in called}
        self._uncalled = list(uncalled.values())
        """Paths of modules whose hooks never run: their forward is part of the graph, or unused."""
        self._hooks = [vars(module)[kind] for module in uncalled for kind in MODULE_HOOKS]
        self._hook_counts = list(map(len, self._hooks))

    def _of_root(self) -> tuple[Any, ...]:
        own = vars(self._root)
        # Capturing another case, in an evaluation, registers its constants: new buffers.
        return len(own["_modules"]), len(own["_parameters"]), own.get("forward")

    def problem(self) -> str | None:
        """What has changed and what to do, or None."""
        changed = self._bindings.change(with_hooks=False)
        if changed is None and self._of_root() != self._own:
            changed = "the model"
        if changed is not None:
            return (
                f"{changed} was replaced, wrapped or reparametrized, or given another forward or "
                "other members after petrafy, and its stage would not follow; undo that, or make "
                "the change before petrafy"
            )
        counts = list(map(len, self._hooks))
        if counts == self._hook_counts:
            return None
        pairs = zip(counts, self._hook_counts, strict=True)
        index = next(i for i, (now, before) in enumerate(pairs) if now != before)
        path = self._uncalled[index // len(MODULE_HOOKS)]
        advice = f", or keep the module whole with petrafy(leaf_modules=[{path!r}])" if path else ""
        return (
            f"a hook of {path or 'the model'} was registered or removed after petrafy, but stages "
            "never call this module: its forward is part of their programs. Undo that, and "
            f"register hooks on the layers inside, which are called{advice}"
        )


def parameters_of(program: StageProgram, root: nn.Module) -> dict[str, Tensor]:
    """The stage's present parameters by name."""
    return {name: attribute(root, name) for name in program.parameters}


class ParameterGuard:
    """Refuses to train if parameters were replaced since the stage was built.

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
        bindings = Bindings(program.forward, root)
        replicated = {id(parameters[name]) for name in replicas}
        present = zip(bindings.slots, bindings.labels, bindings.parameters(), strict=True)
        watched = [entry for entry in present if entry[2] is not None]
        for _, label, parameter in watched:
            if any(_gradient_hooks(parameter)):
                raise InputError(f"trainer, {self._where}: {_hooked(label)}")
        watched = [entry for entry in watched if id(entry[2]) not in replicated]
        self._slots = [slot for slot, _, _ in watched]
        self._labels = [label for _, label, _ in watched]
        self._parameters = [parameter for _, _, parameter in watched]
        self._requires_grad = list(map(_requires_grad, self._parameters))

    def problem(self) -> str | None:
        """What has changed and what to do, or None."""
        present = [owner.get(name) for owner, name in self._slots]
        if not all(map(is_, present, self._parameters)):
            pairs = zip(present, self._parameters, strict=True)
            label = self._labels[next(i for i, (now, old) in enumerate(pairs) if now is not old)]
            return (
                f"{label} was replaced after the trainer was built; build a new trainer (or "
                "copy the values into the original parameter)"
            )
        flags = list(map(_requires_grad, present))
        if flags != self._requires_grad:
            pairs = zip(flags, self._requires_grad, strict=True)
            label = self._labels[next(i for i, (now, old) in enumerate(pairs) if now != old)]
            return (
                f"requires_grad of {label} was changed after the trainer was built; build a "
                "new trainer"
            )
        if any(hooked := list(map(any, map(_gradient_hooks, present)))):
            return _hooked(self._labels[hooked.index(True)])
        return None

    def check(self) -> None:
        """Raise if anything has changed."""
        problem = self.problem()
        if problem is not None:
            raise InputError(f"trainer.step, {self._where}: {problem}")


def _hooked(label: str) -> str:
    return (
        f"{label} has a gradient hook, but stages compute gradients piece by piece and keep them "
        "themselves, so it would see parts of a gradient, or nothing; remove it, and work on whole "
        "gradients in a step hook of the optimizer (optimizer.register_step_pre_hook)"
    )
