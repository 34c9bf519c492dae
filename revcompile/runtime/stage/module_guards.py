"""Changes of a model that its stages do not follow: each is refused by name.

    TreeGuard    the modules, as they were when the stages were compiled
    StageGuard   what the stages of a trainer read of them, since the last step

Hooks on layers that stages call are followed (see `Stage`), and so are settings of layers, unless
micro-batches are in flight.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from revcompile.ir.module_tree import TreeReads
from revcompile.ir.snapshot import STRUCTURE, Change, Kind, TreeSnapshot, Watched, below
from revcompile.ir.types import Rewired


class TreeGuard:
    """The module tree of a model, and whether it is still the one that stages were compiled for."""

    def __init__(self, rewired: Rewired, root: nn.Module) -> None:
        own, *inner = below(root)
        called = set(TreeReads(rewired.graphs, root).modules)
        uncalled = [watched for watched in below(root) if watched.module not in called]
        self._snapshots = (
            # Capturing another case, in an evaluation, registers its constants: new buffers.
            TreeSnapshot([own], (Kind.MODULE, Kind.FORWARD)),
            TreeSnapshot(inner, STRUCTURE),
            TreeSnapshot(uncalled, (Kind.HOOK,)),
        )

    def problem(self) -> str | None:
        """What has changed and what to do, or None."""
        found = filter(None, (snapshot.first_change() for snapshot in self._snapshots))
        change = next(found, None)
        if change is None:
            return None
        if change.kind is not Kind.HOOK:
            return (
                f"{change}, but stages are compiled for what there was at petrafy, and would not "
                "follow; undo the change, or make it before petrafy"
            )
        path = change.path
        advice = f", or keep the module whole with petrafy(leaf_modules=[{path!r}])" if path else ""
        return (
            f"{change} after petrafy, but stages never call this module: its forward is part of "
            "their programs. Undo that, and register hooks on the layers inside, which are "
            f"called{advice}"
        )


class StageGuard:
    """What stages read of a model: parameters, of which they have copies, and settings of layers.

    Optimizers hold these very parameters, and stashed and cast weights are copies of them, so
    nothing else may take their place. What is in flight is rebuilt in backward as it was computed,
    which takes the settings of its forward pass.
    """

    def __init__(self, watched: Sequence[Watched]) -> None:
        kinds = Kind.PARAMETER, Kind.REQUIRES_GRAD, Kind.GRADIENT_HOOK
        self._parameters = TreeSnapshot(watched, kinds)
        self.settings = TreeSnapshot(watched, (Kind.SETTING, Kind.BUFFER))
        """Of layers, modes included, since the last step."""

    def problem(self) -> str | None:
        """What has changed of parameters and what to do, or None."""
        change = self._parameters.first_change()
        if change is None:
            return None
        if change.kind is Kind.GRADIENT_HOOK:
            return hooked(change.where)
        if change.kind is Kind.REQUIRES_GRAD:
            return f"{change} after the trainer was built; build a new trainer"
        return (
            f"{change} after the trainer was built; build a new trainer (or copy the values into "
            "the original parameter)"
        )


def changed_in_flight(change: Change) -> str:
    return (
        f"{change}, but micro-batches are in flight. Backward computes their forward pass again, "
        "which needs the value from before. Undo the change, call trainer.flush(), and change it "
        "then"
    )


def hooked(parameter: str) -> str:
    """Why a parameter with a gradient hook is refused."""
    return (
        f"{parameter} has a gradient hook, but stages compute gradients piece by piece and keep "
        "them themselves, so it would see parts of a gradient, or nothing; remove it, and work on "
        "whole gradients in a step hook of the optimizer (optimizer.register_step_pre_hook)"
    )
