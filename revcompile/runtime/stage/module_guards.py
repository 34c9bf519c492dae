"""Changes of modules and parameters that stages would not follow: each is refused by name.

    TreeGuard        the modules below a model, as they were when its stages were compiled
    ParameterGuard   the parameters of stages, as they were when their optimizers were built

Hooks on layers that stages call are followed (see `Stage`); what else changes what a module
computes is refused, at `net.trainer` and at the next step, flush or evaluation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, Final, TypeVar

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from revcompile.errors import InputError
from revcompile.ir.module_tree import TreeReads
from revcompile.ir.program import StageProgram
from revcompile.ir.types import Rewired
from revcompile.runtime.reversible.bindings import Bindings, Watch
from revcompile.runtime.reversible.hooks import MODULE_HOOKS, NoHooks
from revcompile.runtime.reversible.slots import Column, Slot

_requires_grad: Final = attrgetter("requires_grad")
_gradient_hooks: Final = attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")
_PART: Final = 16
"""How many modules or parameters are looked at before a replay, which reads none of them: each in
its turn, so that a large model does not cost the host more."""
Item = TypeVar("Item")


def _parts(items: Sequence[Item]) -> list[Sequence[Item]]:
    """At least one."""
    return [items[start : start + _PART] for start in range(0, max(len(items), 1), _PART)]


class TreeGuard:
    """The module tree of a model, and whether it is still the one that stages were compiled for."""

    def __init__(self, rewired: Rewired, root: nn.Module) -> None:
        bindings = Bindings(None, root)
        modules = dict.fromkeys([root, *bindings.enclosing, *bindings.modules])
        self._root = root
        self._watches = [Watch([bindings], part) for part in _parts(list(modules))]
        self._own = self._of_root()
        called = set(TreeReads(rewired.graphs, root).modules)
        uncalled = {m: path for path, m in root.named_modules() if m not in called}
        self._hooks = [
            (path, vars(module)[kind], len(vars(module)[kind]))
            for module, path in uncalled.items()
            for kind in MODULE_HOOKS
        ]
        """Of modules whose hooks never run: their forward is part of the graph, or unused."""
        self._no_hooks = NoHooks(hooks for _, hooks, count in self._hooks if not count)
        self._some_hooks = [(hooks, count) for _, hooks, count in self._hooks if count]

    def _of_root(self) -> tuple[Any, ...]:
        own = vars(self._root)
        # Capturing another case, in an evaluation, registers its constants: new buffers.
        return len(own["_modules"]), len(own["_parameters"]), own.get("forward")

    def problem(self, part: int | None = None) -> str | None:
        """What has changed and what to do, or None.

        Args:
            part: Look at some modules only: at all of them in as many steps as there are parts.
        """
        watches = self._watches if part is None else [self._watches[part % len(self._watches)]]
        changes = (watch.change(with_hooks=False) for watch in watches)
        changed = next((change for change in changes if change is not None), None)
        if changed is None and self._of_root() != self._own:
            changed = "the model"
        if changed is not None:
            return (
                f"{changed} was replaced, wrapped or reparametrized, or given another forward or "
                "other members after petrafy, and its stage would not follow; undo that, or make "
                "the change before petrafy"
            )
        if self._no_hooks and all(len(hooks) == n for hooks, n in self._some_hooks):
            return None
        path = next(path for path, hooks, count in self._hooks if len(hooks) != count)
        advice = f", or keep the module whole with petrafy(leaf_modules=[{path!r}])" if path else ""
        return (
            f"a hook of {path or 'the model'} was registered or removed after petrafy, but stages "
            "never call this module: its forward is part of their programs. Undo that, and "
            f"register hooks on the layers inside, which are called{advice}"
        )


Labelled = tuple[Slot, str]
"""Where a parameter is, and its path."""


def parameters_to_watch(
    program: StageProgram, root: nn.Module, own: Mapping[str, Tensor], replicas: Sequence[str]
) -> list[Labelled]:
    """Those of a stage, but for `replicas`: of these it has copies, whatever is in the modules."""
    bindings = Bindings(program.forward, root)
    replicated = {id(own[name]) for name in replicas}
    present = zip(bindings.slots, bindings.labels, bindings.parameters(), strict=True)
    watched = [entry for entry in present if id(entry[2]) not in replicated]
    for _, label, parameter in watched:
        if parameter is not None and any(_gradient_hooks(parameter)):
            raise InputError(f"trainer, stage {program.index}: {_hooked(label)}")
    return [(slot, label) for slot, label, _ in watched]


class ParameterGuard:
    """Whether parameters are still those that stages were built for.

    Optimizers hold these very parameters, and stashed and cast weights are copies of them, so
    nothing else may take their place.
    """

    def __init__(self, watched: Sequence[Labelled], has_parts: bool = True) -> None:
        parts = _parts(watched) if has_parts else []
        self.parts = [ParameterGuard(part, has_parts=False) for part in parts]
        """For some of the parameters each, to be asked in turns."""
        self._watched = watched
        self._slots = Column(slot for slot, _ in watched)
        self._values = self._slots.read()
        self._parameters = [value for value in self._values if value is not None]
        self._requires_grad = list(map(_requires_grad, self._parameters))
        self._handles = -1
        """How many handles of hooks torch had given out when there were no gradient hooks."""

    def problem(self) -> str | None:
        """What has changed and what to do, or None."""
        if not self._slots.holds(self._values):
            slot, _ = self._slots.different(self._values)[0]
            label = next(label for watched, label in self._watched if watched is slot)
            return (
                f"{label} was replaced after the trainer was built; build a new trainer (or "
                "copy the values into the original parameter)"
            )
        flags = list(map(_requires_grad, self._parameters))
        if flags != self._requires_grad:
            pairs = zip(flags, self._requires_grad, strict=True)
            index = next(i for i, (now, old) in enumerate(pairs) if now != old)
            return (
                f"requires_grad of {self._label(index)} was changed after the trainer was built; "
                "build a new trainer"
            )
        if self._handles != RemovableHandle.next_id:  # somebody has registered a hook somewhere
            if any(hooked := list(map(any, map(_gradient_hooks, self._parameters)))):
                return _hooked(self._label(hooked.index(True)))
            self._handles = RemovableHandle.next_id
        return None

    def _label(self, index: int) -> str:
        """The path of one of the parameters."""
        pairs = zip(self._watched, self._values, strict=True)
        return [label for (_, label), value in pairs if value is not None][index]


def _hooked(label: str) -> str:
    return (
        f"{label} has a gradient hook, but stages compute gradients piece by piece and keep them "
        "themselves, so it would see parts of a gradient, or nothing; remove it, and work on whole "
        "gradients in a step hook of the optimizer (optimizer.register_step_pre_hook)"
    )
